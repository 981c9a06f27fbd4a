"""Answers of actors, with nothing left behind where there is none."""

from __future__ import annotations

import traceback
from typing import Any

import ray


def get(refs: Any, timeout_s: float | None = None) -> Any:
    """`ray.get` that raises an actor's own exception instead of Ray's wrapper around it.

    HAZARD: `ray.get` raises out of a frame that has the error among the values: a circle. It keeps the other values,
    and by way of the frames that called it whatever those get later, until Python looks for circles. In a process at
    rest that may be for ever, and the values are the node's shared memory.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        traceback.clear_frames(error.__traceback__)
        if not isinstance(error, ray.exceptions.RayTaskError) or not isinstance(error.cause, Exception):
            raise
        cause = error.with_traceback(None).cause
    try:
        raise cause
    finally:
        del cause
