"""What a segment of a pipeline gives, asked again elsewhere when the replica that worked on it dies."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from deployments.ingress.retries import Retries, answered
from deployments.pipelines.plans import SegmentResult


class EncoderReply:
    """`ask` calls the embedding service and returns Serve's response, which may be handed on without coming here."""

    def __init__(self, ask: Callable[[], Any], timeout_s: float) -> None:
        self._ask = ask
        self._timeout_s = timeout_s
        self._is_first = True
        self.response = ask()

    def __await__(self) -> Generator[Any, None, SegmentResult]:
        return self._answered().__await__()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.response.cancel()

    async def _answered(self) -> SegmentResult:
        result: SegmentResult = await answered(self._try, Retries(self._timeout_s))
        return result

    async def _try(self) -> Any:
        if not self._is_first:
            self.response = self._ask()
        self._is_first = False
        return await self.response
