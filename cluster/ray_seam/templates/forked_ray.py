"""Ray's library in a process that is forked: its ids, and its settings. Nothing is imported that is not there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


def has_ray() -> bool:
    """Return whether this process has imported Ray, and so its compiled library."""
    return "ray" in sys.modules


@contextlib.contextmanager
def python_draws_class_ids() -> Iterator[None]:
    """Let actor classes that are defined in the block have ids of the system's randomness.

    HAZARD: Ray's library draws ids of tasks and objects from one generator, which begins with the first draw. Copies
    made after that would draw the same ids as each other. The class of an actor draws its id when it is defined.
    """
    actor: Any = sys.modules.get("ray.actor")
    if actor is None:
        yield
        return
    drawing = actor.ActorClassID
    actor.ActorClassID = SimpleNamespace(from_random=lambda: drawing(os.urandom(drawing.size())))
    try:
        yield
    finally:
        actor.ActorClassID = drawing


def draw_id() -> str:
    """Return an id of Ray's generator, in hex."""
    return str(sys.modules["ray"].WorkerID.from_random().hex())


def reload_settings() -> None:
    """Read Ray's settings from the environment again, which was another one at import."""
    if has_ray():
        sys.modules["ray._raylet"].Config.initialize("")
