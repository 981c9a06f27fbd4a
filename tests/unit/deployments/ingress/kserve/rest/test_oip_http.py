"""The Open Inference Protocol over REST, as bytes on the wire: written and read by plain formulas here."""

from __future__ import annotations

import contextlib
import gzip
import importlib.metadata
import json
import re
import zlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.seeding import seeded_rng
from ray.exceptions import RayActorError
from unit.deployments.ingress.http_fakes import client_over

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.fair_slots import ReadLimiter
from configs.access import AccessConfig
from configs.admission import AdmissionConfig
from configs.cluster import LimitsConfig
from configs.distribution import DISTRIBUTION
from deployments.ingress.access.callers import Callers
from deployments.ingress.error_forms import install_error_handlers
from deployments.ingress.gate import BodyGate, HttpAccess, ReadGate
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.rest import routes
from deployments.ingress.kserve.rest.messages import read_request
from deployments.ingress.kserve.rest.routes import (
    create_inference_router,
    create_server_router,
    create_shared_memory_router,
)
from deployments.records.errors import GenerationFailed, InvalidRequest, ModelUnavailable, Overloaded, QueueFull

PROMPT = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["a"]}
X = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2.5, -3]}


@pytest.fixture
async def client(inference: Inference, limits: LimitsConfig, as_described: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(create_server_router(inference))
    app.include_router(create_inference_router(inference, limits))
    app.include_router(create_shared_memory_router(inference.shared_memory))
    access = HttpAccess(Callers(AccessConfig()), AccessConfig(), "127.0.0.1")
    app.add_middleware(BodyGate, limits=limits)
    app.add_middleware(ReadGate, limiter=ReadLimiter(Dispatcher(AdmissionConfig(max_waiting=1000))), access=access)
    hooks = as_described(app)
    async with client_over(app, "http://localhost", event_hooks=hooks) as client:
        yield client


async def infer(client: httpx.AsyncClient, model: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.post(f"/v2/models/{model}/infer", content=content, headers=headers)


def parts(response: httpx.Response) -> tuple[dict[str, Any], list[bytes]]:
    """The JSON of an answer, and the raw tensors behind it."""
    length = int(response.headers.get("Inference-Header-Content-Length", len(response.content)))
    form, rest, raw = json.loads(response.content[:length]), response.content[length:], []
    for output in form["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        if size is not None:
            raw.append(rest[:size])
            rest = rest[size:]
    assert rest == b""
    return form, raw


async def test_health_and_metadata(client: httpx.AsyncClient, service: Any) -> None:
    assert (await client.get("/v2/health/live")).json() == {"live": True}
    assert (await client.get("/v2/health/ready")).json() == {"ready": True}
    server = (await client.get("/v2")).json()
    assert server == (await client.get("/v2/")).json()
    assert (server["name"], server["version"]) == ("atelier", importlib.metadata.version(DISTRIBUTION))
    assert {"binary_tensor_data", "classification", "schedule_policy"} <= set(server["extensions"])
    metadata = (await client.get("/v2/models/flux")).json()
    assert metadata == (await client.get("/v2/models/flux/versions/1")).json()
    assert metadata["inputs"][0] == {"name": "prompt", "datatype": "BYTES", "shape": [-1], "optional": False}
    assert metadata["outputs"][0] == {
        "name": "images",
        "datatype": "UINT8",
        "shape": [-1, -1, -1, 3],
        "optional": False,
    }
    for path in ("/v2/models/flux/ready", "/v2/models/flux/versions/1/ready"):
        assert (await client.get(path)).json() == {"name": "flux", "ready": True}
    config = (await client.get("/v2/models/flux/config")).json()
    assert (config["max_batch_size"], config["dynamic_batching"]) == (4, {})
    assert config["output"][0] == {"name": "images", "data_type": "TYPE_UINT8", "dims": [-1, -1, 3]}
    assert config["input"][0] == {"name": "prompt", "data_type": "TYPE_STRING", "dims": [], "optional": False}
    assert "dynamic_batching" not in (await client.get("/v2/models/scale/config")).json()
    service.cards.clear()
    assert (await client.get("/v2/health/ready")).status_code == 503


async def test_json_in_and_out(client: httpx.AsyncClient) -> None:
    body = {"id": "42", "model_name": "scale", "inputs": [X], "outputs": [{"name": "y"}], "parameters": {"other": 1}}
    response = await infer(client, "scale", body)
    assert response.headers["content-type"] == "application/json"
    assert "multiply;dur=1.00" in response.headers["server-timing"]
    assert response.json() == {
        "model_name": "scale",
        "model_version": "1",
        "id": "42",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 3], "data": [2.0, 5.0, -6.0]}],
    }
    nested = await client.post(
        "/v2/models/scale/versions/1/infer", json=body | {"inputs": [X | {"data": [[1, 2.5, -3]]}]}
    )
    assert nested.json() == response.json()


