"""A model's thoughts and its calls, in every protocol: whole, and as a stream that says the same."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest
from unit.deployments.ingress.http_fakes import CHATS, Replicas

from deployments.engines.llm.chat import CalledTool
from deployments.records import TextChunk

QUESTION: Any = [{"role": "user", "content": "x"}]
CHAT: Any = {"model": "chatty", "messages": QUESTION}
LAST: Any = {"timings_ms": {"total": 5.0}}
CHUNKS = [
    TextChunk("", 4, 1, reasoning="Hm"),
    TextChunk("", 4, 2, reasoning="."),
    TextChunk("Well.", 4, 3),
    TextChunk("", 4, 4, tool_calls=(CalledTool(0, "call_1", "weather", '{"city": "Ulm"}'),)),
    TextChunk("", 4, 6, tool_calls=(CalledTool(1, "call_2", "weather", "{}"),)),
    TextChunk("", 4, 7, "tool_calls", **LAST),
]


@pytest.fixture(autouse=True)
def thoughtful(replicas: Replicas) -> None:
    replicas.chunks = CHUNKS


def events_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


async def test_chats_of_openai(http: httpx.AsyncClient, client: openai.AsyncOpenAI) -> None:
    message = (await http.post(f"/v1/{CHATS}", json=CHAT)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == ("Hm.", "Well.", 2)
    deltas = [
        one["choices"][0]["delta"] for one in events_of(await http.post(f"/v1/{CHATS}", json={**CHAT, "stream": True}))
    ]
    assert [one["reasoning_content"] for one in deltas if one.get("reasoning_content")] == ["Hm", "."]
    assert "".join(one.get("content") or "" for one in deltas) == "Well."
    hidden = (await http.post(f"/v1/{CHATS}", json={**CHAT, "include_reasoning": False})).json()
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    again = [*QUESTION, message, {"role": "tool", "tool_call_id": "call_1", "content": "rain", "name": "weather"}]
    assert (await http.post(f"/v1/{CHATS}", json={**CHAT, "messages": again})).status_code == 200


async def test_what_is_asked_of_thinking_reaches_the_model(http: httpx.AsyncClient, replicas: Replicas) -> None:
    variables = {"chat_template_kwargs": {"enable_thinking": False}}
    asked = [
        (f"/v1/{CHATS}", CHAT | variables, ("chat_template_kwargs", {"enable_thinking": False})),
        (f"/v1/{CHATS}", CHAT | {"reasoning_effort": "low"}, ("reasoning_effort", "low")),
        (f"/v1/{CHATS}", CHAT | {"enable_thinking": False}, ("enable_thinking", False)),
        (f"/v1/{CHATS}", CHAT | {"parallel_tool_calls": False}, ("parallel_tool_calls", False)),
        (
            "/v1/responses",
            {"model": "chatty", "input": "x", "reasoning": {"effort": "high"}},
            ("reasoning_effort", "high"),
        ),
        ("/v1/messages", CHAT | {"max_tokens": 5, "thinking": {"type": "disabled"}}, ("enable_thinking", False)),
        ("/v1/messages", CHAT | {"max_tokens": 5, "output_config": {"effort": "max"}}, ("reasoning_effort", "max")),
        (
            "/v1/messages",
            CHAT | {"max_tokens": 5, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("parallel_tool_calls", False),
        ),
        (f"/v1/{CHATS}", CHAT | {"thinking_token_budget": 0}, ("thinking_token_budget", 0)),
        (f"/v1/{CHATS}", CHAT | {"thinking_token_budget": -1}, ("thinking_token_budget", None)),
        (f"/v1/{CHATS}", CHAT | {"reasoning": {"max_tokens": 7}}, ("thinking_token_budget", 7)),
        (f"/v1/{CHATS}", CHAT | {"reasoning": {"effort": "low"}}, ("reasoning_effort", "low")),
        (f"/v1/{CHATS}", CHAT | {"reasoning": {"enabled": False}}, ("enable_thinking", False)),
        (
            "/v1/responses",
            {"model": "chatty", "input": "x", "reasoning": {"max_tokens": 8}},
            ("thinking_token_budget", 8),
        ),
        (
            "/v1/messages",
            CHAT | {"max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 9}},
            ("thinking_token_budget", 9),
        ),
        ("/api/chat", CHAT | {"think": False, "stream": False}, ("enable_thinking", False)),
        ("/api/chat", CHAT | {"think": "high", "stream": False}, ("reasoning_effort", "high")),
        (
            "/api/generate",
            {"model": "chatty", "prompt": "x", "think": True, "stream": False},
            ("enable_thinking", True),
        ),
    ]
    for path, body, (name, value) in asked:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert getattr(replicas.requests[-1], name) == value, path
    hidden = (await http.post(f"/v1/{CHATS}", json={**CHAT, "reasoning": {"exclude": True}})).json()
    assert "reasoning_content" not in hidden["choices"][0]["message"]
    thinking = {"type": "enabled", "budget_tokens": 9}
    small = await http.post("/v1/messages", json=CHAT | {"max_tokens": 9, "thinking": thinking})
    assert small.status_code == 400
    assert "`max_tokens` must be greater than `thinking.budget_tokens`" in small.json()["error"]["message"]
    wrong = await http.post(f"/v1/{CHATS}", json=CHAT | {"reasoning_effort": "huge"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reasoning_effort")


async def test_tokens_of_thoughts_are_said(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.chunks = [*CHUNKS[:-1], TextChunk("", 4, 7, "tool_calls", **LAST, num_reasoning_tokens=2)]
    asked: Any = {"model": "chatty", "messages": QUESTION}
    usage = [(await client.chat.completions.create(**asked)).usage]
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    usage += [chunk.usage async for chunk in await client.chat.completions.create(**asked, **options) if chunk.usage]
    assert [one.completion_tokens_details.reasoning_tokens for one in usage] == [2, 2]  # type: ignore[union-attr]
    whole = await client.responses.create(model="chatty", input="x")
    assert whole.usage is not None
    assert (whole.usage.output_tokens, whole.usage.output_tokens_details.reasoning_tokens) == (7, 2)


async def test_what_ended_an_answer_is_said(http: httpx.AsyncClient, replicas: Replicas) -> None:
    """`stop_reason` as vLLM has it, and Anthropic's stop sequence."""
    asked = {"stop": ["x", "END"], "stop_token_ids": [7]}
    message = {"model": "chatty", "max_tokens": 9, "messages": QUESTION, "stop_sequences": ["END"]}
    cases = [("stop", "END", "stop_sequence"), ("stop", 7, "end_turn"), ("stop", None, "end_turn")]
    for reason, found, ended in [*cases, ("length", None, "max_tokens"), ("tool_calls", "END", "tool_use")]:
        replicas.chunks = [TextChunk("a", 4, 1), TextChunk("", 4, 2, reason, **LAST, stopped_by=found)]
        for path, body in ((CHATS, CHAT), ("completions", {"model": "chatty", "prompt": "x"})):
            (choice,) = (await http.post(f"/v1/{path}", json={**body, **asked})).json()["choices"]
            assert (choice["finish_reason"], choice["stop_reason"]) == (reason, found)
            events = events_of(await http.post(f"/v1/{path}", json={**body, **asked, "stream": True}))
            said = [one["choices"][0] for one in events]
            assert [one["stop_reason"] for one in said if "stop_reason" in one] == [found]
        expected = {"stop_reason": ended, "stop_sequence": found if ended == "stop_sequence" else None}
        whole = (await http.post("/v1/messages", json=message)).json()
        assert {name: whole[name] for name in expected} == expected
        events = events_of(await http.post("/v1/messages", json={**message, "stream": True}))
        assert [one["delta"] for one in events if one["type"] == "message_delta"] == [expected]


