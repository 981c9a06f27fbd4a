"""Tool calls in answers: whatever the pieces in which the text comes, the same text and the same calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from kit.seeding import seeded_random

from deployments.engines.llm.chat import CalledTool, Function, whole_calls
from deployments.engines.llm.tool_calls import ToolCallReader, ToolForm, tool_form
from deployments.engines.protocol import EngineError, SamplingParams, TextRequest

HERMES = tool_form("{{ tools }} <tool_call>\n{...}\n</tool_call>")
LLAMA3 = tool_form('{{ tools }} {"name": function name, "parameters": dictionary} {% if message.tool_calls %}')


def read(form: Any, text: str, rng: random.Random, *, is_begun: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    reader = ToolCallReader(form, is_begun=is_begun)
    shown, pieces = "", list[CalledTool]()
    while text:
        size = rng.randint(1, max(1, len(text) // rng.randint(1, 6)))
        new, calls = reader.feed(text[:size])
        text, shown = text[size:], shown + new
        pieces += calls
    shown += reader.flush()
    calls = whole_calls(pieces)
    assert len({call.id for call in calls}) == len(calls) == reader.num_calls
    return shown, [(call.name, json.loads(call.arguments)) for call in calls]


def random_arguments(rng: random.Random) -> dict[str, Any]:
    strings = ["", "x", 'a "quoted" } brace {', "back\\slash", "<tool_call>", "é\n", "]}"]
    return {
        rng.choice(strings) + str(number): rng.choice(
            [rng.choice(strings), rng.random(), None, [{"deep": rng.choice(strings)}], {"a": {}}]
        )
        for number in range(rng.randrange(4))
    }


@pytest.mark.parametrize("indent", [None, 2])
def test_calls_come_out_however_the_text_is_cut(indent: int | None) -> None:
    rng = seeded_random()
    for _ in range(100):
        calls = [(f"call-{number}", random_arguments(rng)) for number in range(rng.randint(1, 3))]
        written = [
            json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=rng.random() < 0.5)
            for name, arguments in calls
        ]
        before = rng.choice(["", "Let me see. ", "a < b "])
        text = before + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in written)
        shown, found = read(HERMES, text, rng)
        assert (shown.strip(), found) == (before.strip(), calls)
        shown, found = read(HERMES, written[0] + "\n</tool_call>", rng, is_begun=True)
        assert (shown, found) == ("", calls[:1])
        listed = [one.replace('"arguments"', '"parameters"', 1) for one in written]
        assert read(LLAMA3, "; ".join(listed), rng) == ("", calls)


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "a <tool_ca",
        '<tool_call>\n{"nothing": 1}',
        "<tool_call>\n[1, 2]",
        '{"a": {"b": "}"}} and more',
        '{"name": 3, "parameters": {}}',
        '{"name": "half',
        "",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    for form in (HERMES, LLAMA3):
        shown, calls = read(form, text, seeded_random())
        assert not calls
        assert shown.replace("\n", "") == text.replace("\n", "")


def test_other_orders_of_members_and_ends_within_a_call() -> None:
    rng = seeded_random()
    assert read(LLAMA3, '{"parameters": {"a": 1}, "name": "f"}', rng) == ("", [("f", {"a": 1})])
    assert read(LLAMA3, '{"type": "function", "name": "f", "parameters": {"a": 1}}', rng) == ("", [("f", {"a": 1})])
    reader = ToolCallReader(HERMES)
    shown, calls = reader.feed('<tool_call>\n{"name": "f", "arguments": {"a": "be')
    assert (shown, [(call.name, call.arguments) for call in calls]) == ("", [("f", ""), ("f", '{"a": "be')])
    assert reader.flush() == ""
    reader = ToolCallReader(HERMES)
    assert reader.feed('<tool_call>\n{"name": "f", "arguments": {}}\n</tool')[0] == ""
    assert reader.flush() == ""  # an answer that ends within what closes a call
    assert read(LLAMA3, '{"name": "f", "parameters": {}} that is all', rng) == ("that is all", [("f", {})])


@pytest.mark.parametrize(("form", "seed"), [(HERMES, 0), (HERMES, 1), (LLAMA3, 2), (LLAMA3, 3)])
def test_an_answer_that_must_call_calls_one_of_the_functions_by_its_schema(
    form: ToolForm, seed: int, tiny: Callable[..., Any], run_all: Callable[..., Any]
) -> None:
    schemas: dict[str, Any] = {
        "add": {"properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}}},
        "look-up": {"properties": {"deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}},
    }
    for schema in schemas.values():
        schema |= {"required": list(schema["properties"]), "additionalProperties": False}
    functions = [Function(name=name, parameters=schema) for name, schema in schemas.items()]
    engine = tiny(seed=seed, max_position_embeddings=512).engine()
    grammar = engine.grammars.compile_lark(form.grammar(functions))
    requests = [
        TextRequest(
            str(n), engine.encode_text("x"), SamplingParams(max_tokens=200, temperature=1.5, seed=n), 1, grammar
        )
        for n in range(4)
    ]
    for outcome in run_all(engine, requests).values():
        shown, calls = read(form, outcome.text, random.Random(seed), is_begun=True)
        ((name, arguments),) = calls
        assert shown == ""
        Draft202012Validator({"type": "object", **schemas[name]}).validate(arguments)


def test_a_template_of_another_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EngineError, match="Qwen"):
        tool_form("[TOOL_CALLS]{{ tools }}")
