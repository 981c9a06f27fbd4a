"""Options of texts, asked for by the real OpenAI client: what arrives at a replica, and what the client reads."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from unit.deployments.ingress.http_fakes import CHAT, CHATS, COMPLETION, COMPLETIONS, SWITCH, Replicas, problem

from deployments.engines.llm.chat import CalledTool
from deployments.records import TextChunk, TokenText

QUESTION: list[Any] = [{"role": "user", "content": "x"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
LAST: dict[str, Any] = {"timings_ms": {"total": 5.0}, "switch": SWITCH}


def token(text: str, logprob: float, *best: TokenText) -> TokenText:
    return TokenText(text, text.encode(), logprob, best)


async def test_several_answers(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.chunks = [
        TextChunk("a", 4, 1),
        TextChunk("b", 4, 2, index=1),
        TextChunk("B", 4, 3, "length", index=1),
        TextChunk("A", 4, 4, "stop", **LAST),
    ]
    found = await client.chat.completions.create(model="chatty", messages=QUESTION, n=2)
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in found.choices] == [
        (0, "aA", "stop"),
        (1, "bB", "length"),
    ]
    stream = await client.chat.completions.create(model="chatty", messages=QUESTION, n=2, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["aA", "bB"]
    assert [request.n for request in replicas.requests] == [2, 2]


async def test_lists_of_prompts(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.chunks = [TextChunk("one", 4, 1, "stop"), TextChunk("two", 4, 2, "stop", index=1, **LAST)]
    found = await client.completions.create(model="chatty", prompt=["x", "y"])
    assert [(choice.index, choice.text) for choice in found.choices] == [(0, "one"), (1, "two")]
    await client.completions.create(model="chatty", prompt=[[1, 2], [3]])
    assert [request.prompts for request in replicas.requests] == [("x", "y"), ((1, 2), (3,))]


async def test_log_probabilities(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    shown = token("19", -0.5, token("19", -0.5), token("20", float("-inf")))
    replicas.chunks = [TextChunk("19", 4, 1, "stop", logprobs=(shown,), **LAST)]
    found = await client.chat.completions.create(model="chatty", messages=QUESTION, logprobs=True, top_logprobs=2)
    assert found.choices[0].logprobs
    assert found.choices[0].logprobs.content
    (first,) = found.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("19", -0.5, [49, 57])
    assert [(best.token, best.logprob) for best in first.top_logprobs] == [("19", -0.5), ("20", -9999.0)]
    older = (await client.completions.create(model="chatty", prompt="x", logprobs=2)).choices[0].logprobs
    assert older
    assert (older.tokens, older.text_offset) == (["19"], [0])
    assert [request.logprobs for request in replicas.requests] == [2, 2]


async def test_unknown_fields_are_ignored_with_a_warning(http: httpx.AsyncClient) -> None:
    for path, body in ((CHATS, CHAT), (COMPLETIONS, COMPLETION)):
        answer = await http.post(f"/v1/{path}", json={**body, "verbosity": "low", "n\u00e4mlich": 1})
        assert answer.status_code == 200
        assert "verbosity" in answer.headers["X-Atelier-Warning"]
        assert any("verbosity" in warning for warning in answer.json()["warnings"])


async def test_unknown_members_of_parts_are_ignored_with_a_warning(http: httpx.AsyncClient) -> None:
    """OpenAI's clients send some of these on their own."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    chat = {"messages": [{"role": "user", "content": [part]}], "store": True, "stream": True}
    chat |= {"stream_options": {"include_usage": True, "include_obfuscation": False}}
    streamed = await http.post(f"/v1/{CHATS}", json={**CHAT, **chat})
    names = "'messages.content.cache_control', 'stream_options.include_obfuscation'"
    assert (streamed.status_code, streamed.headers["X-Atelier-Warning"]) == (
        200,
        f"unknown fields were ignored: {names}",
    )
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}, "defer_loading": True}
    response = {"model": "chatty", "input": "x", "text": {"verbosity": "low"}, "tools": [tool], "tool_choice": "none"}
    answer = await http.post("/v1/responses", json=response)
    assert answer.status_code == 200
    assert answer.headers["X-Atelier-Warning"].endswith("ignored: 'text.verbosity', 'tools.defer_loading'")
    assert "defer_loading" not in str(answer.json()["tools"])


async def test_json_schemas(client: openai.AsyncOpenAI, http: httpx.AsyncClient, replicas: Replicas) -> None:
    class Sum(BaseModel):
        total: int

    replicas.chunks = [TextChunk('{"total": 19}', 4, 1, "stop", **LAST)]
    found = await client.chat.completions.parse(model="chatty", messages=QUESTION, response_format=Sum)
    assert found.choices[0].message.parsed == Sum(total=19)
    await client.chat.completions.create(model="chatty", messages=QUESTION, response_format={"type": "json_object"})
    asked = [request.response_format.schema_of_answer for request in replicas.requests]
    assert asked[0]["properties"]["total"]["type"] == "integer"
    assert asked[1] == {"type": "object"}
    for wrong in ({"type": "json_schema"}, {"type": "xml"}, {"type": "json_object", "json_schema": {"name": "x"}}):
        answer = await http.post(f"/v1/{CHATS}", json={**CHAT, "response_format": wrong})
        assert answer.status_code == 400
        assert "response_format" in problem(answer)["param"]


