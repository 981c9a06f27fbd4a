"""Arguments of tool calls as models write them, made JSON: values in tags, Python's literals, and Gemma's braces."""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Final

_JSON_NAMES: Final[Mapping[str, Any]] = {"true": True, "false": False, "null": None}
_MAX_DEPTH: Final = 32
_MAX_CHARACTERS: Final = 2**18  # of a call that is read as a whole
_DECODER: Final = json.JSONDecoder(strict=False)
_KEY: Final = re.compile(r"([^:{}\[\],]{1,256}):")
_SCALAR: Final = re.compile(r"[^,{}\[\]]*")
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def to_json(value: Any) -> str:
    """Return a value as JSON. Raises ValueError for one that JSON cannot express."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def types_of(schema: Any, root: Any, depth: int = 8) -> frozenset[str]:
    """Return a schema's types of a value; none if it names none."""
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        found = root
        for part in reference[2:].split("/"):
            found = found.get(part) if isinstance(found, Mapping) else None
        return types_of(found, root, depth - 1)
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset({given})
    if isinstance(given, list):
        return frozenset(one for one in given if isinstance(one, str))
    if isinstance(given := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(_type_of(value) for value in given)
    members = [one for key in ("anyOf", "oneOf") for one in schema.get(key) or () if isinstance(schema[key], list)]
    return frozenset[str]().union(*(types_of(member, root, depth - 1) for member in members))


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, classes in _TYPES.items() if isinstance(value, classes)), "string")


def value_of_text(text: str, types: frozenset[str]) -> str:
    """Return the text of a value of one of these types as JSON; a string if no other type fits.

    Without types, a text that reads as a list or an object in JSON is that.
    """
    value = _read(text.strip())
    kind = _type_of(value)
    fits = kind in types or (kind == "integer" and "number" in types) or (not types and kind in ("array", "object"))
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        return to_json(int(value))
    if value is not None and fits and kind != "string":
        return to_json(value)
    if value is None and text.strip() in ("null", "None") and "string" not in types and types:
        return "null"
    if value is None and text.strip() == "null" and "null" in types:
        return "null"
    return to_json(text)


def nested_value(text: str, mark: str, schema: Any, root: Any, depth: int = 0) -> Any:
    """Return the value of a text in which objects and arrays stand in tags of their members. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    types, members = types_of(schema, root), _members(text, mark)
    if not members:
        empty: Any = {} if types == {"object"} else [] if types == {"array"} else None
        return empty if empty is not None and not text.strip() else json.loads(value_of_text(text, types))
    own = resolved(schema, root)
    if all(name == "item" for name, _ in members) and "object" not in types:
        return [nested_value(inner, mark, own.get("items"), root, depth + 1) for _, inner in members]
    properties = own.get("properties")
    known: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    return {name: nested_value(inner, mark, known.get(name), root, depth + 1) for name, inner in members}


def _members(text: str, mark: str) -> list[tuple[str, str]]:
    """Return the names and texts of the outermost tags."""
    found, begun, name, depth = [], 0, "", 0
    for tag in nested_tags(mark).finditer(text):
        if not tag[1]:
            if not depth:
                name, begun = tag[2], tag.end()
            depth += 1
        elif depth:
            depth -= 1
            if not depth:
                found.append((name, text[begun : tag.start()]))
    return found


@functools.cache
def nested_tags(mark: str) -> re.Pattern[str]:
    """Return the pattern of tags that begin with a mark: a slash, for an end, and the name."""
    return re.compile(re.escape(mark) + r"<(/?)([^<>]{1,256})>")


def resolved(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return the target of a schema's reference; {} if there is none."""
    for _ in range(8):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _read(text: str) -> Any:
    """Return the value of a text in JSON or else in Python; the text itself if it is neither."""
    try:
        found = json.loads(text)
        to_json(found)  # not a number that JSON lacks
    except (ValueError, RecursionError):
        if len(text) > _MAX_CHARACTERS or text[:1] not in "[{(TFN'\"":
            return text
        try:
            return _literal(ast.parse(text, mode="eval").body)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return text
    return found


def python_calls(text: str) -> list[tuple[str, str]] | None:
    """Return the names and arguments of a list of Python's calls, or of one on each line; None for other texts."""
    if len(text) > _MAX_CHARACTERS:
        return None
    text = text.strip()
    source = text if text.startswith("[") else f"[{','.join(line for line in text.splitlines() if line.strip())}]"
    try:
        found = ast.parse(source, mode="eval").body
        calls = found.elts if isinstance(found, ast.List) else []
        return [_python_call(call) for call in calls] or None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _python_call(call: ast.expr) -> tuple[str, str]:
    before = ""
    if isinstance(call, ast.BinOp) and isinstance(call.op, ast.Sub):  # a name with a hyphen
        before, call = f"{ast.unparse(call.left).replace(' ', '')}-", call.right
    if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError("no call with keywords")
    return before + ast.unparse(call.func), to_json({str(one.arg): _literal(one.value) for one in call.keywords})


def _literal(node: ast.expr, depth: int = 0) -> Any:
    """Return the value of a literal, or of one of JSON's three names. Raises ValueError."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    match node:
        case ast.Constant(value=str(text)):  # pairs of surrogates, as JSON escapes them, are a character
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        case ast.Constant(value=int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _JSON_NAMES:
            return _JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item, depth + 1) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key, depth + 1) if key is not None else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a key is no text")
            return dict(zip(names, (_literal(value, depth + 1) for value in values), strict=True))
    raise ValueError("no literal")


def braces_object(text: str, quote: str) -> str | None:
    """Return {key:value, ...} with texts in `quote`s as JSON; None for other texts."""
    if len(text) > _MAX_CHARACTERS:
        return None
    try:
        value, end = _braces(text, 0, quote, 0)
        return to_json(value) if isinstance(value, dict) and not text[end:].strip() else None
    except (ValueError, IndexError):
        return None


def _braces(text: str, at: int, quote: str, depth: int) -> tuple[Any, int]:
    """Return the value that begins at a place, and its end. Raises ValueError, IndexError."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    at = _behind_blanks(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    if text[at] == '"':  # as JSON has it
        try:
            return _DECODER.raw_decode(text, at)
        except ValueError:  # a quote within what is no text
            pass
    if text[at] not in "{[":
        found = _SCALAR.match(text, at)
        assert found is not None
        return _read(found[0].strip()), found.end()
    is_object, members, items = text[at] == "{", {}, []
    at = _behind_blanks(text, at + 1)
    while text[at] not in "}]":
        if is_object:
            key, at = _braces_key(text, at, quote)
            members[key], at = _braces(text, at, quote, depth + 1)
        else:
            item, at = _braces(text, at, quote, depth + 1)
            items.append(item)
        at = _behind_blanks(text, at)
        if text[at] == ",":
            at = _behind_blanks(text, at + 1)
        elif text[at] not in "}]":
            raise ValueError("neither a comma nor an end")
    return (members if is_object else items), at + 1


def _braces_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, at):
        key, at = _braces(text, at, quote, 0)
        at = _behind_blanks(text, at)
        if text[at] != ":":
            raise ValueError("a key without a value")
        return str(key), at + 1
    found = _KEY.match(text, at)
    if found is None:
        raise ValueError("no key")
    return found[1].strip(" \n\"'"), found.end()


def _behind_blanks(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at
