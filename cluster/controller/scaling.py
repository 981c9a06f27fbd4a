"""Workers that come and go: the number of workers that Serve is asked for, and which ones leave first. Pure.

`target_replicas` says how many there should be. More are asked for at once. Fewer are asked for when those that Serve
would stop next may go: until then they drain, so that their requests end and what only they have gets ready elsewhere.
When demand comes back meanwhile, they stay.

Serve stops the newest worker of the node with the fewest (2.60, deployment_scheduler.py), and nobody can name another
one. On a cluster of several nodes it also looks at what else they run: then one may be stopped that has not drained,
whose requests end all the same, and whose models are switched to again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.control.autoscaling import ScalingMemory, ScalingPolicy, can_leave, target_replicas
from cluster.control.plans import Decision
from cluster.control.state import ClusterState

STOP_S: Final = 20.0  # one that was released and is still there then was not the one that Serve stopped
LONGEST_DRAIN_S: Final = 60.0  # then a worker leaves whatever only it has


@dataclass(slots=True)
class Scaling:
    """The number of workers that Serve is to have, its `target`, and the way there.

    `leaving` are the workers that drain before Serve is asked for fewer, the next to stop first; Serve is to stop those
    in `released`. Both say since when. `preloads` are for workers to come.
    """

    policy: ScalingPolicy
    target: int
    reason: str = ""
    leaving: dict[str, float] = field(default_factory=dict)
    released: dict[str, float] = field(default_factory=dict)
    preloads: deque[str] = field(default_factory=deque)
    _memory: ScalingMemory = field(default_factory=ScalingMemory)
    _seen: set[str] = field(default_factory=set)

    @property
    def draining(self) -> frozenset[str]:
        """Workers that get no new work."""
        return frozenset({**self.leaving, **self.released})

    def follow(self, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Move the target. `up_s` is how long each worker has been there."""
        here = state.workers
        self.leaving = {name: since_s for name, since_s in self.leaving.items() if name in here}
        self.released = {
            name: since_s for name, since_s in self.released.items() if name in here and now_s - since_s < STOP_S
        }
        staying = self.target - len(self.leaving)
        plan = target_replicas(state, self.policy, self._memory, staying, now_s)
        self._memory, self.reason = plan.memory, plan.reason
        if plan.target > staying:
            self._call_back(plan.target - staying)
            if plan.target > self.target:
                self.target, self.preloads = plan.target, deque(plan.preloads)
        elif plan.target < staying:
            num_coming = max(0, self.target - len(here.keys() - self.released.keys()))  # Serve stops these first
            num_undone = min(num_coming, staying - plan.target)
            self.target -= num_undone
            self._let_go(staying - plan.target - num_undone, state, up_s, now_s)
        for name, since_s in list(self.leaving.items()):
            if not can_leave(state, state.workers[name]) and now_s - since_s < LONGEST_DRAIN_S:
                break  # Serve stops them in this order
            del self.leaving[name]
            self.released[name] = now_s
            self.target -= 1

    def preload_orders(self, state: ClusterState, busy: Iterable[str]) -> list[Decision]:
        """Return orders to workers that have come since, and have nothing yet, to get ready for what they are for."""
        new = [worker for name, worker in state.workers.items() if name not in self._seen and name not in set(busy)]
        self._seen = set(state.workers)
        orders = []
        for worker in new:
            if self.preloads and not (worker.models or worker.switching_to or worker.is_draining):
                model = state.models.get(self.preloads.popleft())
                if model is not None and model.components.total_bytes <= worker.budget_bytes:
                    reason = "new, and there for this model"
                    switch_s = state.switch_s(model, worker)
                    orders.append(Decision("switch", worker.id, model.id, reason, (), switch_s))
        return orders

    def _call_back(self, count: int) -> None:
        """Let the last of those stay that were to leave."""
        for name in list(self.leaving)[::-1][:count]:
            del self.leaving[name]

    def _let_go(self, count: int, state: ClusterState, up_s: Mapping[str, float], now_s: float) -> None:
        """Begin to drain those that Serve stops next; none behind one that was pinned or frozen by hand."""
        for name in _stop_order(state, up_s):
            if name in self.leaving or name in self.released:
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
