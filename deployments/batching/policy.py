"""The batch policy: the next batch, or when to look again. Pure.

A batch has one group and starts when a slot is free; later arrivals join the next one. It takes the request in front
and then, in the order of service, those of its group that fit whole. Where one does not fit, the batch ends: no
smaller one slips past. Groups with work take turns, the one whose last batch began first before the others: a text
that a worker waits for is not behind the whole backlog of embeddings. A request that is larger than a batch is served
in several, in order, as if its items had come one by one (TEI's way; Triton refuses it); one item above the cost budget
is a batch by itself. What once found no memory lowers the cost budget of its group (`engines/memory_limits.py`).

How long a batch that could start waits for batch-mates, and how much it takes:

- `prefer_latency`: as long, and as much, as lowers the mean latency by what was learned so far (`delay.py`), and never
  longer than `max_queue_delay_us` since its oldest request came. It starts at once at a preferred size or more, when
  nothing more fits, when others wait that it could be working for, or when another slot stays free.
  With preferred sizes it takes all that fits. A delay of 0: it never waits.
- `prefer_batch`: Triton's rule. Before the delay is over, a batch of the largest preferred size that the requests in
  front make exactly starts at once, and so does one that can reach none any more; the others wait. When the delay of
  its oldest request is over, it takes all that fits. Without preferred sizes the preferred one is `max_batch_size`.

While one group waits for batch-mates, another one may start.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic

from configs.batching import BatchingConfig
from deployments.batching.delay import BatchingDelay
from deployments.batching.queue import RequestQueue, RequestT
from deployments.engines.memory_limits import MemoryLimits
from weights.residency.recent import Recent

MAX_GROUPS: Final = 256  # groups that are remembered


@dataclass(frozen=True, slots=True)
class RequestPart(Generic[RequestT]):
    """The items `start` to `stop` of a request."""

    request: RequestT
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Batch(Generic[RequestT]):
    """The parts of requests that run together. `can_grow`: one more request could join, if it came."""

    group: Hashable
    parts: tuple[RequestPart[RequestT], ...]
    cost: int
    can_grow: bool

    @property
    def num_items(self) -> int:
        return sum(map(len, self.parts))

    def cut(self, max_items: int) -> Batch[RequestT]:
        """Return a batch of its first requests, up to so many items, one request at least."""
        size = len(self.parts[0])
        num_parts = 1
        while num_parts < len(self.parts) and size + len(self.parts[num_parts]) <= max_items:
            size += len(self.parts[num_parts])
            num_parts += 1
        if num_parts == len(self.parts):
            return self
        parts = self.parts[:num_parts]
        return Batch(self.group, parts, sum(part.request.cost(part.start, part.stop) for part in parts), False)


def halves(parts: Sequence[RequestPart[RequestT]]) -> list[list[RequestPart[RequestT]]]:
    """Return two lists of half of the items each; one part may be cut in two. Takes at least two items."""
    left = sum(map(len, parts)) // 2
    first: list[RequestPart[RequestT]] = []
    second: list[RequestPart[RequestT]] = []
    for part in parts:
        middle = part.start + min(left, len(part))
        left -= middle - part.start
        first += [RequestPart(part.request, part.start, middle)] if middle > part.start else []
        second += [RequestPart(part.request, middle, part.stop)] if middle < part.stop else []
    return [first, second]


class BatchPolicy(Generic[RequestT]):
    """The decisions over one queue, by what was learned of each group."""

    def __init__(self, queue: RequestQueue[RequestT]) -> None:
        self.queue = queue
        self._delays: Recent[Hashable, BatchingDelay] = Recent(MAX_GROUPS)
        self._memory = MemoryLimits()
        self._turns: Recent[Hashable, int] = Recent(MAX_GROUPS)  # the number of the last batch of each group
        self._num_batches = 0

    def add_request(self, request: RequestT, *, is_busy: bool = True) -> None:
        """Queue a request, as `RequestQueue.add_request` does, and learn from when it came.

        `is_busy`: a batch runs, or nobody knows.
        """
        is_alone = not is_busy and not len(self.queue)
        self.queue.add_request(request)
        self._delay(request.group).note_arrival(request.arrived_s, is_alone=is_alone)

    def note_served(self, batch: Batch[RequestT], duration_s: float) -> None:
        """Learn from a batch that ended well."""
        self._delay(batch.group).note_served(batch.cost, duration_s)
        self._memory.fitted(batch.group, batch.cost)

    def note_out_of_memory(self, group: Hashable, cost: int) -> None:
        """Learn that a batch found no memory: the next ones of the group cost less."""
        self._memory.ran_out(group, cost)

    def next_batch(self, now_s: float, num_free: int) -> Batch[RequestT] | float:
        """Return a batch, whose items have left the queue, or when to ask again if the queue stays as it is."""
        look_again_s = math.inf
        seen: set[Hashable] = set()
        for lead in sorted(self.queue.leads(), key=self._turn) if num_free else ():
            if not self.queue.may_start(lead):
                lead = self.queue.oldest() or lead
            if lead.group in seen:
                continue
            seen.add(lead.group)
            batch = self._form_batch(lead)
            config = self.queue.config
            is_latency = config.strategy == "prefer_latency"
            decided = self._by_latency(batch, now_s, num_free) if is_latency else _by_batch(batch, config, now_s)
            if isinstance(decided, Batch):
                for part in decided.parts:
                    self.queue.take_items(part.request, len(part))
                self._note_turn(decided.group)
                return decided
            look_again_s = min(look_again_s, decided)
        return look_again_s

    def _turn(self, lead: RequestT) -> tuple[bool, int, int]:
        """Return what orders the leads of groups; those that are equal stay in the order of coming."""
        return lead.is_deferred, lead.priority, self._turns.get(lead.group, 0)

    def _note_turn(self, group: Hashable) -> None:
        self._num_batches += 1
        self._turns.note(group, self._num_batches)

    def _form_batch(self, lead: RequestT) -> Batch[RequestT]:
        """Return all that fits, without regard to what pays."""
        config = self.queue.config
        max_cost = min(config.max_batch_cost or math.inf, self._memory.allowed(lead.group))
        first = _first_part(lead, config.max_batch_size, max_cost)
        parts, size, cost = [first], len(first), lead.cost(first.start, first.stop)
        taken = {lead}
        can_grow = first.stop == len(lead.items)
        for request in self.queue.of_group(lead.group) if can_grow else ():
            if request is lead:
                continue
            part = RequestPart(request, request.next_item, len(request.items))
            part_cost = request.cost(part.start, part.stop)
            can_grow = size + len(part) <= config.max_batch_size and cost + part_cost <= max_cost
            if not can_grow or not self.queue.may_start(request, taken):
                can_grow = False
                break
            parts.append(part)
            taken.add(request)
            size, cost = size + len(part), cost + part_cost
        return Batch(lead.group, tuple(parts), cost, can_grow and size < config.max_batch_size and cost < max_cost)

    def _by_latency(self, batch: Batch[RequestT], now_s: float, num_free: int) -> Batch[RequestT] | float:
        config, delay, size = self.queue.config, self._delay(batch.group), batch.num_items
        if not config.preferred_batch_sizes:
            batch = batch.cut(delay.best_size(self.queue.num_items(batch.group), size, batch.cost / size))
        is_enough = not batch.can_grow or size >= min(config.preferred_batch_sizes, default=math.inf)
        if is_enough or num_free > 1 or len(batch.parts) < len(self.queue) or config.max_queue_delay_us == 0:
            return batch
        until_s = now_s + delay.delay_s(now_s, len(batch.parts), batch.cost / len(batch.parts))
        if config.max_queue_delay_us is not None:
            until_s = min(until_s, _oldest_s(batch) + config.max_queue_delay_us / 1e6)
        return until_s if until_s > now_s else batch

    def _delay(self, group: Hashable) -> BatchingDelay:
        return self._delays.used(group, BatchingDelay)


def _by_batch(batch: Batch[RequestT], config: BatchingConfig, now_s: float) -> Batch[RequestT] | float:
    due_s = _oldest_s(batch) + (config.max_queue_delay_us or 0) / 1e6
    if now_s >= due_s:
        return batch
    preferred = config.preferred_batch_sizes or (config.max_batch_size,)
    reached, size = 0, 0
    for part in batch.parts:
        size += len(part)
        if size in preferred:
            reached = size
    if reached:
        return batch.cut(reached)
    return batch if not batch.can_grow or size > max(preferred) else due_s


def _first_part(lead: RequestT, max_items: int, max_cost: float) -> RequestPart[RequestT]:
    """Return as many of its items as fit, one at least."""
    start = lead.next_item
    most = min(len(lead.items), start + max_items)
    if lead.cost(start, most) <= max_cost:
        return RequestPart(lead, start, most)
    stop, cost = start + 1, lead.cost(start, start + 1)
    while (cost := cost + lead.cost(stop, stop + 1)) <= max_cost and stop < most:
        stop += 1
    return RequestPart(lead, start, stop)


def _oldest_s(batch: Batch[RequestT]) -> float:
    return min(part.request.arrived_s for part in batch.parts)