async def test_responses(client: openai.AsyncOpenAI, http: httpx.AsyncClient, replicas: Replicas) -> None:
    whole = await client.responses.create(model="chatty", input="x")
    kinds = [item.type for item in whole.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].to_dict()["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    events = [event async for event in await client.responses.create(model="chatty", input="x", stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hm."
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == kinds
    again = [item.to_dict() for item in whole.output[:3]]
    result = {"type": "function_call_output", "call_id": "call_1", "output": "rain"}
    answer = await http.post("/v1/responses", json={"model": "chatty", "input": [*again, result]})
    assert answer.status_code == 200, answer.text
    said, _ = replicas.requests[-1].messages
    assert (said.role, said.reasoning, said.text, len(said.tool_calls)) == ("assistant", "Hm.", "Well.", 1)


async def test_messages_of_anthropic(http: httpx.AsyncClient, replicas: Replicas) -> None:
    transport = httpx2.ASGITransport(app=http._transport.app)  # type: ignore[attr-defined]
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as plain:
        client = anthropic.AsyncAnthropic(api_key="none", base_url="http://test", http_client=plain, max_retries=0)
        asked: Any = {"model": "chatty", "max_tokens": 9, "messages": QUESTION}
        whole = await client.messages.create(**asked)
        kinds = [block.type for block in whole.content]
        assert kinds == ["thinking", "text", "tool_use", "tool_use"]
        async with client.messages.stream(**asked) as stream:
            final = await stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
        again = [*QUESTION, {"role": "assistant", "content": [block.to_dict() for block in whole.content]}]
        results = [{"type": "tool_result", "tool_use_id": f"call_{n}", "content": "rain"} for n in (1, 2)]
        await client.messages.create(**asked | {"messages": [*again, {"role": "user", "content": results}]})
    said = replicas.requests[-1].messages[1]
    assert (said.reasoning, said.text, len(said.tool_calls)) == ("Hm.", "Well.", 2)


async def test_a_blank_beside_calls_is_no_text(http: httpx.AsyncClient, replicas: Replicas) -> None:
    calls = [CHUNKS[3], TextChunk("\n", 4, 5), *CHUNKS[4:]]
    replicas.chunks = calls
    deltas = events_of(await http.post(f"/v1/{CHATS}", json={**CHAT, "stream": True}))
    assert not "".join(one["choices"][0]["delta"].get("content") or "" for one in deltas)
    asked = {**CHAT, "max_tokens": 9}
    whole = (await http.post("/v1/messages", json=asked)).json()["content"]
    events = events_of(await http.post("/v1/messages", json={**asked, "stream": True}))
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == [block["type"] for block in whole] == ["tool_use", "tool_use"]


async def test_ollama(http: httpx.AsyncClient, replicas: Replicas) -> None:
    whole = (await http.post("/api/chat", json={**CHAT, "stream": False})).json()["message"]
    assert (whole["thinking"], whole["content"].strip(), len(whole["tool_calls"])) == ("Hm.", "Well.", 2)
    lines = [json.loads(line)["message"] for line in (await http.post("/api/chat", json=CHAT)).text.splitlines()]
    assert "".join(line.get("thinking", "") for line in lines) == "Hm."
    hidden = (await http.post("/api/chat", json={**CHAT, "think": False, "stream": False})).json()["message"]
    assert "thinking" not in hidden
    said = {
        "role": "assistant",
        "content": "Well.",
        "thinking": "Hm.",
        "tool_calls": [{"function": {"name": "weather"}}],
    }
    again = [*QUESTION, said, {"role": "tool", "tool_name": "weather", "content": "rain"}]
    assert (await http.post("/api/chat", json={**CHAT, "messages": again, "stream": False})).status_code == 200
    _, thought, result = replicas.requests[-1].messages
    assert (thought.reasoning, result.name) == ("Hm.", "weather")
