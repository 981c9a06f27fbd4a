"""What the next call is, or when to look again. Pure.

A call has one group and starts when a slot is free; who comes while it runs joins the next one. It takes the request
in front and then, in the order of service, those of its group that fit whole. Where one does not fit, the call ends:
nobody slips past. A request that is larger than a call by itself is served in several, in order, as if its items had
come one by one (TEI's way; Triton refuses it); one item above the cost budget is a call by itself. What once found no
memory lowers the cost budget of its group (`engines/memory_limits.py`).

How long a call that could start waits for company, and how much it takes:

- `prefer_latency`: as long, and as much, as lowers the mean latency by what was learned so far (`pace.py`), and never
  longer than `max_queue_delay_us` since its oldest request came. It starts at once at a preferred size or more, when
  nothing more fits, when others wait that it could be working for, or when another slot stays free for who comes.
  With preferred sizes it takes all that fits. A delay of 0: it never waits.
- `prefer_batch`: Triton's rule. Before the delay is over, a call of the largest preferred size that the requests in
  front make exactly starts at once, and so does one that can reach none any more; the others wait. When the delay of
  its oldest request is over, it takes all that fits. Without preferred sizes the preferred one is `max_batch_size`.

While one group waits for company, another one may start.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic

from configs.merging import MergeConfig
from deployments.batching.delay import Pace
from deployments.batching.queue import RequestQueue, RequestT
from deployments.engines.memory_limits import MemoryLimits

MAX_PACES: Final = 256  # groups that are remembered


@dataclass(frozen=True, slots=True)
class Part(Generic[RequestT]):
    """Items `start` to `stop` of a request."""

    request: RequestT
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Call(Generic[RequestT]):
    """What runs together. `can_grow`: one more request could join, if it came."""

    group: Hashable
    parts: tuple[Part[RequestT], ...]
    cost: int
    can_grow: bool

    @property
    def num_items(self) -> int:
        return sum(map(len, self.parts))

    def cut(self, max_items: int) -> Call[RequestT]:
        """Its first requests up to so many items, one at least."""
        size = len(self.parts[0])
        num_parts = 1
        while num_parts < len(self.parts) and size + len(self.parts[num_parts]) <= max_items:
            size += len(self.parts[num_parts])
            num_parts += 1
        if num_parts == len(self.parts):
            return self
        parts = self.parts[:num_parts]
        return Call(self.group, parts, sum(part.request.cost(part.start, part.stop) for part in parts), False)


def halves(parts: Sequence[Part[RequestT]]) -> list[list[Part[RequestT]]]:
    """Two lists of half of the items each; one part may be cut in two. At least two items."""
    left = sum(map(len, parts)) // 2
    first: list[Part[RequestT]] = []
    second: list[Part[RequestT]] = []
    for part in parts:
        middle = part.start + min(left, len(part))
        left -= middle - part.start
        first += [Part(part.request, part.start, middle)] if middle > part.start else []
        second += [Part(part.request, middle, part.stop)] if middle < part.stop else []
    return [first, second]


class CallForming(Generic[RequestT]):
    """Decides over one queue, and learns each group's pace for that."""

    def __init__(self, queue: RequestQueue[RequestT]) -> None:
        self.queue = queue
        self._paces: OrderedDict[Hashable, Pace] = OrderedDict()
        self._memory = MemoryLimits()

    def add(self, request: RequestT) -> None:
        """`RequestQueue.add`, and remembers when it came."""
        self.queue.add(request)
        self._pace(request.group).arrived(request.arrived_s)

    def served(self, call: Call[RequestT], duration_s: float) -> None:
        """The call ended well."""
        self._pace(call.group).served(call.cost, duration_s)
        self._memory.fitted(call.group, call.cost)

    def ran_out(self, group: Hashable, cost: int) -> None:
        """A call found no memory: the next ones of the group cost less."""
        self._memory.ran_out(group, cost)

    def next_call(self, now_s: float, num_free: int) -> Call[RequestT] | float:
        """A call, whose requests have left the queue, or when to ask again if nobody comes or goes before."""
        look_again_s = math.inf
        seen: set[Hashable] = set()
        for lead in self.queue.leads() if num_free else ():
            if not self.queue.may_start(lead):
                lead = self.queue.oldest() or lead
            if lead.group in seen:
                continue
            seen.add(lead.group)
            call = self._form(lead)
            config = self.queue.config
            is_latency = config.strategy == "prefer_latency"
            decided = self._by_latency(call, now_s, num_free) if is_latency else _by_batch(call, config, now_s)
            if isinstance(decided, Call):
                for part in decided.parts:
                    self.queue.take(part.request, len(part))
                return decided
            look_again_s = min(look_again_s, decided)
        return look_again_s

    def _form(self, lead: RequestT) -> Call[RequestT]:
        """All that fits, without regard to what pays."""
        config = self.queue.config
        max_cost = min(config.max_batch_cost or math.inf, self._memory.allowed(lead.group))
        first = _first_part(lead, config.max_batch_size, max_cost)
        parts, size, cost = [first], len(first), lead.cost(first.start, first.stop)
        taken = {lead}
        can_grow = first.stop == len(lead.items)
        for request in self.queue.of_group(lead.group) if can_grow else ():
            if request is lead:
                continue
            part = Part(request, request.next_item, len(request.items))
            part_cost = request.cost(part.start, part.stop)
            can_grow = size + len(part) <= config.max_batch_size and cost + part_cost <= max_cost
            if not can_grow or not self.queue.may_start(request, taken):
                can_grow = False
                break
            parts.append(part)
            taken.add(request)
            size, cost = size + len(part), cost + part_cost
        return Call(lead.group, tuple(parts), cost, can_grow and size < config.max_batch_size and cost < max_cost)

    def _by_latency(self, call: Call[RequestT], now_s: float, num_free: int) -> Call[RequestT] | float:
        config, pace, size = self.queue.config, self._pace(call.group), call.num_items
        if not config.preferred_batch_sizes:
            call = call.cut(pace.best_size(self.queue.num_items(call.group), size, call.cost / size))
        is_enough = not call.can_grow or size >= min(config.preferred_batch_sizes, default=math.inf)
        if is_enough or num_free > 1 or len(call.parts) < len(self.queue) or config.max_queue_delay_us == 0:
            return call
        until_s = now_s + pace.patience_s(now_s, len(call.parts), call.cost / len(call.parts))
        if config.max_queue_delay_us is not None:
            until_s = min(until_s, _oldest_s(call) + config.max_queue_delay_us / 1e6)
        return until_s if until_s > now_s else call

    def _pace(self, group: Hashable) -> Pace:
        pace = self._paces.get(group)
        if pace is None:
            pace = self._paces[group] = Pace()
            if len(self._paces) > MAX_PACES:
                self._paces.popitem(last=False)
        self._paces.move_to_end(group)
        return pace


def _by_batch(call: Call[RequestT], config: MergeConfig, now_s: float) -> Call[RequestT] | float:
    due_s = _oldest_s(call) + (config.max_queue_delay_us or 0) / 1e6
    if now_s >= due_s:
        return call
    preferred = config.preferred_batch_sizes or (config.max_batch_size,)
    reached, size = 0, 0
    for part in call.parts:
        size += len(part)
        if size in preferred:
            reached = size
    if reached:
        return call.cut(reached)
    return call if not call.can_grow or size > max(preferred) else due_s


def _first_part(lead: RequestT, max_items: int, max_cost: float) -> Part[RequestT]:
    """As many of its items as fit, one at least."""
    start = lead.next_item
    most = min(len(lead.items), start + max_items)
    if lead.cost(start, most) <= max_cost:
        return Part(lead, start, most)
    stop, cost = start + 1, lead.cost(start, start + 1)
    while (cost := cost + lead.cost(stop, stop + 1)) <= max_cost and stop < most:
        stop += 1
    return Part(lead, start, stop)


def _oldest_s(call: Call[RequestT]) -> float:
    return min(part.request.arrived_s for part in call.parts)
