"""Requests mean what they mean to the servers that their clients were written for."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from unit.deployments.ingress.http_fakes import CHAT, CHATS, COMPLETIONS, Replicas, problem

from deployments.records import TextChunk, TokenText
from deployments.records.errors import ContextExceeded

LAST: Any = {"timings_ms": {"total": 5.0}}


async def test_digits_are_prompts_and_no_token_ids(http: httpx.AsyncClient, replicas: Replicas) -> None:
    for prompt, expected in (
        (["12", "7"], ("12", "7")),
        ([12, 7], ((12, 7),)),
        ([[12], [7, 8]], ((12,), (7, 8))),
        ("12", ("12",)),
    ):
        answer = await http.post(
            f"/v1/{COMPLETIONS}", json={"model": "chatty", "prompt": prompt, "logit_bias": {"5": 1}}
        )
        assert answer.status_code == 200, answer.text
        assert replicas.requests[-1].prompts == expected
    mixed = await http.post(f"/v1/{COMPLETIONS}", json={"model": "chatty", "prompt": ["12", 7]})
    assert mixed.status_code == 400


async def test_a_json_object_of_a_schema(http: httpx.AsyncClient, replicas: Replicas) -> None:
    form = {"type": "json_object", "schema": {"type": "integer"}}
    assert (await http.post(f"/v1/{CHATS}", json={**CHAT, "response_format": form})).status_code == 200
    assert replicas.requests[-1].response_format.schema_of_answer == {"type": "integer"}
    await http.post(f"/v1/{CHATS}", json={**CHAT, "response_format": {"type": "json_object"}})
    assert replicas.requests[-1].response_format.schema_of_answer == {"type": "object"}
    wrong = await http.post(f"/v1/{CHATS}", json={**CHAT, "response_format": form | {"type": "text"}})
    assert (wrong.status_code, problem(wrong)["param"]) == (400, "response_format")


async def test_texts_begin_where_their_characters_do(http: httpx.AsyncClient, replicas: Replicas) -> None:
    smile = "\U0001f600".encode()
    tokens = [TokenText("Hi ", b"Hi ", -1.0), *(TokenText("\ufffd", smile[at : at + 1], -1.0) for at in range(4))]
    tokens.append(TokenText(" bye", b" bye", -1.0))
    replicas.chunks = [TextChunk("", 1, number + 1, logprobs=(token,)) for number, token in enumerate(tokens)]
    replicas.chunks.append(TextChunk("Hi \U0001f600 bye", 1, 7, "stop", **LAST))
    asked = {"model": "chatty", "prompt": "x", "logprobs": 0}
    whole = (await http.post(f"/v1/{COMPLETIONS}", json=asked)).json()["choices"][0]
    assert whole["logprobs"]["text_offset"] == [0, 3, 3, 3, 3, 4]
    streamed = await http.post(f"/v1/{COMPLETIONS}", json={**asked, "stream": True})
    pieces = [
        httpx.Response(200, text=line[6:]).json() for line in streamed.text.splitlines() if line.startswith("data: {")
    ]
    offsets = [one["choices"][0]["logprobs"]["text_offset"] for one in pieces if one["choices"][0]["logprobs"]]
    assert [place for own in offsets for place in own] == [0, 3, 3, 3, 3, 4]


async def test_a_text_to_embed_is_cut_or_refused_as_asked(http: httpx.AsyncClient, replicas: Replicas) -> None:
    for asked, expected in (({}, "truncate"), ({"truncate": True}, "truncate"), ({"truncate": False}, "error")):
        answer = await http.post("/api/embed", json={"model": "clip", "input": "x", **asked})
        assert answer.status_code == 200, answer.text
        assert replicas.requests[-1].long_text == expected


@pytest.mark.parametrize("path", [f"/v1/{CHATS}", "/v1/messages", "/v1/responses", "/api/chat"])
async def test_agents_are_told_that_their_history_is_too_long(
    http: httpx.AsyncClient, replicas: Replicas, path: str
) -> None:
    replicas.error = ContextExceeded(
        "prompt is too long: 70 tokens > 63 maximum (this model's maximum context length is 64)"
    )
    answer = await http.post(path, json={**CHAT, "input": "x", "max_tokens": 5, "stream": False})
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert "prompt is too long" in message
    assert "maximum context length" in message
    if path.startswith("/v1/c") or path.endswith("responses"):
        assert error["code"] == "context_length_exceeded"
    if path == "/v1/messages":
        assert message.startswith("prompt is too long")


async def test_an_answer_goes_on_with_the_last_message_and_may_repeat_it(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    chat = {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "The sum is "}]}
    for echo, expected in ((True, "The sum is Hello"), (False, "Hello"), (None, "Hello")):
        asked = {**chat, "continue_final_message": True, "add_generation_prompt": False, "echo": echo}
        whole = (await http.post(f"/v1/{CHATS}", json=asked)).json()
        assert whole["choices"][0]["message"]["content"] == expected
        streamed = await http.post(f"/v1/{CHATS}", json={**asked, "stream": True})
        lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        deltas = [httpx.Response(200, text=line).json()["choices"][0]["delta"] for line in lines]
        assert "".join(delta.get("content") or "" for delta in deltas) == expected
        for request in replicas.requests[-2:]:
            assert (request.continue_final_message, request.add_generation_prompt) == (True, False)
    tool = {"type": "function", "function": {"name": "f"}}
    wrong = {**chat, "continue_final_message": True, "tools": [tool], "tool_choice": "required"}
    refused = await http.post(f"/v1/{CHATS}", json=wrong)
    assert refused.status_code == 400
    assert "with continue_final_message no tool can be required" in problem(refused)["message"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, {"json_schema": {"type": "integer"}}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"guided_json": {"type": "integer"}}, {"json_schema": {"type": "integer"}}),
        ({"guided_choice": ["a"]}, {"choice": ("a",)}),
        ({"guided_grammar": "root ::= x"}, {"grammar": "root ::= x"}),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, None),
        ({"structured_outputs": {"regex": "b", "choice": ["a"]}}, None),
        ({"structured_outputs": {"structural_tag": "{"}}, None),
        ({"structured_outputs": {"json": "{"}}, None),
    ],
)
async def test_forms_of_answers_in_vllm_s_words(
    http: httpx.AsyncClient, replicas: Replicas, said: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    for path, body in ((f"/v1/{CHATS}", CHAT), (f"/v1/{COMPLETIONS}", {"model": "chatty", "prompt": "x"})):
        answer = await http.post(path, json={**body, **said})
        if expected is None:
            assert answer.status_code == 400, answer.text
            assert problem(answer)["message"]
        else:
            assert answer.status_code == 200, answer.text
            assert replicas.requests[-1].answer_grammar.model_dump(exclude_none=True) == expected
