"""Makes the components that denoise and write text; the embedding service makes the text encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from configs.cluster import WorkerConfig
from deployments.encoding import is_text_encoder
from deployments.engines.build import build_module
from deployments.engines.llm.engine import LLMEngine
from weights.adapters import parse_adapter
from weights.manifest import Component


class ComponentBuilder:
    """Makes a component of any kind: a module of a pipeline, an LLM engine, an adapter."""

    def __init__(self, settings: WorkerConfig) -> None:
        self._settings = settings

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> Any:
        if self._settings.device != "cpu":
            tensors = {name: tensor.to(self._settings.device) for name, tensor in tensors.items()}
        folder = skeleton / component.folder
        if component.library == "peft":
            return parse_adapter(folder, tensors, component.metadata)
        if component.library == "diffusers":
            return build_module(component.library, component.class_name, folder, tensors)
        return LLMEngine(
            folder,
            tensors,
            device=self._settings.device,
            max_num_seqs=self._settings.max_num_seqs,
            kv_cache_bytes=self._settings.kv_cache_bytes,
        )


def is_denoise_component(component: Component) -> bool:
    """What this service builds: of a pipeline all but its text encoders, of a single model everything."""
    return component.name == "model" or not is_text_encoder(component)
