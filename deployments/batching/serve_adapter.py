"""A batcher behind `@serve.batch`: requests of one moment come to it in one call of the decorated handler.

Alone, `@serve.batch` forms a batch when requests arrive and parks it while another one runs, so that later arrivals
never join. Here the decorated handler returns at once with a future for each request, and the batch forms when it
can start (`batcher.py`).

    self._batcher = Batcher(run_batch, config)
    self._serve_adapter = ServeAdapter(self._batcher, max_ongoing_requests)
    results = await self._serve_adapter.submit(items, group=encoder, priority=request.priority)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ray import serve

from deployments.batching.batcher import Batcher

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


@dataclass(eq=False, slots=True)
class _Submission:
    """The arguments of `Batcher.submit`, and its future once it was called."""

    items: Sequence[Any]
    group: Hashable
    costs: Sequence[int] | None
    priority: int
    timeout_s: float | None
    future: asyncio.Future[list[Any]] | None = None


class ServeAdapter(Generic[ItemT, ResultT]):
    """Passes one replica's requests to its batcher. `max_ongoing_requests` is the deployment's."""

    def __init__(self, batcher: Batcher[ItemT, ResultT], max_ongoing_requests: int) -> None:
        # Two of Serve's batches at a time: while one is handed over, the next is formed. They never wait for more
        # requests: that is the batcher's decision.
        @serve.batch(
            max_batch_size=max(1, max_ongoing_requests // 2),
            batch_wait_timeout_s=0,
            max_concurrent_batches=2,
        )
        async def submit_all(submissions: list[_Submission]) -> list[asyncio.Future[list[Any]]]:
            return [_submit(batcher, submission) for submission in submissions]

        # Decorated here, not as a method: Serve keeps one queue per decorated function, for all of its objects.
        self._submit_one: Callable[[_Submission], Awaitable[asyncio.Future[list[ResultT]]]] = submit_all

    async def submit(
        self,
        items: Sequence[ItemT],
        *,
        group: Hashable = None,
        costs: Sequence[int] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> list[ResultT]:
        """Await `Batcher.submit`. A cancelled caller leaves the batcher's queue."""
        submission = _Submission(items, group, costs, priority, timeout_s)
        try:
            return await (await self._submit_one(submission))
        except asyncio.CancelledError:
            if submission.future is not None:  # cancelled between the handler and the results
                submission.future.cancel()
            raise


def _submit(batcher: Batcher[Any, Any], submission: _Submission) -> asyncio.Future[list[Any]]:
    try:
        submission.future = batcher.submit(
            submission.items,
            group=submission.group,
            costs=submission.costs,
            priority=submission.priority,
            timeout_s=submission.timeout_s,
        )
    except Exception as error:  # a group that has no hash, say: raised here, it would fail all that came with it
        submission.future = asyncio.get_running_loop().create_future()
        submission.future.set_exception(error)
    return submission.future
