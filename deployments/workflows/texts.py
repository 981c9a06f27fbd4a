"""Texts: joined, cut, searched, replaced."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from typing import Any, Final

import regex

from deployments.workflows.kinds import Input, Kind, Output, boolean, choice, growing, integer, link, number, text
from deployments.workflows.patterns import compiled, first_object, in_time, replaced
from deployments.workflows.records import MAX_TEXT, Refused

_MAX_INT: Final = 2**31


def _bounded(length: int) -> None:
    if length > MAX_TEXT:
        raise Refused(f"a text of {length} characters: at most {MAX_TEXT}")


def _concatenate(string_a: str, string_b: str, delimiter: str) -> tuple[str]:
    return (delimiter.join((string_a, string_b)),)


def _replace(string: str, find: str, replace: str) -> tuple[str]:
    _bounded(len(string) + string.count(find) * (len(replace) - len(find)))
    return (string.replace(find, replace),)


def _substring(string: str, start: int, end: int) -> tuple[str]:
    return (string[start:end],)


def _case(string: str, mode: str) -> tuple[str]:
    return (
        {"UPPERCASE": str.upper, "lowercase": str.lower, "Capitalize": str.capitalize}.get(mode, str.title)(string),
    )


def _trim(string: str, mode: str) -> tuple[str]:
    return ({"Left": str.lstrip, "Right": str.rstrip}.get(mode, str.strip)(string),)


def _contains(string: str, substring: str, case_sensitive: bool) -> tuple[bool]:
    return (substring in string if case_sensitive else substring.lower() in string.lower(),)


def _compare(string_a: str, string_b: str, mode: str, case_sensitive: bool) -> tuple[bool]:
    one, other = (string_a, string_b) if case_sensitive else (string_a.lower(), string_b.lower())
    if mode == "Equal":
        return (one == other,)
    return (one.startswith(other) if mode == "Starts With" else one.endswith(other),)


def _match(string: str, regex_pattern: str, **flags: bool) -> tuple[bool]:
    try:
        pattern = compiled(regex_pattern, **flags)
    except regex.error:
        return (False,)
    return (in_time(lambda seconds: pattern.search(string, timeout=seconds)) is not None,)


def _extract(string: str, regex_pattern: str, mode: str, group_index: int, **flags: bool) -> tuple[str]:
    try:
        pattern = compiled(regex_pattern, **flags)
    except regex.error:
        return ("",)
    if mode.startswith("First"):
        first = in_time(lambda seconds: pattern.search(string, timeout=seconds))
        found = [first] if first is not None else []
    else:
        found = in_time(lambda seconds: list(pattern.finditer(string, timeout=seconds)))
    if mode == "All Matches":  # of a pattern with groups, what its first one has
        return ("\n".join((one.group(1) or "") if pattern.groups else one.group(0) for one in found),)
    if mode == "First Match":
        return ("".join(one.group(0) for one in found),)
    if pattern.groups < group_index or (mode == "All Groups" and not pattern.groups):
        return ("",)
    groups = [one.group(group_index) for one in found]
    return ("\n".join(one for one in groups if one is not None),)


def _regex_replace(
    string: str,
    regex_pattern: str,
    replace: str,
    case_insensitive: bool = True,
    multiline: bool = False,
    dotall: bool = False,
    count: int = 0,
) -> tuple[str]:
    try:
        return (replaced(compiled(regex_pattern, case_insensitive, multiline, dotall), replace, string, count),)
    except (regex.error, IndexError) as error:
        raise Refused(f"not a pattern: {error}", "regex_pattern") from None


def _json(json_string: str, key: str) -> tuple[str]:
    found = (first_object(json_string) or {}).get(key)
    return ("" if found is None else str(found),)


def _format(f_string: str, values: Mapping[str, Any]) -> tuple[str]:
    """Fill in `{a}`; what Python's format would do further, attributes and widths, is refused."""
    parts: list[str] = []
    try:
        for before, name, spec, conversion in string.Formatter().parse(f_string):
            parts.append(before)
            if name is None:
                continue
            if spec or conversion or name not in values:
                raise Refused(
                    f"{{{name}}}: expected one of {', '.join(values) or 'no names'}, without a format", "f_string"
                )
            parts.append(str(values[name]))
            _bounded(sum(map(len, parts)))
    except ValueError as error:
        raise Refused(f"not a format: {error}", "f_string") from None
    return ("".join(parts),)


