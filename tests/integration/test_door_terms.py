"""Priorities, tenants and deadlines over every protocol: what cannot be meant, what is late, and what is too much."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import pytest
from integration.harness import Cluster

from deployments.ingress.kserve.grpc.protos import open_inference as messages

INFER = "/inference.GRPCInferenceService/ModelInfer"
CHAT = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
TEXT = {"text_input": "2 + 2"}
LONG = {"model": "digits-flux", "prompt": "a handwritten two", "num_inference_steps": 200, "n": 8}
ANSWER_S = 3.0  # for what needs no work, on two cores that others use, too

# A deadline that is over or none, a priority above the first, a tenant that nobody has heard of.
WRONG = [
    *(("x-request-timeout-seconds", value) for value in ("nan", "-1", "0", "-inf", "1e400", "soon", "\xff")),
    *(("x-priority", value) for value in ("-1", "0", "1.5", "nan", "9" * 30, "first", "\xff")),
    *(("x-tenant", value) for value in ("nobody-knows", "x" * 5000, "\xff\xfe")),
]


@pytest.fixture
def channel(cluster: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(cluster.grpc) as made:
        yield made


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:
        yield client


def continuation(channel: grpc.Channel, **options: Any) -> messages.ModelInferResponse:
    text = messages.ModelInferRequest.InferInputTensor(
        name="text_input",
        datatype="BYTES",
        shape=[1],
        contents=messages.InferTensorContents(bytes_contents=[TEXT["text_input"].encode()]),
    )
    ask = channel.unary_unary(
        INFER, messages.ModelInferRequest.SerializeToString, messages.ModelInferResponse.FromString
    )
    return ask(messages.ModelInferRequest(model_name="adder", inputs=[text]), **{"timeout": 30} | options)


def problem(answer: httpx.Response) -> str:
    """Return the message of an error in the form of its protocol."""
    error = answer.json()["error"]
    if "/v2/" in str(answer.url):
        return str(error)
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_terms_that_cannot_be_are_refused_by_name_over_every_protocol(
    cluster: Cluster, channel: grpc.Channel, name: str, value: str
) -> None:
    header = {name.encode(): value.encode("latin-1")}
    for path, body in (("/v1/chat/completions", CHAT), ("/v2/models/adder/generate", TEXT)):
        answer = httpx.post(f"{cluster.url}{path}", json=body, headers=header)
        assert (answer.status_code, name in problem(answer)) == (400, True), answer.text
        assert len(answer.content) < 1000
    if value.isascii():  # gRPC's clients send nothing else
        with pytest.raises(grpc.RpcError) as refused:
            continuation(channel, metadata=[(name, value)])
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert name in refused.value.details()


def test_terms_that_can_be_are_taken_over_every_protocol(cluster: Cluster, channel: grpc.Channel) -> None:
    terms = {"x-request-timeout-seconds": "20", "x-priority": "3", "x-tenant": "gold"}
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v2/models/adder/generate", TEXT),
        ("/v2/models/adder/generate", TEXT | {"priority": 1, "timeout": 20_000_000}),
    ):
        assert httpx.post(f"{cluster.url}{path}", json=body, headers=terms).status_code == 200
    assert continuation(channel, metadata=[*terms.items()]).outputs


@pytest.mark.parametrize("timeout_s", [1e-6, 0.3])
def test_a_deadline_that_passes_is_said_in_the_form_of_the_protocol(
    cluster: Cluster, channel: grpc.Channel, timeout_s: float
) -> None:
    """Serve reads the same header, and would answer with a text of its own."""
    header = {"x-request-timeout-seconds": str(timeout_s)}
    prompt = {"name": "prompt", "datatype": "BYTES", "shape": [8], "data": ["a handwritten two"] * 8}
    steps = {"name": "num_inference_steps", "datatype": "INT32", "shape": [1], "data": [200]}
    images = {"inputs": [prompt, steps]}
    with httpx.Client(base_url=cluster.url, timeout=60) as http:
        for path, body, headers in (
            ("/v1/images/generations", LONG, header),
            ("/v2/models/digits-flux/infer", images, header),
            ("/v2/models/digits-flux/infer", images | {"parameters": {"timeout": max(1, round(timeout_s * 1e6))}}, {}),
            ("/v2/models/sum-to-digit/infer", {"inputs": [prompt | {"data": ["3 + 4"] * 8}]}, header),
        ):
            start_s = time.monotonic()
            answer = http.post(path, json=body, headers=headers)
            assert time.monotonic() - start_s < timeout_s + ANSWER_S
            if path.startswith("/v2/models/sum") and answer.status_code == 200:
                assert timeout_s > 0.1  # it was quick enough
                continue
            if answer.status_code == 429:  # the queue knows how long such a request takes by now
                assert "longer than its time" in problem(answer)
                continue
            assert answer.status_code == 504, answer.text
            assert any(words in problem(answer) for words in ("timed out", "timeout", "not done within"))
    with pytest.raises(grpc.RpcError) as late:
        continuation(channel, metadata=[("x-request-timeout-seconds", str(min(timeout_s, 1e-3)))])
    if late.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:  # the queue knows how long it takes, as above
        assert "longer" in str(late.value.details())
    else:
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "timeout" in late.value.details()  # the server's word; gRPC's own client has another
    with pytest.raises(grpc.RpcError) as late:
        continuation(channel, timeout=1e-3)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_full_queue_is_said_in_the_form_of_the_protocol(http: httpx.AsyncClient, channel: grpc.Channel) -> None:
    before = (await http.get("/admin/admission")).json()["admission"]
    (await http.put("/admin/admission", json={"max_waiting": 1})).raise_for_status()
    long: list[asyncio.Task[httpx.Response]] = []
    try:
        async with asyncio.timeout(60):
            while await num_waiting(http, long) < 1:  # one by one: a first that waits for a moment refuses the others
                long.append(asyncio.create_task(http.post("/v1/images/generations", json=LONG)))
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", CHAT | {"stream": True}),
            ("/v2/models/adder/generate", TEXT),
            ("/v2/models/adder/generate_stream", TEXT),
        ):
            answer = await http.post(path, json=body)
            assert answer.status_code == 429, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            assert "try again in" in problem(answer)
        with pytest.raises(grpc.RpcError) as full:
            await asyncio.to_thread(continuation, channel)
        assert full.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(full.value.trailing_metadata())["retry-after"]) >= 1
        # A more urgent one takes the place of the one that waits.
        open_ = [task for task in long if not task.done()]
        urgent = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT, headers={"x-priority": "1"}))
        async with asyncio.timeout(ANSWER_S):
            while 429 not in [task.result().status_code for task in open_ if task.done()]:
                await asyncio.wait([task for task in open_ if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        (await http.put("/admin/admission", json=before)).raise_for_status()
    assert (await urgent).status_code == 200


async def num_waiting(http: httpx.AsyncClient, sent: list[asyncio.Task[httpx.Response]]) -> int:
    """Return how many requests wait, once all that were sent and have no answer wait or run, and have for a moment."""
    async with asyncio.timeout(30):
        waiting = -1
        while True:
            number = sum(not task.done() for task in sent)
            models = (await http.get("/admin/admission")).json()["models"]
            before, waiting = waiting, sum(model["waiting"] for model in models)
            if sum(model["running"] for model in models) + waiting >= number and before == waiting:
                return waiting
            await asyncio.sleep(0.1)
