"""Workers that come and go: the number of workers that Serve is asked for, and which ones leave first. Pure.

`target_replicas` says how many there should be. More are asked for at once. Fewer are asked for when those that Serve
would stop next may go: until then they drain, so that their requests end and what only they have gets ready elsewhere.
When demand comes back meanwhile, they stay.

Spare workers have done their imports and get no work. One works as soon as more are wanted or a worker is gone, and
Serve is asked for another spare. Who has drained is a spare before a younger one; surplus spares are stopped.

Serve stops the newest worker of the node with the fewest (2.60, deployment_scheduler.py), and nobody can name another
one. On a cluster of several nodes it also looks at what else they run: then one may be stopped that has not drained,
whose requests end all the same, and whose models are switched to again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from cluster.placement.autoscaling import ScalingMemory, ScalingPolicy, can_leave, target_replicas
from cluster.placement.state import ClusterState, Decision

STOP_S: Final = 20.0  # one that was released and is still there then was not the one that Serve stopped
LONGEST_DRAIN_S: Final = 60.0  # then a worker leaves whatever only it has


@dataclass(slots=True)
class Scaling:
    """The number of workers that Serve is to have, its `target`, and the way there.

    `leaving` are the workers that drain before Serve is asked for fewer, the next to stop first; Serve is to stop those
    in `released`. Both say since when. `preloads` are for workers to come. Of the target, `num_spares` are spares, and
    `spares` are those of them that are here.
    """

    policy: ScalingPolicy
    target: int
    reason: str = ""
    leaving: dict[str, float] = field(default_factory=dict)
    released: dict[str, float] = field(default_factory=dict)
    preloads: deque[str] = field(default_factory=deque)
    num_spares: int = field(init=False)
    spares: list[str] = field(default_factory=list)
    _memory: ScalingMemory = field(default_factory=ScalingMemory)
    _here: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.num_spares = min(self.policy.spare_workers, max(0, self.target - max(1, self.policy.min_workers)))

    @property
    def draining(self) -> frozenset[str]:
        """Workers that get no new work."""
        return frozenset({**self.leaving, **self.released}).union(self.spares)

    @property
    def _num_working(self) -> int:
        """Number of workers that are to work, of those that are here or coming."""
        return self.target - len(self.leaving) - self.num_spares

    def describe(self) -> dict[str, Any]:
        """Return how many workers are wanted, which leave or are spare, and why."""
        leaving = sorted({**self.leaving, **self.released})
        return {"target": self.target, "leaving": leaving, "spares": sorted(self.spares), "reason": self.reason}

    def assign(self, here: Sequence[str]) -> None:
        """Choose who of the workers works and who is spare; the first of the newcomers work first."""
        self.spares = [name for name in self.spares if name in here]
        working = {name for name in here if name in self._here} - self.draining
        for name in here:
            if name in self._here or name in self.draining:
                continue
            if len(working) >= self._num_working and len(self.spares) < self.num_spares:
                self.spares.append(name)
            else:
                working.add(name)
        self._here = set(here)
        num_missing = max(0, self._num_working - len(working))
        del self.spares[:num_missing]

    def follow(self, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Move the target. `up_s` is how long each worker has been there."""
        here = state.workers
        self.leaving = {name: since_s for name, since_s in self.leaving.items() if name in here}
        self.released = {
            name: since_s for name, since_s in self.released.items() if name in here and now_s - since_s < STOP_S
        }
        plan = target_replicas(state, self.policy, self._memory, self._num_working, now_s)
        self._memory, self.reason = plan.memory, plan.reason
        if plan.target > self._num_working:
            self._call_back(plan.target - self._num_working)
            if plan.target > self._num_working:
                self.preloads = deque(plan.preloads)
                self._put_to_work(plan.target - self._num_working)
        elif plan.target < self._num_working:
            num_coming = self._num_coming(state) - (self.num_spares - len(self.spares))  # Serve stops these first
            num_undone = min(max(0, num_coming), self._num_working - plan.target)
            self.target -= num_undone
            self._let_go(self._num_working - plan.target, state, up_s, now_s)
        for name, since_s in list(self.leaving.items()):
            if not can_leave(state, state.workers[name]) and now_s - since_s < LONGEST_DRAIN_S:
                break  # Serve stops them in this order
            del self.leaving[name]
            self.spares.append(name)
            self.num_spares += 1
        self._set_spares(plan.target, state, up_s, now_s)

    def preload_orders(self, state: ClusterState, busy: Iterable[str]) -> list[Decision]:
        """Return orders to workers that have begun to work since, and have nothing yet, to get what they are for."""
        working = {name: worker for name, worker in state.workers.items() if not worker.is_draining}
        new = [worker for name, worker in working.items() if name not in self._seen and name not in set(busy)]
        self._seen = set(working)
        orders = []
        for worker in new:
            if self.preloads and not (worker.models or worker.switching_to):
                model = state.models.get(self.preloads.popleft())
                able = model is not None and model.id not in worker.unable
                if model is not None and able and model.components.total_bytes <= worker.budget_bytes:
                    reason = "new, and there for this model"
                    switch_s = state.switch_s(model, worker)
                    orders.append(Decision("switch", worker.id, model.id, reason, (), switch_s))
        return orders

    def _num_coming(self, state: ClusterState) -> int:
        return max(0, self.target - len(state.workers.keys() - self.released.keys()))

    def _put_to_work(self, count: int) -> None:
        """Let spares work, here or coming, and ask for more where they are too few."""
        num_taken = min(count, self.num_spares)
        self.num_spares -= num_taken
        del self.spares[:num_taken]
        self.target += count - num_taken

    def _set_spares(self, num_working: int, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Have Serve stop spares that are too many, and ask for one that lacks once all others are here."""
        num_wanted = min(self.policy.spare_workers, self.policy.max_workers - num_working) if num_working else 0
        while self.num_spares > max(num_wanted, len(self.spares)):  # not here yet
            self.num_spares -= 1
            self.target -= 1
        for name in _stop_order(state, up_s):
            worker = state.workers[name]
            if self.num_spares <= num_wanted or worker.pinned or worker.is_frozen:
                break
            if name in self.spares:
                self.spares.remove(name)
                self.released[name] = now_s
                self.num_spares -= 1
                self.target -= 1
        if self.num_spares + len(self.leaving) < num_wanted and not self._num_coming(state):
            self.num_spares += 1
            self.target += 1

    def _call_back(self, count: int) -> None:
        """Let the last of those stay that were to leave."""
        for name in list(self.leaving)[::-1][:count]:
            del self.leaving[name]

    def _let_go(self, count: int, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Begin to drain those that Serve stops next; none behind one that was pinned or frozen by hand."""
        for name in _stop_order(state, up_s):
            if name in self.draining:
                continue
            worker = state.workers[name]
            if not count or worker.pinned or worker.is_frozen:
                return
            self.leaving[name] = now_s
            count -= 1


def _stop_order(state: ClusterState, up_s: Mapping[str, float]) -> list[str]:
    """Return the workers in the order in which Serve stops them: of nodes with few workers, and new ones, first."""
    on_node = Counter(worker.node for worker in state.workers.values())
    return sorted(state.workers, key=lambda name: (on_node[state.workers[name].node], up_s.get(name, 0.0), name))