async def test_many_elements_as_json(client: httpx.AsyncClient) -> None:
    parameters = {"width": 128, "height": 96}
    body = {"inputs": [PROMPT | {"shape": [2], "data": ["a", "b"]}], "parameters": parameters}
    images, seed = (await infer(client, "flux", body)).json()["outputs"]
    values = [zlib.crc32(prompt) % 251 for prompt in (b"a", b"b")]
    assert images["shape"] == [2, 96, 128, 3]
    assert images["data"] == [value for value in values for _ in range(96 * 128 * 3)]
    assert seed["data"] == [7, 7]


async def test_large_messages_are_read_written_and_compressed_beside_the_event_loop(
    client: httpx.AsyncClient, calls_on_loop: Any
) -> None:
    read, written = calls_on_loop(routes, "read_request"), calls_on_loop(routes, "write_response")
    compressed = calls_on_loop(routes, "_compressed")
    for side, is_on_loop in ((4, True), (192, False)):
        answer = await infer(client, "flux", {"inputs": [PROMPT], "parameters": {"width": side, "height": side}})
        assert len(answer.json()["outputs"][0]["data"]) == side * side * 3
        assert (read.pop(), written.pop()) == (True, is_on_loop)
    assert compressed == [False]  # httpx accepts gzip; the small answer is not worth it
    text = {"name": "text", "datatype": "BYTES", "shape": [3], "data": ["a" * 30_000] * 3}
    assert (await infer(client, "minilm", {"inputs": [text]})).status_code == 200
    assert (read, written) == ([False], [True])


async def test_raw_bytes_in_and_out(client: httpx.AsyncClient) -> None:
    x = seeded_rng().normal(size=(2, 3)).astype(np.float32)
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": x.nbytes}},
        {"name": "factor", "datatype": "FP64", "shape": [1], "parameters": {"binary_data_size": 8}},
    ]
    raw = x.tobytes() + np.float64(-1.5).tobytes()
    y = (x * np.float64(-1.5)).astype(np.float32)
    note = b"\x05\x00\x00\x00\xff\x00raw" * 2
    for outputs, parameters, expected in (
        (None, {"binary_data_output": True}, [y.tobytes(), y.astype(np.float16).tobytes(), note]),
        ([{"name": "note", "parameters": {"binary_data": True}}, {"name": "y"}], {}, [note]),
        ([{"name": "y", "parameters": {"binary_data": False}}, {"name": "half"}], {"binary_data_output": True}, None),
    ):
        form = {"inputs": inputs, "parameters": parameters} | ({"outputs": outputs} if outputs else {})
        head = json.dumps(form).encode()
        response = await infer(client, "scale", head + raw, **{"Inference-Header-Content-Length": str(len(head))})
        assert response.headers["content-type"] == "application/octet-stream"
        answered, tensors = parts(response)
        assert tensors == (expected or [y.astype(np.float16).tobytes()])
        for output in answered["outputs"]:
            if "data" in output:
                assert (output["name"], output["data"]) == ("y", y.reshape(-1).tolist())


