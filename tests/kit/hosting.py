"""Model hosts on a device over a store of the demo's models, without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.cluster import WorkerConfig
from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.records.manifest import Component, ExtentRef, Manifest
from weights.storage.store import WeightStore

DEMO = Path(__file__).parents[2] / "infra/demo/models"


def demo_store(path: Path, *names: str) -> WeightStore:
    """Return a store with these models of the demo, in float32."""
    store = WeightStore(path)
    for name in names:
        externalize(store, name, DEMO / name, dtype="float32")
    return store


class Provider(LocalExtents):
    """Counts leases and what is fetched; fails when told to."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.leases: Counter[str] = Counter()
        self.fetched_bytes = 0
        self.failure: Exception | None = None

    def fetch(self, extents: Sequence[ExtentRef]) -> Any:
        if self.failure is not None:
            raise self.failure
        self.leases.update(extent.id for extent in extents)
        self.fetched_bytes += sum(extent.nbytes for extent in extents)
        return super().fetch(extents)

    def release(self, extents: Sequence[ExtentRef]) -> None:
        self.leases -= Counter(extent.id for extent in extents)

    def prefetch(self, extents: Sequence[ExtentRef]) -> None: ...


class Host(ModuleCache):
    """A replica's model host on `device`."""

    def __init__(
        self, store: WeightStore, device: str, budget_bytes: int = 2**30, builder: Any = None, **settings: Any
    ) -> None:
        self.store = store
        self.provider = Provider(store.packs)
        self.settings = WorkerConfig(device=device, device_budget_bytes=budget_bytes, **settings)
        self.builder = builder or ComponentBuilder(self.settings)
        super().__init__(
            self._manifest_of,
            self.provider,
            store.models,
            ModuleBudget.of(self.settings, "worker"),
            self.builder,
        )

    async def _manifest_of(self, model: str, version: str | None) -> Manifest:
        return self.store.manifest(model)

    async def use(self, model: str, wanted: Callable[[Component], bool] = is_denoise_component) -> Lease:
        async with self.lease(model, wanted) as lease:
            return lease

    def bytes_of(self, *models: str) -> int:
        """Return the bytes of the distinct tensors that are wanted of these models."""
        return sum(self.tensors_of(*models).values())

    def tensors_of(self, *models: str) -> dict[str, int]:
        return {
            ref.sha256: ref.nbytes
            for model in models
            for component in self.store.manifest(model).components.values()
            if is_denoise_component(component)
            for ref in component.tensors.values()
        }

    @property
    def arena(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.describe()["arena"]
        return shown
