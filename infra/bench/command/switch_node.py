"""A node to switch on: models in a store, a keeper, and replicas without Serve around them, as they are needed."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from cluster.keeper.actor import KeeperStats, keeper_class
from cluster.keeper.ray_extents import ExtentUser, RayExtents
from configs.cluster import WorkerConfig
from configs.model import ModelConfig
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from deployments.modules.cache import ModuleCache
from deployments.modules.encoders import KeyedEncoder, TextEncoderBuilder, is_text_encoder
from deployments.modules.loading import ComponentBuilder
from deployments.services.model_replica import limit_torch_threads, prepare_models
from weights.operations.externalize import externalize
from weights.records.manifest import Component, ExtentRef, Manifest
from weights.storage.store import WeightStore

HOLDER = "bench"


class Models:
    """Checkpoints by name, brought into a store in the order given."""

    def __init__(self, store: Path, sources: dict[str, Path]) -> None:
        self.store = WeightStore(store)
        self.sources = sources
        self.manifests: dict[str, Manifest] = {
            name: externalize(self.store, name, source) for name, source in sources.items()
        }

    def extents(self, *names: str) -> list[ExtentRef]:
        """Return all extents of the models of these names, once; without names, of all models."""
        manifests = [self.manifests[name] for name in names or self.manifests]
        return list({e.id: e for m in manifests for e in m.extents_of(m.components)}.values())

    def nbytes(self, *names: str) -> int:
        """Return the bytes of the extents, which is what a keeper holds."""
        return sum(extent.nbytes for extent in self.extents(*names))

    def different_bytes(self, name: str, base: str) -> int:
        """Return the tensor bytes of `name` that `base` does not have."""
        return sum((_tensors(self.manifests[name]) | _tensors(self.manifests[base])).values()) - sum(
            _tensors(self.manifests[base]).values()
        )


class BenchNode:
    """The keeper of a Ray node and its replicas. Ended by `close`."""

    def __init__(self, models: Models, budget_bytes: int) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        self.models = models
        self.keeper: Any = keeper_class().remote(str(models.store.packs), budget_bytes, node_id)
        self._replicas: list[Any] = []

    def replicas(self, number: int, budget_bytes: int, **options: Any) -> list[Any]:
        """Start fresh processes and wait for them; `options` as `_BenchReplica` takes them."""
        cls, models = ray.remote(num_cpus=0)(_BenchReplica), self.models
        started = [
            cls.remote(self.keeper, models.store.models, models.manifests, budget_bytes, **options)
            for _ in range(number)
        ]
        self._replicas += started
        ray.get([replica.pid.remote() for replica in started])
        return started

    def end_replicas(self, replicas: Sequence[Any]) -> None:
        for replica in replicas:
            self._replicas.remove(replica)
            ray.kill(replica)

    def import_models(self, *names: str) -> None:
        """Make these models resident, leased for as long as this process lives."""
        ray.get(self.keeper.acquire.remote(self.models.extents(*names), HOLDER))

    def keeper_stats(self) -> KeeperStats:
        stats: KeeperStats = ray.get(self.keeper.stats.remote())
        return stats

    def keeper_pid(self) -> int:
        pid: int = ray.get(self.keeper.__ray_call__.remote(lambda _: os.getpid()))
        return pid

    def close(self) -> None:
        self.end_replicas(list(self._replicas))
        ray.kill(self.keeper)


@contextlib.contextmanager
def node_of(models: Models, budget_bytes: int | None = None) -> Iterator[BenchNode]:
    """Start a node of its own; the default budget holds all models."""
    node = BenchNode(models, budget_bytes or models.nbytes())
    try:
        yield node
    finally:
        node.close()


def _tensors(manifest: Manifest) -> dict[str, int]:
    return {ref.sha256: ref.nbytes for component in manifest.components.values() for ref in component.tensors.values()}


class _BenchReplica(ExtentUser):
    """A replica that switches as a worker and a text encoder do, for a whole pipeline.

    `prepare`: make the structures of the models at start, as a replica of the cluster does. Imports are done always.

    `keeps`: on device "cpu", keep what the node has not called back, as a replica of the cluster does. `skeletons` is
    the store's folder of what is not weights.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        keeper: Any,
        skeletons: Path,
        manifests: Mapping[str, Manifest],
        budget_bytes: int,
        *,
        device: str = "cpu",
        prepare: bool = True,
        keeps: bool = True,
    ) -> None:
        self._budget_bytes = budget_bytes
        self.keeps = keeps = keeps and device == "cpu"
        extents = RayExtents(keeper, f"replica-{os.getpid()}", self)
        self._module_cache = await _open_cache(extents, skeletons, manifests, budget_bytes, device, prepare, keeps)

    def release_recalled(self, extents: Sequence[str], is_overdue: bool) -> None:
        self._module_cache.release_recalled(extents, is_overdue)

    async def pid(self) -> int:
        return os.getpid()

    async def switch(self, model: str, touch: bool = False) -> dict[str, Any]:
        """Build every component of `model`; returns `ms`, the report, and with `touch` the time to read all bytes."""
        start = time.perf_counter()
        async with self._module_cache.lease(model, _is_wanted) as lease:
            ms = (time.perf_counter() - start) * 1e3
            if touch:
                _touch_parameters(lease.modules)
            touched_ms = (time.perf_counter() - start) * 1e3
            return asdict(lease.report) | {"ms": ms, "touched_ms": touched_ms}

    async def forget(self) -> None:
        """Let go of all modules: their structures stay."""
        self._module_cache.set_budget(0)
        self._module_cache.set_budget(self._budget_bytes)

    async def switch_many(self, models: Sequence[str]) -> float:
        """Switch to the models one after the other; returns seconds for all."""
        start = time.perf_counter()
        for model in models:
            await self.switch(model)
        return time.perf_counter() - start

    async def collect(self) -> None:
        """Collect garbage, which is no memory that somebody lost."""
        gc.collect()


