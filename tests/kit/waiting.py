"""Waits for what other threads, tasks or processes do, with a bound.

The condition is looked at every millisecond first, and less often the longer it takes.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 60.0  # for what takes milliseconds on an idle machine


async def until(condition: Callable[[], Any], what: str = "", timeout_s: float = WAIT_S) -> Any:
    """Return the condition's value as soon as it is true; it may be a coroutine function.

    Raises:
        TimeoutError: It has not become true within `timeout_s`.
    """
    start_s = time.monotonic()
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await asyncio.sleep(_pause_s(condition, what, start_s, timeout_s))


def wait_until(condition: Callable[[], Any], what: str = "", timeout_s: float = WAIT_S) -> Any:
    """Return the condition's value as soon as it is true, looked at from this thread.

    Raises:
        TimeoutError: It has not become true within `timeout_s`.
    """
    start_s, pause = time.monotonic(), threading.Event()  # a test may have patched time.sleep
    while not (found := condition()):
        pause.wait(_pause_s(condition, what, start_s, timeout_s))
    return found


def _pause_s(condition: Callable[[], Any], what: str, start_s: float, timeout_s: float) -> float:
    waited_s = time.monotonic() - start_s
    if waited_s >= timeout_s:
        code = getattr(condition, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
        raise TimeoutError(f"{what or 'the condition'} was not true within {timeout_s:g} s{where}")
    return min(max(waited_s / 20, 0.001), 0.2)
