"""Bodies of requests: their time, their memory, and the values of their JSON, counted as the bytes come."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import Any

import httpx
import pytest
from kit.drawing import seeds
from pydantic import ValidationError
from starlette.types import Message
from unit.deployments.ingress.http_fakes import CHAT, CHATS, EMBEDDING, EMBEDDINGS, IMAGE, IMAGES, problem

from configs.cluster import LimitsConfig
from deployments.ingress.compat.anthropic import MessagesBody
from deployments.ingress.compat.ollama import OllamaChatBody
from deployments.ingress.compat.vllm import TokenizeBody
from deployments.ingress.kserve.rest.messages import InferBody
from deployments.ingress.messages import bodies
from deployments.ingress.messages.bodies import (
    MAX_JSON_DEPTH,
    MAX_JSON_PARTS,
    SMALL_BYTES,
    BoundedBody,
    JsonSize,
    LargeBodies,
    LargeBody,
)
from deployments.ingress.openai.embeddings import EmbeddingsBody
from deployments.ingress.openai.image_bodies import GenerationBody
from deployments.ingress.openai.text import ChatBody, CompletionBody
from deployments.ingress.openai.text_responses import ResponsesBody
from deployments.records.errors import Overloaded, RequestTooLarge, RequestTooSlow
from deployments.records.requests import most_telling

LIMITS = LimitsConfig()
JSON_TYPE = {"content-type": "application/json"}
MANY = 50_000
WRONG: list[tuple[Any, dict[str, Any]]] = [
    (ChatBody, CHAT | {"messages": [{}] * MANY}),
    (ChatBody, CHAT | {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    (ChatBody, CHAT | {"logit_bias": {str(number): "x" for number in range(MANY)}}),
    (CompletionBody, {"model": "m", "prompt": [0.5] * MANY}),
    (CompletionBody, {"model": "m", "prompt": "x", "stop_token_ids": ["x"] * MANY}),
    (EmbeddingsBody, {"model": "m", "input": [0.5] * MANY}),
    (EmbeddingsBody, {"model": "m", "input": [[0.5] * 100] * (MANY // 100)}),
    (ResponsesBody, {"model": "m", "input": [{}] * MANY}),
    (GenerationBody, IMAGE | {"control": [[]] * MANY}),
    (GenerationBody, IMAGE | {"lora": [[]] * MANY}),
    (InferBody, {"inputs": [{}] * MANY}),
]


@pytest.mark.parametrize(("class_", "body"), WRONG, ids=[f"{class_.__name__} {[*b][-1]}" for class_, b in WRONG])
def test_a_list_of_wrong_items_makes_few_errors(class_: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as wrong:
        class_.model_validate(body)
    assert wrong.value.error_count() <= 12


TURN = {"role": "user", "content": "x"}
LONG: list[tuple[Any, dict[str, Any]]] = [
    (ChatBody, CHAT | {"messages": [TURN] * MANY}),
    (ChatBody, CHAT | {"lora": [{"name": "x"}] * MANY}),
    (TokenizeBody, {"model": "m", "messages": [TURN] * MANY}),
    (ResponsesBody, {"model": "m", "input": [TURN] * MANY}),
    (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [TURN] * MANY}),
    (OllamaChatBody, {"model": "m", "messages": [TURN] * MANY}),
    (OllamaChatBody, {"model": "m", "messages": [TURN | {"tool_calls": [{"function": {"name": "f"}}] * MANY}]}),
    (GenerationBody, IMAGE | {"lora": [{"name": "x"}] * MANY}),
    (InferBody, {"inputs": [{"name": "x", "datatype": "FP32", "shape": []}] * MANY}),
    (InferBody, {"inputs": [], "outputs": [{"name": "x"}] * MANY}),
]


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("class_", "body"), LONG, ids=[f"{class_.__name__} {[*b][-1]}" for class_, b in LONG])
def test_what_a_list_has_too_many_of_is_counted_and_not_looked_at(class_: Any, body: dict[str, Any]) -> None:
    """Wrong ones at the front would be told of otherwise. 20,000 right messages took the event loop 0.3 s."""
    wrong_too = json.loads(json.dumps(body), object_hook=lambda part: {} if {*part} <= {*TURN, "name"} else part)
    for given in (body, wrong_too):
        with pytest.raises(ValidationError) as wrong:
            class_.model_validate(given)
        assert "too_long" in [error["type"] for error in wrong.value.errors(include_url=False)]


def test_the_most_telling_error_is_found_among_the_first() -> None:
    num_looks = 0

    class Noted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            nonlocal num_looks
            num_looks += 1
            return super().__getitem__(name)

    errors = [Noted(type="missing", loc=("messages", number, "role")) for number in range(20_000)]
    assert most_telling(errors) in errors
    assert num_looks <= 20 * bodies_looked_at()


def bodies_looked_at() -> int:
    from deployments.records import requests

    return requests._MAX_ERRORS


def count_parts(value: Any) -> int:
    """Count lists, objects and members: the plain way, of the parsed value."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count_parts, value.values()))
    return 1 + sum(map(count_parts, value)) if isinstance(value, list) else 0


