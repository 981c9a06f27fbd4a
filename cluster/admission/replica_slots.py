"""The requests that run on the replicas of one pool: who has which slot, and when the next ones become free. Pure.

A request takes a share of a replica, its slot there. A replica is full when the shares of its requests add up to 1.
A request whose share does not fit beside others starts on an idle replica.

If several ingresses have queues, each owns a part of every replica, the others run theirs beside it, and nothing
starts beyond that part. A replica without a name is the ingress's own.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from cluster.admission.records import Demand, ReplicaLoad, ReplicaPart, ReplicaUse, Waiting
from cluster.admission.replica_choice import Assignment
from cluster.admission.replicas import MAX_RECENT, ROUNDING, Replica, Replicas
from cluster.admission.service_times import BatchLatency

NO_PART: Final = ReplicaPart(0.0)
PLAYED: Final = 64  # starts of a forecast, and free places that it looks at


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has left its replica: its seconds of the whole replica, and its seconds from start to end."""

    waiting: Waiting
    replica: str
    busy_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class _RunningRequest:
    waiting: Waiting
    replica: str
    started_s: float
    began: float  # the replica's `clock` at the start
    latency: BatchLatency  # expected at the start

    def left_s(self, replica: Replica, now_s: float) -> float:
        """Return the estimated seconds left: the past at its own concurrency, the rest at the present one."""
        share, passed_s = self.waiting.demand.share, now_s - self.started_s
        num_sharing = max(1.0, replica.all_used / share)
        busy_s = share * (replica.clock_at(now_s) - self.began)
        expected_s = self.latency.seconds_at(passed_s / busy_s if busy_s > 0 else num_sharing)
        part = passed_s / expected_s if expected_s > 0 else 1.0
        return max(0.0, 1 - part) * self.latency.seconds_at(num_sharing)


class PlayedStarts:
    """The times when requests start, one after the other, that each take `each_s` of a place.

    `places` are free at these times, in order. The first `PLAYED` starts are played; the places take turns after them.
    """

    def __init__(self, places: list[float], each_s: float) -> None:
        self._free_s = places  # sorted, so a heap
        self._each_s = each_s
        self._found: list[float] = []

    def at_s(self, number: float) -> float:
        """Return when the request starts before which so many start; of a part of one, in proportion."""
        whole = min(int(number), PLAYED)
        while len(self._found) < whole + 2:
            self._found.append(self._free_s[0])
            heapq.heapreplace(self._free_s, self._free_s[0] + self._each_s)
        step_s = self._found[whole + 1] - self._found[whole] if whole < PLAYED else self._each_s / len(self._free_s)
        return self._found[whole] + (number - whole) * step_s


