"""Literals of a document, cast and bounded as their inputs are declared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from deployments.workflows.backend import Catalog
from deployments.workflows.kinds import Input
from deployments.workflows.records import MAX_TEXT, ErrorType

_SHOWN_CHOICES: Final = 20
_MAX_DIGITS: Final = 40  # of a whole number that is written as a text


class BadLiteral(Exception):
    """A value that its input does not take."""

    def __init__(self, type: ErrorType, message: str, details: str) -> None:
        super().__init__(type, message, details)
        self.type: ErrorType = type
        self.message = message
        self.details = details


def unwrapped(value: Any) -> Any:
    """Return a literal list without its wrapping: a bare list would be a link."""
    return value["__value__"] if isinstance(value, Mapping) and set(value) == {"__value__"} else value


def choices_of(one: Input, catalog: Catalog | None) -> Sequence[str]:
    """Return the values that a COMBO may have; nothing where it may have any."""
    return catalog.files(one.folder) if one.folder and catalog is not None else one.choices


def literal(one: Input, value: Any, catalog: Catalog | None) -> Any:
    """Return the value as the input's type has it, or raise BadLiteral. Without a catalog, any file is known."""
    if one.type not in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
        return value
    cast = _cast(one, unwrapped(value))
    if isinstance(cast, int | float) and not isinstance(cast, bool):
        if one.minimum is not None and cast < one.minimum:
            raise BadLiteral("value_smaller_than_min", f"Value {cast} smaller than min of {one.minimum:g}", one.name)
        if one.maximum is not None and cast > one.maximum:
            raise BadLiteral("value_bigger_than_max", f"Value {cast} bigger than max of {one.maximum:g}", one.name)
    if one.type == "COMBO" and (one.choices or (one.folder and catalog is not None)):
        known = choices_of(one, catalog)
        if cast not in known:
            names = ", ".join(known[:_SHOWN_CHOICES]) + (", ..." if len(known) > _SHOWN_CHOICES else "")
            where = f"{one.folder}: " if one.folder else ""
            raise BadLiteral(
                "value_not_in_list", "Value not in list", f"{one.name}: {str(cast)[:200]!r} not in [{where}{names}]"
            )
    return cast


def _cast(one: Input, value: Any) -> Any:
    try:
        if one.type == "INT":
            return _whole(value)
        if one.type == "FLOAT":
            number = float(value)
            if not math.isfinite(number):
                raise ValueError("not a finite number")
            return number
        if one.type == "BOOLEAN":
            return bool(value)
    except (TypeError, ValueError, OverflowError) as error:
        details = f"{one.name}, {str(value)[:200]!r}, {error}"
        raise BadLiteral(
            "invalid_input_type", f"Failed to convert an input value to a {one.type} value", details
        ) from None
    if isinstance(value, Mapping | list):
        raise BadLiteral("invalid_input_type", f"expected a {one.type}", f"{one.name}, {type(value).__name__}")
    shown = str(value) if one.type == "STRING" else value
    if isinstance(shown, str) and len(shown) > MAX_TEXT:
        raise BadLiteral("invalid_input_type", f"a text of at most {MAX_TEXT} characters", f"{one.name}, {len(shown)}")
    return shown


def _whole(value: Any) -> int:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise ValueError(f"more than {_MAX_DIGITS} digits")
    return int(value)
