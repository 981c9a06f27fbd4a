"""The batch policy: the next batch, or when to look again. Pure.

A batch has one group and starts when a slot is free; later arrivals join the next one. It takes the request in front
and then, in the order of service, those of its group that fit whole. Where one does not fit, the batch ends: no
smaller one slips past. Groups with work take turns, the one whose last batch began first before the others: a text
that a worker waits for is not behind the whole backlog of embeddings. A request that is larger than a batch is served
in several, in order, as if its items had come one by one (TEI's way; Triton refuses it); one item above the cost budget
is a batch by itself. What once found no memory lowers the cost budget of its group (`engines/costs/memory_limits.py`).

How long a batch that could start waits for batch-mates, and how much it takes:

- `prefer_latency`: as long, and as much, as lowers the mean latency by what was learned so far (`_BatchingDelay`), and
  never longer than `max_queue_delay_us` since its oldest request came. It starts at once at a preferred size or more,
  when nothing more fits, when others wait that it could be working for, or when another slot stays free. With
  preferred sizes it takes all that fits. A delay of 0: it never waits.
- `prefer_batch`: Triton's rule. Before the delay is over, a batch of the largest preferred size that the requests in
  front make exactly starts at once, and so does one that can reach none any more; the others wait. When the delay of
  its oldest request is over, it takes all that fits. Without preferred sizes the preferred one is `max_batch_size`.

While one group waits for batch-mates, another one may start.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple

from configs.batching import BatchingConfig
from deployments.batching.queue import RequestQueue, RequestT
from deployments.engines.costs.memory_limits import MemoryLimits
from weights.residency.recent import Recent

MAX_GROUPS: Final = 256  # groups that are remembered
WINDOW: Final = 64  # gaps remembered
DECAY: Final = 0.98  # of a batch's weight with every later batch: about the last 50 count
MIN_SPREAD: Final = 1e-4  # of sizes, relative variance; below it a line through them is arbitrary
SLACK: Final = 1.25  # a gap so much longer than one seen before may still be the same
MARGIN: Final = 0.02  # of fixed_s, shared by those who wait: the next gap may be the longest yet, by a little
WORTH: Final = 0.95  # of the latency of full batches, which smaller ones have to stay below: estimates are noisy


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
    """The decisions over one queue, from the statistics of each group."""

    def __init__(self, queue: RequestQueue[RequestT]) -> None:
        self.queue = queue
        self._delays: Recent[Hashable, _BatchingDelay] = Recent(MAX_GROUPS)
        self._memory = MemoryLimits()
        self._turns: Recent[Hashable, int] = Recent(MAX_GROUPS)  # the number of the last batch of each group
        self._num_batches = 0

    def add_request(self, request: RequestT, *, is_busy: bool = True) -> None:
        """Queue a request, as `RequestQueue.add_request` does, and learn from its arrival.

        `is_busy`: a batch runs, or may run.
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
        """Return the sort key of groups' leads; equal ones stay in the order of arrival."""
        return lead.is_deferred, lead.priority, self._turns.get(lead.group, 0)

    def _note_turn(self, group: Hashable) -> None:
        self._num_batches += 1
        self._turns.note(group, self._num_batches)

    def _form_batch(self, lead: RequestT) -> Batch[RequestT]:
        """Return the largest batch that fits, whether or not it pays."""
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

    def _delay(self, group: Hashable) -> _BatchingDelay:
        return self._delays.used(group, _BatchingDelay)


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


class _ServiceCurve(NamedTuple):
    """The seconds of a batch of cost n: fixed_s + per_cost_s * n. Items cost 1 where nobody says otherwise."""

    fixed_s: float
    per_cost_s: float


