"""A copy of the model directory in every process that asks it often, kept up to date by long poll."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final

from ray.exceptions import RayActorError, RayTaskError

from cluster.registry.directory import Directory, ModelRecord

POLL_S: Final = 30.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0

logger = logging.getLogger("atelier.watch")


class DirectoryWatch:
    """Lives on one event loop. While the registry is gone the copy goes on serving as it was.

    `connect` gives a handle of the registry, of a new one when the one before is gone for good; it may block.
    """

    def __init__(self, connect: Callable[[], Any], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._connect = connect
        self._sleep = sleep
        self._registry: Any = None
        self._copy = Directory("")
        self._is_ready = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Returns when the first copy is there; begins to watch when that was not done yet."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._follow())
        await self._is_ready.wait()

    def record(self, model: str) -> ModelRecord | None:
        """As last heard; None for what is not known here."""
        return self._copy.get(model)

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(self._copy)

    async def ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the registry itself. Raises its own errors, and RayActorError while it is gone."""
        registry = self._registry or await self._reconnect()
        try:
            return await getattr(registry, method).remote(*arguments, **options)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None

    def tell(self, method: str, *arguments: Any) -> None:
        """Call the registry without waiting for it; nobody hears of it when it is gone."""
        if self._registry is not None:
            getattr(self._registry, method).remote(*arguments)

    def close(self) -> None:
        if self._task:
            self._task.cancel()

    async def _reconnect(self) -> Any:
        self._registry = await asyncio.to_thread(self._connect)
        return self._registry

    async def _follow(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                registry = self._registry or await self._reconnect()
                change = await registry.watch.remote(self._copy.revision, self._copy.epoch, POLL_S)
            except Exception as error:  # whatever it is, the copy serves and the next round may do better
                logger.warning("the registry does not answer: %s", str(error).partition("\n")[0])
                if isinstance(error, RayActorError):
                    self._registry = None  # Ray restarts it under this handle, unless it was ended for good
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            self._copy.absorb(change)
            self._is_ready.set()
