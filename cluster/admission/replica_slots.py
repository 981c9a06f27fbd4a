"""The replicas of one pool: their running requests, their room, and the one where a request would end first. Pure.

A request takes a share of a replica, its slot there. A replica is full when the shares of its requests add up to 1.
A request whose share does not fit beside others starts on an idle replica.

If several ingresses have queues, each owns a part of every replica, the others run theirs beside it, and nothing
starts beyond that part. A replica without a name is the ingress's own.

Requests of a model on one replica share its batches, so a joining request costs the delay that it adds to its batch,
and the batch to it. A switch on demand (`cluster/placement/on_demand.py`) takes the replica with the least work, switch
and loss together. An idle replica takes it at once. A replica with running models, which must end first, takes only a
request that has waited for some time, so fewer switches are needed.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.admission.records import Demand, OnDemandSwitch, ReplicaLoad, ReplicaPart, ReplicaUse, Waiting
from cluster.admission.service_times import BatchLatency

MAX_RECENT: Final = 4  # models that a replica is believed to have at hand: those that it ran last
LOSS_SWITCHES: Final = 0.5  # for evicting a model that is wanted next; half of them would be gone by then anyway
JOIN_DELAYS: Final = 2.0  # a request that joins a batch is delayed by each of the others, and delays each of them
HOLD_TIMES: Final = 4.0  # times a request's switch and run: the longest that it waits for others' batches to end
NO_PART: Final = ReplicaPart(0.0)
_ROUNDING: Final = 1e-9  # of shares that add up to 1


@dataclass(frozen=True, slots=True)
class Options:
    """The places where a request may start, and its costs there beside the work.

    `among` are the replicas on which its model may start, None for all. `switch_s` is the time of a switch to the model
    where it is not at hand, unless `on_demand` has one. `joining_s` is the mutual delay between a request that joins a
    batch and each of the others. `chances` are the models' chances to be asked for next. Until `held_until_s` the
    request starts nowhere that other models have to end first.
    """

    among: Collection[str] | None = None
    switch_s: float = 0.0
    joining_s: float = 0.0
    on_demand: Mapping[str, OnDemandSwitch] = field(default_factory=dict)
    chances: Mapping[str, float] = field(default_factory=dict)
    held_until_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Assignment:
    """The replica for a request, and the seconds of a switch to its model there. `is_alone`: other models go for it."""

    replica: str
    switch_s: float = 0.0
    is_alone: bool = False


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
    latency: BatchLatency  # expected

    def left_s(self, replica: _Replica, now_s: float) -> float:
        """Return the estimated seconds left: the past at its own concurrency, the rest at the present one."""
        share, passed_s = self.waiting.demand.share, now_s - self.started_s
        num_sharing = max(1.0, replica.all_used / share)
        busy_s = share * (replica.clock_at(now_s) - self.began)
        expected_s = self.latency.seconds_at(passed_s / busy_s if busy_s > 0 else num_sharing)
        part = passed_s / expected_s if expected_s > 0 else 1.0
        return max(0.0, 1 - part) * self.latency.seconds_at(num_sharing)


@dataclass(slots=True)
class _Replica:
    """One replica. `clock` counts seconds per unit of share: it is slower the more requests run together."""

    limit: float = 1.0  # of the shares that this queue may run
    used: float = 0.0
    load_s: float = 0.0
    others: Mapping[str, int] = field(default_factory=dict)  # running for other ingresses, by model
    others_used: float = 0.0
    others_load_s: float = 0.0
    ready_at_s: float = -math.inf  # when the switch ends that a request began
    clock: float = 0.0
    clock_at_s: float = 0.0
    is_gone: bool = False
    models: Counter[str] = field(default_factory=Counter)  # running
    recent: OrderedDict[str, None] = field(default_factory=OrderedDict)

    @property
    def all_used(self) -> float:
        return self.used + self.others_used

    @property
    def num_running(self) -> int:
        return self.models.total() + sum(self.others.values())

    def clock_at(self, now_s: float) -> float:
        used = self.all_used
        return self.clock + (max(0.0, now_s - self.clock_at_s) / used if used > _ROUNDING else 0.0)

    def advance(self, now_s: float) -> None:
        self.clock = self.clock_at(now_s)
        self.clock_at_s = now_s

    def delay_s(self, model: str, joining_s: float) -> float:
        num, num_alike = self.num_running, self.models[model] + self.others.get(model, 0)
        load_s = self.load_s + self.others_load_s
        return JOIN_DELAYS * joining_s * num_alike + load_s * (num - num_alike) / max(num, 1)

    def has_room(self, share: float) -> bool:
        return not self.is_gone and self.used + share <= self.limit + _ROUNDING


class ReplicaSlots:
    """The replicas of one pool. `is_shared`: nothing starts on those with names before `set_parts` allows it."""

    def __init__(self, *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._capacity = 0.0  # where it is shared
        self.has_overdrawn = False  # a request ended where more ran than allowed; its reader clears it
        self._replicas: dict[str, _Replica] = {}
        self._runs: dict[int, _RunningRequest] = {}
        self._num_running: Counter[str] = Counter()  # by model
        self._num_at_hand: Counter[str] = Counter()  # replicas, by model
        self._ends: list[float] | None = None  # expected, sorted; None when they have to be sorted again

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @property
    def num_replicas(self) -> int:
        """The number of replicas that can be given work."""
        return sum(not replica.is_gone for replica in self._replicas.values())

    @property
    def capacity(self) -> float:
        """Number of replicas that this queue can count on."""
        return self._capacity if self._is_shared and "" not in self._replicas else float(self.num_replicas)

    def names(self) -> list[str]:
        """Return the replicas that can be given work."""
        return [name for name, replica in self._replicas.items() if not replica.is_gone]

    def run_of(self, ticket: int) -> tuple[Demand, str] | None:
        """Return the demand of a running request and its replica; None for any other request."""
        run = self._runs.get(ticket)
        return (run.waiting.demand, run.replica) if run else None

    def set_replicas(self, names: Collection[str], now_s: float) -> None:
        """Give work to these replicas from now on. Requests on others stay there until they end."""
        for name, replica in list(self._replicas.items()):
            replica.is_gone = name not in names
            if replica.is_gone and not replica.models:
                self._forget_replica(name)
        for name in names:
            if name not in self._replicas:
                limit = 0.0 if self._is_shared and name else 1.0
                self._replicas[name] = _Replica(limit=limit, clock_at_s=now_s)

    def set_parts(self, parts: Mapping[str, ReplicaPart], capacity: float, now_s: float) -> None:
        """Own these parts of the replicas from now on, and none of the others; `capacity` replicas' worth in all.

        Models that others have begun to run are believed to be at hand.
        """
        self._capacity, self._ends = capacity, None
        for name, replica in self._replicas.items():
            if not name:
                continue
            part = parts.get(name, NO_PART)
            replica.advance(now_s)
            replica.limit, replica.others = part.limit, part.others
            replica.others_used, replica.others_load_s = part.others_used, part.others_load_s
            if new := [model for model in part.others if model not in replica.recent]:
                self._believe(replica, [*replica.recent, *new][-MAX_RECENT:])

    def suspend(self) -> None:
        """Own nothing, until the next parts are set."""
        for name, replica in self._replicas.items():
            replica.limit = 0.0 if name else 1.0

    def uses(self) -> dict[str, ReplicaUse]:
        """Return this queue's slots on each named replica."""
        return {
            name: ReplicaUse(replica.used, replica.limit, dict(replica.models), replica.load_s, not replica.is_gone)
            for name, replica in self._replicas.items()
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

    def best(self, demand: Demand, options: Options, now_s: float) -> Assignment | None:
        """Return the replica with room where the wait is shortest; None when the request has to wait.

        The wait is the mutual delay of it and the requests there, the rest of a switch, and one to a model that the
        replica is not believed to have at hand.
        """
        best: tuple[float, float, str] | None = None
        for name, replica in self._replicas.items() if options.among is None else self._present(options.among):
            if not replica.has_room(demand.share):
                continue
            if (missing_s := self._missing_s(name, replica, demand.model, options, now_s)) is None:
                continue
            switching_s = max(0.0, replica.ready_at_s - now_s)
            wait_s = switching_s + replica.delay_s(demand.model, options.joining_s) + missing_s
            if best is None or (wait_s, replica.all_used, name) < best:
                best = wait_s, replica.all_used, name
        if best is None:
            return None
        start = options.on_demand.get(best[2])
        return (
            Assignment(best[2], start.switch_s, not start.is_beside) if start else Assignment(best[2], options.switch_s)
        )

    def _missing_s(self, name: str, replica: _Replica, model: str, options: Options, now_s: float) -> float | None:
        """Return the seconds to get the model ready, with the expected loss of evictions; None if it has to wait."""
        if model in replica.recent:
            return 0.0
        if (start := options.on_demand.get(name)) is None:
            return options.switch_s
        if start.is_beside:
            return start.switch_s * (1 + replica.num_running)
        if replica.num_running and now_s < options.held_until_s:
            return None
        return start.switch_s * (1 + LOSS_SWITCHES * self._loss(replica, options.chances))

    def may_take(self, model: str, options: Options, now_s: float) -> tuple[str, ...]:
        """Return the replicas on which a request would start if it had room there."""
        among = self._replicas.items() if options.among is None else self._present(options.among)
        return tuple(
            name
            for name, replica in among
            if not replica.is_gone and self._missing_s(name, replica, model, options, now_s) is not None
        )

    def models_at_hand(self, name: str) -> Collection[str]:
        """Return the models that a replica is believed to have."""
        return self._replicas[name].recent

    def _loss(self, replica: _Replica, chances: Mapping[str, float]) -> float:
        """Return the chance that the next request is for a model that would be evicted and is on no other replica."""
        lost = 1.0 if replica.recent else 0.0
        for model in replica.recent:
            is_alone = self._num_at_hand[model] == 1
            lost = min(lost, chances.get(model, 0.0) if is_alone else 0.0)
        return lost

    def has_room(self, share: float, among: Collection[str] | None = None) -> bool:
        """Return whether any replica, or any of those named, could start a request of that share."""
        if among is None:
            return any(replica.has_room(share) for replica in self._replicas.values())
        return any(replica.has_room(share) for _, replica in self._present(among))

    def start_request(self, waiting: Waiting, where: Assignment, now_s: float, latency: BatchLatency) -> None:
        """Count a request as running on a replica, where it is expected to take `latency`."""
        replica = self._replicas[where.replica]
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
        self._believe(replica, [*(others if len(others) < MAX_RECENT else others[1:]), model])
        self._runs[waiting.ticket] = _RunningRequest(waiting, where.replica, now_s, replica.clock, latency)
        self._ends = None

    def end(self, ticket: int, now_s: float) -> Ended:
        """Stop counting a request as running, however it ended."""
        run = self._runs.pop(ticket)
        self._ends = None
        replica, waiting = self._replicas[run.replica], run.waiting
        replica.advance(now_s)
        self.has_overdrawn |= replica.used > replica.limit + _ROUNDING
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
            self._forget_replica(run.replica)
        return Ended(waiting, run.replica, busy_s, now_s - run.started_s)

    def forget_model(self, name: str, model: str) -> None:
        """Stop believing that the replica has the model at hand."""
        if name in self._replicas:
            self._believe(self._replicas[name], [each for each in self._replicas[name].recent if each != model])

    def set_resident(self, resident: Mapping[str, Iterable[str]]) -> None:
        """Believe that these models are at hand, by replica, and no others.

        A replica with another running model is left out: that request started after the report was made.
        """
        for name, models in resident.items():
            replica = self._replicas.get(name)
            running = replica.models.keys() | replica.others.keys() if replica else ()
            if replica is not None and set(running) <= set(models):
                last = [model for model in replica.recent if model in models]  # the order of use stays
                self._believe(replica, [*(model for model in models if model not in last), *last])

    def start_in_s(self, share: float, ahead_s: float, now_s: float) -> float:
        """Return the seconds until a request would start that has `ahead_s` replica seconds of work before it.

        Infinity: there is no replica, or no part of one. Slots become free in the order in which the running requests
        are expected to end, round by round: requests that began together as a batch end together, too.
        """
        if not (capacity := self.capacity):
            return math.inf
        if not ahead_s and self.has_room(share):
            return 0.0
        wait_s = ahead_s / capacity
        if not self._runs:
            return wait_s
        if self._ends is None:
            self._ends = sorted(now_s + run.left_s(self._replicas[run.replica], now_s) for run in self._runs.values())
        round_s = sum(replica.load_s for replica in self._replicas.values()) / capacity
        has_rounds = round_s > _ROUNDING  # less is what subtractions have left
        num_rounds = int(wait_s / round_s) if has_rounds else 0
        part = wait_s / round_s - num_rounds if has_rounds else 0.0
        end_s = self._ends[min(int(part * len(self._ends) + _ROUNDING), len(self._ends) - 1)]
        return num_rounds * round_s + max(0.0, end_s - now_s)

    def num_sharing(self, share: float, ahead_s: float) -> float:
        """Return how many requests of that share would run together on a replica, behind `ahead_s` seconds of work.

        If work is before it, replicas are full when it starts; if not, it gets the emptiest one.
        """
        if not ahead_s:
            free = [replica.all_used for replica in self._replicas.values() if replica.has_room(share)]
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
            for name, replica in self._replicas.items()
        )

    def _believe(self, replica: _Replica, models: Iterable[str]) -> None:
        """Believe that the replica has these models at hand, the last one used last, and no others."""
        self._num_at_hand.subtract(replica.recent.keys())
        for model in replica.recent:
            if not self._num_at_hand[model]:
                del self._num_at_hand[model]
        replica.recent = OrderedDict.fromkeys(models)
        self._num_at_hand.update(replica.recent.keys())

    def _forget_replica(self, name: str) -> None:
        self._believe(self._replicas[name], ())
        del self._replicas[name]

    def _present(self, names: Collection[str]) -> list[tuple[str, _Replica]]:
        return [(name, self._replicas[name]) for name in names if name in self._replicas]


def held_until_s(
    starts: Mapping[str, OnDemandSwitch] | None, waiting: Waiting, latency_s: float, now_s: float
) -> float:
    """Return the time until which a request waits only for an idle worker or one with its model.

    It does not wait if its time is not known yet, or if its deadline is near.
    """
    if not starts or not latency_s:
        return waiting.arrived_s
    once_s = max([start.switch_s for start in starts.values()]) + latency_s
    is_near = waiting.demand.deadline_s - now_s <= (HOLD_TIMES + 1) * once_s
    return waiting.arrived_s + (0.0 if is_near else HOLD_TIMES * once_s)
