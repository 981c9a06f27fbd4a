"""A replica's model host over checkpoint folders in a store of their own (no Ray, real weights); a watch of threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import ModuleCache
from weights.loading.provider import LocalExtents
from weights.operations.externalize import externalize
from weights.records.manifest import ExtentRef, Manifest
from weights.storage.store import WeightStore


class CountedExtents(LocalExtents):
    """Reads the store of this machine; `leases` counts what is fetched and not released."""

    def __init__(self, packs: Path) -> None:
        super().__init__(packs)
        self.leases: Counter[str] = Counter()

    def fetch(self, extents: Sequence[ExtentRef]) -> Any:
        self.leases.update(extent.id for extent in extents)
        return super().fetch(extents)

    def release(self, extents: Sequence[ExtentRef]) -> None:
        self.leases.subtract(extent.id for extent in extents)

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """There is no memory of the node to bring them into."""


OpenHost = Callable[..., ModuleCache]


@pytest.fixture
def open_host(tmp_path: Path) -> OpenHost:
    """`open_host(builder, {"name": folder, …}, budget_bytes=…)`, in float32."""
    store = WeightStore(tmp_path / "store")

    def open_(builder: Any, folders: Mapping[str, Path], budget_bytes: int = 2**30) -> ModuleCache:
        manifests = {name: externalize(store, name, folder, dtype="float32") for name, folder in folders.items()}

        async def fetch_manifest(model: str, version: str | None) -> Manifest:
            return manifests[model]

        extents = CountedExtents(store.packs)
        return ModuleCache(fetch_manifest, extents, store.models, ModuleBudget(budget_bytes), builder)

    return open_


@pytest.fixture
def calls_on_loop(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str], list[bool]]:
    """Patch a function of a module; the list has, for each call, whether the event loop waited for it."""

    def watch(module: Any, name: str) -> list[bool]:
        function, loop_thread, calls = getattr(module, name), threading.get_ident(), list[bool]()

        def noted(*arguments: Any, **options: Any) -> Any:
            calls.append(threading.get_ident() == loop_thread)
            return function(*arguments, **options)

        monkeypatch.setattr(module, name, noted)
        return calls

    return watch
