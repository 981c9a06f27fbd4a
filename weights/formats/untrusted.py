"""Checks of values from strangers: JSON of any depth, sizes of any length, and how a message shows them.

HAZARD: one call into C holds the interpreter lock until it ends. Python multiplies, prints and compares numbers of any
length, so no number of a file is used in arithmetic before its digits are counted.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Any, Final

from weights.records.manifest import MAX_RANK

MAX_SIZE: Final = 2**63 - 1
MAX_SHOWN_CHARS: Final = 120


def load_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for nesting too deep to read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_shape(value: Any) -> bool:
    """Return True for a list of at most 64 sizes, each a non-negative integer below 2^63."""
    return isinstance(value, list) and len(value) <= MAX_RANK and all(map(is_size, value))


def is_size(value: Any) -> bool:
    """Return whether a value of a file is an integer from 0 to `MAX_SIZE`; bools are none."""
    return type(value) is int and 0 <= value <= MAX_SIZE


def num_elements(shape: Sequence[int]) -> int | None:
    """Multiply the sizes from the first to the last; None as soon as that is 2^64 or more, whatever comes after.

    So does the safetensors library: an early product that overflows is refused though a zero may follow.
    """
    product = 1
    for size in shape:
        product *= size
        if product >= 2**64:
            return None
    return product


def shown(value: Any) -> str:
    """Print a value for a message: one line of at most 120 characters, whatever it is."""
    printer = reprlib.Repr()
    printer.maxlevel, printer.maxdict = 3, 6
    printer.maxstring = printer.maxother = printer.maxlong = MAX_SHOWN_CHARS - 20
    try:
        text = printer.repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"
