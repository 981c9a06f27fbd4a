"""Agents by the makers' own clients over two turns: a tool's call, its result, and the answer, in a family's form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import httpx2
import ollama
import openai
import pytest
from unit.deployments.ingress.scripted_agents import (
    ANSWER,
    ARGUMENTS,
    FAMILIES,
    PARAMETERS,
    THOUGHT,
    Agents,
    larger_limits,
)
from unit.deployments.serve_fakes import FakeHandle

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from deployments.ingress.http import create_http_app
from deployments.ingress.service.service import Service

FUNCTION: Any = {"name": "weather", "description": "Tell the weather.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
QUESTION: Any = [{"role": "user", "content": "Will it rain?"}]
RESULT = "rain"


@pytest.fixture
async def app(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Any, Agents]]:
    replicas = Agents(tmp_path, request.node.callspec.params["family"])
    watch, handle = RegistrySnapshot(NamedActor(lambda: replicas)), FakeHandle(replicas)
    config = larger_limits()
    yield create_http_app(Service(config, watch, handle, handle), config), replicas
    watch.close()


@pytest.mark.drawn
@pytest.mark.parametrize("family", FAMILIES)
async def test_an_agent_calls_and_answers(app: tuple[Any, Agents], family: str) -> None:
    made, replicas = app
    transport = httpx.ASGITransport(app=made)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        client = openai.AsyncOpenAI(api_key="none", base_url="http://test/v1", http_client=http, max_retries=0)
        await chats(client)
        await chats_in_streams(client)
        await responses(client)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=made), base_url="http://test") as plain:
        await messages(
            anthropic.AsyncAnthropic(api_key="none", base_url="http://test", http_client=plain, max_retries=0)
        )
    await lines(ollama.AsyncClient("http://test", transport=transport))
    *_, last = replicas.requests
    assert [message.role for message in last.messages] == ["user", "assistant", "tool"]
    assert all(request.messages[1].reasoning == THOUGHT for request in replicas.requests if len(request.messages) > 1)


async def chats(client: openai.AsyncOpenAI) -> None:
    asked: Any = {"model": "chatty", "tools": TOOLS}
    first = (await client.chat.completions.create(messages=QUESTION, **asked)).choices[0]
    assert first.finish_reason == "tool_calls"
    (call,) = first.message.tool_calls or ()
    assert json.loads(call.function.arguments) == ARGUMENTS  # type: ignore[union-attr]
    said = first.message.to_dict()
    assert (said["reasoning_content"], said["content"]) == (THOUGHT, None)
    history = [*QUESTION, said, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    second = (await client.chat.completions.create(messages=history, **asked)).choices[0]
    assert (second.message.content, second.finish_reason) == (ANSWER, "stop")


async def chats_in_streams(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="chatty", messages=QUESTION, tools=TOOLS) as stream:
        first = (await stream.get_final_completion()).choices[0]
    (call,) = first.message.tool_calls or ()
    assert json.loads(call.function.arguments) == ARGUMENTS
    said = first.message.to_dict()
    assert said["reasoning_content"] == THOUGHT
    history: Any = [*QUESTION, said, {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    async with client.chat.completions.stream(model="chatty", messages=history, tools=TOOLS) as stream:
        assert (await stream.get_final_completion()).choices[0].message.content == ANSWER


async def responses(client: openai.AsyncOpenAI) -> None:
    tools: Any = [{"type": "function", "strict": False, **FUNCTION}]
    first = await client.responses.create(model="chatty", input=QUESTION, tools=tools, store=False)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == ARGUMENTS
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    history: Any = [*QUESTION, *(item.to_dict() for item in first.output), result]
    second = await client.responses.create(model="chatty", input=history, tools=tools, store=False)
    assert second.output_text == ANSWER


async def messages(client: anthropic.AsyncAnthropic) -> None:
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    asked: Any = {"model": "chatty", "max_tokens": 200, "tools": tools}
    async with client.messages.stream(messages=QUESTION, **asked) as stream:
        first = await stream.get_final_message()
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["thinking", "tool_use"]
    call: Any = first.content[-1]
    assert call.input == ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    said = {"role": "assistant", "content": [block.to_dict() for block in first.content]}
    second = await client.messages.create(messages=[*QUESTION, said, {"role": "user", "content": [result]}], **asked)
    assert [block.text for block in second.content if block.type == "text"] == [ANSWER]


async def lines(client: ollama.AsyncClient) -> None:
    calls: list[Any] = []
    thoughts = ""
    async for line in await client.chat("chatty", QUESTION, tools=TOOLS, stream=True):
        calls += line.message.tool_calls or ()
        thoughts += line.message.thinking or ""
    assert [call.function.arguments for call in calls] == [ARGUMENTS]
    assert thoughts == THOUGHT
    said = {"role": "assistant", "thinking": thoughts, "tool_calls": calls}
    history = [*QUESTION, said, {"role": "tool", "tool_name": "weather", "content": RESULT}]
    assert (await client.chat("chatty", history, tools=TOOLS)).message.content == ANSWER
