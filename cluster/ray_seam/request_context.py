"""The id of the request that a task works on, where Serve keeps it: Serve sends it along with calls of other replicas,
and writes it into its log lines.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from typing import Any, Final

from cluster.ray_seam import shims

_MODULE: Final = "ray.serve.context"


def current_request_id() -> str:
    """Return the id; empty outside of a request, and in a process without Serve."""
    if (context := sys.modules.get(_MODULE)) is None:
        return ""
    found = context._serve_request_context.get()
    return found.request_id if found is not None else ""


def set_request_id(id_: str) -> None:
    """Let this task, and what it starts, work on a request. Raises RayIncompatible."""
    context = _context()
    known = context._serve_request_context.get() or context._RequestContext()
    context._serve_request_context.set(replace(known, request_id=id_))


@cache
def _context() -> Any:
    from ray.serve import context

    shims.require(shims.REQUEST_CONTEXT)
    return context
