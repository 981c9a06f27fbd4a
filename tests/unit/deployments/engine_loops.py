"""Requests to an engine's loop that tests follow to the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from deployments.services.step_loop import EngineLoop


async def last_output(loop: EngineLoop[Any, Any], request: Any, on_output: Callable[[Any], None] | None = None) -> Any:
    """Return the last output of one request; `on_output` sees every one."""
    async with contextlib.aclosing(loop.stream_outputs(request)) as outputs:
        async for output in outputs:
            if on_output is not None:
                on_output(output)
    return output
