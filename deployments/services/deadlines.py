"""Deadline: the time that a request has from its arrival on, one value for all that is done for it. Free of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from deployments.errors import DeadlineExceeded


class Deadline:
    """A point in the time of the running event loop, `timeout_s` from now; None is for ever."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    def left_s(self) -> float | None:
        """Return the time that is left, at least a little: zero is refused where the deadline itself says it better."""
        return None if self.at is None else max(1e-3, self.at - asyncio.get_running_loop().time())

    def exceeded(self) -> DeadlineExceeded:
        """Return the error that is raised when the time is over."""
        return DeadlineExceeded(f"the request exceeded its timeout of {self.timeout_s:g} s", "timeout")

    @asynccontextmanager
    async def bounding(self) -> AsyncIterator[None]:
        """Cancel the block when the time is over, and raise DeadlineExceeded."""
        try:
            async with asyncio.timeout_at(self.at) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():  # somebody else's
                raise
            raise self.exceeded() from None
