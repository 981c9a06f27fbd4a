"""Reports of workers and queues, short to write."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from cluster.admission.records import AdmissionSnapshot, ModelLoad, ReplicaLoad
from cluster.placement.observing import CatalogEntry
from cluster.placement.reports import ModelNeed, WorkerReport

POOL = "worker"


def worker(
    budget: int = 1000,
    leased: Collection[str] = (),
    pinned: Collection[str] = (),
    **more: Any,
) -> WorkerReport:
    return WorkerReport(
        POOL, "node", frozenset({"llm"}), budget, leased=frozenset(leased), pinned=frozenset(pinned), **more
    )


def need(version: str = "1", **sizes: int) -> ModelNeed:
    return ModelNeed(version, sizes, {key: (f"extent of {key}",) for key in sizes})


def load(model: str, **more: Any) -> ModelLoad:
    values: dict[str, Any] = {
        "waiting": 0,
        "oldest_age_s": 0.0,
        "running": 0,
        "rate_short": 0.0,
        "rate_long": 0.0,
        "service_s": 0.0,
        "latency_s": 0.0,
        "switch_s": 0.0,
        "started": 0,
        "refused": 0,
    }
    return ModelLoad(POOL, model, **(values | more))


def queue(loads: Collection[ModelLoad], gone: Collection[str] = (), **running: Mapping[str, int]) -> AdmissionSnapshot:
    """`running` is by worker and model."""
    replicas = [ReplicaLoad(name, 0.1 * sum(models.values()), dict(models), ()) for name, models in running.items()]
    replicas += [ReplicaLoad(name, 0.0, {}, (), is_gone=True) for name in gone]
    return AdmissionSnapshot(tuple(loads), {POOL: tuple(replicas)})


def versions(*models: str, version: str = "1") -> dict[str, CatalogEntry]:
    return {model: CatalogEntry("llm", version) for model in models}
