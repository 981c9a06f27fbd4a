"""Answers in blocks, whole and streamed: the same ones, however a model's text is cut and its pieces are joined."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from kit.seeding import seeded_random
from unit.deployments.engines.llm.test_answer_reader import FUNCTIONS, TEMPLATES, random_calls, random_cuts, written
from unit.deployments.ingress.http_fakes import Replicas

from deployments.engines.llm.answer_forms import REASONING_FORMS, TOOL_FORMS, AnswerForm
from deployments.engines.llm.answer_reader import AnswerReader
from deployments.records import TextChunk
from deployments.records.texts import merge_text_chunks

Blocks = tuple[str, str, list[tuple[str, str, Any]]]  # all thoughts, all texts, and the calls
HARMONY = "<|start|>assistant"


def chunks_of(
    form: AnswerForm, pieces: Sequence[str], begun: str, rng: random.Random, *, is_cut: bool = False
) -> list[TextChunk]:
    """Return the pieces as a replica streams them; some are joined, as they are for clients that read slowly."""
    reader = AnswerReader(form, FUNCTIONS)
    reader.feed(begun)
    read = [*map(reader.feed, pieces), reader.flush(is_cut=is_cut)]
    chunks = [TextChunk(one.text, 4, 9, tool_calls=one.calls, reasoning=one.reasoning) for one in read]
    joined = chunks[:1]
    for chunk in chunks[1:]:
        merged = merge_text_chunks(joined[-1], chunk) if rng.random() < 0.5 else None
        joined[-1:] = [merged] if merged else [joined[-1], chunk]
    reason = "length" if is_cut else "tool_calls" if reader.num_calls else "stop"
    return [*joined, TextChunk("", 4, 9, reason, {"total": 1.0})]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines]


def told(blocks: Sequence[dict[str, Any]]) -> Blocks:
    """Return the contents of a message's blocks."""
    thoughts = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    texts = "".join(block["text"] for block in blocks if block["type"] == "text")
    return thoughts, texts, [(one["id"], one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]


def streamed_message(events: Sequence[dict[str, Any]]) -> Blocks:
    """Return the message of a stream, where what is added to a block is of its kind, and to the open one."""
    blocks: list[dict[str, Any]] = []
    deltas = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}
    members = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            is_open = True
            blocks.append(event["content_block"] | {"partial_json": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            assert is_open
            kind, delta = blocks[-1]["type"], event["delta"]
            assert (event["index"], delta["type"]) == (len(blocks) - 1, deltas[kind])
            blocks[-1][members[kind]] += delta[members[kind]]
        elif event["type"] == "content_block_stop":
            is_open = False
    return told([block | {"input": json.loads(block["partial_json"] or "{}")} for block in blocks])


def response_told(items: Sequence[dict[str, Any]]) -> Blocks:
    """Return the contents of a response's items."""
    thoughts = "".join(part["text"] for one in items if one["type"] == "reasoning" for part in one["content"])
    texts = "".join(part["text"] for one in items if one["type"] == "message" for part in one["content"])
    calls = [
        (one["call_id"], one["name"], json.loads(one["arguments"])) for one in items if one["type"] == "function_call"
    ]
    return thoughts, texts, calls


def streamed_response(events: Sequence[dict[str, Any]]) -> Blocks:
    """Return the response that the pieces of a stream make, which is also what its last event says."""
    items: list[dict[str, Any]] = []
    grown: dict[int, str] = {}
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append(event["item"])
        elif event["type"].endswith(".delta"):
            place = event["output_index"]
            kind = event["type"].split(".")[1].removesuffix("_text").removesuffix("_arguments")
            assert items[place]["type"] == {"output": "message", "reasoning": "reasoning"}.get(kind, kind)
            grown[place] = grown.get(place, "") + event["delta"]
    for place, item in enumerate(items):
        item |= {"content": [{"text": grown.get(place, "")}], "arguments": grown.get(place, "")}
    made = response_told(items)
    assert made == response_told(events[-1]["response"]["output"])
    return made


def an_answer(name: str, rng: random.Random) -> str:
    """Return an answer in which thoughts, texts and calls follow each other in any order."""
    parts = []
    for _ in range(rng.randint(1, 3)):
        parts += [f"<think>\n{rng.choice(['Hm.', 'Ulm? '])}\n</think>\n\n"] * (rng.random() < 0.6)
        parts += [rng.choice(["Let me see. ", "So:\n"])] * (rng.random() < 0.3)
        parts += [written(TEMPLATES[name], random_calls(rng)[:1])[1]] * (rng.random() < 0.8)
    return "".join(parts)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", TOOL_FORMS)
async def test_blocks_of_a_stream_are_those_of_the_whole_answer(
    name: str, http: httpx.AsyncClient, replicas: Replicas
) -> None:
    """Also where a thought, a text and another call follow a call."""
    rng = seeded_random()
    thinks = REASONING_FORMS["harmony" if name == "harmony" else "think"]
    form = AnswerForm(TOOL_FORMS[name], thinks)
    asked = {"model": "chatty", "max_tokens": 99, "messages": [{"role": "user", "content": "x"}]}
    response = {"model": "chatty", "input": "x", "store": False, "tools": []}
    for _ in range(3):
        text = an_answer(name, rng)
        for pieces in ([text], list(text), random_cuts(text, rng)):
            replicas.chunks = chunks_of(form, pieces, HARMONY if name == "harmony" else "", rng)
            whole = told((await http.post("/v1/messages", json=asked)).json()["content"])
            assert streamed_message(events_of(await http.post("/v1/messages", json=asked | {"stream": True}))) == whole
            items = response_told((await http.post("/v1/responses", json=response)).json()["output"])
            assert (items[0], items[1].strip(), items[2]) == (whole[0], whole[1].strip(), whole[2])
            events = events_of(await http.post("/v1/responses", json=response | {"stream": True}))
            assert streamed_response(events) == items


def message_of(deltas: Sequence[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Return the message that the deltas of a chat make."""
    calls: dict[int, list[str]] = {}
    for call in (one for delta in deltas for one in delta.get("tool_calls") or ()):
        own = calls.setdefault(call.get("index", len(calls)), ["", "", ""])
        own[0] += call.get("id") or ""
        own[1] += call["function"].get("name") or ""
        own[2] += call["function"]["arguments"]
    thoughts, texts = ("".join(one.get(name) or "" for one in deltas) for name in ("reasoning_content", "content"))
    return thoughts, texts.strip(), [(*own,) for _, own in sorted(calls.items())]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", TOOL_FORMS)
async def test_messages_of_a_stream_are_those_of_the_whole_answer(
    name: str, http: httpx.AsyncClient, replicas: Replicas
) -> None:
    """OpenAI's chats and Ollama's lines, of answers that end by themselves or are cut anywhere."""
    rng = seeded_random()
    thinks = REASONING_FORMS["harmony" if name == "harmony" else "think"]
    form = AnswerForm(TOOL_FORMS[name], thinks)
    asked = {"model": "chatty", "messages": [{"role": "user", "content": "x"}]}
    for _ in range(3):
        text = an_answer(name, rng) or "So."
        is_cut = rng.random() < 0.5
        text = text[: rng.randrange(1, len(text) + 1)] if is_cut else text
        pieces = random_cuts(text, rng)
        replicas.chunks = chunks_of(form, pieces, HARMONY if name == "harmony" else "", rng, is_cut=is_cut)
        choice = (await http.post("/v1/chat/completions", json=asked)).json()["choices"][0]
        streamed = await http.post("/v1/chat/completions", json=asked | {"stream": True})
        choices = [
            event["choices"][0]
            for event in events_of(httpx.Response(200, text=streamed.text.replace("data: [DONE]", "")))
        ]
        assert message_of([one["delta"] for one in choices]) == message_of([choice["message"]])
        assert choices[-1]["finish_reason"] == choice["finish_reason"]
        whole = (await http.post("/api/chat", json=asked | {"stream": False})).json()
        lines = [json.loads(line) for line in (await http.post("/api/chat", json=asked)).text.splitlines()]
        for member in ("thinking", "content"):
            assert "".join(one["message"].get(member, "") for one in lines) == whole["message"].get(member, "")
        calls = [call for one in lines for call in one["message"].get("tool_calls", ())]
        assert calls == whole["message"].get("tool_calls", [])
        assert [one["done"] for one in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1]["done_reason"] == whole["done_reason"]