def drawn_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 5 else 4)
    texts = ["", "a,b[{:", 'say "[]"', "\\", '\\"', "\\\\", "é\u2028", "x" * rng.randrange(300)]
    if kind < 3:
        return rng.choice(["".join(rng.choices(texts, k=3)), rng.random(), rng.randrange(10**6), None, True])
    if kind == 3:
        return "".join(rng.choices(texts, k=2))
    if kind == 4:
        return {f"{rng.choice(texts)}{number}": drawn_value(rng, depth + 1) for number in range(rng.randrange(6))}
    return [drawn_value(rng, depth + 1) for _ in range(rng.randrange(6))]


@seeds(50)
def test_what_is_counted_is_what_a_parser_makes_wherever_the_pieces_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    value = [drawn_value(rng) for _ in range(20)]
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
    size, position = JsonSize(len(text)), 0
    while position < len(text):
        length = rng.choice([1, 2, 3, 50, 1000])
        size.add(text[position : position + length])
        position += length
    assert size._num_parts == count_parts(value)


def pieces_of(body: bytes) -> list[Message]:
    pieces = [body[start : start + SMALL_BYTES] for start in range(0, len(body), SMALL_BYTES)]
    return [
        {"type": "http.request", "body": piece, "more_body": number < len(pieces) - 1}
        for number, piece in enumerate(pieces)
    ]


def scope_of(path: str, body: bytes) -> dict[str, Any]:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return {"type": "http", "method": "POST", "path": path, "headers": headers}


async def read_all(body: BoundedBody) -> int:
    """Read the body to its end, and return the number of messages."""
    number = 1
    while (await body.receive()).get("more_body"):
        number += 1
    return number


async def no_send(message: Message) -> None:
    raise AssertionError(message)


def only_body() -> LargeBody:
    return LargeBody(LargeBodies(LIMITS), "", has_others=False)


def bounded(path: str, body: bytes, messages: list[Message], **options: Any) -> BoundedBody:
    async def receive() -> Message:
        return messages.pop(0)

    return BoundedBody(scope_of(path, body), receive, no_send, LIMITS, only_body(), **options)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("unit", [b"[],", b"{},", b'{"a":0},', b'"",', b"0,", b'"\\"",'])
