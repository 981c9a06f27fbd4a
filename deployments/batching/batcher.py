"""Requests in, one call for many, answers out: the asyncio side of merging. What is decided is decided in `forming.py`.

merger = RequestMerger(run, MergeConfig(max_batch_size=8))
results = await merger.submit([item, item])
"""

from __future__ import annotations

import asyncio
import contextvars
import math
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from configs.merging import MergeConfig
from deployments.batching.answers import Answer, MergerClosed, MergeRequest, check, refuse
from deployments.batching.policy import Call, CallForming, Part, halves
from deployments.batching.queue import RequestQueue
from deployments.batching.stats import MergeCounts, MergeStats
from deployments.engines.memory_limits import forget_frames, is_out_of_memory
from deployments.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, QueueFull

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# Who comes within one turn of the event loop belongs together, and a burst takes a few turns to come through sockets
# and tasks: a call waits for a turn that brings nobody, but not for more than these. A turn takes microseconds.
MAX_TURNS: Final = 8


class RequestMerger(Generic[ItemT, ResultT]):
    """Lives on one event loop. `run` gets the items of one call, all of one group, and returns a result for each in
    order; an exception in place of a result is that item's own. When `run` itself fails, or returns another number of
    results, its requests run again one by one, so that only the one to blame fails. When it runs out of memory, its
    items run again in halves, and later calls of the group stay below what failed. `clock` has to go as the event
    loop's does, in seconds.
    """

    def __init__(
        self,
        run: Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT | Exception]]],
        config: MergeConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._clock = clock
        self._queue: RequestQueue[MergeRequest] = RequestQueue(config)
        self._forming = CallForming(self._queue)
        self._counts = MergeCounts()
        self._calls: set[asyncio.Task[None]] = set()
        self._num_running = 0
        self._timer: asyncio.TimerHandle | None = None
        self._look_again_s = math.inf
        self._turns_left, self._num_seen = 0, 0
        self._is_closed = False
        # A call belongs to no single request: its task shall not run in the context of whoever came last.
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
        """One result per item, in order, once all are there. Returns at once; every refusal comes through the future.

        `group`: only items of one group run together. `costs`: one per item, in the unit of `max_batch_cost`; 1 each
        by default. `priority`: 0 is the default one. `timeout_s`: of waiting, where the priority's policy lets a
        request shorten it. The future raises InvalidRequest, QueueFull, DeadlineExceeded, MergerClosed, or what the
        model raised for this request. Cancelling it takes the request back; what runs already runs on for the others.
        """
        answer = Answer(loop=asyncio.get_running_loop())
        items = tuple(items)
        try:
            if self._is_closed:
                raise MergerClosed("this replica is ending and takes no more requests")
            check(items, costs, timeout_s)
            if items:
                level = priority or self._queue.config.default_priority
                self._add(MergeRequest(items, costs, group, level, self._clock(), timeout_s, answer=answer))
            else:
                answer.set_result([])
        except (InvalidRequest, QueueFull, MergerClosed) as error:
            self._counts.rejected += 1
            answer.set_exception(error)
        return answer

    def retune(self, config: MergeConfig) -> None:
        """From now on, for those who wait as well. Who waits at a priority that is gone, waits at the last one."""
        self._queue.retune(config)
        self._pump()

    def stats(self) -> MergeStats:
        return self._counts.stats(self._queue.num_by_priority)

    async def close(self) -> None:
        """Who waits is refused with MergerClosed; returns when what runs has ended."""
        self._is_closed = True
        for request in self._queue.drain():
            self._counts.rejected += 1
            refuse(request, MergerClosed("this replica is ending; the request had not been started"))
        self._set_timer(math.inf)
        if self._calls:
            await asyncio.wait(self._calls)

    def _add(self, request: MergeRequest) -> None:
        if not self._queue.has_room(request.priority):
            self._pump()  # who could have started does not wait
        self._forming.add(request)
        request.num_missing = len(request.items)
        request.answer.on_cancel = partial(self._take_back, request)
        if request.deadline_s < self._look_again_s:
            self._set_timer(request.deadline_s)
        if self._num_free() > 0:
            self._start_soon()

    def _start_soon(self) -> None:
        """Start calls when a turn of the event loop has brought nobody new."""
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
        """Refuse whose time is over, start what can start, and set the timer for what comes next by itself."""
        now_s = self._clock()
        for request in self._queue.expire(now_s):
            self._counts.expired += 1
            waited_s = now_s - request.arrived_s
            message = f"the request waited {waited_s:.3f} s for its turn, and its time was over"
            refuse(request, DeadlineExceeded(message, "timeout"))
        next_call: Call[MergeRequest] | float
        while isinstance(next_call := self._forming.next_call(now_s, self._num_free()), Call):
            self._start(next_call, now_s)
        self._set_timer(min(next_call, self._queue.next_deadline_s()))

    def _num_free(self) -> int:
        return max(0, self._queue.config.max_concurrent_batches - self._num_running)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._look_again_s = at_s
        if at_s != math.inf:
            delay_s = max(0.0, at_s - self._clock())
            # Not the pump: after a stall of the loop, who was due before the timer is on the way in.
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._start_soon, context=self._context)

    def _take_back(self, request: MergeRequest) -> None:
        self._counts.cancelled += 1
        if request.is_queued:
            self._queue.remove(request)
            self._start_soon()  # others may have waited behind it

    def _start(self, call: Call[MergeRequest], now_s: float) -> None:
        counts = self._counts
        counts.calls += 1
        counts.batch_sizes[call.num_items] += 1
        for part in call.parts:
            request = part.request
            counts.items += len(part)
            if not part.start:
                counts.requests += 1
                counts.queue_wait.add(now_s - request.arrived_s)
            if not request.num_running:
                request.running_priority = request.priority
                counts.running[request.priority] += 1
            request.num_running += 1
        self._num_running += 1
        task = asyncio.get_running_loop().create_task(self._work(call), context=self._context.copy())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard, context=self._context)

    async def _work(self, call: Call[MergeRequest]) -> None:
        start_s = self._clock()
        try:
            error = await self._attempt(call.parts)
            if error is None:
                self._forming.served(call, self._clock() - start_s)
            else:
                await self._retry(call.group, call.parts, error)
        except BaseException as error:  # the run was cancelled, or the process ends; nobody is left waiting
            for part in call.parts:
                self._fail(part.request, GenerationFailed("the call that worked on the request was cancelled"))
            if not isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._num_running -= 1
            for part in call.parts:
                part.request.num_running -= 1
                if not part.request.num_running:
                    self._counts.running[part.request.running_priority] -= 1
            self._start_soon()  # not now: who gets an answer may have the next request, and it should join

    async def _retry(self, group: Hashable, parts: Sequence[Part[MergeRequest]], error: Exception) -> None:
        """In halves what found no memory, else each by itself, so that only the one to blame fails."""
        num_items = sum(map(len, parts))
        if is_out_of_memory(error) and num_items > 1:
            self._forming.ran_out(group, sum(part.request.cost(part.start, part.stop) for part in parts))
            smaller = halves(parts)
        elif len(parts) > 1:
            smaller = [[part] for part in parts]
        else:
            self._fail(parts[0].request, error)
            return
        forget_frames(error)  # they know the tensors of the call that failed, whose memory the next ones need
        for each in smaller:
            waiting = [part for part in each if not part.request.answer.done()]
            if waiting:
                self._counts.retried += len(waiting)
                if (again := await self._attempt(waiting)) is not None:
                    await self._retry(group, waiting, again)

    async def _attempt(self, parts: Sequence[Part[MergeRequest]]) -> Exception | None:
        """Runs them together and answers, or says why not."""
        items = [item for part in parts for item in part.request.items[part.start : part.stop]]
        start_s = self._clock()
        try:
            results = list(await self._run(items))
            if len(results) != len(items):
                raise GenerationFailed(f"the model returned {len(results)} results for {len(items)} items")
        except Exception as error:
            return error
        finally:
            self._counts.execution.add(self._clock() - start_s)
        done = 0
        for part in parts:
            self._answer(part, results[done : done + len(part)])
            done += len(part)
        return None

    def _answer(self, part: Part[MergeRequest], results: list[Any]) -> None:
        request = part.request
        error = next((result for result in results if isinstance(result, BaseException)), None)
        if error is not None:
            self._fail(request, error)
            return
        request.results = request.results or [None] * len(request.items)
        request.results[part.start : part.stop] = results
        request.num_missing -= len(part)
        if not request.num_missing and not request.answer.done():
            request.answer.on_cancel = None
            request.answer.set_result(request.results)

    def _fail(self, request: MergeRequest, error: BaseException) -> None:
        """What of it still waits is of no use any more."""
        self._queue.remove(request)
        if not request.answer.done():
            self._counts.failed += 1
            refuse(request, error)
