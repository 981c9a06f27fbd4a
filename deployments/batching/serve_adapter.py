"""Serve's batching decorator as the door of a merger: requests of one moment come through it in one call.

Alone, `@serve.batch` forms a batch when requests arrive and parks it while another one runs, so that whoever comes
later never joins. Behind this door the decorated handler returns at once with a future for each request, and the call
is formed when it can start (`merger.py`).

    self._merger = RequestMerger(run, config)
    self._door = ServeDoor(self._merger, max_ongoing_requests)
    results = await self._door.submit(items, group=encoder, priority=request.priority)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray import serve

from deployments.batching.batcher import RequestMerger

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(eq=False, slots=True)
class Submission:
    """What goes through the door, and the answer once it is on the other side."""

    items: Sequence[Any]
    group: Hashable
    costs: Sequence[int] | None
    priority: int
    timeout_s: float | None
    answer: asyncio.Future[list[Any]] | None = None


class ServeDoor(Generic[ItemT, ResultT]):
    """Of one merger; made inside a replica. `max_ongoing_requests` is the deployment's: the door is as wide as that."""

    def __init__(self, merger: RequestMerger[ItemT, ResultT], max_ongoing_requests: int) -> None:
        # Two batches at a time: while one is handed over, the next is formed. Never a wait for company: that is the
        # merger's decision.
        @serve.batch(
            max_batch_size=max(1, max_ongoing_requests // 2),
            batch_wait_timeout_s=0,
            max_concurrent_batches=2,
        )
        async def enter(submissions: list[Submission]) -> list[asyncio.Future[list[Any]]]:
            return [_enter(merger, submission) for submission in submissions]

        # Decorated here, not as a method: Serve keeps one queue per decorated function, for all of its objects.
        self._enter: Callable[[Submission], Awaitable[asyncio.Future[list[ResultT]]]] = enter

    async def submit(
        self,
        items: Sequence[ItemT],
        *,
        group: Hashable = None,
        costs: Sequence[int] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[ResultT]:
        """`RequestMerger.submit`, awaited. Who is cancelled meanwhile is taken out of the merger's queue."""
        submission = Submission(items, group, costs, priority, timeout_s)
        try:
            return await (await self._enter(submission))
        except asyncio.CancelledError:
            if submission.answer is not None:  # cancelled between the door and the answer
                submission.answer.cancel()
            raise


def _enter(merger: RequestMerger[Any, Any], submission: Submission) -> asyncio.Future[list[Any]]:
    try:
        submission.answer = merger.submit(
            submission.items,
            group=submission.group,
            costs=submission.costs,
            priority=submission.priority,
            timeout_s=submission.timeout_s,
        )
    except Exception as error:  # a group that has no hash, say: raised here, it would fail all that came with it
        submission.answer = asyncio.get_running_loop().create_future()
        submission.answer.set_exception(error)
    return submission.answer
