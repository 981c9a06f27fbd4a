"""Work that several requests wait for, and that outlives the one that began it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


def shared_task(work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
    """A task of the running loop that belongs to no request. The caller keeps it: the loop holds tasks weakly.

    HAZARD: when Serve cancels a request, Ray cancels all actor calls that were made in its context as well, and tasks
    inherit the context of who created them. Here it is an empty one.
    """
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())
