"""The places of one pool of replicas: who runs what, where there is room, and where a request would end first. Pure.

A request takes a share of a replica, and a replica is full when the shares of what it runs add up to 1. A request
whose share does not fit beside others starts on a replica that runs nothing.

Requests of a model that meet on a replica share its batches, so one that joins costs only what it delays the others
and they it. A free start (`free_starts.py`) takes the replica where work, switch and the loss of what goes are least
together. An idle replica takes it at once; one that runs other models, which must end first, only a request that has
waited for some time: until then it serves what it has, and so fewer switches are needed.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.control.lanes import Waiting
from cluster.control.plans import FreeStart
from cluster.control.service_times import SharedSeconds

MAX_RECENT: Final = 4  # models that a replica is believed to have at hand: the ones that it ran last
LOSS_SWITCHES: Final = 0.5  # of a model that goes and is wanted next; half of them would have gone anyway until then
JOIN_DELAYS: Final = 2.0  # who joins a batch is delayed by each of the others, and delays each of them
_ROUNDING: Final = 1e-9  # of shares that add up to 1


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has left its replica: seconds of the whole replica that it had, and seconds from start to end."""

    waiting: Waiting
    replica: str
    busy_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica: the part of it that is used, running requests by model, and the models believed to be at hand."""

    name: str
    used: float
    running: dict[str, int]
    recent: tuple[str, ...]
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    waiting: Waiting
    replica: str
    started_s: float
    began: float  # the replica's `clock` then
    latency: SharedSeconds  # expected

    def left_s(self, replica: _Replica, now_s: float) -> float:
        """Return in how many seconds it will end: what it has done counts in the company that it had, the rest in
        the present one.
        """
        share, passed_s = self.waiting.ask.share, now_s - self.started_s
        num_sharing = max(1.0, replica.used / share)
        busy_s = share * (replica.clock_at(now_s) - self.began)
        expected_s = self.latency.seconds_among(passed_s / busy_s if busy_s > 0 else num_sharing)
        part = passed_s / expected_s if expected_s > 0 else 1.0
        return max(0.0, 1 - part) * self.latency.seconds_among(num_sharing)


@dataclass(slots=True)
class _Replica:
    """One replica. `clock` counts seconds per unit of share: it is slower the more runs beside each other."""

    used: float = 0.0
    load_s: float = 0.0
    ready_at_s: float = -math.inf  # when the switch ends that a request began
    clock: float = 0.0
    clock_at_s: float = 0.0
    is_gone: bool = False
    models: Counter[str] = field(default_factory=Counter)  # running
    recent: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def clock_at(self, now_s: float) -> float:
        return self.clock + (max(0.0, now_s - self.clock_at_s) / self.used if self.used > _ROUNDING else 0.0)

    def advance(self, now_s: float) -> None:
        self.clock = self.clock_at(now_s)
        self.clock_at_s = now_s

    def delay_s(self, model: str, joining_s: float) -> float:
        num, num_alike = self.models.total(), self.models[model]
        return JOIN_DELAYS * joining_s * num_alike + self.load_s * (num - num_alike) / max(num, 1)

    def has_room(self, share: float) -> bool:
        return not self.is_gone and (self.used + share <= 1 + _ROUNDING or not self.models)


class Places:
    """The replicas of one pool."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._runs: dict[int, _Run] = {}
        self._ends: list[float] | None = None  # expected, sorted; None when they have to be sorted again

    @property
    def num_running(self) -> int:
        return len(self._runs)

    @property
    def num_replicas(self) -> int:
        """The number of replicas that can be given work."""
        return sum(not replica.is_gone for replica in self._replicas.values())

    def set_replicas(self, names: Collection[str], now_s: float) -> None:
        """Give work to these replicas from now on. What others run stays theirs until it ends."""
        for name, replica in list(self._replicas.items()):
            replica.is_gone = name not in names
            if replica.is_gone and not replica.models:
                del self._replicas[name]
        for name in names:
            self._replicas.setdefault(name, _Replica(clock_at_s=now_s))

    def choose(
        self,
        share: float,
        model: str,
        switch_s: float,
        joining_s: float,
        now_s: float,
        among: Collection[str] | None = None,
        free: Mapping[str, FreeStart] | None = None,
        chances: Mapping[str, float] | None = None,
        is_held: bool = False,
    ) -> str | None:
        """Return the replica with room where the wait is shortest; None when there is no room.

        The wait is what the requests there delay it by and it them (`joining_s` is by how much one of its model does),
        the rest of a switch, and one to a model that it is not believed to have at hand. `among`:
        the replicas that the model may start on, None for all. `free` says what a switch costs where, `chances` how
        likely each model is asked for next. While it `is_held`, it starts nowhere that other models have to end first.
        """
        best: tuple[float, float, str] | None = None
        for name, replica in self._replicas.items() if among is None else self._named(among):
            if replica.has_room(share):
                if model in replica.recent:
                    missing_s = 0.0
                elif free is None or (start := free.get(name)) is None:
                    missing_s = switch_s
                elif start.is_beside:
                    missing_s = start.switch_s * (1 + replica.models.total())
                elif replica.models and is_held:
                    continue
                else:
                    missing_s = start.switch_s * (1 + LOSS_SWITCHES * self._loss(replica, chances or {}))
                switching_s = max(0.0, replica.ready_at_s - now_s)
                wait = switching_s + replica.delay_s(model, joining_s) + missing_s, replica.used, name
                if best is None or wait < best:
                    best = wait
        return best[2] if best else None

    def models_at_hand(self, name: str) -> Collection[str]:
        """Return the models that a replica is believed to have."""
        return self._replicas[name].recent

    def _loss(self, replica: _Replica, chances: Mapping[str, float]) -> float:
        """Return how likely the next request is for a model that goes and that no other replica has."""
        lost = 1.0 if replica.recent else 0.0
        for model in replica.recent:
            is_alone = sum(model in other.recent for other in self._replicas.values()) == 1
            lost = min(lost, chances.get(model, 0.0) if is_alone else 0.0)
        return lost

    def has_room(self, share: float, among: Collection[str] | None = None) -> bool:
        """Return whether any replica, or any of those named, could start a request of that share."""
        if among is None:
            return any(replica.has_room(share) for replica in self._replicas.values())
        return any(replica.has_room(share) for _, replica in self._named(among))

    def start_request(
        self,
        waiting: Waiting,
        name: str,
        now_s: float,
        latency: SharedSeconds,
        switch_s: float = 0.0,
        is_alone: bool = False,
    ) -> None:
        """Count a request as running on a replica, where it is expected to take `latency`.

        `switch_s`: what a switch to its model takes, where it is not at hand. `is_alone`: other models go for it.
        """
        replica = self._replicas[name]
        if waiting.ask.model not in replica.recent:
            replica.ready_at_s = max(now_s, replica.ready_at_s) + switch_s
            if is_alone:
                replica.recent.clear()
        replica.advance(now_s)
        replica.used += waiting.ask.share
        replica.load_s += waiting.cost_s
        replica.models[waiting.ask.model] += 1
        replica.recent[waiting.ask.model] = None
        replica.recent.move_to_end(waiting.ask.model)
        if len(replica.recent) > MAX_RECENT:
            replica.recent.popitem(last=False)
        self._runs[waiting.ticket] = _Run(waiting, name, now_s, replica.clock, latency)
        self._ends = None

    def restore(self, waiting: Waiting, name: str, now_s: float) -> None:
        """Count a request as running that started before this was made. Its replica may not be known yet."""
        self._replicas.setdefault(name, _Replica(clock_at_s=now_s, is_gone=True))
        self.start_request(waiting, name, now_s, SharedSeconds())

    def end(self, ticket: int, now_s: float) -> Ended:
        """Count a request as running no longer, however it ended."""
        run = self._runs.pop(ticket)
        self._ends = None
        replica, waiting = self._replicas[run.replica], run.waiting
        replica.advance(now_s)
        busy_s = waiting.ask.share * (replica.clock - run.began)
        replica.models[waiting.ask.model] -= 1
        if not replica.models[waiting.ask.model]:
            del replica.models[waiting.ask.model]
        is_idle = not replica.models
        replica.used = 0.0 if is_idle else replica.used - waiting.ask.share
        replica.load_s = 0.0 if is_idle else max(0.0, replica.load_s - waiting.cost_s)
        if is_idle and replica.is_gone:
            del self._replicas[run.replica]
        return Ended(waiting, run.replica, busy_s, now_s - run.started_s)

    def forget_model(self, name: str, model: str) -> None:
        """Believe no longer that the replica has the model at hand."""
        if name in self._replicas:
            self._replicas[name].recent.pop(model, None)

    def set_resident(self, resident: Mapping[str, Iterable[str]]) -> None:
        """Believe that these models are at hand, by replica, and no others.

        Not where something runs that is not among them: it started after those who say so have looked.
        """
        for name, models in resident.items():
            replica = self._replicas.get(name)
            if replica is not None and replica.models.keys() <= set(models):
                last = [model for model in replica.recent if model in models]  # the order of use stays
                replica.recent = OrderedDict.fromkeys([*(model for model in models if model not in last), *last])

    def start_in_s(self, share: float, ahead_s: float, now_s: float) -> float:
        """Return in how many seconds a request would start that has `ahead_s` replica seconds of work before it.

        Infinity: there is no replica. Places become free in the order in which the running requests are expected to
        end, round by round: requests that began together as a batch end together, too.
        """
        if not (num_replicas := self.num_replicas):
            return math.inf
        if not ahead_s and self.has_room(share):
            return 0.0
        wait_s = ahead_s / num_replicas
        if not self._runs:
            return wait_s
        if self._ends is None:
            self._ends = sorted(now_s + run.left_s(self._replicas[run.replica], now_s) for run in self._runs.values())
        round_s = sum(replica.load_s for replica in self._replicas.values()) / num_replicas
        num_rounds = int(wait_s / round_s) if round_s else 0
        part = wait_s / round_s - num_rounds if round_s else 0.0
        end_s = self._ends[min(int(part * len(self._ends) + _ROUNDING), len(self._ends) - 1)]
        return num_rounds * round_s + max(0.0, end_s - now_s)

    def num_sharing(self, share: float, ahead_s: float) -> float:
        """Return how many of that share would have the replica together with a request that waits behind `ahead_s`.

        Where something is before it, replicas are full when it starts; where nothing is, it has the emptiest one.
        """
        if not ahead_s:
            free = [replica.used for replica in self._replicas.values() if replica.has_room(share)]
            if free:
                return min(free) / share + 1
        return 1 / share

    def num_of(self, model: str) -> int:
        """Return how many requests for the model run."""
        return sum(replica.models[model] for replica in self._replicas.values())

    def running(self) -> Counter[str]:
        """Return the number of running requests by model."""
        return Counter(run.waiting.ask.model for run in self._runs.values())

    def load(self) -> tuple[ReplicaLoad, ...]:
        """Return what every replica does."""
        return tuple(
            ReplicaLoad(name, replica.used, dict(replica.models), tuple(replica.recent), replica.is_gone)
            for name, replica in self._replicas.items()
        )

    def _named(self, names: Collection[str]) -> list[tuple[str, _Replica]]:
        return [(name, self._replicas[name]) for name in names if name in self._replicas]
