"""Dynamic batching at dispatch: requests in, one batch for many, results out. `policy.py` decides; this acts.

batcher = Batcher(run_batch, BatchingConfig(max_batch_size=8))
results = await batcher.submit([item, item])
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeVar

from configs.batching import BatchingConfig
from deployments.batching.policy import Batch, BatchPolicy, RequestPart, halves
from deployments.batching.queue import QueuedRequest, RequestQueue
from deployments.engines.costs.memory_limits import forget_frames, is_out_of_memory
from deployments.records.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, Overloaded, QueueFull
from weights.platform.panics import panics_as_errors

RECENT: Final = 1024  # durations that percentiles are of

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Requests that come within one turn of the event loop belong together, and a burst takes a few turns to come through
# sockets and tasks: a batch waits for a turn that brings nobody, but not for more than these. A turn is microseconds.
MAX_TURNS: Final = 8


@dataclass(frozen=True, slots=True)
class DurationStats:
    """Durations in seconds: count, sum and maximum since the start; percentiles of the last `RECENT`, 0 at first."""

    count: int
    sum_s: float
    max_s: float
    p50_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class BatchingStats:
    """A snapshot of counts since the start; `queued` and `running` are requests by priority, now.

    `requests` and `items` are those that were started; `batch_sizes` counts batches by their items. `retried` counts
    requests that ran again, alone or with fewer others, after their batch had failed; those runs are not among
    `batches`. `cancelled` ones were taken back while they waited or ran. `failed` ones got an error of the model.
    """

    batches: int
    requests: int
    items: int
    batch_sizes: dict[int, int]
    queue_wait: DurationStats
    execution: DurationStats
    rejected: int
    expired: int
    cancelled: int
    retried: int
    failed: int
    queued: dict[int, int]
    running: dict[int, int]


class _Durations:
    """Durations in seconds, cheap to add to."""

    def __init__(self) -> None:
        self._count, self._sum_s, self._max_s = 0, 0.0, 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def add_duration(self, duration_s: float) -> None:
        self._count += 1
        self._sum_s += duration_s
        self._max_s = max(self._max_s, duration_s)
        self._recent.append(duration_s)

    def duration_stats(self) -> DurationStats:
        recent = sorted(self._recent)
        return DurationStats(self._count, self._sum_s, self._max_s, _nearest(recent, 0.5), _nearest(recent, 0.99))


@dataclass(slots=True)
class _BatchingCounts:
    """The counters behind `BatchingStats`."""

    batches: int = 0
    requests: int = 0
    items: int = 0
    rejected: int = 0
    expired: int = 0
    cancelled: int = 0
    retried: int = 0
    failed: int = 0
    batch_sizes: Counter[int] = field(default_factory=Counter)
    running: Counter[int] = field(default_factory=Counter)
    queue_wait: _Durations = field(default_factory=_Durations)
    execution: _Durations = field(default_factory=_Durations)

    def batching_stats(self, queued: Counter[int]) -> BatchingStats:
        """Return a snapshot. `queued`: requests by priority."""
        return BatchingStats(
            batches=self.batches,
            requests=self.requests,
            items=self.items,
            batch_sizes=dict(sorted(self.batch_sizes.items())),
            queue_wait=self.queue_wait.duration_stats(),
            execution=self.execution.duration_stats(),
            rejected=self.rejected,
            expired=self.expired,
            cancelled=self.cancelled,
            retried=self.retried,
            failed=self.failed,
            queued={priority: count for priority, count in sorted(queued.items()) if count},
            running={priority: count for priority, count in sorted(self.running.items()) if count},
        )


def _nearest(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as `share` of all values."""
    return ordered[math.ceil(share * len(ordered)) - 1] if ordered else 0.0


class BatcherClosed(Overloaded):
    """The replica is ending and takes no more requests."""


class _Results(asyncio.Future[list[Any]]):
    """The future of a request. Cancelling it takes the request out of the queue at once; a done callback is late."""

    on_cancel: Callable[[], None] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        was_open = super().cancel(msg)
        if was_open and self.on_cancel is not None:
            self.on_cancel()
        return was_open

    def refuse(self, error: BaseException) -> None:
        """Set this error, unless the future has ended."""
        if not self.done():
            self.on_cancel = None
            if not isinstance(error, Exception) or isinstance(error, StopIteration):  # a future takes neither
                error = GenerationFailed(f"the model failed: {error!r}")
            self.set_exception(error)


@dataclass(eq=False, slots=True)
class _ItemsRequest(QueuedRequest):
    future: _Results = field(kw_only=True)
    results: list[Any] = field(default_factory=list)  # by item, where it takes several batches
    num_missing: int = 0
    num_running: int = 0  # batches
    running_priority: int = 0  # as counted: a retune may change the other one