async def test_an_images_body_is_refused_by_its_values_long_before_it_is_here(unit: bytes) -> None:
    """57 MiB of them took 20 s of the event loop and 1.5 GB."""
    body = b'{"model":"flux","prompt":"x","control":[' + unit * (2**25 // len(unit)) + b"0]}"
    messages = pieces_of(body)
    with pytest.raises(RequestTooLarge, match=r"more lists|besides its texts"):
        await read_all(bounded("/v1/images/generations", body, messages))
    received = len(body) - sum(len(message["body"]) for message in messages)
    assert received <= LIMITS.max_body_bytes * max(1.5, len(unit)) + 2 * SMALL_BYTES


async def test_large_images_of_few_values_pass() -> None:
    image = "data:image/png;base64," + "A" * (2**24)
    body = json.dumps({"model": "flux", "prompt": "x, y [z]", "init_image": image, "mask_image": image}).encode()
    assert await read_all(bounded("/v1/images/generations", body, pieces_of(body))) > 500


@pytest.mark.parametrize("path", [f"/v1/{CHATS}", f"/v1/{EMBEDDINGS}", f"/v1/{IMAGES}", "/v2/models/clip/infer"])
async def test_more_values_than_are_read_are_a_413_in_the_form_of_the_protocol(
    http: httpx.AsyncClient, path: str
) -> None:
    content = b'{"model":"x","messages":[' + b"[]," * (MAX_JSON_PARTS + 1) + b"0]}"
    answer = await http.post(path, content=content, headers=JSON_TYPE)
    assert answer.status_code == 413
    assert f"at most {MAX_JSON_PARTS} are allowed" in answer.text


@pytest.mark.parametrize("filling", [0, SMALL_BYTES])
async def test_json_that_is_nested_too_deeply_is_a_400(http: httpx.AsyncClient, filling: int) -> None:
    """Schemas are nested in requests as clients say; what took one to a replica failed at 500 levels."""
    for depth, status in ((MAX_JSON_DEPTH - 3, 200), (MAX_JSON_DEPTH - 2, 400), (900, 400)):
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(depth - 1):
            schema = {"items": schema}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        answer = await http.post(f"/v1/{CHATS}", json=CHAT | {"x": "[" * filling, "response_format": form})
        assert (answer.status_code, "nested deeper" in answer.text) == (status, status == 400)


@pytest.mark.parametrize("filling", [0, SMALL_BYTES])
@pytest.mark.parametrize("half", [rb"\ud800", "\ud800".encode("utf-8", "surrogatepass")])
async def test_half_of_a_surrogate_pair_is_a_400(http: httpx.AsyncClient, half: bytes, filling: int) -> None:
    """It was a 500 wherever a text without bounds is written again: into a PNG, a kept response, an answer."""
    for path, body, name in (
        (IMAGES, IMAGE, "negative_prompt"),
        ("responses", {"model": "chatty", "input": "x"}, "input"),
        ("responses", {"model": "chatty", "input": "x"}, "previous_response_id"),
        (CHATS, CHAT, "unknown"),
    ):
        text = json.dumps(body | {"more": "A" * filling, name: "HALF"}).encode()
        answer = await http.post(f"/v1/{path}", content=text.replace(b"HALF", half), headers=JSON_TYPE)
        assert (answer.status_code, "an unpaired surrogate" in answer.text) == (400, True), answer.text
        pair = await http.post(f"/v1/{path}", content=text.replace(b"HALF", rb"\ud83d\ude00"), headers=JSON_TYPE)
        assert pair.status_code == (400 if name == "previous_response_id" else 200)


async def test_large_json_is_joined_and_parsed_beside_the_event_loop(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noted(work: Any) -> Any:
        def run(argument: Any) -> Any:
            threads.append(threading.current_thread())
            return work(argument)

        return run

    for name in ("_join_pieces", "_parsed"):
        monkeypatch.setattr(bodies, name, noted(getattr(bodies, name)))
    for name, body in ((EMBEDDINGS, EMBEDDING), (CHATS, CHAT), (IMAGES, IMAGE)):
        answer = await http.post(f"/v1/{name}", json=body | {"user": "x" * SMALL_BYTES})
        assert problem(answer)["param"] == "user"
        broken = await http.post(f"/v1/{name}", content=b'{"a": ' + b" " * SMALL_BYTES + b"x}", headers=JSON_TYPE)
        assert (broken.status_code, problem(broken)["code"]) == (400, "invalid_json")
    assert len(threads) == 12
    assert threading.current_thread() not in threads


async def test_a_small_body_that_does_not_end_is_a_408(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_MAX_BODY_S", 0.05)

    async def endless() -> Any:
        yield b"{"
        await asyncio.Event().wait()

    for headers in ({"content-length": "60000"}, {}):  # read before its turn, and after
        answer = await http.post(f"/v1/{CHATS}", content=endless(), headers=JSON_TYPE | headers)
        assert (answer.status_code, problem(answer)["code"]) == (408, "request_timeout")


@pytest.mark.parametrize(("piece_s", "is_too_slow"), [(0.9, False), (1.5, True)])
async def test_a_large_body_has_time_by_its_bytes(piece_s: float, is_too_slow: bool) -> None:
    """A piece of 64 KiB may take a second, beyond the first half minute."""
    body, now_s = b'"' + b"A" * (2**22 - 1), 0.0
    messages, read = pieces_of(body), 0

    async def receive() -> Message:
        nonlocal now_s, read
        now_s += piece_s
        read += 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the deadline may pass
        return messages.pop(0)

    bound = BoundedBody(scope_of("/v1/images/generations", body), receive, no_send, LIMITS, only_body(), lambda: now_s)
    if is_too_slow:
        with pytest.raises(RequestTooSlow):
            await read_all(bound)
        assert 55 <= read <= 65  # 1.5 n = 30 + n
    else:
        assert await read_all(bound) == 64


async def test_large_bodies_have_a_bound_in_all_and_a_tenant_half_of_it() -> None:
    large = LargeBodies(LIMITS)
    half = large.max_bytes // 2
    with LargeBody(large, "one", has_others=True) as one:
        one.hold(half)
        with pytest.raises(Overloaded):
            one.hold(1)
        with LargeBody(large, "one", has_others=True) as again, pytest.raises(Overloaded):
            again.hold(1)
        with LargeBody(large, "other", has_others=True) as other:
            other.hold(half)
        with LargeBody(large, "other", has_others=True) as other:
            other.hold(half)
            with LargeBody(large, "third", has_others=True) as third, pytest.raises(Overloaded):
                third.hold(1)
    assert not large.held
    with LargeBody(large, "", has_others=False) as whole:
        whole.hold(2 * half)
