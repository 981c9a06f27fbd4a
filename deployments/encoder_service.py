"""A worker's way to the embedding service, which may be slow without being down, and down without saying so.

Serve's router waits for a replica as long as there is none, so a call to a dead service does not fail: it hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from deployments.encoding.records import Conditioning, ConditioningRequest

PATIENCE_S: Final = 2.0  # before a service that has not answered is asked whether it lives
PING_TIMEOUT_S: Final = 1.0
BELIEVED_DOWN_S: Final = 5.0  # nobody waits for it again sooner


class EncoderDown(Exception):
    """No replica of the embedding service answers. Says why that is believed."""


class EncoderService:
    """Lives on one event loop. `handle` is the deployment's."""

    def __init__(
        self,
        handle: Any,
        *,
        patience_s: float = PATIENCE_S,
        ping_timeout_s: float = PING_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handle = handle
        self._patience_s = patience_s
        self._ping_timeout_s = ping_timeout_s
        self._clock = clock
        self._down_until_s = 0.0

    @property
    def is_believed_down(self) -> bool:
        return self._clock() < self._down_until_s

    async def condition(self, request: ConditioningRequest) -> Conditioning:
        """Raises EncoderDown, and what a replica raises, as itself."""
        if self.is_believed_down:
            raise EncoderDown("the text encoder service did not answer a moment ago")
        for _ in range(2):  # another replica may have outlived the one that was asked
            answer = asyncio.ensure_future(_answer(self._handle.condition.remote(request)))
            try:
                while not answer.done():
                    await asyncio.wait({answer}, timeout=self._patience_s)
                    if not answer.done() and not await self._is_alive():
                        break
                if answer.done():  # perhaps while nobody answered the ping
                    return answer.result()
            except (RayActorError, ReplicaUnavailableError):
                if await self._is_alive():
                    continue
            finally:
                answer.cancel()
            break
        self._down_until_s = self._clock() + BELIEVED_DOWN_S
        raise EncoderDown("no replica of the text encoder service answers")

    async def _is_alive(self) -> bool:
        with contextlib.suppress(TimeoutError, RayActorError, ReplicaUnavailableError):
            async with asyncio.timeout(self._ping_timeout_s):
                await self._handle.ping.remote()
                return True
        return False


async def _answer(response: Awaitable[Conditioning]) -> Conditioning:
    """A replica's own error leaves as itself, out of Ray's wrapper."""
    try:
        return await response
    except Exception as error:
        cause = getattr(error, "cause", None)
        raise (cause if isinstance(cause, Exception) else error) from None
