"""The reports of all queues together: requests by model and by replica. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import Final

from cluster.admission.outcomes import joined_loads
from cluster.admission.records import AdmissionSnapshot, ModelLoad, ReplicaLoad

QUEUE_LOST_S: Final = 1.5  # a queue silent for this long belongs to a dead ingress


class SeenQueues:
    """The newest snapshot of each queue, and when each replica was last seen with work."""

    def __init__(self) -> None:
        self._snapshots: dict[str, AdmissionSnapshot] = {}
        self._seen_s: dict[str, float] = {}  # the last sign of life
        self.busy_s: dict[str, float] = {}  # by replica

    def note(self, name: str, snapshot: AdmissionSnapshot, now_s: float) -> None:
        """Take in the snapshot of a queue."""
        self._snapshots[name], self._seen_s[name] = snapshot, now_s
        for loads in snapshot.replicas.values():
            for load in loads:
                if load.running or load.name not in self.busy_s:
                    self.busy_s[load.name] = now_s

    def note_sign(self, name: str, now_s: float) -> None:
        """Note a sign of life of a queue: its last report still holds."""
        if name in self._seen_s:
            self._seen_s[name] = now_s

    def forget_silent(self, now_s: float) -> None:
        """Forget the queues that count as gone, and the replicas that no queue lists."""
        for name, seen_s in list(self._seen_s.items()):
            if now_s - seen_s > QUEUE_LOST_S:
                del self._snapshots[name], self._seen_s[name]
        loads = [found for snapshot in self._snapshots.values() for found in snapshot.replicas.values()]
        if len(self.busy_s) > max(map(len, loads), default=0):
            listed = {load.name for found in loads for load in found}
            self.busy_s = {name: at_s for name, at_s in self.busy_s.items() if name in listed}

    @property
    def names(self) -> Set[str]:
        """The names of the queues."""
        return self._snapshots.keys()

    @property
    def is_at_rest(self) -> bool:
        """Return whether nothing waits or runs in any of them."""
        return all(snapshot.is_at_rest for snapshot in self._snapshots.values())

    def joined(self) -> AdmissionSnapshot:
        """Return the state of all queues as if they were one."""
        snapshots = self._snapshots.values()
        pools = {load.pool for snapshot in snapshots for load in snapshot.models}
        tenants: Counter[str] = Counter()
        replicas: dict[str, dict[str, ReplicaLoad]] = {}
        for snapshot in snapshots:
            tenants.update(snapshot.tenants)
            for pool, loads in snapshot.replicas.items():
                found = replicas.setdefault(pool, {})
                for load in loads:
                    found[load.name] = _both_loads(found[load.name], load) if load.name in found else load
        models = [load for pool in sorted(pools) for load in self.loads(pool).values()]
        return AdmissionSnapshot(
            tuple(models),
            {pool: tuple(found.values()) for pool, found in replicas.items()},
            dict(tenants),
            joined_loads(load for snapshot in snapshots for load in snapshot.shares),
        )

    def listed(self, pool: str) -> set[str]:
        """Return the replicas of a pool that requests may start on."""
        return {
            load.name
            for snapshot in self._snapshots.values()
            for load in snapshot.replicas.get(pool, ())
            if not load.is_gone
        }

    def running(self, pool: str) -> Mapping[str, Mapping[str, int]]:
        """Return the running requests by replica and model."""
        running: dict[str, Mapping[str, int]] = {}
        for snapshot in self._snapshots.values():
            for load in snapshot.replicas.get(pool, ()):
                before = running.get(load.name)
                running[load.name] = Counter(before) + Counter(load.running) if before else load.running
        return running

    def loads(self, pool: str) -> dict[str, ModelLoad]:
        """Return the loads of the pool's models."""
        found: dict[str, ModelLoad] = {}
        for snapshot in self._snapshots.values():
            for load in snapshot.models:
                if load.pool == pool:
                    before = found.get(load.model)
                    found[load.model] = load if before is None else _added_loads(before, load)
        return found


def _added_loads(one: ModelLoad, other: ModelLoad) -> ModelLoad:
    slacks = [load.slack_s for load in (one, other) if load.slack_s is not None]
    return ModelLoad(
        one.pool,
        one.model,
        one.waiting + other.waiting,
        max(one.oldest_age_s, other.oldest_age_s),
        one.running + other.running,
        one.rate_short + other.rate_short,
        one.rate_long + other.rate_long,
        max(one.service_s, other.service_s),
        max(one.latency_s, other.latency_s),
        max(one.switch_s, other.switch_s),
        one.started + other.started,
        one.refused + other.refused,
        min(slacks, default=None),
        max(one.unstarted_s, other.unstarted_s),
    )


def _both_loads(one: ReplicaLoad, other: ReplicaLoad) -> ReplicaLoad:
    running = Counter(one.running) + Counter(other.running)
    recent = tuple(dict.fromkeys((*one.recent, *other.recent)))
    return ReplicaLoad(one.name, one.used + other.used, dict(running), recent, one.is_gone and other.is_gone)