async def test_images_as_raw_bytes_compressed(client: httpx.AsyncClient, service: Any) -> None:
    body = {
        "inputs": [PROMPT | {"shape": [2], "data": ["a", "b"]}],
        "outputs": [{"name": "images", "parameters": {"binary_data": True}}],
        "parameters": {"width": 64, "height": 32},
    }
    expected = b"".join(bytes([zlib.crc32(prompt) % 251]) * 64 * 32 * 3 for prompt in (b"a", b"b"))
    content = json.dumps(body).encode()
    for coding, packed in (
        ("gzip", gzip.compress(content)),
        ("deflate", zlib.compress(content)),
        ("identity", content),
    ):
        response = await infer(client, "flux", packed, **{"Content-Encoding": coding, "Accept-Encoding": coding})
        assert response.headers.get("content-encoding", "identity") == coding
        assert parts(response)[1] == [expected]  # httpx has decompressed it
        sent = int(response.headers["content-length"])
        assert sent < 1000 if coding != "identity" else sent > len(expected)
    assert len(service.requests) == 6


BOMBS: list[tuple[bytes, str, int, str]] = [
    (gzip.compress(bytes(2**24)), "gzip", 413, "more than 1048576 bytes when it is decompressed"),
    (zlib.compress(bytes(2**24)), "deflate", 413, "more than 1048576"),
    (gzip.compress(b"{}" * 99)[:-9], "gzip", 400, "ends too early"),
    (gzip.compress(b"{}") + b"more", "gzip", 400, "4 bytes follow"),
    (b"{}", "gzip", 400, "is not gzip"),
    (b"{}", "br", 400, "not known"),
    (b"x" * (2**20 + 1), "identity", 413, "at most 1048576"),
]


async def test_compressed_bodies_up_to_no_good(client: httpx.AsyncClient) -> None:
    for content, coding, status, reason in BOMBS:
        headers = {"Content-Encoding": coding}
        response = await client.post("/v2/models/flux/infer", content=unannounced(content), headers=headers)
        assert response.status_code == status
        assert reason in response.json()["error"]


async def unannounced(content: bytes) -> AsyncIterator[bytes]:
    """A body that comes without its length."""
    yield content


BAD: list[tuple[str, Any, dict[str, str], str]] = [
    ("flux", b"", {}, "not valid JSON"),
    ("flux", b"\xff\xfe\xfa", {}, "not valid JSON"),
    ("flux", b"[" * 60_000, {}, "nested deeper than 128 levels"),
    ("flux", b'{"inputs": NaN}', {}, "NaN is not a JSON number"),
    ("flux", b'{"inputs": ' + b"9" * 5000 + b"}", {}, "not valid JSON"),
    ("flux", [], {}, "the body: "),
    ("flux", {}, {}, "inputs: Field required"),
    ("flux", {"inputs": [PROMPT], "output": []}, {}, "output: unknown member"),
    ("flux", {"inputs": [PROMPT], "model_name": "other"}, {}, "another model than the path"),
    ("flux", {"inputs": [PROMPT], "id": 5}, {}, "id: "),
    ("flux", {"inputs": [PROMPT | {"name": 5}]}, {}, r"inputs\.0\.name"),
    ("flux", {"inputs": [PROMPT | {"datatype": "TEXT"}]}, {}, "unknown datatype 'TEXT'"),
    ("flux", {"inputs": [PROMPT | {"shape": [2**62, 2**62]}]}, {}, "more than 2147483647 elements"),
    ("flux", {"inputs": [PROMPT | {"shape": [-1]}]}, {}, "-1 in the shape"),
    ("flux", {"inputs": [PROMPT | {"data": None}]}, {}, "neither data nor"),
    ("flux", {"inputs": [PROMPT | {"parameters": {"binary_data_size": 4}}]}, {}, "has data and binary_data_size"),
    ("flux", {"inputs": [PROMPT | {"parameters": {"x": [1]}}]}, {}, "'x' takes text, a finite number"),
    ("flux", {"inputs": [PROMPT | {"parameters": {"shared_memory_region": "r"}}]}, {}, "shared_memory"),
    ("flux", {"inputs": [{"name": "prompt", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}]},
     {}, "0 bytes are left after the JSON"),
    ("flux", {"inputs": [PROMPT], "parameters": {"priority": "high"}}, {}, "priority: expected a whole number"),
    ("flux", {"inputs": [PROMPT], "parameters": {"binary_data_output": 1}}, {}, "binary_data_output: expected true"),
    ("flux", {"inputs": [PROMPT], "parameters": {"x": {}}}, {}, "'x' takes text"),
    ("flux", {"inputs": [PROMPT], "outputs": [{"name": "images", "parameters": {"binary_data": 1}}]}, {}, "true or"),
    ("flux", {"inputs": [PROMPT], "outputs": [{"name": "seed", "parameters": {"classification": -1}}]}, {}, "classes"),
    ("flux", {"inputs": [PROMPT], "outputs": [{"name": "seed", "parameters": {"shared_memory_region": "r"}}]}, {},
     "shared_memory"),
    ("flux", {"inputs": [PROMPT]}, {"Inference-Header-Content-Length": "-1"}, "Content-Length is '-1'"),
    ("flux", {"inputs": [PROMPT]}, {"Inference-Header-Content-Length": "999"}, "Inference-Header-Content-Length"),
    ("flux", {"inputs": [PROMPT]}, {"Inference-Header-Content-Length": "٣"}, "Inference-Header-Content-Length"),
    ("flux", {"inputs": [PROMPT]}, {"Inference-Header-Content-Length": "5"}, "not valid JSON"),
    ("flux", b'{"inputs":[]}tail', {"Inference-Header-Content-Length": "13"}, "4 bytes of the body belong to no input"),
    ("scale", {"inputs": [X]}, {}, "half: ask for it as binary data"),
    ("scale", {"inputs": [X], "outputs": [{"name": "note"}]}, {}, "not UTF-8"),
    ("scale", {"inputs": [X | {"data": [1e39, 1e39, 1]}]}, {}, "out of range of FP32"),
]  # fmt: skip


