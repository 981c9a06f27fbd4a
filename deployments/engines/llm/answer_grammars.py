"""Grammars of answers in a model's own form: calls of its tools, and JSON after its reasoning. llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from llguidance.gbnf_to_lark import any_to_lark

from deployments.engines.llm.answer_forms import ReasoningForm, ToolForm
from deployments.engines.llm.call_arguments import resolved, types_of
from deployments.engines.llm.chat import AnswerGrammar, Function
from deployments.engines.llm.schemas import prepare_schema
from deployments.engines.records.protocol import EngineError

_AS_TEMPLATES_WRITE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_FREE: Final = {"whitespace_pattern": r"[ \n\t]{0,24}"}
_TEXT: Final = "/(?s:.*)/"
_BLANKS: Final = r"/[ \n]{1,8}/"
_MAX_DEPTH: Final = 12
_KINDS: Final[Mapping[type, str]] = {dict: "object", list: "list", str: "text"}
_T = TypeVar("_T")


class LarkGrammar:
    """A grammar under construction. `special` has the ids of special tokens by their texts."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._split = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """Return the whole grammar of answers of the expression `start`."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, expression: str, options: str = "") -> str:
        """Return the name of a rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def literal(self, text: str) -> str:
        """Return the rule for a text, with special tokens where it has any."""
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [text[at : found.start()], found[0]]
            at = found.end()
        shown = [*parts, text[at:]]
        written = [
            f"<[{self._special[part]}]>" if part in self._special else json.dumps(part) for part in shown if part
        ]
        return " ".join(written) or '""'

    def up_to(self, end: str) -> str:
        """Return the rule for any text up to the first `end`, which is included."""
        first = self._split.search(end)
        if first is not None and not first.start():
            return self.rule(f"{_TEXT} {self.literal(end)}")
        head = end[: first.start()] if first is not None else end
        rest = end[len(head) :]
        rule = self.rule(_TEXT, f"[suffix={json.dumps(head)}]")
        return f"{rule} {self.literal(rest)}" if rest else rule

    def expression(self, regex: str) -> str:
        """Return the rule for the texts of a regular expression."""
        pattern = regex.removeprefix("^").removesuffix("$")
        return self.rule("/" + re.sub(r"((?:^|[^\\])(?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n") + "/")

    def json(self, schema: Mapping[str, Any], *, is_free: bool = False) -> str:
        """Return the rule for the JSON documents of a prepared schema."""
        return self.rule(f"%json {json.dumps({**schema, 'x-guidance': _FREE if is_free else _AS_TEMPLATES_WRITE})}")

    def answer(self, form: AnswerGrammar) -> str:
        """Return the rule for the answers of a form. Raises EngineError for a grammar that cannot be read."""
        if form.json_schema is not None:
            return self.json(prepare_schema(form.json_schema), is_free=True)
        if form.regex is not None:
            return self.expression(form.regex)
        if form.choice is not None:
            return " | ".join(map(self.literal, form.choice))
        if form.structural_tag is not None:
            return structural_tag(self, form.structural_tag)
        try:
            text = any_to_lark(form.grammar or "")
        except Exception as error:  # of several kinds, which all mean that this is no grammar
            raise EngineError(f"the grammar cannot be read: {str(error)[:200]}") from None
        if not re.search(r"^\??start\b", text, re.MULTILINE):
            raise EngineError("the grammar has no rule `start` (Lark), or `root` (GBNF)")
        self._rules.append(re.sub(r"\bstart\b", "start_of_answer", text.replace("%llguidance {}", "")))
        return "start_of_answer"

    def behind_thought(self, form: ReasoningForm | None, answer: str, *, is_begun: bool, may_begin: bool) -> str:
        """Return the rule of an answer after reasoning that has begun, or that may begin."""
        if form is None or not form.openings or not (is_begun or may_begin):
            return answer
        thought = f"{self.up_to(form.closings[0])} {self.rule(_BLANKS)}?"
        return f"{thought} ({answer})" if is_begun else f"({self.literal(form.openings[0])} {thought})? ({answer})"


def call_rule(grammar: LarkGrammar, form: ToolForm, functions: Sequence[Function]) -> str:
    """Return the rule for one call of one of the functions, after the form's prefix.

    Raises EngineError for parameters that no grammar can keep to.
    """
    return " | ".join(grammar.rule(_call(grammar, form, function)) for function in functions)


def _call(grammar: LarkGrammar, form: ToolForm, function: Function) -> str:
    schema = {"type": "object", **prepare_schema(function.parameters)}
    if form.syntax == "object":
        head = form.name.replace("NAME", json.dumps(function.name))
        return f'{grammar.literal(head)} {grammar.json(schema)} "}}"'
    name = form.name.replace("NAME", function.name)
    if form.syntax in ("named", "channels"):
        return f"{grammar.literal(name + form.name_end)} {grammar.json(schema)}"
    if form.syntax == "tagged":
        arguments = _tagged(grammar, form, schema)
        return f"{grammar.literal(name + form.name_end + form.first)} {arguments} {grammar.literal(form.call[1])}"
    members = [
        (f"{key}{'=' if form.syntax == 'python' else ':'}", _value(grammar, form, one, schema), is_needed)
        for key, one, is_needed in _properties(schema)
    ]
    listed = _listed(grammar, members, ", " if form.syntax == "python" else ",")
    if form.syntax == "braces":
        return f'{grammar.literal(name)} "{{" {listed} "}}"'
    around = ('"["', '"]"') if form.is_bare else ("", grammar.literal(form.section[1]))
    return f'{around[0]} {grammar.literal(name)} "(" {listed} ")" {around[1]}'


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """Return the names and schemas of an object's members, and whether each is required."""
    properties, required = schema.get("properties"), schema.get("required")
    needed = required if isinstance(required, list) else []
    return [(key, one, key in needed) for key, one in properties.items()] if isinstance(properties, Mapping) else []


