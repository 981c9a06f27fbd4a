"""Regular expressions that a workflow brings. They may take for ever, so each has a time after which it is given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

import regex

from deployments.workflows.records import MAX_TEXT, Refused

_SECONDS: Final = 1.0
_MAX_PATTERN: Final = 2_000  # characters
_MAX_BRACES: Final = 1_000  # places where an object may begin
_T = TypeVar("_T")


def compiled(pattern: str, case_insensitive: bool, multiline: bool, dotall: bool) -> Any:
    """Return a pattern; raises `regex.error` where it is none."""
    if len(pattern) > _MAX_PATTERN:
        raise Refused(f"a pattern of {len(pattern)} characters: at most {_MAX_PATTERN}", "regex_pattern")
    flags = regex.VERSION0
    for is_set, flag in ((case_insensitive, regex.IGNORECASE), (multiline, regex.MULTILINE), (dotall, regex.DOTALL)):
        flags |= flag if is_set else 0
    return regex.compile(pattern, flags)


def in_time(search: Callable[[float], _T]) -> _T:
    """Return the result of a search; it is called with the seconds that it may take."""
    try:
        return search(_SECONDS)
    except TimeoutError:
        raise Refused(f"the pattern took more than {_SECONDS:g} s on this text", "regex_pattern") from None


def replaced(pattern: Any, replacement: str, text: str, count: int) -> str:
    """Return a text with matches replaced, where the result is of a bounded length."""
    parts: list[str] = []
    length, at = 0, 0

    def walk(seconds: float) -> None:
        nonlocal length, at
        for number, match in enumerate(pattern.finditer(text, timeout=seconds)):
            if count and number == count:
                break
            parts.extend((text[at : match.start()], match.expand(replacement)))
            length += len(parts[-1]) + len(parts[-2])
            at = match.end()
            if length > MAX_TEXT:
                raise Refused(f"a text of more than {MAX_TEXT} characters")

    in_time(walk)
    return "".join([*parts, text[at:]])


def first_object(text: str) -> dict[str, Any] | None:
    """Return the first JSON object in a text, or None."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    for _ in range(_MAX_BRACES):
        if at < 0:
            break
        try:
            found, _ = decoder.raw_decode(text, at)
        except (json.JSONDecodeError, RecursionError):
            at = text.find("{", at + 1)
            continue
        return found if isinstance(found, dict) else None
    return None
