"""The registry snapshot: a copy of the directory of models in another process, kept current by long poll."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Final, ParamSpec, TypeVar

from ray.exceptions import RayTaskError

from cluster.process.ray_calls import NamedActor, call_actor
from cluster.registry.actor import Method, WeightRegistry
from cluster.registry.asking import Asking
from cluster.registry.directory import Directory, ModelRecord

POLL_S: Final = 30.0
# HAZARD: Ray's timers go by the wall clock. Where that was set back they stand still, and Ray does not say of a call
# that it died with the registry: a poll that is so late has no answer any more.
LATE_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
_CATCH_UP_S: Final = 2.0

logger = logging.getLogger("atelier.snapshot")

P = ParamSpec("P")
R = TypeVar("R")


class RegistrySnapshot:
    """A copy of the directory of models, and the way to the registry itself. Lives on one event loop.

    The copy stays as it was while the registry is gone. The control plane stays while the `replica` of that name runs.
    """

    def __init__(
        self,
        registry: NamedActor,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        *,
        replica: str | None = None,
    ) -> None:
        self._replica = replica
        self._sleep = sleep
        self._registry = registry
        self._asking = Asking()
        self._copy = Directory("")
        self._is_ready = asyncio.Event()
        self._changed = asyncio.Event()  # another one after each change
        self._task: asyncio.Task[None] | None = None
        self._pausing: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait for the first copy; start to follow the registry unless that was done."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._follow_registry())
        await self._is_ready.wait()

    @property
    def records(self) -> Mapping[str, ModelRecord]:
        """The records by id, as last received."""
        return self._copy.records

    @property
    def revision(self) -> tuple[str, int]:
        """The epoch and number of the last change received: equal ones mean equal records."""
        return self._copy.epoch, self._copy.revision

    def find_model(self, id_: str) -> ModelRecord | None:
        """Return the model's record as last received, None for a model that the copy does not have."""
        return self._copy.get(id_)

    def __iter__(self) -> Iterator[ModelRecord]:
        return iter(self._copy)

    async def call_registry(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a method of the registry, as in `call_registry(WeightRegistry.find_model, id_)`.

        Raises the registry's own errors, and RayActorError while it is gone.
        """
        registry = await self._registry.handle()
        try:
            answer = await self._asking.ask(registry, method, *args, **kwargs)
        except RayTaskError as error:
            self._end_pause()
            raise error.cause if isinstance(error.cause, Exception) else error from None
        self._end_pause()
        return answer

    async def catch_up(self, condition: Callable[[], bool]) -> None:
        """Wait until the copy has followed the registry so far that the condition holds, 2 s at most.

        Whoever was notified of a change must not find the old state here.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_S):
                while not condition():
                    await self._changed.wait()

    def notify_registry(self, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a method of the registry without waiting for it; nothing happens while the registry is gone."""
        if (registry := self._registry.known_handle) is not None:
            call_actor(registry, method, *args, **kwargs)

    def close(self) -> None:
        """Stop following the registry."""
        for task in (self._task, self._pausing):
            if task:
                task.cancel()

    def _end_pause(self) -> None:
        """Follow the registry at once: it has answered a caller, and the copy must not lag behind that answer."""
        if self._pausing:
            self._pausing.cancel()

    async def _follow_registry(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                registry = await self._registry.handle()
                known = self._copy.revision, self._copy.epoch
                async with asyncio.timeout(POLL_S + LATE_S):
                    change = await call_actor(registry, WeightRegistry.watch, *known, POLL_S, self._replica)
            except Exception as error:  # whatever it is, the copy serves and the next round may do better
                logger.warning("the registry does not answer: %s", str(error).partition("\n")[0])
                self._registry.note_failure(error)
                self._pausing = asyncio.ensure_future(self._sleep(pause_s))
                await asyncio.wait([self._pausing])
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            self._copy.absorb(change)
            self._asking.was_heard = True
            self._is_ready.set()
            self._changed.set()
            self._changed = asyncio.Event()
