"""A replica without Serve around it: what a worker and a text encoder do when they switch, for a whole pipeline."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from cluster.keeper.ray_extents import RayExtents
from deployments.bench import switch_host
from weights.manifest import Manifest


def replica_class() -> Any:
    """BenchReplica as an actor class."""
    return ray.remote(num_cpus=0)(BenchReplica)


class BenchReplica:
    """`prepare`: make the structures of the models at start, as a replica of the cluster does. Imports are done always.

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
        keeps = keeps and device == "cpu"
        extents = RayExtents(keeper, f"replica-{os.getpid()}", on_recall=self._give_up if keeps else None)
        self._host = await switch_host.open_bench_host(
            extents, skeletons, manifests, budget_bytes, device, prepare, keeps
        )

    def _give_up(self, extents: Sequence[str], is_overdue: bool) -> None:
        self._host.give_up(extents, is_overdue)

    async def pid(self) -> int:
        return os.getpid()

    async def switch(self, model: str, touch: bool = False) -> dict[str, Any]:
        """Until every component of `model` is built, in `ms`, and the report on it; `touched_ms`: and read once."""
        start = time.perf_counter()
        async with self._host.lease(model, switch_host.everything) as lease:
            ms = (time.perf_counter() - start) * 1e3
            if touch:
                switch_host.touch(lease.modules)
            touched_ms = (time.perf_counter() - start) * 1e3
            return asdict(lease.report) | {"ms": ms, "touched_ms": touched_ms}

    async def forget(self) -> None:
        """Let go of all modules: their structures stay."""
        self._host.set_budget(0)
        self._host.set_budget(self._budget_bytes)

    async def switch_many(self, models: Sequence[str]) -> float:
        """Seconds for all, one after the other."""
        start = time.perf_counter()
        for model in models:
            await self.switch(model)
        return time.perf_counter() - start

    async def collect(self) -> None:
        """What is garbage is no memory that somebody lost."""
        gc.collect()