def _camera_angle(horizontal_angle: int, vertical_angle: int, zoom: float, **view: Any) -> tuple[None, str]:
    """Describe where a camera stands by the words that LoRAs for it are trained with; its place in 3D goes nowhere."""
    sector = math.floor(horizontal_angle / _SECTOR + 0.5) % len(_AROUND)
    height = next(word for most, word in _HEIGHTS if vertical_angle < most)
    distance = next(word for most, word in _DISTANCES if zoom < most)
    return None, f"{_AROUND[sector]} {height} {distance}"


def _long(name: str) -> Input:
    return text(name, multiline=True)


_FLAGS: Final = (boolean("case_insensitive", True), boolean("multiline"), boolean("dotall"))
_SOFT_FLAGS: Final = tuple(boolean(one.name, one.default, required=False) for one in _FLAGS)
_TEXT: Final = (Output("STRING"),)

_SECTOR: Final = 45  # degrees
_AROUND: Final = tuple(
    f"{side} view"
    for side in (
        *("front", "front-right quarter", "right side", "back-right quarter"),
        *("back", "back-left quarter", "left side", "front-left quarter"),
    )
)
_HEIGHTS: Final = (
    *((-15, "low-angle shot"), (15, "eye-level shot"), (45, "elevated shot"), (math.inf, "high-angle shot")),
)
_DISTANCES: Final = ((2, "wide shot"), (6, "medium shot"), (math.inf, "close-up"))

TEXTS: Final = (
    Kind(
        "CameraAngle",
        (
            *(integer("horizontal_angle", 0, 0, 360), integer("vertical_angle", 0, -30, 60)),
            *(number("zoom", 5.0, 0.0, 10.0), link("image", "IMAGE", required=False), text("view", required=False)),
        ),
        (Output("LOAD3D_CAMERA", "camera_info"), Output("STRING", "prompt")),
        _camera_angle,
        is_opaque=True,
        category="3d",
    ),
    Kind("StringConcatenate", (_long("string_a"), _long("string_b"), text("delimiter")), _TEXT, _concatenate),
    Kind("StringReplace", (_long("string"), _long("find"), _long("replace")), _TEXT, _replace),
    Kind(
        "StringSubstring",
        (_long("string"), integer("start", 0, -_MAX_INT, _MAX_INT), integer("end", 0, -_MAX_INT, _MAX_INT)),
        _TEXT,
        _substring,
    ),
    Kind("StringLength", (_long("string"),), (Output("INT", "length"),), lambda string: (len(string),)),
    Kind(
        "CaseConverter",
        (_long("string"), choice("mode", ("UPPERCASE", "lowercase", "Capitalize", "Title Case"))),
        _TEXT,
        _case,
    ),
    Kind("StringTrim", (_long("string"), choice("mode", ("Both", "Left", "Right"))), _TEXT, _trim),
    Kind(
        "StringContains",
        (_long("string"), _long("substring"), boolean("case_sensitive", True)),
        (Output("BOOLEAN", "contains"),),
        _contains,
    ),
    Kind(
        "StringCompare",
        (
            *(_long("string_a"), _long("string_b")),
            choice("mode", ("Starts With", "Ends With", "Equal")),
            boolean("case_sensitive", True),
        ),
        (Output("BOOLEAN"),),
        _compare,
    ),
    Kind(
        "RegexMatch",
        (_long("string"), _long("regex_pattern"), *_FLAGS),
        (Output("BOOLEAN", "matches"),),
        _match,
        is_costly=True,
    ),
    Kind(
        "RegexExtract",
        (
            *(_long("string"), _long("regex_pattern")),
            choice("mode", ("First Match", "All Matches", "First Group", "All Groups")),
            *(*_FLAGS, integer("group_index", 1, 0, 100)),
        ),
        _TEXT,
        _extract,
        is_costly=True,
    ),
    Kind(
        "RegexReplace",
        (
            *(_long("string"), _long("regex_pattern"), _long("replace"), *_SOFT_FLAGS),
            integer("count", 0, 0, 100, required=False),
        ),
        _TEXT,
        _regex_replace,
        is_costly=True,
    ),
    Kind("JsonExtractString", (_long("json_string"), text("key")), _TEXT, _json),
    Kind(
        "StringFormat",
        (growing("values", "*", tuple(string.ascii_lowercase), 0), text("f_string", "{a}", multiline=True)),
        _TEXT,
        _format,
    ),
)