def _tagged(grammar: LarkGrammar, form: ToolForm, root: Mapping[str, Any]) -> str:
    assert form.tags is not None
    (before, behind), opening = form.tags.key, form.tags.value[0]
    found = []
    for key, schema, is_needed in _properties(root):
        types, closing = types_of(schema, root), form.tags.closing(key)
        said = form.tags.said[types != {"string"}].replace("TYPE", next(iter(types)) if len(types) == 1 else "object")
        head = grammar.literal(before + form.tags.written_key(key) + behind + said + opening)
        if types == {"string"}:
            values = _texts(schema, root)
            value = " | ".join(map(grammar.literal, values)) if values else ""
            body = f"({value}) {grammar.literal(closing)}" if value else grammar.up_to(closing)
        elif form.tags.nested:
            body = f"{_nested(grammar, form.tags.nested, schema, root)} {grammar.literal(closing)}"
        else:
            body = f"{grammar.json(_with_definitions(schema, root))} {grammar.literal(closing)}"
        rule = grammar.rule(f"{head} {body}")
        found.append(rule if is_needed else f"{rule}?")
    return " ".join(found)


def _nested(grammar: LarkGrammar, mark: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return what writes a value whose objects and arrays stand in tags of their members."""
    if depth > _MAX_DEPTH:
        raise EngineError("the schema is nested too deeply")

    def tagged(name: str, inner: Any) -> str:
        closing = f"{mark}</{name}>"
        head, types = grammar.literal(f"{mark}<{name}>"), types_of(inner, root)
        if types == {"string"} and not _texts(inner, root):
            return f"{head} {grammar.up_to(closing)}"
        return f"{head} {_nested(grammar, mark, inner, root, depth + 1)} {grammar.literal(closing)}"

    found, ways = resolved(schema, root), []
    for kind in sorted(types_of(schema, root) or {"string", "number", "boolean"}):
        if kind == "object" and (members := _properties(found)):
            ways.append(" ".join(f"({tagged(key, one)}){'' if needed else '?'}" for key, one, needed in members))
        elif kind == "array":
            ways.append(f"({tagged('item', found.get('items'))})*")
        elif kind == "string":
            texts = _texts(schema, root)
            ways.append(" | ".join(map(grammar.literal, texts)) if texts else "/[^<>\\[\\]]*/")
        else:
            ways.append(grammar.json(_with_definitions({**found, "type": kind}, root)))
    return grammar.rule(" | ".join(f"({way})" for way in ways))


def _with_definitions(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(schema) if isinstance(schema, Mapping) else {}
    return {key: root[key] for key in ("$defs", "definitions") if key in root} | own


def _texts(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """Return the few texts that a value may be; none where it may be any."""
    found = resolved(schema, root)
    given = found.get("enum", [found["const"]] if "const" in found else [])
    return [value for value in given if isinstance(value, str)] if isinstance(given, list) else []


def _listed(grammar: LarkGrammar, members: Sequence[tuple[str, str, bool]], comma: str) -> str:
    """Return the rule of members in their order, with commas between the present ones."""
    rest = ""  # the rules after a member, and without one before, from the last one on
    alone = ""
    for key, value, is_needed in reversed(members):
        own = grammar.rule(f"{grammar.literal(key)} {value}")
        follows = grammar.rule(f"{json.dumps(comma)} {own} {rest}")
        begins = grammar.rule(f"{own} {rest}")
        if is_needed:
            rest, alone = follows, begins
        else:
            rest = grammar.rule(f"{follows} | {rest}") if rest else f"{follows}?"
            alone = grammar.rule(f"{begins} | {alone}") if alone else f"{begins}?"
    return alone


def _value(grammar: LarkGrammar, form: ToolForm, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return the rule for a value in Python, or in Gemma's braces."""
    if depth > _MAX_DEPTH:
        raise EngineError("the schema is nested too deeply")
    is_python = form.syntax == "python"
    words = ("True", "False", "None") if is_python else ("true", "false", "null")
    found = resolved(schema, root)
    kinds = types_of(schema, root) or {"string", "number", "boolean"}
    ways = []
    for kind in sorted(kinds):
        if kind == "string" and (values := _texts(schema, root)):
            ways += [grammar.literal(json.dumps(one) if is_python else form.quote + one + form.quote) for one in values]
        elif kind == "string" and not is_python:
            ways.append(f"{grammar.literal(form.quote)} {grammar.up_to(form.quote)}")
        elif kind == "boolean":
            ways += [json.dumps(word) for word in words[:2]]
        elif kind == "null":
            ways.append(json.dumps(words[2]))
        elif kind == "array":
            item = _value(grammar, form, found.get("items"), root, depth + 1)
            comma = ", " if is_python else ","
            ways.append(f'"[" ({item} ({json.dumps(comma)} {item})*)? "]"')
        elif kind == "object":
            members = [
                (f'"{key}": ' if is_python else f"{key}:", _value(grammar, form, one, root, depth + 1), is_needed)
                for key, one, is_needed in _properties(found)
            ]
            ways.append(f'"{{" {_listed(grammar, members, ", " if is_python else ",")} "}}"')
        else:
            ways.append(grammar.json(_with_definitions({**found, "type": kind}, root)))
    return grammar.rule(" | ".join(ways))


# Forms of parts, as in xgrammar and vLLM

_Part = Mapping[str, Any]


def structural_tag(grammar: LarkGrammar, tag: _Part) -> str:
    """Return the rule for the answers of a `structural_tag`, in its older form or in the one with a `format`.

    Raises EngineError for an unknown part, with the known ones.
    """
    if "structures" not in tag:
        return _part(grammar, _member(tag, "format", dict), 0)
    structures = _member(tag, "structures", list)
    tags = [
        {"begin": one.get("begin"), "content": {"type": "json_schema", "json_schema": one.get("schema")}, "end": end}
        for one in structures
        if isinstance(one, Mapping) and isinstance(end := one.get("end", ""), str)
    ]
    return _triggered(grammar, {"triggers": tag.get("triggers"), "tags": tags}, 0)


def _part(grammar: LarkGrammar, part: Any, depth: int) -> str:
    if not isinstance(part, Mapping):
        raise EngineError("structural_tag: a format is an object with a type")
    if depth > _MAX_DEPTH:
        raise EngineError("structural_tag: nested too deeply")
    kind = part.get("type")
    if kind == "any_text":
        return grammar.rule(_TEXT)
    if kind == "const_string":
        return grammar.literal(_member(part, "value", str))
    if kind == "json_schema":
        schema = part.get("json_schema")
        return grammar.json(prepare_schema({} if schema is True else _member(part, "json_schema", dict)), is_free=True)
    if kind == "regex":
        return grammar.expression(_member(part, "pattern", str))
    if kind in ("sequence", "or"):
        found = [f"({_part(grammar, one, depth + 1)})" for one in _member(part, "elements", list)]
        return grammar.rule((" " if kind == "sequence" else " | ").join(found))
    if kind == "tag":
        return _tag(grammar, part, depth)
    if kind == "triggered_tags":
        return _triggered(grammar, part, depth)
    if kind == "tags_with_separator":
        one = f"({' | '.join(_tag(grammar, each, depth) for each in _member(part, 'tags', list))})"
        if part.get("stop_after_first"):
            return one if part.get("at_least_one") else f"{one}?"
        some = f"{one} ({grammar.literal(_member(part, 'separator', str))} {one})*"
        return some if part.get("at_least_one") else f"({some})?"
    known = "any_text, const_string, json_schema, or, regex, sequence, tag, tags_with_separator, triggered_tags"
    raise EngineError(f"structural_tag: a format of the type {str(kind)[:64]!r} is not known (known: {known})")


def _tag(grammar: LarkGrammar, part: Any, depth: int, written: int = 0) -> str:
    """Return the rule for a tag, after the first `written` characters of its beginning."""
    if not isinstance(part, Mapping):
        raise EngineError("structural_tag: a tag is an object with begin, content and end")
    begin, content, end = _member(part, "begin", str), part.get("content"), _member(part, "end", str)
    head = grammar.literal(begin[written:])
    if isinstance(content, Mapping) and content.get("type") == "any_text" and end:
        return grammar.rule(f"{head} {grammar.up_to(end)}")
    return grammar.rule(f"{head} ({_part(grammar, content, depth + 1)}) {grammar.literal(end)}")


def _triggered(grammar: LarkGrammar, part: _Part, depth: int) -> str:
    """Return the rule for free text with tags, each of which begins with a trigger."""
    triggers, tags = _member(part, "triggers", list), _member(part, "tags", list)
    if not triggers or not all(isinstance(one, str) and one for one in triggers):
        raise EngineError("structural_tag: triggers are texts, one or several")
    hits = []
    for trigger in triggers:
        own = [one for one in tags if isinstance(one, Mapping) and str(one.get("begin")).startswith(trigger)]
        if own:
            ways = " | ".join(_tag(grammar, one, depth, len(trigger)) for one in own)
            hits.append(f"{grammar.up_to(trigger)} ({ways})")
    num_begun = sum(any(str(one.get("begin")).startswith(each) for each in triggers) for one in tags)
    if not hits or num_begun < len(tags):
        raise EngineError("structural_tag: every tag begins with one of the triggers, and there is one at least")
    hit = grammar.rule(" | ".join(hits))
    text = grammar.rule(_TEXT)
    if part.get("stop_after_first"):
        return hit if part.get("at_least_one") else f"({hit} | {text})"
    return f"{hit} ({hit})* {text}" if part.get("at_least_one") else f"({hit})* {text}"


def _member(part: _Part, name: str, kind: type[_T]) -> _T:
    found = part.get(name)
    if not isinstance(found, kind):
        raise EngineError(f"structural_tag: {name} is missing, or is no {_KINDS[kind]}")
    return found
