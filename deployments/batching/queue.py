"""The admission queue of a batcher: order, limits and deadlines. Pure; `now_s` is the caller's clock.

Requests of one priority and group are served FIFO. The more urgent priority goes first; the policy chooses among
groups. A request whose time in the queue is over is refused or, if its priority defers, goes behind all whose time is
not over. Whatever the order, at most `max_overtakes` requests that came later start before one that waits; then it is
next.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from configs.batching import BatchingConfig, QueuePolicyConfig
from deployments.records.errors import InvalidRequest, QueueFull

MAX_STALE: Final = 64  # deadlines of requests that left, beside as many as wait


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """A request of one or more items whose results come together. `costs` None: 1 each.

    `timeout_s` counts from `arrived_s`. Items before `next_item` have been started; the last four are the queue's.
    """

    items: Sequence[Any]
    costs: Sequence[int] | None
    group: Hashable
    priority: int
    arrived_s: float
    timeout_s: float | None = None
    next_item: int = 0
    number: int = -1
    deadline_s: float = math.inf
    is_deferred: bool = False
    is_queued: bool = False

    @property
    def num_left(self) -> int:
        """Number of items that no batch has taken yet."""
        return len(self.items) - self.next_item

    def cost(self, start: int, stop: int) -> int:
        """Return the cost of items `start` to `stop`."""
        return stop - start if self.costs is None else sum(self.costs[start:stop])


RequestT = TypeVar("RequestT", bound=QueuedRequest)
_Rank = tuple[bool, int]  # deferred, priority


@dataclass(slots=True)
class _GroupCount:
    num_requests: int = 0
    num_items: int = 0


class _Overtaking:
    """Counts of overtakings, which keep waiting requests from starving.

    Requests are known by their number in the order of coming. A request that came after another and has started has
    passed it. So how often a waiting request was passed is the number of higher ones that have started, and the oldest
    that waits was passed most: it alone has to be watched. Numbers below the oldest are dropped, which leaves no more
    than were allowed to pass it.
    """

    def __init__(self) -> None:
        self._started: list[int] = []

    def __len__(self) -> int:
        return len(self._started)

    def num_passed(self, number: int) -> int:
        return len(self._started) - bisect_right(self._started, number)

    def note_start(self, number: int) -> None:
        insort(self._started, number)

    def forget_before(self, oldest: int) -> None:
        del self._started[: bisect_right(self._started, oldest)]


@dataclass(eq=False, slots=True)
class RequestQueue(Generic[RequestT]):
    """A bounded admission queue of one batcher."""

    config: BatchingConfig
    num_by_priority: Counter[int] = field(default_factory=Counter)
    _all: OrderedDict[int, RequestT] = field(default_factory=OrderedDict)
    _lines: dict[_Rank, dict[Hashable, OrderedDict[int, RequestT]]] = field(default_factory=dict)
    _groups: dict[Hashable, _GroupCount] = field(default_factory=dict)
    _deadlines: list[tuple[float, int, RequestT]] = field(default_factory=list)
    _overtaking: _Overtaking = field(default_factory=_Overtaking)
    _num_added: int = 0

    def __len__(self) -> int:
        return len(self._all)

    def has_room(self, priority: int) -> bool:
        """Return whether one more request may wait at this priority."""
        limit = self._policy(priority).max_queue_size
        return limit is None or self.num_by_priority[priority] < limit

    def add_request(self, request: RequestT) -> None:
        """Queue a request. Raises InvalidRequest for an unknown priority, QueueFull when too many wait at it."""
        if not 1 <= request.priority <= self.config.priority_levels:
            raise InvalidRequest(
                f"priority {request.priority} is not served (known: 1, most urgent, to {self.config.priority_levels})",
                "priority",
            )
        if not self.has_room(request.priority):
            limit = self._policy(request.priority).max_queue_size
            raise QueueFull(
                f"queue full: {limit} requests wait at priority {request.priority}, the maximum; try again later"
            )
        request.number = self._num_added
        self._num_added += 1
        self._insert(request)

    def remove_request(self, request: RequestT) -> None:
        """Remove a cancelled or failed request, if it waits."""
        if not request.is_queued:
            return
        request.is_queued = False
        del self._all[request.number]
        self._leave_line(request)
        self.num_by_priority[request.priority] -= 1
        count = self._groups[request.group]
        count.num_requests -= 1
        count.num_items -= request.num_left
        if not count.num_requests:
            del self._groups[request.group]
        self._overtaking.forget_before(next(iter(self._all), self._num_added))

    def take_items(self, request: RequestT, num_items: int) -> None:
        """Note that the request's next items have started. It leaves with its last item."""
        if not request.next_item:
            self._overtaking.note_start(request.number)
        if num_items == request.num_left:
            self.remove_request(request)
            request.next_item += num_items
        else:
            request.next_item += num_items
            self._groups[request.group].num_items -= num_items

    def expire(self, now_s: float) -> list[RequestT]:
        """Remove and return the requests whose time is over; defer those whose priority defers."""
        refused = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if not request.is_queued:
                continue
            if self._policy(request.priority).timeout_action == "reject":
                self.remove_request(request)
                refused.append(request)
            else:
                self._leave_line(request)
                request.is_deferred = True
                self._line(request)[request.number] = request
        return refused

    def next_deadline_s(self) -> float:
        """Return the time of the next deadline; infinity without one."""
        while self._deadlines and not self._deadlines[0][2].is_queued:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def leads(self) -> Iterator[RequestT]:
        """Yield the first request of every line: the more urgent first, then the older one."""
        for rank in sorted(self._lines):
            yield from sorted((next(iter(line.values())) for line in self._lines[rank].values()), key=_number)

    def of_group(self, group: Hashable) -> Iterator[RequestT]:
        """Yield all requests of the group, in the order of service."""
        for rank in sorted(self._lines):
            yield from self._lines[rank].get(group, {}).values()

    def num_items(self, group: Hashable) -> int:
        """Return how many items of the group wait."""
        return self._groups[group].num_items

    def oldest(self, but: Collection[RequestT] = ()) -> RequestT | None:
        """Return the waiting request that came first, those in `but` left out."""
        return next((request for request in self._all.values() if request not in but), None)

    def may_start(self, request: RequestT, with_: Collection[RequestT] = ()) -> bool:
        """Return whether starting it, with those in `with_`, overtakes no waiting request too often."""
        oldest = self.oldest({*with_, request})
        if oldest is None or request.number < oldest.number or request.next_item:
            return True  # a request that has started in part has been counted
        passing = sum(other.number > oldest.number and not other.next_item for other in with_)
        return self._overtaking.num_passed(oldest.number) + passing < self.config.max_overtakes

    def drain(self) -> list[RequestT]:
        """Remove and return all requests."""
        everybody = list(self._all.values())
        for request in everybody:
            self.remove_request(request)
        return everybody

    def retune(self, config: BatchingConfig) -> None:
        """Use the new config's limits and deadlines; requests of a priority that is gone get the last one."""
        waiting = list(self._all.values())
        self.config = config
        self._lines, self._groups, self._deadlines = {}, {}, []
        self._all.clear()
        self.num_by_priority.clear()
        for request in waiting:
            request.priority = min(request.priority, config.priority_levels)
            request.is_deferred = False
            self._insert(request)

    def _insert(self, request: RequestT) -> None:
        policy = self._policy(request.priority)
        timeout_s = math.inf if policy.timeout_us is None else policy.timeout_us / 1e6
        if request.timeout_s is not None and policy.allow_timeout_override:
            timeout_s = min(timeout_s, request.timeout_s)
        request.deadline_s = request.arrived_s + timeout_s
        request.is_queued = True
        self._all[request.number] = request
        self._line(request)[request.number] = request
        self.num_by_priority[request.priority] += 1
        count = self._groups.setdefault(request.group, _GroupCount())
        count.num_requests += 1
        count.num_items += request.num_left
        if timeout_s != math.inf:
            if len(self._deadlines) > 2 * len(self._all) + MAX_STALE:
                self._deadlines = [entry for entry in self._deadlines if entry[2].is_queued]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (request.deadline_s, request.number, request))

    def _policy(self, priority: int) -> QueuePolicyConfig:
        return self.config.queue_policies.get(priority, self.config.default_queue_policy)

    def _line(self, request: RequestT) -> OrderedDict[int, RequestT]:
        rank = (request.is_deferred, request.priority)
        return self._lines.setdefault(rank, {}).setdefault(request.group, OrderedDict())

    def _leave_line(self, request: RequestT) -> None:
        rank = (request.is_deferred, request.priority)
        lines = self._lines[rank]
        del lines[request.group][request.number]
        if not lines[request.group]:
            del lines[request.group]
        if not lines:
            del self._lines[rank]


def _number(request: QueuedRequest) -> int:
    return request.number