async def test_tool_calls(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    pieces = [CalledTool(0, "call_1", "weather", ""), CalledTool(0, "call_1", "weather", '{"city": ')]
    replicas.chunks = [
        TextChunk("Well. ", 4, 1),
        TextChunk("", 4, 2, tool_calls=tuple(pieces)),
        TextChunk("", 4, 3, tool_calls=(CalledTool(0, "call_1", "weather", '"Ulm"}'),)),
        TextChunk("", 4, 4, tool_calls=(CalledTool(1, "call_2", "weather", '{"city": "Bern"}'),)),
        TextChunk("", 4, 5, "tool_calls", **LAST),
    ]
    options: Any = {"model": "chatty", "messages": QUESTION, "tools": [WEATHER], "tool_choice": "auto"}
    choice = (await client.chat.completions.create(**options)).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Well.")
    calls: Any = choice.message.tool_calls
    assert [(call.id, call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("call_1", "weather", {"city": "Ulm"}),
        ("call_2", "weather", {"city": "Bern"}),
    ]
    async with client.chat.completions.stream(**options) as stream:  # the client joins the pieces itself
        async for _ in stream:
            pass
        final = (await stream.get_final_completion()).choices[0]
    assert final.message.tool_calls
    assert [call.function.arguments for call in final.message.tool_calls] == [
        '{"city": "Ulm"}',
        '{"city": "Bern"}',
    ]
    assert replicas.requests[0].tools[0].function.parameters == WEATHER["function"]["parameters"]  # type: ignore[index]
    history = [*QUESTION, choice.message, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]
    named = {"type": "function", "function": {"name": "weather"}}
    await client.chat.completions.create(**options | {"messages": history, "tool_choice": named})
    request = replicas.requests[-1]
    assert request.tool_choice.function.name == "weather"
    assert [json.loads(call.function.arguments) for call in request.messages[1].tool_calls] == [
        {"city": "Ulm"},
        {"city": "Bern"},
    ]
    assert (request.messages[2].role, request.messages[2].tool_call_id) == ("tool", "call_1")


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "tool", "content": "rain"}]},
        {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
        {"tools": [{"type": "function", "function": {"name": "two words"}}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        {"tools": [WEATHER], "tool_choice": "maybe"},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 200}}]},
    ],
)
async def test_tools_that_make_no_sense(http: httpx.AsyncClient, replicas: Replicas, wrong: dict[str, Any]) -> None:
    answer = await http.post(f"/v1/{CHATS}", json={**CHAT, **wrong})
    assert answer.status_code == 400
    assert problem(answer)["param"].split(".")[0] in wrong
    assert not replicas.requests


async def test_loras_come_with_their_versions(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    extra = {"lora": [{"name": "polite", "scale": 0.5}]}
    await client.chat.completions.create(model="chatty", messages=QUESTION, extra_body=extra)
    await client.completions.create(model="chatty", prompt="x", extra_body=extra)
    await client.responses.create(model="chatty", input="x", extra_body=extra)
    await client.responses.create(model="chatty", input="x")
    *adapted, plain = replicas.requests
    for request in adapted:
        assert [(use.name, use.scale) for use in request.lora] == [("polite", 0.5)]
        assert request.adapter_versions == {"polite": "version of polite"}
    assert (plain.lora, plain.adapter_versions) == ((), {})
    listed = {model.id: model.to_dict() for model in (await client.models.list(extra_query={"all": True})).data}
    assert (listed["polite"]["kind"], listed["polite"]["base"]) == ("adapter", ["chatty"])


async def test_a_structural_tag_is_said_in_either_field(http: httpx.AsyncClient, replicas: Replicas) -> None:
    form = {"type": "any_text"}
    tag = {"type": "structural_tag", "format": form}
    asked = {"model": "chatty", "messages": [{"role": "user", "content": "x"}]}
    for fields in (
        {"response_format": tag},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        {"structured_outputs": {"structural_tag": tag}},
    ):
        answer = await http.post("/v1/chat/completions", json=asked | fields)
        assert answer.status_code == 200, answer.text
        grammar = replicas.requests[-1].answer_grammar
        assert grammar is not None
        assert grammar.structural_tag is not None
        assert grammar.structural_tag["format"] == form
    both = asked | {"response_format": tag, "structured_outputs": {"regex": "a"}}
    assert (await http.post("/v1/chat/completions", json=both)).status_code == 400


async def test_some_of_the_tools_may_be_called(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, replicas: Replicas
) -> None:
    functions: list[Any] = [{"name": name, "parameters": {"type": "object", "properties": {}}} for name in "fgh"]
    tools: Any = [{"type": "function", "function": one} for one in functions]
    for mode in ("auto", "required"):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}} for name in "hf"]}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        await client.chat.completions.create(model="chatty", messages=QUESTION, tools=tools, tool_choice=choice)
        flat: Any = {"mode": mode, "tools": [*({"type": "function", "name": name} for name in "hf"), {"type": "mcp"}]}
        asked: Any = {
            "tools": [{"type": "function", "strict": False, **one} for one in functions],
            "tool_choice": {"type": "allowed_tools", **flat},
        }
        answer = await client.responses.create(model="chatty", input="x", **asked)
        assert answer.tool_choice.type == "allowed_tools"  # type: ignore[union-attr]
        for request in replicas.requests[-2:]:
            assert [tool.function.name for tool in request.tools] == ["f", "h"]
            assert request.tool_choice == mode
    allowed["tools"] = [{"type": "function", "function": {"name": "nobody"}}]
    wrong = await http.post(f"/v1/{CHATS}", json={**CHAT, "tools": tools, "tool_choice": choice})
    assert (wrong.status_code, problem(wrong)["param"]) == (400, "tool_choice")
    assert "no tool 'nobody' (tools: f, g, h)" in problem(wrong)["message"]
