"""What a segment of a pipeline gives, asked again elsewhere when the replica that worked on it dies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from deployments.ingress.retries import RetriedCalls
from deployments.pipelines.plans import SegmentResult
from deployments.services.deadlines import Deadline


class EncoderReply:
    """`ask` begins a call of `encoder`, with the responses of `upstream` as they are then, and returns Serve's
    response, which may be handed on without coming here.
    """

    def __init__(self, encoder: RetriedCalls, ask: Callable[[], Any], upstream: Sequence[EncoderReply] = ()) -> None:
        self._encoder = encoder
        self._ask = ask
        self._deadline = encoder.deadline()
        self._upstream = upstream
        self._has_failed = False
        self.response = ask()

    def __await__(self) -> Generator[Any, None, SegmentResult]:
        return self._answered().__await__()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.response.cancel()

    def ask_again(self) -> None:
        """What was worked on may have died anywhere on the way: results that came along are made anew as well."""
        for reply in self._upstream:
            reply.ask_again()
        self.response = self._ask()
        self._has_failed = False

    async def _answered(self) -> SegmentResult:
        result: SegmentResult = await self._encoder.answered(lambda: self._try(self._deadline), self._deadline)
        return result

    async def _try(self, deadline: Deadline) -> Any:
        if self._has_failed:
            self.ask_again()
        try:
            return await self._encoder.answer_begun(self.response, deadline)
        except Exception:
            self._has_failed = True
            raise
