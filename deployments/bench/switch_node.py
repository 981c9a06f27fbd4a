"""A node to switch on: models in a store, a keeper, and replicas as they are needed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from cluster.keeper.actor import KeeperStats, keeper_class
from deployments.bench.switch_replica import BenchReplica
from weights.externalize import externalize
from weights.manifest import ExtentRef, Manifest
from weights.store import WeightStore

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


class Node:
    """The keeper of a Ray node and its replicas. Ended by `close`."""

    def __init__(self, models: Models, budget_bytes: int) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        self.models = models
        self.keeper: Any = keeper_class().remote(str(models.store.packs), budget_bytes, node_id)
        self._replicas: list[Any] = []

    def replicas(self, number: int, budget_bytes: int, **options: Any) -> list[Any]:
        """Start fresh processes and wait for them; `options` as `BenchReplica` takes them."""
        cls, models = ray.remote(num_cpus=0)(BenchReplica), self.models
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

    def bring_in(self, *names: str) -> None:
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
def node_of(models: Models, budget_bytes: int | None = None) -> Iterator[Node]:
    """Start a node of its own; the default budget holds all models."""
    node = Node(models, budget_bytes or models.nbytes())
    try:
        yield node
    finally:
        node.close()


def _tensors(manifest: Manifest) -> dict[str, int]:
    return {ref.sha256: ref.nbytes for component in manifest.components.values() for ref in component.tensors.values()}
