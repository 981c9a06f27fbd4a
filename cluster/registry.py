"""WeightRegistry: the cluster's directory of models. A named, detached actor.

It brings every configured checkpoint into the store, says which models are ready and which are not and why, and
gives each node its keeper. It never holds weights or references to them.
"""

from __future__ import annotations

import concurrent.futures
import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.errors import ModelUnavailable, ModelUnknown
from cluster.keeper import KeeperStats, NodeKeeper
from configs.cluster import ClusterConfig
from configs.model import AdapterConfig, ModelConfig
from weights.externalize import externalize
from weights.manifest import Manifest, ModelKind
from weights.store import WeightStore

NAMESPACE = "atelier"
KEEPER_THREADS = 32  # callers that wait for the same extent each hold one


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One line of the directory. `error` is for the operator: it names the file and the tensor.

    An unavailable model without `kind` never made it into the store; one with `kind` did, but could not be attached.
    """

    id: str
    state: Literal["registering", "ready", "unavailable"]
    kind: ModelKind | None = None
    nbytes: int = 0
    error: str = ""


class WeightRegistry:
    """Models by id. Thread-safe: Ray calls it from a pool of threads."""

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config
        self._store = WeightStore(config.store.path)
        self._lock = threading.Lock()
        self._manifests: dict[str, Manifest] = {}
        self._keepers: dict[str, Any] = {}
        # One thread: writers of one store wait for each other anyway, and memory stays bounded by one checkpoint.
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="externalize")
        self._states: dict[str, ModelStatus] = {}
        self._pending: dict[str, concurrent.futures.Future[None]] = {}
        for entry in config.entries.values():
            self.register(entry)

    def register(self, entry: ModelConfig | AdapterConfig) -> None:
        """Start bringing a checkpoint into the store; `status` and `manifest` tell how it went."""
        with self._lock:
            self._states[entry.id] = ModelStatus(entry.id, "registering")
            self._pending[entry.id] = self._worker.submit(self._externalize, entry)

    def _externalize(self, entry: ModelConfig | AdapterConfig) -> None:
        component = entry.component if isinstance(entry, ModelConfig) else None
        try:
            manifest = externalize(self._store, entry.id, entry.path, component=component, dtype=entry.dtype)
            status = ModelStatus(entry.id, "ready", manifest.kind, manifest.nbytes)
        except Exception as error:  # of this model; whatever it is, the others go on and nobody waits for it for ever
            manifest, status = None, ModelStatus(entry.id, "unavailable", error=str(error) or repr(error))
        with self._lock:
            self._states[entry.id] = status
            if manifest:
                self._manifests[entry.id] = manifest

    def statuses(self) -> list[ModelStatus]:
        with self._lock:
            return list(self._states.values())

    def status(self, model: str) -> ModelStatus:
        """Waits while the model is being registered. Raises ModelUnknown with the known names."""
        with self._lock:
            pending = self._pending.get(model)
            known = ", ".join(self._states)
        if pending is None:
            raise ModelUnknown(f"no model {model!r} (known: {known})")
        pending.result()
        with self._lock:
            return self._states[model]

    def manifest(self, model: str) -> Manifest:
        """Waits while the model is being registered. Raises ModelUnknown, or ModelUnavailable with the reason."""
        status = self.status(model)
        with self._lock:
            if model not in self._manifests:
                raise ModelUnavailable(f"model {model!r} is unavailable: {status.error}")
            return self._manifests[model]

    def report_attach(self, model: str, error: str | None) -> None:
        """A replica could not attach the weights, or could again (None). The directory shows it; requests still try."""
        with self._lock:
            status = self._states.get(model)
            if status and model in self._manifests:
                state: Literal["ready", "unavailable"] = "unavailable" if error else "ready"
                self._states[model] = replace(status, state=state, error=error or "")

    def keeper(self, node_id: str) -> Any:
        """The keeper of a node, started when there is none."""
        with self._lock:
            if node_id not in self._keepers:
                self._keepers[node_id] = self._start_keeper(node_id)
            return self._keepers[node_id]

    def keeper_stats(self) -> list[KeeperStats]:
        with self._lock:
            keepers = list(self._keepers.values())
        return ray.get([keeper.stats.remote() for keeper in keepers])

    def close(self) -> None:
        """End the keepers; the caller ends the registry itself."""
        for keeper in self._keepers.values():
            ray.kill(keeper)

    def _start_keeper(self, node_id: str) -> Any:
        actor = ray.remote(NodeKeeper).options(
            name=f"keeper-{node_id}",
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=KEEPER_THREADS,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        return actor.remote(str(self._store.packs), self._config.node_budget_bytes, node_id)


def connect_registry(config: ClusterConfig) -> Any:
    """The cluster's registry; the first caller starts it."""
    actor = ray.remote(WeightRegistry).options(
        name=registry_name(config),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=KEEPER_THREADS,
        num_cpus=0,
    )
    return actor.remote(config)


def registry_name(config: ClusterConfig) -> str:
    return f"registry-{config.name}"
