"""The inside of a bench replica: a host that builds what a worker and what a text encoder build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.keeper.ray_extents import RayExtents
from configs.cluster import WorkerConfig
from configs.model import ModelConfig
from deployments.modules.component_builder import ComponentBuilder
from deployments.modules.model_host import ModelHost
from deployments.services.model_replica import limit_torch_threads, prepare_models
from deployments.text.encoders import KeyedEncoder, TextEncoderBuilder, is_text_encoder
from weights.manifest import Component, Manifest


async def open_bench_host(
    extents: RayExtents,
    skeletons: Path,
    manifests: Mapping[str, Manifest],
    budget_bytes: int,
    device: str,
    prepare: bool,
    keeps: bool,
) -> ModelHost:
    """As `BenchReplica` describes it; what the models' classes are in has been imported."""
    limit_torch_threads(1, 1)
    builder = _PipelineBuilder(prepare)

    async def fetch_manifest(model: str, version: str | None) -> Manifest:
        return manifests[model]

    host = ModelHost(
        fetch_manifest,
        extents,
        skeletons,
        budget_bytes,
        builder,
        device=device,
        kept=extents if keeps else None,
        retire=builder.retire,
    )
    models = [ModelConfig(id=name, path=Path(name)) for name in manifests]
    await prepare_models(host, models, {"diffusion"}, everything, builder.prepare)
    return host


def everything(component: Component) -> bool:
    """Of a pipeline."""
    return True


def touch(modules: Mapping[str, Any]) -> None:
    """Read every byte of their parameters."""
    for thing in modules.values():
        module = thing.encoder.module if isinstance(thing, KeyedEncoder) else thing
        for tensor in module.parameters():
            np.bitwise_or.reduce(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class _PipelineBuilder:
    """The builders of both services."""

    def __init__(self, prepares: bool) -> None:
        self._prepares = prepares
        self._encoders = TextEncoderBuilder()
        self._components = ComponentBuilder(WorkerConfig())

    def __call__(self, component: Component, skeleton: Path, tensors: dict[str, torch.Tensor]) -> Any:
        return self._of(is_text_encoder(component))(component, skeleton, tensors)

    def prepare(self, component: Component, skeleton: Path) -> None:
        if self._prepares:
            self._of(is_text_encoder(component)).prepare(component, skeleton)

    def retire(self, thing: Any) -> None:
        self._of(isinstance(thing, KeyedEncoder)).retire(thing)

    def _of(self, is_encoder: bool) -> Any:
        return self._encoders if is_encoder else self._components
