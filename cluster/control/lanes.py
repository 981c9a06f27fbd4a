"""The order of service among waiting requests: priorities, weighted fair shares of tenants, and no starvation. Pure.

The more urgent priority goes first. Inside a priority, tenants take turns by start-time fair queueing (Goyal, Vin and
Cheng, SIGCOMM 1996): each has a clock that its work moves on, the faster the less weight it has, and the one that is
behind goes next. Inside a tenant, requests are served in the order of their arrival.

The oldest request of all goes next once `max_overtakes` others went before it although they came later, whatever its
priority. Requests that come back from a replica that died go before all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

MAX_CLOCKS: Final = 1024  # of tenants that wait for nothing
_FEW: Final = 16  # tenants


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as far as admission goes.

    `work` is in a unit of its `model` (pixels x steps, tokens). `share` is the part of a replica that it takes while
    it runs, above 0 and at most 1. `deadline_s` is a time of the queue's clock. `is_inner`: it is a part of a request
    that was admitted before, and no bound may refuse it. `mark` is the same when the same is asked again, 0 where
    nobody knows.
    """

    pool: str
    model: str
    work: float
    share: float
    priority: int
    tenant: str
    deadline_s: float
    is_inner: bool = False
    mark: int = 0


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that waits since `arrived_s`, the `number`th that came. `cost_s`: replica seconds that it may take."""

    ticket: int
    ask: Ask
    number: int
    arrived_s: float
    cost_s: float


@dataclass(slots=True)
class _Lane:
    """The requests of one tenant at one priority, by model, each in the order of arrival."""

    weight: float
    clock_s: float = 0.0
    cost_s: float = 0.0
    num_waiting: int = 0
    models: dict[str, OrderedDict[int, Waiting]] = field(default_factory=dict)

    def first(self, held: Collection[str]) -> Waiting | None:
        fronts = [next(iter(line.values())) for model, line in self.models.items() if model not in held]
        return min(fronts, key=lambda waiting: waiting.number, default=None)

    def count(self, model: str | None) -> int:
        """Return how many wait, for one model or for all."""
        return self.num_waiting if model is None else len(self.models.get(model, ()))

    def newest(self, model: str | None) -> Waiting:
        lines = self.models.values() if model is None else (self.models[model],)
        return max((next(reversed(line.values())) for line in lines), key=lambda waiting: waiting.number)


class Lanes:
    """The waiting requests of one pool of replicas."""

    def __init__(self, weight_of: Callable[[str], float], max_overtakes: int) -> None:
        self.weight_of = weight_of
        self.max_overtakes = max_overtakes
        self._waiting: dict[int, Waiting] = {}
        self._returned: OrderedDict[int, Waiting] = OrderedDict()
        self._ages: OrderedDict[int, Waiting] = OrderedDict()  # by arrival
        self._num_overtakes = 0
        self._classes: dict[int, dict[str, _Lane]] = {}
        self._floors_s: dict[int, float] = {}  # by priority: the clock of who was served last

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._waiting

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._waiting.values())

    def add(self, waiting: Waiting) -> None:
        """Add a request behind those that came before."""
        ask = waiting.ask
        lane = self._lane(ask)
        if not lane.num_waiting:  # nobody saves up turns while there is nothing to do
            lane.clock_s = max(lane.clock_s, self._floors_s.get(ask.priority, 0.0))
        lane.models.setdefault(ask.model, OrderedDict())[waiting.ticket] = waiting
        lane.num_waiting += 1
        lane.cost_s += waiting.cost_s
        self._waiting[waiting.ticket] = self._ages[waiting.ticket] = waiting

    def add_returned(self, waiting: Waiting) -> None:
        """Add a request whose replica died, before all others."""
        self._waiting[waiting.ticket] = self._returned[waiting.ticket] = waiting

    def remove(self, ticket: int) -> Waiting:
        """Take a request out."""
        waiting = self._waiting.pop(ticket)
        if self._returned.pop(ticket, None) is not None:
            return waiting
        if next(iter(self._ages)) == ticket:
            self._num_overtakes = 0
        del self._ages[ticket]
        lane = self._lane(waiting.ask)
        line = lane.models[waiting.ask.model]
        del line[ticket]
        if not line:
            del lane.models[waiting.ask.model]
        lane.num_waiting -= 1
        lane.cost_s = max(0.0, lane.cost_s - waiting.cost_s) if lane.num_waiting else 0.0
        return waiting

    def next_up(self, held: Collection[str] = ()) -> Waiting | None:
        """Return the request to start next. Requests for models that are `held` are passed over."""
        for waiting in self._returned.values():
            if waiting.ask.model not in held:
                return waiting
        if self._num_overtakes >= self.max_overtakes and self._ages:
            oldest = next(iter(self._ages.values()))
            if oldest.ask.model not in held:
                return oldest
        for priority in sorted(self._classes):
            lanes = self._classes[priority].values()
            fronts = [(lane.clock_s, front.number, front) for lane in lanes if (front := lane.first(held))]
            if fronts:
                return min(fronts)[2]
        return None

    def beside(self, waiting: Waiting, models: Iterable[str]) -> Waiting | None:
        """Return the first request of the same tenant and priority for one of the models; None where it must not pass.

        It must not pass one that came back from a replica that died, nor the oldest of all after `max_overtakes`.
        """
        is_oldest = next(iter(self._ages), None) == waiting.ticket
        if waiting.ticket in self._returned or (is_oldest and self._num_overtakes >= self.max_overtakes):
            return None
        lines = self._lane(waiting.ask).models
        fronts = [next(iter(lines[model].values())) for model in models if model in lines]
        return min(fronts, key=lambda front: front.number, default=None)

    def start_request(self, ticket: int, cost_s: float) -> Waiting:
        """Take a request out because it starts: its tenant is charged with `cost_s`, which it may cost."""
        overtakes = ticket not in self._returned and next(iter(self._ages)) != ticket
        waiting = self.remove(ticket)
        self._num_overtakes += overtakes
        lane = self._lane(waiting.ask)
        self._floors_s[waiting.ask.priority] = max(self._floors_s.get(waiting.ask.priority, 0.0), lane.clock_s)
        lane.clock_s += cost_s / lane.weight
        waiting.cost_s = cost_s
        return waiting

    def settle(self, started: Waiting, cost_s: float) -> None:
        """Charge what a request did cost instead of what it might have."""
        lane = self._lane(started.ask)
        lane.clock_s += (cost_s - started.cost_s) / lane.weight

    def displaced_by(self, ask: Ask, model: str | None) -> Waiting | None:
        """Return the request that leaves a full queue in favour of `ask`; None when it is `ask` that has to go.

        Those of a less urgent priority go first; then the newest one of the tenant that has the most waiting by its
        weight, if that is more than the tenant of `ask` would have. `model` is the one whose bound is reached, None
        for the bound of all.
        """
        best: tuple[int, float, Waiting] | None = None
        own = self._classes.get(ask.priority, {}).get(ask.tenant)
        own_length = ((own.count(model) if own else 0) + 1) / self.weight_of(ask.tenant)
        for priority, lanes in self._classes.items():
            for tenant, lane in lanes.items():
                num = lane.count(model)
                length = num / lane.weight
                is_longer = priority == ask.priority and tenant != ask.tenant and length > own_length
                if num and (priority > ask.priority or is_longer) and (best is None or (priority, length) > best[:2]):
                    newest = lane.newest(model)
                    if not newest.ask.is_inner:
                        best = priority, length, newest
        return best[2] if best else None

    def ahead_s(self, ask: Ask) -> float:
        """Return the replica seconds of work that would be done before a request that came now."""
        before = sum(waiting.cost_s for waiting in self._returned.values())
        for priority, lanes in self._classes.items():
            if priority < ask.priority:
                before += sum(lane.cost_s for lane in lanes.values())
        lanes = self._classes.get(ask.priority, {})
        own = lanes.get(ask.tenant)
        return before + _share_ahead_s(own.cost_s if own else 0.0, self.weight_of(ask.tenant), ask.tenant, lanes)

    def walk(self, cost_of: Callable[[Ask], float]) -> Iterator[tuple[Waiting, float]]:
        """Yield every request with the replica seconds of work before it, costs estimated anew by `cost_of`.

        A request that the caller removes before it goes on does not count for those behind it in its lane.
        """
        for lanes in self._classes.values():
            for lane in lanes.values():
                lane.cost_s = 0.0
                for line in lane.models.values():
                    for waiting in line.values():
                        waiting.cost_s = cost_of(waiting.ask)
                        lane.cost_s += waiting.cost_s
        before = 0.0
        for waiting in list(self._returned.values()):
            waiting.cost_s = cost_of(waiting.ask)
            yield waiting, before
            before += waiting.cost_s
        for priority in sorted(self._classes):
            lanes = self._classes[priority]
            for tenant, lane in lanes.items():
                behind = sorted((w for line in lane.models.values() for w in line.values()), key=lambda w: w.number)
                own_s = 0.0
                for waiting in behind:
                    yield waiting, before + _share_ahead_s(own_s, lane.weight, tenant, lanes)
                    own_s += waiting.cost_s if waiting.ticket in self._waiting else 0.0
            before += sum(lane.cost_s for lane in lanes.values())

    def reweigh(self) -> None:
        """Read the weights anew."""
        for lanes in self._classes.values():
            for tenant, lane in lanes.items():
                lane.weight = self.weight_of(tenant)

    def _lane(self, ask: Ask) -> _Lane:
        lanes = self._classes.setdefault(ask.priority, {})
        lane = lanes.get(ask.tenant)
        if lane is None:
            if len(lanes) >= MAX_CLOCKS:
                for tenant in [tenant for tenant, idle in lanes.items() if not idle.num_waiting]:
                    del lanes[tenant]
            floor_s = self._floors_s.get(ask.priority, 0.0)
            lane = lanes[ask.tenant] = _Lane(self.weight_of(ask.tenant), floor_s)
        return lane


def _share_ahead_s(own_s: float, weight: float, tenant: str, lanes: dict[str, _Lane]) -> float:
    """Return the work of a priority that is done before a tenant's next request, after `own_s` of its own.

    Until then every other tenant with work gets its share beside it, and no more than it has. Of many tenants, that is
    told for all together.
    """
    others = [lane for name, lane in lanes.items() if name != tenant and lane.num_waiting]
    if len(others) <= _FEW:
        return own_s + sum(min(lane.cost_s, own_s * lane.weight / weight) for lane in others)
    return own_s + min(sum(lane.cost_s for lane in others), own_s * sum(lane.weight for lane in others) / weight)
