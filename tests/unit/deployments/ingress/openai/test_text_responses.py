"""/v1/responses over fake replicas, asked by the real OpenAI client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
from unit.deployments.ingress.http_fakes import SWITCH, Replicas, problem

from deployments.engines.llm.chat import CalledTool
from deployments.records import TextChunk

LAST: dict[str, Any] = {"timings_ms": {"total": 5.0}, "switch": SWITCH}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}


async def test_a_response(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    found = await client.responses.create(model="chatty", input="12 + 7", instructions="Add.", max_output_tokens=9)
    assert (found.output_text, found.status, found.error) == ("Hello", "completed", None)
    assert found.usage
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (4, 3, 7)
    (request,) = replicas.requests
    assert [(turn.role, turn.content) for turn in request.messages] == [("system", "Add."), ("user", "12 + 7")]
    assert request.max_tokens == 9
    replicas.chunks = [TextChunk("cut", 4, 1, "length", **LAST)]
    cut = await client.responses.create(model="chatty", input=[{"role": "user", "content": "x"}])
    assert (cut.status, cut.incomplete_details and cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_response_as_a_stream(client: openai.AsyncOpenAI) -> None:
    async with client.responses.stream(model="chatty", input="x") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Hello"
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_tools_of_a_response(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.chunks = [
        TextChunk("Well.", 4, 1),
        TextChunk("", 4, 2, tool_calls=(CalledTool(0, "call_1", "weather", ""),)),
        TextChunk("", 4, 3, tool_calls=(CalledTool(0, "call_1", "weather", '{"a": 1}'),)),
        TextChunk("", 4, 4, tool_calls=(CalledTool(1, "call_2", "weather", "{}"),)),
        TextChunk("", 4, 5, "tool_calls", **LAST),
    ]
    choice: Any = {"type": "function", "name": "weather"}
    found = await client.responses.create(model="chatty", input="x", tools=[WEATHER], tool_choice=choice)
    first, *calls = found.output
    assert (first.type, found.output_text) == ("message", "Well.")
    shown = [(call.call_id, call.name, json.loads(call.arguments)) for call in calls if call.type == "function_call"]
    assert shown == [("call_1", "weather", {"a": 1}), ("call_2", "weather", {})]
    async with client.responses.stream(model="chatty", input="x", tools=[WEATHER]) as stream:
        types = [event.type async for event in stream]
        again = await stream.get_final_response()
    assert types.count("response.function_call_arguments.done") == 2
    assert [item.type for item in again.output] == ["message", "function_call", "function_call"]
    history: Any = [*found.to_dict()["output"], {"type": "function_call_output", "call_id": "call_1", "output": "rain"}]  # type: ignore[misc]
    await client.responses.create(model="chatty", input=[{"role": "user", "content": "x"}, *history])
    turns = replicas.requests[-1].messages
    assert [turn.role for turn in turns] == ["user", "assistant", "tool"]
    assert [call.id for call in turns[1].tool_calls] == ["call_1", "call_2"]
    assert replicas.requests[0].tool_choice.function.name == "weather"


async def test_formats_warnings_and_refusals(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, replicas: Replicas
) -> None:
    schema = {"type": "object", "properties": {"total": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "name": "sum", "schema": schema}}
    await client.responses.create(model="chatty", input="x", text=form)
    assert replicas.requests[0].response_format.schema_of_answer == schema
    asked = {"model": "chatty", "input": "x", "reasoning": {"effort": "low"}, "truncation": "auto"}
    answer = await http.post("/v1/responses", json=asked)
    assert replicas.requests[-1].reasoning_effort == "low"
    assert "truncation" in answer.headers["X-Atelier-Warning"]
    assert "truncation" in answer.json()["warnings"][0]
    for name, wrong in (("previous_response_id", "resp_1"), ("input", [])):
        asked = {"model": "chatty", "input": "x", "stream": True, name: wrong}
        answer = await http.post("/v1/responses", json=asked)
        assert answer.status_code == 400
        assert problem(answer)["param"] == name
    replicas.error_after = 1
    events = [event async for event in await client.responses.create(model="chatty", input="x", stream=True)]
    assert events[-1].type == "error"
    assert "token 2" in events[-1].message
