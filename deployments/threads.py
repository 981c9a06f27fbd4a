"""Calls in a thread that end before their caller does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def in_thread(function: Callable[..., ResultT], *arguments: object) -> ResultT:
    """As `asyncio.to_thread`, but a caller who is cancelled meanwhile goes on only when the thread is done.

    HAZARD: a thread cannot be cancelled. What it works on (a lease, a place in an arena, a tokenizer) must not be
    somebody else's before it is done.
    """
    return await outcome_of(asyncio.ensure_future(asyncio.to_thread(function, *arguments)))


async def outcome_of(work: asyncio.Future[ResultT]) -> ResultT:
    """What `work` gives or raises. Cancelling a caller does not cancel it: the caller goes on when it is done."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # nobody will ask for it
        raise
