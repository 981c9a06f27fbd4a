"""Forms of requests: which are one, and what the queue says of one that it knows."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from cluster.control.dispatcher import Dispatcher
from cluster.control.lanes import Ask
from configs.admission import AdmissionConfig
from configs.cluster import ClusterConfig
from deployments.ingress.asking import ask_of
from deployments.ingress.gate import OuterGate
from deployments.ingress.http import _why_refused
from deployments.ingress.known_forms import _MAX_FORMS, Form, KnownForms
from deployments.ingress.terms import Terms
from deployments.ingress.turns import MAX_TURNS, Turns, end_turn
from deployments.records import ChatRequest, EmbeddingRequest, ImageRequest

CONFIG = ClusterConfig.model_validate({"store": {"path": "/s"}, "models": [{"id": "m", "path": "/m"}]})
ASK = Ask("worker", "m", 1.0, 1.0, 2, "default", 3.0)
IMAGE = {"model": "m", "prompt": "a handwritten five", "n": 1, "num_inference_steps": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 16}


def form(body: Any, path: str = "/v1/x", **headers: str) -> Form | None:
    given = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Form.of(path, given, json.dumps(body).encode())


def key(body: Any, path: str = "/v1/x", **headers: str) -> bytes:
    found = form(body, path, **headers)
    assert found is not None
    return found.key


def test_what_costs_the_same_and_is_of_the_same_client_has_one_form() -> None:
    assert key(IMAGE) == key(IMAGE | {"prompt": "a handwritten six!", "seed": 7}) == key(dict(reversed(IMAGE.items())))
    others = [
        key(IMAGE | {"num_inference_steps": 9}),
        key(IMAGE | {"model": "other"}),
        key(IMAGE | {"prompt": "five " * 50}),  # of a language model or an encoder, a long text costs more
        key(IMAGE, "/v1/y"),
        key(CHAT),
        key(CHAT | {"messages": CHAT["messages"] * 2}),
        *(key(IMAGE, x_priority=priority) for priority in ("1", "2")),
        key(IMAGE, x_tenant="gold"),
        key(IMAGE, authorization="Bearer one"),
        key(IMAGE, authorization="Bearer two"),
        key(IMAGE, x_request_timeout_seconds="3"),
    ]
    assert len({key(IMAGE), *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("body", "request_"),
    [
        (IMAGE, ImageRequest(model="m", prompt=str(IMAGE["prompt"]))),
        (CHAT, ChatRequest.model_validate(CHAT)),
        ({"model": "m", "input": "\ud800"}, EmbeddingRequest(model="m", input=("\ud800",))),  # refused by the model
        ({"model": "m", "input": "a text"}, EmbeddingRequest(model="m", input=("a text",))),
        ({"model": "m", "input": ["a text", "b"]}, EmbeddingRequest(model="m", input=("a text", "b"))),
    ],
)
def test_the_mark_is_that_of_the_request_when_it_has_been_read(body: Any, request_: Any) -> None:
    found = form(body)
    assert found is not None
    assert found.mark == ask_of(request_, Terms(), 60.0, CONFIG).mark


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_request_has_no_form_and_does_no_harm(body: bytes) -> None:
    Form.of("/v1/x", {}, body)


@given(JSON, JSON, JSON)
def test_fields_of_any_kind_do_no_harm(texts: Any, model: Any, option: Any) -> None:
    for name in ("prompt", "messages", "input"):
        form({name: texts, "model": model, "option": option})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[" * 10_000,
        b"[]",
        json.dumps({"model": "m"}).encode(),
        json.dumps(CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}).encode(),
        json.dumps(IMAGE | {"prompt": "x" * 20_000}).encode(),
        json.dumps({"model": "m", "input": [1, 2, 3]}).encode(),
    ],
)
def test_what_has_no_text_or_is_large_is_read(body: bytes) -> None:
    assert Form.of("/v1/x", {}, body) is None


def test_the_queue_is_asked_with_the_time_that_is_left_and_forms_are_forgotten() -> None:
    asked: list[Ask] = []
    forms = KnownForms(asked.append)  # type: ignore[arg-type]
    one, other = form(IMAGE), form(IMAGE | {"prompt": "a handwritten six"})
    assert one is not None
    assert other is not None
    assert forms.why_refused(one, 0.0) is None
    assert not asked
    forms.note_ask(one, ASK, waited_s=0.5)
    forms.why_refused(other, waited_s=1.5)
    (found,) = asked
    assert (found.deadline_s, found.mark, found.model) == (2.0, other.mark, "m")
    for number in range(_MAX_FORMS):
        forms.note_ask(Form(number.to_bytes(4), 1), ASK, 0.0)
    forms.why_refused(one, 0.0)
    assert len(asked) == 1


async def test_an_overload_is_refused_before_it_is_read_by_the_queue_s_own_rules() -> None:
    """One place, taken; requests that take a second and have three. What is read and what is not is told the same."""
    now_s, rng = 0.0, random.Random(1)
    queue = Dispatcher(AdmissionConfig(), clock=lambda: now_s)
    queue.set_replicas("worker", ["one"])
    for _ in range(5):  # it learns that a request takes a second
        ticket = queue.submit(ASK)
        now_s += 1.0
        queue.leave(ticket, is_answered=True)
    tickets = [queue.submit(ASK) for _ in range(3)]
    assert [queue.place(ticket).done() for ticket in tickets] == [True, False, True]  # the third is refused
    read: list[bytes] = []
    gate = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        read.append(dict(scope["headers"]).get(b"x-priority", b""))
        await gate.wait()
        end_turn(ASK)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    turns = Turns(lambda: 10_000, KnownForms(partial(_why_refused, queue)))
    transport = httpx.ASGITransport(OuterGate(app, turns))

    def ask(http: httpx.AsyncClient, **headers: str) -> asyncio.Task[httpx.Response]:
        body = IMAGE | {"seed": rng.random()}
        return asyncio.create_task(http.post("/v1/images/generations", json=body, headers=headers))

    async def crowd(http: httpx.AsyncClient, **headers: str) -> list[httpx.Response]:
        """Ask so often that some wait for their turns."""
        gate.clear()
        calls = [ask(http, **headers) for _ in range(2 * MAX_TURNS)]
        async with asyncio.timeout(20):
            while turns.num_waiting < MAX_TURNS:
                await asyncio.sleep(0)
        gate.set()
        return list(await asyncio.gather(*calls))

    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        await crowd(http)
        assert len(read) > MAX_TURNS  # nobody knew the form, so one that found a crowd was read as well
        num_read = len(read)
        answers = await crowd(http)
        assert [answer.status_code for answer in answers].count(429) == MAX_TURNS
        assert len(read) == num_read + MAX_TURNS  # those who found no crowd
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        (load,) = (await queue.snapshot()).models
        assert load.refused >= 1 + MAX_TURNS
        await crowd(http, **{"x-priority": "1"})
        assert read.count(b"1") > MAX_TURNS  # another form
        for ticket in tickets:
            queue.leave(ticket)
        assert {answer.status_code for answer in await crowd(http)} == {200}  # there is room again
