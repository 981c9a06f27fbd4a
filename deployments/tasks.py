"""Work that does not end with the request that began it: it is waited for by several, or cannot be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def shared_task(work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """Start a task of the running loop that belongs to no request. The caller keeps it: the loop holds tasks weakly.

    HAZARD: when Serve cancels a request, Ray cancels all actor calls that were made in its context as well, and tasks
    inherit the context of who created them. Here it is an empty one.
    """
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


async def in_thread(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """Call a function as `asyncio.to_thread` does, but a caller who is cancelled goes on only when the thread is done.

    HAZARD: a thread cannot be cancelled. What it works on (a lease, a place in an arena, a tokenizer) must not be
    somebody else's before it is done.
    """
    return await outcome_of(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


async def outcome_of(work: asyncio.Future[ResultT]) -> ResultT:
    """Return what `work` gives, or raise as it does. A caller who is cancelled goes on when it is done, uncancelled."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # nobody will ask for it
        raise
