"""Primitives, switches, arithmetic, and sizes."""

from __future__ import annotations

import math
import string
from collections.abc import Mapping
from typing import Any, Final

from deployments.workflows.expressions import computed
from deployments.workflows.kinds import (
    MAX_SEED,
    Input,
    Kind,
    Output,
    boolean,
    choice,
    growing,
    integer,
    link,
    number,
    text,
)
from deployments.workflows.records import Refused
from deployments.workflows.values import PENDING, Shown

_MAX_INT: Final = 2**63 - 1
_NUMBERS: Final = "FLOAT,INT,BOOLEAN"
_MAX_SHOWN: Final = 100_000  # characters that a page is shown
_RATIOS: Final = {
    "1:1 (Square)": (1, 1),
    "3:2 (Photo)": (3, 2),
    "4:3 (Standard)": (4, 3),
    "16:9 (Widescreen)": (16, 9),
    "21:9 (Ultrawide)": (21, 9),
    "2:3 (Portrait Photo)": (2, 3),
    "3:4 (Portrait Standard)": (3, 4),
    "9:16 (Portrait Widescreen)": (9, 16),
}


def _same(value: Any) -> tuple[Any]:
    return (value,)


def _wanted_branch(given: Mapping[str, Any]) -> tuple[str, ...]:
    switch = given.get("switch")
    if switch is PENDING:
        return "on_true", "on_false"
    return ("on_true",) if switch else ("on_false",)


def _switch(switch: Any, on_false: Any = None, on_true: Any = None) -> tuple[Any]:
    return (on_true if switch else on_false,)


def _expression(expression: str, values: Mapping[str, Any]) -> tuple[float, int, bool]:
    result = computed(expression, values)
    return float(result), int(result), bool(result)


def _converted(value: Any) -> tuple[float, int]:
    if isinstance(value, str):
        value = value.strip()
        if len(value) > 400:
            raise Refused("a number of more than 400 characters", "value")
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise Refused(f"{value!r} is no finite number", "value")
    return found, int(value) if isinstance(value, int) else int(found)


def _resolution(aspect_ratio: str, megapixels: float, multiple: int = 8) -> tuple[int, int]:
    wide, high = _RATIOS[aspect_ratio]
    scale = math.sqrt(megapixels * 1024 * 1024 / (wide * high))
    return round(wide * scale / multiple) * multiple, round(high * scale / multiple) * multiple


def _combo(choice: str, index: int = 0) -> tuple[str, int]:
    return choice, index


def _shown(source: Any = None) -> Shown:
    if source is None:
        written = "None"
    elif isinstance(source, str | int | float | bool):
        written = str(source)
    else:
        shape = getattr(source, "shape", None)
        written = f"{type(source).__name__}{f' {tuple(shape)}' if shape is not None else ''}"
    return Shown((written,), {"text": [written[:_MAX_SHOWN]]})


def _is_all(values: Mapping[str, Any]) -> tuple[bool]:
    return (all(map(bool, values.values())),)


def _is_any(values: Mapping[str, Any]) -> tuple[bool]:
    return (any(map(bool, values.values())),)


def _or_default(anything: Any = None, default: Any = None) -> tuple[Any, bool]:
    found = default if anything is None else anything
    return found, found is None


_WHOLE: Final = integer("value", 0, -_MAX_INT, _MAX_INT, seed=True)
_VALUES: Final = tuple(f"value{place}" for place in range(50))

LOGIC: Final = (
    Kind("PrimitiveInt", (_WHOLE,), (Output("INT"),), _same),
    Kind("PrimitiveFloat", (number("value", 0.0, -(2.0**63), 2.0**63),), (Output("FLOAT"),), _same),
    Kind("PrimitiveBoolean", (boolean("value"),), (Output("BOOLEAN"),), _same),
    Kind("PrimitiveString", (text("value"),), (Output("STRING"),), _same),
    Kind("PrimitiveStringMultiline", (text("value", multiline=True),), (Output("STRING"),), _same),
    Kind("SeedNode", (integer("seed", 0, 0, MAX_SEED),), (Output("INT", "seed"),), lambda seed: (seed,)),
    Kind(
        "ComfySwitchNode",
        (boolean("switch"), link("on_false", "*", required=False), link("on_true", "*", required=False)),
        (Output("*", "output"),),
        _switch,
        wants=_wanted_branch,
        category="logic",
    ),
    Kind("ComfyNotNode", (link("value", "*"),), (Output("BOOLEAN"),), lambda value: (not value,)),
    Kind("ComfyAndNode", (growing("values", "*", _VALUES),), (Output("BOOLEAN"),), _is_all),
    Kind("ComfyOrNode", (growing("values", "*", _VALUES),), (Output("BOOLEAN"),), _is_any),
    Kind("InvertBooleanNode", (boolean("boolean"),), (Output("BOOLEAN"),), lambda boolean: (not boolean,)),
    Kind(
        "ComfyPassOrNoneNode",
        (link("anything", "*", required=False), link("default", "*", required=False)),
        (Output("*", "output"), Output("BOOLEAN", "is_none")),
        _or_default,
    ),
    Kind(
        "ComfyMathExpression",
        (text("expression", "a + b", multiline=True), growing("values", _NUMBERS, tuple(string.ascii_lowercase), 0)),
        (Output("FLOAT"), Output("INT"), Output("BOOLEAN", "BOOL")),
        _expression,
        category="math",
    ),
    Kind(
        "ComfyNumberConvert",
        (link("value", "INT,FLOAT,STRING,BOOLEAN"),),
        (Output("FLOAT"), Output("INT")),
        _converted,
        category="math",
    ),
    Kind(
        "CustomCombo",
        (Input("choice", "COMBO"), integer("index", 0, 0, 1000, required=False)),
        (Output("STRING"), Output("INT", "INDEX")),
        _combo,
    ),
    Kind(
        "ResolutionSelector",
        (
            choice("aspect_ratio", tuple(_RATIOS)),
            number("megapixels", 1.0, 0.1, 16.0),
            integer("multiple", 8, 1, 128, required=False),
        ),
        (Output("INT", "width"), Output("INT", "height")),
        _resolution,
    ),
    Kind("PreviewAny", (link("source", "*"),), (Output("STRING"),), _shown, is_output=True),
)
