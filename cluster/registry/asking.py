"""A question to the registry, which is waited for as long as the registry lives that was asked."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final, ParamSpec, TypeVar

import ray

from cluster.process.ray_calls import call_actor
from cluster.registry.actor import Method, WeightRegistry

LOOK_S: Final = 5.0  # so often who waits looks whether the registry is the one that was asked
SILENT_S: Final = 20.0  # what does not say so much as that within this time does not answer

P = ParamSpec("P")
R = TypeVar("R")


async def ask_registry(registry: Any, method: Method[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Return the answer, however long it takes. Raises the call's errors, RayActorError for a registry that is gone.

    HAZARD: Ray's timers go by the wall clock. Where that was set back they stand still, and Ray does not say of a call
    that it died with the registry: for minutes after the clock is right again, or for as long as it was set back.
    """
    began_s = time.monotonic()
    answer: asyncio.Future[R] = asyncio.ensure_future(call_actor(registry, method, *args, **kwargs))
    try:
        while not (await asyncio.wait([answer], timeout=LOOK_S))[0]:
            waited_s = time.monotonic() - began_s
            try:
                async with asyncio.timeout(SILENT_S):
                    up_s = await call_actor(registry, WeightRegistry.up_s)
            except TimeoutError:
                raise ray.exceptions.ActorUnavailableError("the registry does not answer", None) from None
            if up_s < waited_s and not answer.done():
                raise ray.exceptions.ActorUnavailableError("another registry is in its place", None)
        return answer.result()
    finally:
        answer.cancel()
