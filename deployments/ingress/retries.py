"""A request whose replica dies is asked again elsewhere: its answer depends on nothing that died with the replica."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from deployments.errors import ReplicaLost
from deployments.ingress.errors import unwrap

MAX_RETRIES: Final = 2
PAUSE_S: Final = 0.1  # the router hears of a death a moment after the caller


def is_lost(error: BaseException | None) -> bool:
    """Whether a replica on the request's way is gone: the one that was asked, or one that it asked itself."""
    if isinstance(error, RayActorError | ReplicaUnavailableError):
        return True
    # Serve's own wrapper around the death of a replica further on.
    return error is not None and isinstance(error.__cause__, RayActorError)


class Retries:
    """How often one request may be asked again, never begun later than `timeout_s` after the first time."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._deadline = clock() + timeout_s
        self._num_tries = 1

    async def after(self, error: Exception, num_pieces: int = 0) -> None:
        """Returns when the request may be asked again.

        Raises the replica's own error when there is one, and ReplicaLost when it died too often, too late, or when
        `num_pieces` of a stream have gone out already: another replica would begin anew.
        """
        original = unwrap(error)
        if not is_lost(original):
            raise original from (error if original is not error else None)
        if num_pieces:
            raise ReplicaLost(
                f"the replica that worked on this request died after {num_pieces} pieces; try again"
            ) from error
        if self._num_tries > MAX_RETRIES or self._clock() + PAUSE_S >= self._deadline:
            raise ReplicaLost(
                f"the replica that worked on this request is gone (tries: {self._num_tries}); try again"
            ) from error
        self._num_tries += 1
        await self._sleep(PAUSE_S)


async def answered(ask: Callable[[], Awaitable[Any]], retries: Retries) -> Any:
    """What `ask` gives, of a second or third replica if need be."""
    while True:
        try:
            return await ask()
        except Exception as error:
            await retries.after(error)
