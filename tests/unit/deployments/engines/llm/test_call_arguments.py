"""Arguments of calls as models write them: their types, their depth, and what is left a text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.engines.llm.call_arguments import nested_value, python_calls, types_of, value_of_text

DEEPEST = 32


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null", 3]}, "integer null"),
        ({"enum": [1, "a", None, True]}, "integer string null boolean"),
        ({"const": 1.5}, "number"),
        ({"anyOf": [{"type": "array"}, {"oneOf": [{"type": "null"}, {"type": "object"}]}]}, "array null object"),
        ({"$ref": "#/$defs/a"}, "integer"),
        ({"$ref": "#/$defs/gone"}, ""),
        ({"$ref": "#/$defs/round"}, ""),
        ({"$ref": "elsewhere", "type": "string"}, "string"),
        ({"anyOf": "no list"}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_a_schemas_types_are_found(schema: Any, types: str) -> None:
    root = {"$defs": {"a": {"type": "integer"}, "round": {"$ref": "#/$defs/round"}}}
    assert types_of(schema, root) == frozenset(types.split())


@pytest.mark.parametrize(("levels", "types"), [(7, {"null"}), (8, set())])
def test_a_schema_is_followed_for_eight_levels(levels: int, types: set[str]) -> None:
    schema: Any = {"type": "null"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    assert types_of(schema, schema) == types
    root: Any = {str(level): {"$ref": f"#/{level + 1}"} for level in range(levels)} | {str(levels): {"type": "null"}}
    assert types_of({"$ref": "#/1"}, root) == types


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("3", "integer", 3),
        ("3", "number", 3),
        ("3", "string", "3"),
        ("3", "", "3"),
        ("3.0", "integer", 3),
        ("3.0", "integer number", 3.0),
        ("3.5", "integer", "3.5"),
        ("true", "boolean", True),
        ("True", "boolean", True),
        ("True", "string", "True"),
        ("null", "integer", None),
        ("None", "integer", None),
        ("null", "string", "null"),
        ("null", "string null", None),
        ("None", "string null", "None"),
        ("null", "", "null"),
        ("[1, 'a']", "", [1, "a"]),
        ("{'a': -1}", "object", {"a": -1}),
        ("[1]", "string", "[1]"),
        ("NaN", "number", "NaN"),
        (" word ", "string", " word "),
    ],
)
def test_a_text_is_read_as_one_of_its_types(text: str, types: str, value: Any) -> None:
    found = json.loads(value_of_text(text, frozenset(types.split())))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(("depth", "is_read"), [(DEEPEST, True), (DEEPEST + 1, False)])
def test_values_are_nested_so_deep(depth: int, is_read: bool) -> None:
    for begin, end in ("[]", ("{'a':", "}")):
        text = begin * depth + "True" + end * depth  # Python's, so that JSON does not read it
        assert isinstance(json.loads(value_of_text(text, frozenset())), list | dict) is is_read
        assert (python_calls(f"[f(a={text})]") is not None) is is_read
    tagged = "<item>" * depth + "1" + "</item>" * depth
    if is_read:
        assert json.dumps(nested_value(tagged, "", {}, {})).count("[") == depth
    else:
        with pytest.raises(ValueError, match="nested too deeply"):
            nested_value(tagged, "", {}, {})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[f(a=1, b='x'), g()]", [("f", {"a": 1, "b": "x"}), ("g", {})]),
        ("f(a=null)\n\n a.g(b=true)", [("f", {"a": None}), ("a.g", {"b": True})]),
        ("get-time(zone=-1)", [("get-time", {"zone": -1})]),
        ("[f(1)]", None),
        ("[f(**x)]", None),
        ("[3]", None),
        ("[]", None),
        ("f(a=open)", None),
        ("words", None),
        ("", None),
    ],
)
def test_calls_in_python_have_keywords_and_literals(text: str, calls: Any) -> None:
    found = python_calls(text)
    assert (found and [(name, json.loads(arguments)) for name, arguments in found]) == calls
