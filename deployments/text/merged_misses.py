"""What one request has to compute goes as one call per encoder, although a cache asks for each text on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from deployments.shared_work import shared_task
from deployments.text.cache import Encoding, Found
from deployments.text.encode_jobs import EncodeJob

RunMerged = Callable[[Sequence[EncodeJob], int, float | None], Awaitable[Sequence[Encoding]]]
Compute = Callable[[], Awaitable[Encoding]]
MAX_HOLD_S = 0.005


class MergedMisses:
    """Collects the computations of one request until all its lookups have asked or ended. Lives on one event loop.

    A lookup may also wait for what another request computes. It must not hold this request's own texts back, and the
    other request may in turn wait for one of them, so nothing is held longer than `max_hold_s` after the first text.
    What comes after that, because a slow tier said no, goes at once. A text is run whatever becomes of the request:
    others may have joined its computation.
    """

    def __init__(
        self,
        run_merged: RunMerged,
        num_lookups: int,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        max_hold_s: float = MAX_HOLD_S,
    ) -> None:
        self._run_merged = run_merged
        self._num_open = num_lookups
        self._priority = priority
        self._timeout_s = timeout_s
        self._max_hold_s = max_hold_s
        self._held: list[tuple[EncodeJob, asyncio.Future[Encoding]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._calls: set[asyncio.Task[None]] = set()  # the event loop itself holds tasks weakly

    async def find(self, job: EncodeJob, get: Callable[[Compute], Awaitable[Found]]) -> Found:
        """What `get` finds, as one of the lookups. It may call the function that it is given, which computes `job`
        together with the request's other texts for that encoder, and raises as `run_merged` does.
        """
        is_open = True

        def settle() -> None:
            nonlocal is_open
            self._num_open -= is_open
            is_open = False
            if self._num_open <= 0 and self._held:
                self._flush()

        async def compute() -> Encoding:
            future = self._hold(job)
            settle()
            return await future

        try:
            return await get(compute)
        finally:
            settle()

    def _hold(self, job: EncodeJob) -> asyncio.Future[Encoding]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Encoding] = loop.create_future()
        self._held.append((job, future))
        if self._timer is None:
            self._timer = loop.call_later(self._max_hold_s, self._flush)
        return future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held = self._held, []
        for encoder in {id(job.encoder): job.encoder for job, _ in held}.values():
            call = shared_task(self._call([entry for entry in held if entry[0].encoder is encoder]))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _call(self, entries: Sequence[tuple[EncodeJob, asyncio.Future[Encoding]]]) -> None:
        try:
            found = await self._run_merged([job for job, _ in entries], self._priority, self._timeout_s)
        except BaseException as error:
            for _, future in entries:
                if isinstance(error, asyncio.CancelledError):
                    future.cancel()
                elif not future.done():
                    future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), encoding in zip(entries, found, strict=True):
            if not future.done():
                future.set_result(encoding)