async def _open_cache(
    extents: RayExtents,
    skeletons: Path,
    manifests: Mapping[str, Manifest],
    budget_bytes: int,
    device: str,
    prepare: bool,
    keeps: bool,
) -> ModuleCache:
    """Open a module cache that builds what a worker and a text encoder build; the models' classes are imported."""
    limit_torch_threads(1, 1)
    builder = _PipelineBuilder(prepare)

    async def fetch_manifest(model: str, version: str | None) -> Manifest:
        return manifests[model]

    module_cache = ModuleCache(
        fetch_manifest,
        extents,
        skeletons,
        ModuleBudget(budget_bytes, device),
        builder,
        kept=extents if keeps else None,
    )
    models = [ModelConfig(id=name, path=Path(name)) for name in manifests]
    await prepare_models(module_cache, models, {"diffusion"}, _is_wanted, builder.prepare)
    return module_cache


def _is_wanted(component: Component) -> bool:
    """Return True: every component of a pipeline is wanted."""
    return True


def _touch_parameters(modules: Mapping[str, Any]) -> None:
    """Read every byte of the modules' parameters."""
    for thing in modules.values():
        module = thing.encoder.module if isinstance(thing, KeyedEncoder) else thing
        for tensor in module.parameters():
            np.bitwise_or.reduce(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class _PipelineBuilder(Builder):
    """A builder of both services' components."""

    def __init__(self, prepares: bool) -> None:
        self._prepares = prepares
        self._encoders = TextEncoderBuilder()
        self._components = ComponentBuilder(WorkerConfig())

    def __call__(self, component: Component, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Any:
        return self._of(is_text_encoder(component))(component, skeleton, tensors)

    def prepare(self, component: Component, skeleton: Path) -> None:
        if self._prepares:
            self._of(is_text_encoder(component)).prepare(component, skeleton)

    def retire(self, thing: Any) -> None:
        self._of(isinstance(thing, KeyedEncoder)).retire(thing)

    def _of(self, is_encoder: bool) -> Any:
        return self._encoders if is_encoder else self._components
