"""The turns of tenants at one priority: whose request goes next, of the models that may start. Pure.

Each call costs at most the logarithm of the numbers of tenants, models and requests: lanes that
wait are in a heap by their clocks, sums over waiting requests are kept, and only a lane's startable models are
looked at.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from cluster.admission.lazy_heap import LazyHeap
from cluster.admission.records import Waiting
from cluster.admission.service_times import ArrivalRate
from configs.admission import AdmissionConfig

MAX_CLOCKS: Final = 1024  # of tenants without waiting requests
FEW: Final = 16  # tenants or models: so few are all looked at


class Line(OrderedDict[int, Waiting]):
    """Requests of one tenant for one model. `cost_s`: their estimated replica seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.cost_s = 0.0


@dataclass(slots=True, eq=False)
class Lane:
    """The requests of one tenant at one priority, in the order of arrival: all, and those of each model.

    `num_startable` of them, with the estimated cost `cost_s`, are for models that have a replica.
    """

    tenant: str
    weight: float
    clock_s: float = 0.0
    cost_s: float = 0.0
    num_startable: int = 0
    offered: ArrivalRate = field(default_factory=ArrivalRate)  # replica seconds, refused ones included
    waiting: OrderedDict[int, Waiting] = field(default_factory=OrderedDict)
    models: dict[str, Line] = field(default_factory=dict)

    def key(self) -> tuple[float, int]:
        """Return the sort key of lanes: the clock, then the number of the oldest request."""
        return self.clock_s, next(iter(self.waiting.values())).number

    def next_s(self, floor_s: float) -> float:
        """Return the clock at its next turn; `floor_s` is that of the lane served last. Idle lanes save up no turns."""
        return self.clock_s if self.num_startable else max(self.clock_s, floor_s)


@dataclass(frozen=True, slots=True)
class _Fronts:
    """The first requests of a lane for each of the models."""

    lane: Lane
    models: Collection[str]

    def key_of(self, model: str) -> int | None:
        return _front(self.lane.models[model]).number if model in self.models and model in self.lane.models else None


class OpenModels:
    """The models whose requests may start in this moment. Each lane's requests for them are in a heap by arrival."""

    def __init__(self, names: Collection[str]) -> None:
        self.names = names if isinstance(names, set) else set(names)
        self._fronts: dict[Lane, LazyHeap[str]] = {}

    def close(self, model: str) -> None:
        """Start no more requests of a model."""
        self.names.discard(model)

    def first(self, lane: Lane) -> Waiting | None:
        """Return the first request of the lane that may start."""
        oldest = next(iter(lane.waiting.values()))
        if oldest.demand.model in self.names:
            return oldest
        if (fronts := self._fronts.get(lane)) is None:
            less, more = sorted((self.names, lane.models.keys()), key=len)
            fronts = LazyHeap(_Fronts(lane, self.names), [model for model in less if model in more])
            self._fronts[lane] = fronts
        model = fronts.first()
        return None if model is None else _front(lane.models[model])


