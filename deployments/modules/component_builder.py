"""Makes the components that denoise and write text, and text encoders where the text-encoder service is down."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from configs.cluster import WorkerConfig
from deployments.engines.build import IMPORT_LOCK
from deployments.engines.diffusion.rows import BatchBounds
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.skeletons import SkeletonPool
from deployments.modules.built_modules import object_footprint
from deployments.text.encoders import KeyedEncoder, TextEncoderBuilder
from weights.adapters import parse_adapter
from weights.manifest import Component


class ComponentBuilder:
    """Makes a component of any kind: a module of a pipeline, an LLM engine, an adapter.

    Modules come from `skeletons` where one of their structure is kept. An LLM engine is made anew each time: its KV
    cache and its sequences belong to the weights that computed them, and it takes less than 10 ms.
    """

    def __init__(self, settings: WorkerConfig) -> None:
        self._settings = settings
        self.skeletons = SkeletonPool()
        self._encoders = TextEncoderBuilder()

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> Any:
        if not is_denoise_component(component):
            return self._encoders(component, skeleton, tensors)
        folder = skeleton / component.folder
        if component.library == "peft":
            return parse_adapter(folder, tensors, component.metadata)
        if component.library == "diffusers":
            key = component.structure_key
            return self.skeletons.build_module(key, component.library, component.class_name, folder, tensors)
        with IMPORT_LOCK:
            return LLMEngine(
                folder,
                tensors,
                device=self._settings.torch_device,
                max_num_seqs=self._settings.max_num_seqs,
                kv_cache_bytes=self._settings.kv_cache_bytes,
            )

    def prepare(self, component: Component, skeleton: Path) -> None:
        """Make its structure before it is needed. Raises EngineError."""
        if component.library == "diffusers":
            self.skeletons.prepare_skeleton(component, skeleton / component.folder)

    def private_footprint(self, component: Component) -> Mapping[str, int]:
        """Return what a component costs beside the node's shared memory: Python's objects, and an LLM's KV cache.

        One LLM always fits, however large its cache: the replica's budget is of what is kept for later, too.
        """
        footprint = object_footprint(component)
        if not is_denoise_component(component) or component.library in ("diffusers", "peft"):
            return footprint
        (nbytes,) = footprint.values()
        budget_bytes = self._settings.weights_budget_bytes
        return {component.module_key: min(nbytes + self._settings.kv_cache_bytes, budget_bytes)}

    def retire(self, thing: Any) -> None:
        """Take back what was built here and is not used any more."""
        if isinstance(thing, nn.Module):
            self.skeletons.retire_module(thing)
        elif isinstance(thing, KeyedEncoder):
            self._encoders.retire(thing)


def batch_bounds(settings: WorkerConfig) -> BatchBounds:
    """Return the batch bounds of the pipelines of this service."""
    return BatchBounds(settings.max_batch_rows, settings.max_batch_pixels, settings.max_decode_pixels)


def is_denoise_component(component: Component) -> bool:
    """Return whether the worker builds it: of a pipeline diffusers' modules, of a single model everything.

    A Stable Diffusion's safety checker is of neither library that a replica knows, and nobody builds it.
    """
    return component.name == "model" or component.library in ("diffusers", "peft")