class _BatchingDelay:
    """The batching delay and the best batch size of a group, learned from its arrivals and its batches' times.

    A batch of n items takes about a + b n seconds; batching saves the a. Two questions follow, both about mean latency:

    - *May a batch that could start wait for the next arrival?* With k requests waiting and the next one x seconds
      away, starting together costs each of the k its x + b, and spares the newcomer a - x of waiting for the batch to
      end. Over the gaps seen lately that are longer than the present one, `delay_s` is the wait of the best expected
      balance, 0 when there is none. For Poisson arrivals this is the control limit that is optimal for batch service
      (Deb and Serfozo, "Optimal control of batch service queues", Adv. Appl. Prob. 5, 1973), with the look-ahead cut
      to one step. Gaps are remembered apart for arrivals that found nothing else under way: a caller that waits for
      its answer before it asks again leaves long ones there, whatever a crowd before it did.
    - *How many of those that wait should one batch take?* All items of a batch end when the last one does, so where b
      outweighs a, small batches answer most requests sooner: `best_size`.

    Nothing is known before two batch sizes were seen, and again when only one size came for long: then a batch starts
    at once with all that fits, which is how the next two sizes come about.

    `now_s` is on the caller's clock.
    """

    def __init__(self) -> None:
        self._gaps_s = {is_alone: deque[float](maxlen=WINDOW) for is_alone in (False, True)}
        self._last_s: float | None = None
        self._was_alone = False  # the last one
        self._weight = self._cost = self._time = self._cost_cost = self._cost_time = 0.0

    def note_arrival(self, now_s: float, *, is_alone: bool = False) -> None:
        """Learn that one request came. `is_alone`: it found nobody waiting, and nothing running."""
        if self._last_s is not None:
            self._gaps_s[self._was_alone].append(max(0.0, now_s - self._last_s))
        self._last_s, self._was_alone = now_s, is_alone

    def note_served(self, cost: float, duration_s: float) -> None:
        """Learn that one batch of this cost took so long."""
        self._weight = self._weight * DECAY + 1.0
        self._cost = self._cost * DECAY + cost
        self._time = self._time * DECAY + duration_s
        self._cost_cost = self._cost_cost * DECAY + cost * cost
        self._cost_time = self._cost_time * DECAY + cost * duration_s

    def _curve(self) -> _ServiceCurve | None:
        """Return the line of least squares, neither part below zero; None while there is too little to tell."""
        spread = self._cost_cost * self._weight - self._cost * self._cost
        if spread <= MIN_SPREAD * self._cost * self._cost:
            return None
        slope = (self._cost_time * self._weight - self._cost * self._time) / spread
        slope = min(max(slope, 0.0), self._time / self._cost)
        return _ServiceCurve((self._time - slope * self._cost) / self._weight, slope)

    def delay_s(self, now_s: float, num_waiting: int, cost: float) -> float:
        """Return the seconds that are worth waiting for one more request of `cost` while `num_waiting` wait."""
        curve = self._curve()
        if curve is None or self._last_s is None:
            return 0.0
        fixed_s, extra_s = curve.fixed_s, curve.per_cost_s * cost
        if fixed_s <= num_waiting * extra_s:
            return 0.0
        gaps_s = sorted(self._gaps_s[self._was_alone])
        since_s = now_s - self._last_s
        ahead = [gap_s - since_s for gap_s in gaps_s[bisect_right(gaps_s, since_s * SLACK) :]]
        best, best_s, balance = 0.0, 0.0, 0.0
        for index, wait_s in enumerate(ahead):
            if wait_s >= fixed_s:
                break
            balance += fixed_s - wait_s - num_waiting * (wait_s + extra_s)
            in_vain = (len(ahead) - index - 1) * num_waiting * wait_s
            if balance - in_vain > best:
                best, best_s = balance - in_vain, wait_s
        return best_s * SLACK + MARGIN * fixed_s / num_waiting if best else 0.0

    def best_size(self, num_items: int, max_size: int, cost: float) -> int:
        """Return the best number of items for the next batch when `num_items` of about `cost` each wait."""
        most = min(num_items, max_size)
        curve = self._curve()
        if curve is None or most <= 1:
            return most
        fixed_s, item_s = curve.fixed_s, curve.per_cost_s * cost
        latency_s = {size: _total_latency_s(num_items, size, fixed_s, item_s) for size in range(1, most + 1)}
        best = min(latency_s, key=lambda size: (latency_s[size], -size))
        return best if latency_s[best] < WORTH * latency_s[most] else most


def _total_latency_s(num_items: int, size: int, fixed_s: float, item_s: float) -> float:
    """Return the sum over all items, served in one batch of `size` after the other."""
    num_full, rest = divmod(num_items, size)
    full_s = fixed_s + item_s * size
    last_s = num_full * full_s + fixed_s + item_s * rest
    return size * full_s * num_full * (num_full + 1) / 2 + rest * last_s