async def test_bad_bodies_get_a_400_that_says_why(client: httpx.AsyncClient, service: Any) -> None:
    for model, body, headers, reason in BAD:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        response = await client.post(f"/v2/models/{model}/infer", content=content, headers=raw)
        assert response.status_code == 400, (reason, response.text)
        assert list(response.json()) == ["error"]
        assert re.search(reason, response.json()["error"]), (reason, response.text)
    assert service.requests == []


KEYS = ("inputs", "outputs", "parameters", "name", "datatype", "shape", "data", "binary_data_size", "id")
VALUES = (
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.sampled_from(("INT8", "BYTES", "a", "\ud800"))
)
FORMS = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5)
)
TENSOR = st.fixed_dictionaries(
    {"name": st.text(max_size=2), "datatype": st.sampled_from(("INT8", "BYTES", "FP32")), "shape": st.just([1])},
    optional={"data": FORMS, "parameters": st.fixed_dictionaries({"binary_data_size": VALUES | st.just(4)})},
)


@settings(max_examples=40, deadline=None)
@given(
    form=FORMS | st.fixed_dictionaries({"inputs": st.lists(TENSOR, max_size=2)}),
    tail=st.binary(max_size=8),
    json_length=st.none() | st.integers(-1, 30).map(str) | st.text(max_size=3) | st.just("right"),
)
def test_any_body_is_a_request_or_an_invalid_one(form: Any, tail: bytes, json_length: str | None) -> None:
    head = json.dumps(form).encode()
    length = str(len(head)) if json_length == "right" else json_length
    with contextlib.suppress(InvalidRequest):
        request = read_request("m", "", head + tail, length)
        assert [value.name for value in request.inputs] == [tensor["name"] for tensor in form["inputs"]]


ERRORS: list[tuple[Exception, int]] = [
    (InvalidRequest("no"), 400),
    (QueueFull("full"), 429),
    (Overloaded("full"), 503),
    (ModelUnavailable("torn"), 503),
    (GenerationFailed("nan"), 500),
    (RayActorError(), 503),
    (ZeroDivisionError("secret"), 500),
]


async def test_errors_have_the_status_of_the_table(client: httpx.AsyncClient, service: Any) -> None:
    for error, status in ERRORS:
        service.error = lambda request, error=error: error
        response = await infer(client, "flux", {"inputs": [PROMPT]})
        assert (response.status_code, list(response.json())) == (status, ["error"])
        assert isinstance(response.json()["error"], str)
        assert "secret" not in response.text
        assert ("retry-after" in response.headers) == (status in (429, 503))


