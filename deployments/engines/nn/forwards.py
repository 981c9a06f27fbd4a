"""Modules that compute something else for a while. Their parameters stay where they are, untouched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


@contextlib.contextmanager
def replaced_forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let each module run the given function in place of its `forward` within the block; its hooks stay.

    Blocks may be nested. HAZARD: one thread at a time may run the modules.
    """
    before = {module: module.__dict__.get("forward") for module in forwards}
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, earlier in before.items():
            if earlier is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = earlier
