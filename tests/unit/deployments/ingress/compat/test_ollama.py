"""/api, asked by Ollama's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import ollama
import pytest
from unit.deployments.ingress.compat.conftest import OpenApp
from unit.deployments.ingress.http_fakes import STATUSES, Replicas

from deployments.engines.llm.chat import CalledTool
from deployments.ingress.compat.ollama_answers import shown_model
from deployments.ingress.service.catalog import card_of
from deployments.records import ChatRequest, CompletionRequest, TextChunk, TokenText
from weights.formats.language_models import LanguageModelDetails

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "required": ["a"]}}}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
CALLS = [
    TextChunk("so", 4, 1),
    TextChunk("", 4, 2, tool_calls=(CalledTool(0, "call_a", "add", '{"a":'),)),
    TextChunk("", 4, 3, tool_calls=(CalledTool(0, "", "", " 1}"),)),
    TextChunk("", 4, 4, "tool_calls", {"total": 5.0}),
]


@pytest.fixture
async def client(open_app: OpenApp) -> AsyncIterator[ollama.AsyncClient]:
    async with open_app() as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        yield ollama.AsyncClient("http://test", transport=transport)


async def test_a_chat(client: ollama.AsyncClient, replicas: Replicas) -> None:
    options = {"temperature": 0.5, "top_k": 7, "num_predict": 9, "seed": 3, "stop": ["a", "b"], "repeat_penalty": 1.1}
    ignored = {"num_ctx": 4096, "mirostat": 0, "num_gpu": 1}
    answer = await client.chat("chatty:latest", ASKED, options=options | ignored, keep_alive="5m")
    assert (answer.model, answer.message.role, answer.message.content) == ("chatty:latest", "assistant", "Hello")
    assert (answer.done, answer.done_reason, answer.prompt_eval_count, answer.eval_count) == (True, "stop", 4, 3)
    assert answer.total_duration is not None
    assert answer.total_duration > 0
    (request,) = replicas.requests
    assert isinstance(request, ChatRequest)
    assert (request.model, request.temperature, request.top_k, request.max_tokens) == ("chatty", 0.5, 7, 9)
    assert (request.seed, request.stop, request.repetition_penalty) == (3, ("a", "b"), 1.1)


async def test_what_ollama_writes_for_no_bound_is_none(client: ollama.AsyncClient, replicas: Replicas) -> None:
    await client.chat("chatty", ASKED, options={"num_predict": -1, "seed": -1, "top_k": -1})
    (request,) = replicas.requests
    assert (request.max_tokens, request.top_k) == (None, 0)
    assert request.seed >= 0  # a drawn one


async def test_a_chat_is_a_stream_of_lines(client: ollama.AsyncClient, http: httpx.AsyncClient) -> None:
    pieces = [piece async for piece in await client.chat("chatty", ASKED, stream=True)]
    assert [(piece.message.content, piece.done) for piece in pieces] == [("Hel", False), ("lo", False), ("", True)]
    assert pieces[-1].eval_count == 3
    answer = await http.post("/api/chat", json={"model": "chatty", "messages": ASKED})  # a stream unless it says not
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False, False, True]


@pytest.mark.parametrize("streams", [False, True])
async def test_tool_calls_come_whole(client: ollama.AsyncClient, replicas: Replicas, streams: bool) -> None:
    replicas.chunks = CALLS
    if streams:
        pieces = [one async for one in await client.chat("chatty", ASKED, tools=[ADD], stream=True)]
        assert "".join(piece.message.content or "" for piece in pieces) == "so"
        *before, answer, last = pieces  # clients look for calls in lines that are not the last
        assert not any(piece.message.tool_calls for piece in (*before, last))
        assert [piece.done for piece in (answer, last)] == [False, True]
    else:
        answer = await client.chat("chatty", ASKED, tools=[ADD])
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1})
    (request,) = replicas.requests
    assert request.tools[0].function.name == "add"
    assert request.tools[0].function.parameters["required"] == ["a"]


async def test_tool_results_find_their_calls(client: ollama.AsyncClient, replicas: Replicas) -> None:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}} for name in ("add", "sub", "add")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("sub", "add", "add")]
    messages = [*ASKED, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    await client.chat("chatty", messages)
    (request,) = replicas.requests
    ids = [call.id for call in request.messages[1].tool_calls]
    assert len({*ids}) == 3
    assert [one.tool_call_id for one in request.messages[2:]] == [ids[1], ids[0], ids[2]]


async def test_formats(client: ollama.AsyncClient, replicas: Replicas) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await client.chat("chatty", ASKED, format="json")
    await client.chat("chatty", ASKED, format=schema)
    await client.generate("chatty", "x", format=schema)
    forms = [request.response_format for request in replicas.requests]
    assert [form.type for form in forms] == ["json_object", "json_schema", "json_schema"]
    assert forms[1].schema_of_answer == forms[2].schema_of_answer == schema


async def test_a_prompt_is_a_turn_and_a_raw_one_is_a_text(client: ollama.AsyncClient, replicas: Replicas) -> None:
    answer = await client.generate("chatty", "x", system="be brief")
    assert (answer.response, answer.done_reason) == ("Hello", "stop")
    raw = [piece.response async for piece in await client.generate("chatty", "<s>x", raw=True, stream=True)]
    assert raw == ["Hel", "lo", ""]
    turn, text = replicas.requests
    assert [(one.role, one.content) for one in turn.messages] == [("system", "be brief"), ("user", "x")]
    assert isinstance(text, CompletionRequest)
    assert text.prompt == "<s>x"


async def test_log_probabilities(client: ollama.AsyncClient, replicas: Replicas) -> None:
    tokens = (TokenText("a", b"a", -0.5, (TokenText("b", b"b", -1.5),)),)
    replicas.chunks = [TextChunk("a", 4, 1, "stop", {"total": 1.0}, logprobs=tokens)]
    answer = await client.chat("chatty", ASKED, logprobs=True, top_logprobs=1)
    assert answer.logprobs is not None
    found = answer.logprobs[0]
    assert (found.token, found.logprob) == ("a", -0.5)
    assert found.top_logprobs is not None
    assert (found.top_logprobs[0].token, replicas.requests[0].logprobs) == ("b", 1)


async def test_phases_are_told_in_nanoseconds(client: ollama.AsyncClient, replicas: Replicas) -> None:
    replicas.chunks = [TextChunk("a", 4, 1, "stop", {"prefill": 0.25})]
    answer = await client.chat("chatty", ASKED)
    assert (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration) == (0, 250_000, 0)


async def test_an_empty_request_only_loads(client: ollama.AsyncClient, replicas: Replicas) -> None:
    assert (await client.chat("chatty")).done_reason == "load"
    assert (await client.generate("chatty", keep_alive=0)).done_reason == "load"
    assert replicas.requests == []
    with pytest.raises(ollama.ResponseError, match="no model 'nobody'"):
        await client.generate("nobody")


async def test_embeddings(client: ollama.AsyncClient, replicas: Replicas) -> None:
    found = await client.embed("clip", ["a", "b"], truncate=True)
    np.testing.assert_allclose(found.embeddings, [[0, 0.1, -2.5], [1, 0.1, -2.5]], rtol=1e-6)
    assert found.prompt_eval_count == 7
    np.testing.assert_allclose((await client.embed("clip", "a")).embeddings, [[0, 0.1, -2.5]], rtol=1e-6)
    np.testing.assert_allclose((await client.embeddings("clip", "a")).embedding, [0, 0.1, -2.5], rtol=1e-6)
    replicas.vectors = np.array([[np.inf]], np.float32)
    with pytest.raises(ollama.ResponseError, match="not finite") as refused:
        await client.embed("clip", "a")
    assert refused.value.status_code == 500


async def test_the_models_that_can_be_asked(client: ollama.AsyncClient) -> None:
    listed = {model.model: model for model in (await client.list()).models}
    assert listed.keys() == {"chatty", "plain", "clip"}
    assert (listed["chatty"].size, listed["chatty"].digest) == (10, "version of chatty")
    shown = await client.show("chatty")
    assert (shown.capabilities, shown.parameters) == (["completion", "tools"], "temperature 0.0")
    assert (await client.show("clip")).capabilities == ["embedding"]
    for facts, capabilities in (
        ({"context_length": 4096, "knows_tools": False, "thinks": False}, ["completion"]),
        ({"context_length": 4096, "knows_tools": True, "thinks": True}, ["completion", "tools", "thinking"]),
    ):
        card = card_of(replace(STATUSES["chatty"], variant=facts))
        shown_card = shown_model(card, LanguageModelDetails("qwen3"))
        assert shown_card.capabilities == capabilities
        assert shown_card.model_info["qwen3.context_length"] == 4096
    with pytest.raises(ollama.ResponseError, match="writes no text"):
        await client.show("flux")
    assert (await client.ps()).models == []


async def test_what_clients_read_of_a_model(client: ollama.AsyncClient, replicas: Replicas) -> None:
    """Its architecture, by which they find its context, how large it is, and its template."""
    sizes = {"qwen3.embedding_length": 1024, "qwen3.context_length": 1}
    replicas.details["chatty"] = LanguageModelDetails("qwen3", "{{ messages }}", "gguf", "Q4_K", 8_030_000_000, sizes)
    replicas.states["chatty"] = replace(STATUSES["chatty"], variant={"context_length": 4096})
    shown = await client.show("chatty")
    assert shown.details is not None
    assert shown.modelinfo is not None
    assert (shown.template, shown.details.format, shown.details.quantization_level) == (
        "{{ messages }}",
        "gguf",
        "Q4_K",
    )
    assert (shown.details.family, shown.details.families, shown.details.parameter_size) == ("qwen3", ["qwen3"], "8.0B")
    architecture = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{architecture}.context_length"] == 4096  # what is served, and not what the file says
    assert shown.modelinfo["qwen3.embedding_length"] == 1024
    assert shown.modelinfo["general.parameter_count"] == 8_030_000_000
    for number, text in ((0, ""), (12, "12"), (1500, "1.50K"), (494_030_000, "494.03M"), (671_000_000_000, "671.0B")):
        replicas.details["chatty"] = LanguageModelDetails(num_parameters=number)
        details = (await client.show("chatty")).details
        assert details is not None
        assert details.parameter_size == text


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, "model 'chatty' sees no images"),
        ("generate", {"prompt": "x", "images": ["eA=="]}, "model 'chatty' sees no images"),
        ("generate", {"prompt": "x", "images": ["http://a.example/"]}, "images.0: expected an image file in base64"),
        ("generate", {"prompt": "x", "raw": True, "images": ["eA=="]}, "images: a raw prompt has none"),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "x", "context": [1]}, "context"),
        ("generate", {"prompt": "x", "raw": True, "format": "json"}, "format"),
        ("chat", {"messages": ASKED, "format": "yaml"}, "'yaml'"),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ("chat", {"messages": ASKED, "options": {"temperature": 9}}, "temperature"),
        ("chat", {"messages": ASKED, "options": {"num_predict": "many"}}, "options.num_predict"),
    ],
)
async def test_refusals_name_the_field(http: httpx.AsyncClient, path: str, fields: dict[str, Any], text: str) -> None:
    for stream in (True, False):
        answer = await http.post(f"/api/{path}", json={"model": "chatty", "stream": stream} | fields)
        assert answer.status_code == 400
        assert answer.json().keys() == {"error"}
        assert text in answer.json()["error"]


async def test_errors_on_the_way_and_unknown_paths(
    client: ollama.AsyncClient, http: httpx.AsyncClient, replicas: Replicas
) -> None:
    replicas.error_after = 1
    seen = []

    async def read() -> None:
        async for piece in await client.chat("chatty", ASKED, stream=True):
            seen.append(piece.message.content)

    with pytest.raises(ollama.ResponseError, match="the model failed at token 2"):
        await read()
    assert seen == ["Hel"]
    with pytest.raises(ollama.ResponseError, match="Not Found") as unknown:
        await client.pull("chatty")
    assert unknown.value.status_code == 404
    assert (await http.get("/")).text == "Ollama is running"
    assert (await http.head("/")).status_code == 200
    assert (await http.get("/api/version")).json()["version"].count(".") == 2