class TenantTurns:
    """The lanes of one priority: those that wait, `waiting`, and idle ones.

    `floor_s` is the clock of the lane served last, so no lane saves up turns.

    Models in `stalled` have no replica. A lane that waits only for such models is not busy, and its clock goes on.
    """

    def __init__(self, config: AdmissionConfig, stalled: Collection[str] = ()) -> None:
        self._config = config
        self._stalled = set(stalled)
        self.waiting: dict[str, Lane] = {}
        self._lanes: dict[str, Lane] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._busy: dict[str, Lane] = {}
        self._by_model: dict[str, dict[str, Lane]] = {}  # the lanes that wait for it, by tenant
        self._turns = LazyHeap[str](self)  # of the busy tenants
        self._weight = 0.0  # of the busy lanes
        self.cost_s = 0.0
        self.offered = ArrivalRate()  # replica seconds
        self.floor_s = 0.0

    def lane(self, tenant: str) -> Lane:
        """Return the lane of a tenant, which may be idle. The lanes that were idle longest are forgotten."""
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = Lane(tenant, self._config.weight_of(tenant), self.floor_s)
            self._idle[tenant] = None
            while len(self._idle) > MAX_CLOCKS:
                del self._lanes[self._idle.popitem(last=False)[0]]
        return lane

    def charge(self, tenant: str, cost_s: float) -> None:
        """Move a tenant's clock on by work, or back where it was charged too much."""
        lane = self.lane(tenant)
        lane.clock_s += cost_s / lane.weight
        if tenant in self._busy:
            self._turns.push(tenant)

    def note_offer(self, tenant: str, cost_s: float, now_s: float) -> None:
        """Count the work of a request that comes, whether it is let in or not."""
        self.lane(tenant).offered.note_arrival(now_s, cost_s)
        self.offered.note_arrival(now_s, cost_s)

    def ahead_s(self, tenant: str, model: str, now_s: float, most_s: float) -> float:
        """Return the work that is done before the next request of a tenant for a model, if that waits for `most_s`.

        Until its turn every other tenant gets its share, at most the work that it has and that it sends meanwhile, at
        the rate of late. The shares of many tenants are summed together. While the model has no replica, only the work
        waiting for it counts: no other competes for its future replicas.
        """
        lane = self.lane(tenant)
        if model in self._stalled:
            return lane.models[model].cost_s if model in lane.models else 0.0
        turn_s = lane.next_s(self.floor_s) + lane.cost_s / lane.weight
        if len(self._busy) > FEW:
            weight, work_s = self._weight - lane.weight * (lane.num_startable > 0), self.cost_s - lane.cost_s
            coming_s = most_s * (self.offered.steady_per_s(now_s) - lane.offered.steady_per_s(now_s))
            claims = [((turn_s - self.floor_s) * weight, work_s + coming_s)]
        else:
            recent = [self._lanes[other] for other in islice(reversed(self._idle), FEW)]
            claims = [
                (
                    (turn_s - other.next_s(self.floor_s)) * other.weight,
                    other.cost_s + most_s * other.offered.steady_per_s(now_s),
                )
                for other in (*self._busy.values(), *recent)
                if other is not lane
            ]
        return lane.cost_s + sum([max(0.0, min(claim)) for claim in claims])

    def add(self, waiting: Waiting) -> None:
        """Add a request behind the others of its tenant."""
        lane, model = self.lane(waiting.demand.tenant), waiting.demand.model
        lane.waiting[waiting.ticket] = waiting
        line = lane.models.setdefault(model, Line())
        line[waiting.ticket] = waiting
        line.cost_s += waiting.cost_s
        if len(line) == 1:
            self._by_model.setdefault(model, {})[lane.tenant] = lane
        if len(lane.waiting) == 1:
            self.waiting[lane.tenant] = lane
            self._idle.pop(lane.tenant, None)
        self._count(lane, model, 1, waiting.cost_s)

    def remove(self, waiting: Waiting) -> None:
        """Take a request out."""
        lane, model = self.waiting[waiting.demand.tenant], waiting.demand.model
        del lane.waiting[waiting.ticket]
        line = lane.models[model]
        del line[waiting.ticket]
        line.cost_s -= waiting.cost_s
        if not line:
            del lane.models[model], self._by_model[model][lane.tenant]
            if not self._by_model[model]:
                del self._by_model[model]
        if not lane.waiting:
            del self.waiting[lane.tenant]
            self._idle[lane.tenant] = None
        self._count(lane, model, -1, -waiting.cost_s)

    def _count(self, lane: Lane, model: str, num: int, cost_s: float) -> None:
        """Add so many requests to the lane's startable ones, or take them off, unless the model is stalled."""
        if model not in self._stalled:
            lane.num_startable += num
            lane.cost_s = max(0.0, lane.cost_s + cost_s) if lane.num_startable else 0.0
            self.cost_s = max(0.0, self.cost_s + cost_s)
        is_busy = lane.tenant in self._busy
        if lane.num_startable and not is_busy:
            lane.clock_s = max(lane.clock_s, self.floor_s)
            self._busy[lane.tenant] = lane
            self._weight += lane.weight
            self._turns.push(lane.tenant)
        elif is_busy and not lane.num_startable:
            del self._busy[lane.tenant]
            self._weight -= lane.weight
        if not self._busy:  # a rest left by rounding
            self._weight = self.cost_s = 0.0

    def set_stalled(self, models: Collection[str]) -> None:
        """Count on replicas for all models but these."""
        changed = [model for model in self._stalled.symmetric_difference(models) if model in self._by_model]
        lines = [(lane, model, lane.models[model]) for model in changed for lane in self._by_model[model].values()]
        for lane, model, line in lines:
            self._count(lane, model, -len(line), -line.cost_s)
        self._stalled = set(models)
        for lane, model, line in lines:
            self._count(lane, model, len(line), line.cost_s)

    def first(self, open_models: OpenModels) -> Waiting | None:
        """Return the request to start next, among the models that may start."""
        few = self._few_lanes(open_models.names)
        if few is not None:
            lanes = iter(sorted(few, key=Lane.key))
            return next((front for lane in lanes if (front := open_models.first(lane)) is not None), None)
        passed, found = list[str](), None
        while found is None and (tenant := self._turns.pop()) is not None:
            passed.append(tenant)
            found = open_models.first(self._busy[tenant])
        for tenant in passed:
            self._turns.push(tenant)
        return found

    def walk(self) -> Iterator[tuple[Waiting, float]]:
        """Yield waiting requests with their tenants' work before each. The caller removes one before the next one."""
        for lane in list(self.waiting.values()):
            own_s = 0.0
            for waiting in list(lane.waiting.values()):
                is_stalled = waiting.demand.model in self._stalled
                yield waiting, 0.0 if is_stalled else own_s
                own_s += 0.0 if is_stalled or waiting.ticket not in lane.waiting else waiting.cost_s

    def count_again(self) -> None:
        """Add up the costs of all waiting requests, which were estimated anew."""
        for lane in self.waiting.values():
            for line in lane.models.values():
                line.cost_s = sum([waiting.cost_s for waiting in line.values()])
            lane.cost_s = sum([line.cost_s for model, line in lane.models.items() if model not in self._stalled])
        self.cost_s = sum([lane.cost_s for lane in self.waiting.values()])

    def reweigh(self, config: AdmissionConfig) -> None:
        """Use its weights from now on."""
        self._config = config
        for tenant, lane in self._lanes.items():
            lane.weight = config.weight_of(tenant)
        self._weight = sum([lane.weight for lane in self._busy.values()])

    def _few_lanes(self, models: Collection[str]) -> Collection[Lane] | None:
        """Return the lanes that wait for any of the models; None if models or lanes are too many."""
        if len(models) > FEW:
            return None
        found: dict[str, Lane] = {}
        for model in models:
            lanes = self._by_model.get(model, {})
            if len(found) + len(lanes) > FEW:
                return None
            found.update(lanes)
        return found.values()

    def key_of(self, tenant: str) -> tuple[float, int] | None:
        """Return the key of a busy tenant's turn."""
        return self._busy[tenant].key() if tenant in self._busy else None


def _front(line: OrderedDict[int, Waiting]) -> Waiting:
    return next(iter(line.values()))


def newest(line: OrderedDict[int, Waiting]) -> Waiting | None:
    """Return the newest request that is not part of an admitted one; None if only such parts came lately."""
    lately = islice(reversed(line.values()), FEW)
    return next((waiting for waiting in lately if not waiting.demand.is_inner), None)