class ReplicaSlots:
    """The replicas of one pool. `is_shared`: nothing starts on those with names before `set_parts` allows it."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._capacity = 0.0  # where it is shared
        self.has_overdrawn = False  # a request ended where more ran than allowed; its reader clears it
        self.replicas = Replicas()
        self._runs: dict[int, _RunningRequest] = {}
        self._num_running: Counter[str] = Counter()  # by model
        self._ends: list[float] | None = None  # expected, sorted; None when they have to be sorted again
        self._starts: PlayedStarts | None = None  # for requests of `_starts_of`: their share, and replica seconds
        self._starts_of = (0.0, 0.0)

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @property
    def capacity(self) -> float:
        """Number of replicas that this queue can count on."""
        return self._capacity if self._is_shared and "" not in self.replicas else float(len(self.replicas.names()))

    def run_of(self, ticket: int) -> tuple[Demand, str] | None:
        """Return the demand of a running request and its replica; None for any other request."""
        run = self._runs.get(ticket)
        return (run.waiting.demand, run.replica) if run else None

    def set_replicas(self, names: Collection[str], now_s: float) -> None:
        """Give work to these replicas from now on. Requests on others stay there until they end."""
        self._starts = None
        for name, replica in list(self.replicas.items()):
            replica.is_gone = name not in names
            if replica.is_gone and not replica.models:
                self.replicas.drop(name)
        for name in names:
            if name not in self.replicas:
                limit = 0.0 if self._is_shared and name else 1.0
                self.replicas[name] = Replica(limit=limit, clock_at_s=now_s)

    def set_parts(
        self, parts: Mapping[str, ReplicaPart], capacity: float, now_s: float, *, is_suspended: bool = False
    ) -> None:
        """Own these parts of the replicas from now on, and none of the others; `capacity` replicas' worth in all.

        While it `is_suspended`, nothing starts in them. Models that others run are believed to be at hand.
        """
        self._capacity, self._ends, self._starts = capacity, None, None
        for name, replica in self.replicas.items():
            if not name:
                continue
            part = parts.get(name, NO_PART)
            replica.advance(now_s)
            replica.limit, replica.others = 0.0 if is_suspended else part.limit, part.others
            replica.others_used, replica.others_load_s = part.others_used, part.others_load_s
            if new := [model for model in part.others if model not in replica.recent]:
                self.replicas.believe(replica, [*replica.recent, *new][-MAX_RECENT:])

    def uses(self) -> dict[str, ReplicaUse]:
        """Return this queue's slots on each named replica."""
        return {
            name: ReplicaUse(replica.used, replica.limit, dict(replica.models), replica.load_s, not replica.is_gone)
            for name, replica in self.replicas.items()
            if name
        }

    def running_shares(self) -> dict[tuple[str, int, str], float]:
        """Return the shares of running requests by replica, priority and tenant."""
        found: dict[tuple[str, int, str], float] = {}
        for run in self._runs.values():
            demand = run.waiting.demand
            key = run.replica, demand.priority, demand.tenant
            found[key] = found.get(key, 0.0) + demand.share
        return found

    def start_request(self, waiting: Waiting, where: Assignment, now_s: float, latency: BatchLatency) -> None:
        """Count a request as running on a replica, where it is expected to take `latency`."""
        replica = self.replicas[where.replica]
        model, others = waiting.demand.model, [each for each in replica.recent if each != waiting.demand.model]
        if model not in replica.recent:
            replica.ready_at_s = max(now_s, replica.ready_at_s) + where.switch_s
            if where.is_alone:
                others = []
        replica.advance(now_s)
        replica.used += waiting.demand.share
        replica.load_s += waiting.cost_s
        replica.models[model] += 1
        self._num_running[model] += 1
        self.replicas.believe(replica, [*(others if len(others) < MAX_RECENT else others[1:]), model])
        self._runs[waiting.ticket] = _RunningRequest(waiting, where.replica, now_s, replica.clock, latency)
        self._ends = self._starts = None

    def end(self, ticket: int, now_s: float) -> Ended:
        """Stop counting a request as running, however it ended."""
        run = self._runs.pop(ticket)
        self._ends = self._starts = None
        replica, waiting = self.replicas[run.replica], run.waiting
        replica.advance(now_s)
        self.has_overdrawn |= replica.used > replica.limit + ROUNDING
        busy_s = waiting.demand.share * (replica.clock - run.began)
        replica.models[waiting.demand.model] -= 1
        self._num_running[waiting.demand.model] -= 1
        if not replica.models[waiting.demand.model]:
            del replica.models[waiting.demand.model]
        if not self._num_running[waiting.demand.model]:
            del self._num_running[waiting.demand.model]
        is_idle = not replica.models
        replica.used = 0.0 if is_idle else replica.used - waiting.demand.share
        replica.load_s = 0.0 if is_idle else max(0.0, replica.load_s - waiting.cost_s)
        if is_idle and replica.is_gone:
            self.replicas.drop(run.replica)
        return Ended(waiting, run.replica, busy_s, now_s - run.started_s)

    def start_in_s(self, share: float, ahead_s: float, each_s: float, now_s: float) -> float:
        """Return the seconds until a request would start that has `ahead_s` replica seconds of work before it, in
        requests of `each_s`.

        Infinity: there is no replica, or no part of one. Each of them starts in the place that is free first, and keeps
        it for its time.
        """
        if not (capacity := self.capacity):
            return math.inf
        if not ahead_s and self.replicas.has_room(share):
            return 0.0
        if not self._runs:
            return ahead_s / capacity
        if self._ends is None:
            self._ends = sorted(now_s + run.left_s(self.replicas[run.replica], now_s) for run in self._runs.values())
        if self._starts is None or self._starts_of != (share, each_s):
            num_free = min(PLAYED, sum([replica.num_places(share, PLAYED) for replica in self.replicas.values()]))
            places = [now_s] * num_free + [max(now_s, end_s) for end_s in self._ends]
            self._starts, self._starts_of = PlayedStarts(places, each_s * len(places) / capacity), (share, each_s)
        return max(0.0, self._starts.at_s(ahead_s / each_s if each_s else 0.0) - now_s)

    def num_sharing(self, share: float, ahead_s: float) -> float:
        """Return how many requests of that share would run together on a replica, behind `ahead_s` seconds of work.

        If work is before it, replicas are full when it starts; if not, it gets the emptiest one.
        """
        if not ahead_s:
            free = [replica.all_used for replica in self.replicas.values() if replica.has_room(share)]
            if free:
                return min(free) / share + 1
        return 1 / share

    def num_of(self, model: str) -> int:
        """Return the number of running requests for the model."""
        return self._num_running[model]

    def running(self) -> Counter[str]:
        """Return the number of running requests by model."""
        return self._num_running.copy()

    def load(self) -> tuple[ReplicaLoad, ...]:
        """Return the load of every replica."""
        return tuple(
            ReplicaLoad(name, replica.used, dict(replica.models), tuple(replica.recent), replica.is_gone)
            for name, replica in self.replicas.items()
        )