NOT_THERE: list[tuple[str, str, int]] = [
    ("GET", "/v2/models/nobody", 404),
    ("GET", "/v2/models/nobody/ready", 404),
    ("GET", "/v2/models/flux/versions/2", 404),
    ("GET", "/v2/models/flux/versions/2/ready", 404),
    ("GET", "/v2/models/broken/ready", 503),
    ("GET", "/v2/models/bold", 400),
    ("POST", "/v2/models/nobody/infer", 404),
    ("POST", "/v2/models/flux/versions/2/infer", 404),
    ("GET", "/v2/models/flux/infer", 405),
    ("POST", "/v2/health/live", 405),
    ("GET", "/v2/nothing/here", 404),
    ("GET", "/v2/systemsharedmemory/status", 501),
    ("POST", "/v2/cudasharedmemory/region/x/register", 501),
    ("GET", "/v2/trace/setting", 501),
    ("POST", "/v2/models/flux/trace/setting", 501),
    ("GET", "/v2/logging", 501),
]


async def test_what_is_not_there(client: httpx.AsyncClient) -> None:
    for method, path, status in NOT_THERE:
        response = await client.request(method, path, json={"inputs": []} if method == "POST" else None)
        assert (path, response.status_code, list(response.json())) == (path, status, ["error"])


async def test_paths_beside_v2_keep_their_own_form(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v22")).json()["error"]["code"] == "unknown_url"


async def test_generate(client: httpx.AsyncClient, service: Any) -> None:
    body = {"text_input": "1 + 1", "parameters": {"temperature": 0, "stream": False}, "stop": ["x", "y"], "id": "7"}
    response = await client.post("/v2/models/adder/generate", json=body)
    assert response.json() == {
        "model_name": "adder",
        "model_version": "1",
        "id": "7",
        "text_output": "more:1 + 1",
        "finish_reason": "length",
        "num_input_tokens": 2,
        "num_output_tokens": 3,
    }
    assert (service.requests[0].temperature, service.requests[0].stop) == (0.0, ("x", "y"))
    for wrong, reason in (
        ({}, "text_input"),
        ({"text_input": "a", "temperatur": 1}, "unknown option 'temperatur' (known: max_tokens, temperature"),
        ({"text_input": "a", "stop": [1]}, "stop: BYTES takes text"),
        ({"text_input": "a", "max_tokens": None}, "max_tokens"),
        ({"text_input": "\ud800"}, "surrogate"),
        ({"text_input": "a", "priority": [1]}, "'priority' takes text, a finite number"),
        ({"text_input": "a", "max_tokens": [1]}, "'max_tokens' takes text, a finite number"),
        ({"text_input": "a", "stream": 1}, "stream: expected true or false"),
        (
            {"text_input": "a", "seed": 1, "parameters": {"seed": 2}},
            "seed: given both in parameters and outside of them",
        ),
    ):
        response = await client.post("/v2/models/adder/generate", content=json.dumps(wrong))
        assert response.status_code == 400
        assert reason in response.json()["error"]
    response = await client.post("/v2/models/flux/generate", json={"text_input": "a"})
    assert (response.status_code, "model 'flux' takes prompt" in response.text) == (400, True)


async def test_generate_stream(client: httpx.AsyncClient, service: Any) -> None:
    async def events(body: Any) -> list[Any]:
        response = await client.post("/v2/models/adder/versions/1/generate_stream", json=body)
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.text.split("\n\n")
        assert lines.pop() == ""
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    pieces = await events({"text_input": "a"})
    assert [piece["text_output"] for piece in pieces] == ["Hel", "lö", ""]
    assert [piece["finish_reason"] for piece in pieces] == ["", "", "stop"]
    service.error = lambda position: GenerationFailed("no numbers") if position == 1 else None
    assert [piece.get("error") for piece in await events({"text_input": "a"})] == [None, "no numbers"]
    refused = await client.post("/v2/models/nobody/generate_stream", json={"text_input": "a"})
    assert (refused.status_code, list(refused.json())) == (404, ["error"])
