"""A question to the registry, which is waited for as long as the registry lives that was asked."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any, Final, ParamSpec, TypeVar

import ray

from cluster.process.ray_calls import call_actor
from cluster.registry.actor import Method, WeightRegistry

LOOK_S: Final = 5.0  # between two checks, while a call waits, that the registry is still the one that it asked
SILENT_S: Final = 90.0  # a registry that starts on a busy machine is silent for long; a dead one is silent for ever

P = ParamSpec("P")
R = TypeVar("R")


class Asking:
    """The questions of one process. `was_heard`: the registry has answered before, so that it is no longer starting."""

    def __init__(self) -> None:
        self.was_heard = False

    async def ask(self, registry: Any, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the answer, however long it takes.

        Raises the call's errors, and RayActorError for a registry that is gone.
        HAZARD: Ray's timers go by the wall clock. Where that was set back they stand still, and Ray does not say of a
        call that it died with the registry: for minutes after the clock is right again, or for as long as it was set
        back.
        """
        began_s = heard_s = time.monotonic()
        born_by_s = began_s if self.was_heard else math.inf  # a call may wait for the first registry to start
        answer: asyncio.Future[R] = asyncio.ensure_future(call_actor(registry, method, *args, **kwargs))
        try:
            while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
                now_s = time.monotonic()
                try:
                    async with asyncio.timeout(LOOK_S):  # a question that is lost as well is asked again
                        up_s = await call_actor(registry, WeightRegistry.up_s)
                except TimeoutError:
                    if now_s - heard_s > SILENT_S:
                        raise ray.exceptions.ActorUnavailableError("the registry does not answer", None) from None
                    continue
                heard_s, self.was_heard = now_s, True
                if now_s - up_s > born_by_s and not answer.done():
                    raise ray.exceptions.ActorUnavailableError("another registry is in its place", None)
                born_by_s = min(born_by_s, now_s)
            self.was_heard = True
            return answer.result()
        finally:
            answer.cancel()
