"""/v1/messages, asked by Anthropic's own client."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from unit.deployments.ingress.compat.conftest import OpenApp
from unit.deployments.ingress.http_fakes import Replicas

from deployments.engines.llm.chat import CalledTool
from deployments.ingress.compat.anthropic import CountBody
from deployments.records import TextChunk

ADD = {
    "name": "add",
    "description": "adds",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "cache_control": {"type": "ephemeral"},
}
ASKED: dict[str, Any] = {"model": "chatty", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
CALL = [
    TextChunk("so: ", 4, 1, num_cached_tokens=3),
    TextChunk("", 4, 2, tool_calls=(CalledTool(0, "call_a", "add", '{"a":'),)),
    TextChunk("", 4, 3, tool_calls=(CalledTool(0, "", "", " 1}"),)),
    TextChunk("", 4, 4, tool_calls=(CalledTool(1, "call_b", "add", '{"a": 2}'),)),
    TextChunk("", 4, 5, "tool_calls", {"total": 5.0}, num_cached_tokens=3),
]


@pytest.fixture
async def client(open_app: OpenApp) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with open_app() as app:
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport) as http:
            yield anthropic.AsyncAnthropic(api_key="none", base_url="http://test", http_client=http, max_retries=0)


async def test_a_message(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    answer = await client.messages.create(
        **ASKED,
        system="be brief",
        stop_sequences=["\n\n", "END"],
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 7},
    )
    assert [(block.type, block.text) for block in answer.content] == [("text", "Hello")]
    assert (answer.role, answer.model) == ("assistant", "chatty")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.cache_read_input_tokens) == (4, 3, 0)
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")
    (request,) = replicas.requests
    assert [(one.role, one.content) for one in request.messages] == [("system", "be brief"), ("user", "x")]
    assert (request.max_tokens, request.temperature, request.top_p, request.top_k) == (9, 0.5, 0.9, 7)
    assert request.stop == ("\n\n", "END")


async def test_a_stream_is_the_message_in_pieces(client: anthropic.AsyncAnthropic) -> None:
    async with client.messages.stream(**ASKED) as stream:
        pieces = [text async for text in stream.text_stream]
        answer = await stream.get_final_message()
    assert pieces == ["Hel", "lo"]
    assert (answer.content[0].text, answer.stop_reason) == ("Hello", "end_turn")  # type: ignore[union-attr]
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (4, 3)


async def test_events_are_in_the_documented_order(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    replicas.chunks = CALL
    events = [event async for event in await client.messages.create(**ASKED, tools=[ADD], stream=True)]
    block = ["content_block_start", "content_block_delta"]
    assert [event.type for event in events] == [
        "message_start",
        *[*block, "content_block_stop"],
        *[*block, "content_block_delta", "content_block_stop"],
        *[*block, "content_block_stop"],
        "message_delta",
        "message_stop",
    ]
    assert [event.index for event in events[1:-2]] == [0] * 3 + [1] * 4 + [2] * 3


@pytest.mark.parametrize("streams", [False, True])
async def test_tool_calls(client: anthropic.AsyncAnthropic, replicas: Replicas, streams: bool) -> None:
    replicas.chunks = CALL
    asked = ASKED | {"tools": [ADD], "tool_choice": {"type": "any"}}
    if streams:
        async with client.messages.stream(**asked) as stream:
            answer: Any = await stream.get_final_message()
    else:
        answer = await client.messages.create(**asked)
    assert [block.type for block in answer.content] == ["text", "tool_use", "tool_use"]
    assert [(block.id, block.name, block.input) for block in answer.content[1:]] == [
        ("call_a", "add", {"a": 1}),
        ("call_b", "add", {"a": 2}),
    ]
    assert answer.stop_reason == "tool_use"
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (1, 3)
    (request,) = replicas.requests
    assert request.tool_choice == "required"
    assert request.tools[0].function.parameters == ADD["input_schema"]


async def test_tool_results_and_blocks_become_messages(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "wait"},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    choice: Any = {"type": "tool", "name": "add"}
    await client.messages.create(**ASKED | {"messages": messages}, system=system, tools=[ADD], tool_choice=choice)
    (request,) = replicas.requests
    assert [(one.role, one.content, one.tool_call_id) for one in request.messages] == [
        ("system", "be brief", None),
        ("user", "one two", None),
        ("assistant", "wait", None),
        ("tool", "2", "t1"),
        ("tool", "", "t2"),
        ("user", "go on", None),
    ]
    calls = request.messages[2].tool_calls
    assert [(call.id, json.loads(call.function.arguments)) for call in calls] == [("t1", {"a": 1}), ("t2", {})]
    assert request.tool_choice.function.name == "add"


async def test_the_answer_keeps_to_a_schema(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await client.messages.create(**ASKED, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert replicas.requests[0].response_format.schema_of_answer == schema


async def test_tokens_are_counted_as_the_model_sees_them(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    found = await client.messages.count_tokens(**asked, system="ab", tools=[ADD])
    assert found.input_tokens == 3
    (request,) = replicas.requests
    assert (len(request.messages), len(request.tools)) == (2, 1)


async def test_an_answer_goes_on_with_the_last_turn(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    begun: Any = [*ASKED["messages"], {"role": "assistant", "content": [{"type": "text", "text": "The sum is"}]}]
    for messages, goes_on in ((begun, True), (ASKED["messages"], False)):
        await client.messages.create(**ASKED | {"messages": messages})
        await client.messages.count_tokens(model="chatty", messages=messages)
        for request in replicas.requests[-2:]:
            assert (request.continue_final_message, len(request.messages)) == (goes_on, len(messages))


async def test_documents_of_plain_text_are_read(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "Ferns are green."}
    parts = {"type": "content", "content": [{"type": "text", "text": "Ferns "}, {"type": "text", "text": "grow."}]}
    for source, expected in ((plain, "Ferns\nA book\nFerns are green."), (parts, "Ferns\nA book\nFerns grow.")):
        document: Any = {"type": "document", "source": source, "title": "Ferns", "context": "A book"}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [document]}
        use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
        asked = [{"role": "user", "content": [document]}, use, {"role": "user", "content": [result]}]
        await client.messages.create(**ASKED | {"messages": asked})
        first, _, last = replicas.requests[-1].messages
        assert first.text == last.text == expected


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "no model 'nobody'"),
        ({"model": "flux"}, anthropic.BadRequestError, "does not make text"),
        ({"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "temperature"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens"),
        ({"messages": []}, anthropic.BadRequestError, "messages"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}]}, anthropic.BadRequestError, "messages.1.content: the last turn calls tools"),  # noqa: E501
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": "So"}], "tools": [ADD], "tool_choice": {"type": "any"}}, anthropic.BadRequestError, "continue_final_message no tool can be required"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "eA=="}}]}]}, anthropic.BadRequestError, "read no block of type 'document' but of plain text"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, anthropic.BadRequestError, "model 'chatty' sees no images"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}]}]}, anthropic.BadRequestError, "sees no images"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, anthropic.BadRequestError, "messages.0.content.0: language models here read no"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]}, anthropic.BadRequestError, "messages.0.content.0"),  # noqa: E501
        ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, anthropic.BadRequestError, "odd"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "tools.0"),
    ],
)  # fmt: skip
async def test_refusals_are_the_clients_own_errors(
    client: anthropic.AsyncAnthropic, fields: dict[str, Any], error: type[anthropic.APIStatusError], text: str
) -> None:
    with pytest.raises(error) as refused:
        await client.messages.create(**ASKED | fields)
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == ("not_found_error" if error is anthropic.NotFoundError else "invalid_request_error")
    assert text in body["error"]["message"]
    assert refused.value.request_id == body["request_id"]


async def test_an_error_on_the_way_ends_the_stream(client: anthropic.AsyncAnthropic, replicas: Replicas) -> None:
    replicas.error_after = 1
    seen = []

    async def read() -> None:
        async for event in await client.messages.create(**ASKED, stream=True):
            seen.append(event.type)

    with pytest.raises(anthropic.APIStatusError, match="the model failed at token 2"):
        await read()
    assert seen == ["message_start", "content_block_start", "content_block_delta"]


async def test_what_has_no_effect_is_named(http: httpx.AsyncClient) -> None:
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1}, "service_tier": "auto"}
    answer = await http.post("/v1/messages", json=ASKED | thinking)
    assert answer.status_code == 200
    assert "'service_tier'" in answer.headers["x-atelier-warning"]


async def test_refusals_of_the_gate_and_unknown_paths_have_the_same_form(http: httpx.AsyncClient) -> None:
    large = await http.post("/v1/messages", content=b"x" * 2**22)
    broken = await http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    unknown = await http.get("/v1/messages/batches")
    answers = [(one.status_code, one.json()["error"]["type"]) for one in (large, broken, unknown)]
    assert answers == [(413, "request_too_large"), (400, "invalid_request_error"), (404, "not_found_error")]


def test_many_blocks_of_a_turn_are_copied_once() -> None:
    """Joined one by one, 100 MB of them would copy 25 GB."""
    blocks = [{"type": "text", "text": "x" * 200_000}] * 500
    body = CountBody.model_validate({"model": "m", "messages": [{"role": "user", "content": blocks}]})
    begun_s = time.thread_time()
    fields = body.to_fields()
    assert time.thread_time() - begun_s < 1.0
    assert fields["messages"][0]["content"] == "x" * 100_000_000