class Batcher(Generic[ItemT, ResultT]):
    """A dynamic batcher. Lives on one event loop.

    `run_batch` gets the items of one batch, all of one group, and returns a result for each in order; an exception in
    place of a result is that item's own. When `run_batch` itself fails, or returns another number of results, its
    requests run again one by one, so that only the one to blame fails. When it runs out of memory, its items run again
    in halves, and later batches of the group stay below what failed. `clock` goes as the event loop's does, in seconds.
    """

    def __init__(
        self,
        run_batch: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT | Exception]]],
        config: BatchingConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_batch = run_batch
        self._clock = clock
        self._queue: RequestQueue[_ItemsRequest] = RequestQueue(config)
        self._policy = BatchPolicy(self._queue)
        self._counts = _BatchingCounts()
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look_again_s = math.inf
        self._turns_left, self._num_seen = 0, 0
        self._is_closed = False
        # A batch belongs to no single request: its task must not run in the context of the last one.
        self._context = contextvars.copy_context()

    def submit(
        self,
        items: Sequence[ItemT],
        *,
        group: Hashable = None,
        costs: Sequence[int] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> asyncio.Future[list[ResultT]]:
        """Queue a request; the future gives one result per item, in order, once all are there. Returns at once.

        `group`: only items of one group run together. `costs`: one per item, in the unit of `max_batch_cost`; 1 each
        by default. `priority`: 0 is the default one. `timeout_s`: of waiting, where the priority's policy lets a
        request shorten it. Every refusal comes through the future: InvalidRequest, QueueFull, DeadlineExceeded,
        BatcherClosed, or what the model raised for this request. Cancelling the future takes the request back; batches
        that run already run on for the others.
        """
        future = _Results(loop=asyncio.get_running_loop())
        items = tuple(items)
        try:
            if self._is_closed:
                raise BatcherClosed("this replica is ending and takes no more requests")
            _check_request(items, costs, timeout_s)
            if items:
                level = priority or self._queue.config.default_priority
                self._add(_ItemsRequest(items, costs, group, level, self._clock(), timeout_s, future=future))
            else:
                future.set_result([])
        except (InvalidRequest, QueueFull, BatcherClosed) as error:
            self._counts.rejected += 1
            future.set_exception(error)
        return future

    def retune(self, config: BatchingConfig) -> None:
        """Use this config from now on, for waiting requests too; removed priorities become the last one."""
        self._queue.retune(config)
        self._pump()

    def batching_stats(self) -> BatchingStats:
        """Return a snapshot."""
        return self._counts.batching_stats(self._queue.num_by_priority)

    async def close(self) -> None:
        """Refuse waiting requests with BatcherClosed; return when running batches have ended."""
        self._is_closed = True
        for request in self._queue.drain():
            self._counts.rejected += 1
            request.future.refuse(BatcherClosed("this replica is ending; the request had not been started"))
        self._set_timer(math.inf)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _add(self, request: _ItemsRequest) -> None:
        if not self._queue.has_room(request.priority):
            self._pump()  # requests that could have started do not count as waiting
        self._policy.add_request(request, is_busy=self._num_running > 0)
        request.num_missing = len(request.items)
        request.future.on_cancel = partial(self._take_back, request)
        if request.deadline_s < self._look_again_s:
            self._set_timer(request.deadline_s)
        if self._num_free() > 0:
            self._start_soon()

    def _start_soon(self) -> None:
        """Start batches when a turn of the event loop has brought no new request."""
        if not self._turns_left:
            self._turns_left, self._num_seen = MAX_TURNS, 0
            asyncio.get_running_loop().call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        num_waiting, self._turns_left = len(self._queue), self._turns_left - 1
        has_grown, self._num_seen = num_waiting > self._num_seen, num_waiting
        if self._turns_left and has_grown and num_waiting < self._queue.config.max_batch_size:
            asyncio.get_running_loop().call_soon(self._turn, context=self._context)
        else:
            self._turns_left = 0
            self._pump()

    def _pump(self) -> None:
        """Refuse requests whose time is over, start what can start, and set the timer for what comes next."""
        now_s = self._clock()
        for request in self._queue.expire(now_s):
            self._counts.expired += 1
            waited_s = now_s - request.arrived_s
            message = f"the request waited {waited_s:.3f} s for its turn, and its time was over"
            request.future.refuse(DeadlineExceeded(message, "timeout"))
        batch: Batch[_ItemsRequest] | float
        while isinstance(batch := self._policy.next_batch(now_s, self._num_free()), Batch):
            self._start_batch(batch, now_s)
        self._set_timer(min(batch, self._queue.next_deadline_s()))

    def _num_free(self) -> int:
        return max(0, self._queue.config.max_concurrent_batches - self._num_running)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._look_again_s = at_s
        if at_s != math.inf:
            delay_s = max(0.0, at_s - self._clock())
            # Not the pump: after a stall of the loop, requests that were due before the timer are on the way in.
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._start_soon, context=self._context)

    def _take_back(self, request: _ItemsRequest) -> None:
        self._counts.cancelled += 1
        if request.is_queued:
            self._queue.remove_request(request)
            self._start_soon()  # others may have waited behind it

    def _start_batch(self, batch: Batch[_ItemsRequest], now_s: float) -> None:
        counts = self._counts
        counts.batches += 1
        counts.batch_sizes[batch.num_items] += 1
        for part in batch.parts:
            request = part.request
            counts.items += len(part)
            if not part.start:
                counts.requests += 1
                counts.queue_wait.add_duration(now_s - request.arrived_s)
            if not request.num_running:
                request.running_priority = request.priority
                counts.running[request.priority] += 1
            request.num_running += 1
        self._num_running += 1
        task = asyncio.get_running_loop().create_task(self._work(batch), context=self._context.copy())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard, context=self._context)

    async def _work(self, batch: Batch[_ItemsRequest]) -> None:
        start_s = self._clock()
        try:
            error = await self._attempt(batch.parts)
            if error is None:
                self._policy.note_served(batch, self._clock() - start_s)
            else:
                await self._retry(batch.group, batch.parts, error)
        except BaseException as error:  # the run was cancelled, or the process ends; nobody is left waiting
            for part in batch.parts:
                self._fail(part.request, GenerationFailed("the batch that worked on the request was cancelled"))
            if not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._num_running -= 1
            for part in batch.parts:
                part.request.num_running -= 1
                if not part.request.num_running:
                    self._counts.running[part.request.running_priority] -= 1
            self._start_soon()  # not now: a caller that gets its results may have the next request, and it should join

    async def _retry(self, group: Hashable, parts: Sequence[RequestPart[_ItemsRequest]], error: Exception) -> None:
        """Run the requests again: in halves if out of memory, else one by one, so that only the faulty one fails."""
        num_items = sum(map(len, parts))
        if is_out_of_memory(error) and num_items > 1:
            self._policy.note_out_of_memory(group, sum(part.request.cost(part.start, part.stop) for part in parts))
            smaller = halves(parts)
        elif len(parts) > 1:
            smaller = [[part] for part in parts]
        else:
            self._fail(parts[0].request, error)
            return
        forget_frames(error)  # they know the tensors of the batch that failed, whose memory the next ones need
        for each in smaller:
            waiting = [part for part in each if not part.request.future.done()]
            if waiting:
                self._counts.retried += len(waiting)
                if (again := await self._attempt(waiting)) is not None:
                    await self._retry(group, waiting, again)

    async def _attempt(self, parts: Sequence[RequestPart[_ItemsRequest]]) -> Exception | None:
        """Run the requests together and set their results. Return the error of a batch that failed as a whole."""
        items = [item for part in parts for item in part.request.items[part.start : part.stop]]
        start_s = self._clock()
        try:
            with panics_as_errors():
                results = list(await self._run_batch(items))
            if len(results) != len(items):
                raise GenerationFailed(f"the model returned {len(results)} results for {len(items)} items")
        except Exception as error:
            return error
        finally:
            self._counts.execution.add_duration(self._clock() - start_s)
        done = 0
        for part in parts:
            self._finish_part(part, results[done : done + len(part)])
            done += len(part)
        return None

    def _finish_part(self, part: RequestPart[_ItemsRequest], results: list[Any]) -> None:
        request = part.request
        error = next((result for result in results if isinstance(result, BaseException)), None)
        if error is not None:
            self._fail(request, error)
            return
        request.results = request.results or [None] * len(request.items)
        request.results[part.start : part.stop] = results
        request.num_missing -= len(part)
        if not request.num_missing and not request.future.done():
            request.future.on_cancel = None
            request.future.set_result(request.results)

    def _fail(self, request: _ItemsRequest, error: BaseException) -> None:
        """End the request with the error, and drop its waiting items."""
        self._queue.remove_request(request)
        if not request.future.done():
            self._counts.failed += 1
            request.future.refuse(error)


def _check_request(items: Sequence[Any], costs: Sequence[int] | None, timeout_s: float | None) -> None:
    """Raises InvalidRequest."""
    if costs is not None and len(costs) != len(items):
        raise InvalidRequest(f"{len(items)} items came with {len(costs)} costs; one each is expected")
    if costs is not None and min(costs, default=0) < 0:
        raise InvalidRequest(f"the cost of an item cannot be below 0, got {min(costs)}")
    if timeout_s is not None and not timeout_s >= 0:
        raise InvalidRequest(f"a timeout is 0 s or more, got {timeout_s}", "timeout")
