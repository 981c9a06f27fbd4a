"""JSON schemas as people write them, converted to keywords that llguidance knows.

An unknown format is an annotation, as in the standard (JSON Schema 2020-12, Validation 7.2.1). Members
of `oneOf` that a property tells apart must have it: pydantic writes the tag of a union with a default, which lets it be
absent. Arrays of unique items are their permutations, where the items are a few constants.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from deployments.engines.records.protocol import EngineError

MAX_SCHEMA_CHARS: Final = 2**16
_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
# Keywords whose values are schemas, lists of schemas, and schemas by name.
_ONE: Final = frozenset({"items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else"})
_LISTS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_UNREAD: Final = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")  # lookarounds and back references
_LARGEST: Final = 2**53
_INT64: Final = 2**63 - 1
_MOST_UNIQUE: Final = 4  # values: they have 65 orders
_MOST_TAGS: Final = 16  # properties tried as the discriminator


def left_out_of(schema: Any) -> tuple[str, ...]:
    """Return the parts of a schema that `prepare_schema` leaves out as no grammar keeps to them. Raises as it does."""
    left_out: list[str] = []
    prepare_schema(schema, left_out)
    return tuple(dict.fromkeys(left_out))


def prepare_schema(schema: Any, left_out: list[str] | None = None) -> Any:
    """Return an equivalent schema without keywords that llguidance refuses; `left_out` gets the lost ones.

    Raises EngineError for a schema that is too large or too deep, or that no grammar can enforce.
    """
    try:
        size = len(json.dumps(schema, ensure_ascii=False))
        if size > MAX_SCHEMA_CHARS:
            raise EngineError(f"the schema has {size} characters; expected {MAX_SCHEMA_CHARS} at most")
        return _prepared(schema, schema, [] if left_out is None else left_out)
    except RecursionError:
        raise EngineError("the schema is nested too deeply") from None


def _prepared(schema: Any, root: Any, left_out: list[str]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("not") in ({}, True):  # nothing
        return False
    found = dict(schema)
    _leave_out(found, left_out)
    if isinstance(found.get("format"), str) and found["format"] not in _FORMATS:
        del found["format"]
    if not found.get("uniqueItems", True):
        del found["uniqueItems"]
    for key, value in found.items():
        if key in _ONE:
            found[key] = _prepared(value, root, left_out)
        elif key in _LISTS and isinstance(value, list):
            found[key] = [_prepared(one, root, left_out) for one in value]
        elif key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: _prepared(one, root, left_out) for name, one in value.items()}
    if isinstance(found.get("oneOf"), list) and "anyOf" not in found:
        members = _by_discriminator(found["oneOf"], found.get("discriminator"), root)
        if members is not None:  # no document fits two of them
            del found["oneOf"]
            found["anyOf"] = members
    return _permutations(found, root) if found.get("uniqueItems") is True else found


def _leave_out(schema: dict[str, Any], left_out: list[str]) -> None:
    """Take out keywords unknown to llguidance that zod and pydantic write for other readers."""
    schema.pop("$schema", None)
    if isinstance(schema.get("pattern"), str) and _UNREAD.search(schema["pattern"]):
        left_out.append(f"pattern {schema.pop('pattern')[:64]!r}")
    if "propertyNames" in schema:
        names = schema.pop("propertyNames")
        if names not in ({"type": "string"}, {}, True):  # true of all names
            left_out.append("propertyNames")
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        value = schema.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > _LARGEST:
            del schema[key]  # bounds of machine integers, far from real values
            if abs(value) < _INT64:
                left_out.append(key)


def _resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return the target of a reference into `$defs`; {} for anything that is not a schema with keywords."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        parts = reference.split("/")
        schema = root
        for part in parts[1:] if parts[0] == "#" else ["none"]:
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _constants(schema: Any, root: Any) -> list[Any] | None:
    """Return the values of a schema of a few constants; None for any other."""
    schema = _resolved(schema, root)
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    return [False, True] if schema.get("type") == "boolean" else None


def _by_discriminator(members: list[Any], discriminator: Any, root: Any) -> list[Any] | None:
    """Return the members of a `oneOf`, each with its discriminator, a property of constants, as a required one.

    None without such a property.
    """
    found = [_resolved(member, root).get("properties") for member in members]
    properties = [own for own in found if isinstance(own, Mapping)]
    if not members or len(properties) < len(members):
        return None
    named = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
    for name in [named] if isinstance(named, str) else itertools.islice(properties[0], _MOST_TAGS):
        values = [_constants(own.get(name), root) for own in properties]
        if None in values:
            continue
        texts = [json.dumps(value) for own in values for value in own or ()]
        if len(set(texts)) == len(texts):
            return [{**member, "required": _with_required(member.get("required"), name)} for member in members]
    return None


def _with_required(required: Any, name: str) -> list[Any]:
    given = list(required) if isinstance(required, list) else []
    return given if name in given else [*given, name]


def _permutations(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Return an array of unique items as the choice of all its contents. Raises EngineError for too many."""
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if most in (0, 1):
        del schema["uniqueItems"]
        return schema
    values = _constants(schema.get("items"), root)
    texts = [] if values is None else [json.dumps(value) for value in values]
    if values is None or not 0 < len(set(texts)) <= _MOST_UNIQUE or "prefixItems" in schema or "contains" in schema:
        raise EngineError(
            f"uniqueItems is supported for items that are one of {_MOST_UNIQUE} constants at most, or with maxItems 1"
        )
    distinct = list(dict(zip(texts, values, strict=True)).values())
    longest = len(distinct) if not isinstance(most, int) else min(most, len(distinct))
    orders = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in order],
            "items": False,
            "minItems": size,
            "maxItems": size,
        }
        for size in range(least if isinstance(least, int) else 0, longest + 1)
        for order in itertools.permutations(distinct, size)
    ]
    if not orders:
        raise EngineError(f"no document fits the schema (minItems {least} of {len(distinct)} unique values)")
    kept = {"uniqueItems", "items", "minItems", "maxItems"}
    if isinstance(types := schema.get("type"), list):
        kept.add("type")
        orders += [{"type": one} for one in types if one != "array"]
    return {key: value for key, value in schema.items() if key not in kept} | {"anyOf": orders}
