"""Requests over HTTP that are refused: bad fields and bodies, errors of replicas, streams that break off."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import PIL.Image
import pytest
import pytest_asyncio
from ray.exceptions import RayActorError, RayTaskError
from unit.deployments.ingress.http_fakes import (
    CHAT,
    CHATS,
    COMPLETION,
    COMPLETIONS,
    CONFIG,
    EMBEDDING,
    EMBEDDINGS,
    IMAGE,
    IMAGES,
    Replicas,
    client_over,
    problem,
)

from cluster.process.ray_calls import NamedActor
from cluster.registry.snapshot import RegistrySnapshot
from configs.cluster import ClusterConfig
from deployments.ingress.http import create_http_app
from deployments.ingress.openai.text_answers import ChatChunk, CompletionChunk
from deployments.ingress.service.service import Service
from deployments.records.errors import GenerationFailed, InvalidRequest, Overloaded

NAN, INF = float("nan"), float("inf")

BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    (IMAGES, {**IMAGE, "model": "nothing"}, 404, "model"),
    (IMAGES, {**IMAGE, "model": "../etc"}, 404, "model"),
    (IMAGES, {**IMAGE, "model": "clip"}, 400, "model"),
    (IMAGES, {**IMAGE, "model": "bold"}, 400, "model"),
    (IMAGES, {**IMAGE, "model": "broken"}, 503, "model"),
    (IMAGES, {**IMAGE, "model": 3}, 400, "model"),
    (IMAGES, {"prompt": "x"}, 400, "model"),
    (IMAGES, {"model": "flux"}, 400, "prompt"),
    (IMAGES, {}, 400, "model"),
    (IMAGES, {**IMAGE, "prompt": ""}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": ["x"]}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": None}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": "x" * 101}, 400, "prompt"),
    (IMAGES, {**IMAGE, "prompt": "x" * 2**20}, 400, "prompt"),
    (IMAGES, {**IMAGE, "negative_prompt": "x" * 101}, 400, "negative_prompt"),
    (IMAGES, {**IMAGE, "n": 0}, 400, "n"),
    (IMAGES, {**IMAGE, "n": 5}, 400, "n"),
    (IMAGES, {**IMAGE, "n": 10**30}, 400, "n"),
    (IMAGES, {**IMAGE, "n": 1.5}, 400, "n"),
    (IMAGES, {**IMAGE, "n": "many"}, 400, "n"),
    (IMAGES, {**IMAGE, "n": INF}, 400, "n"),
    (IMAGES, {**IMAGE, "size": "0x0"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "0x8"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "64x65"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "9999999x9999999"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "-8x8"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "8x"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "8X8"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": "٣x٣"}, 400, "size"),
    (IMAGES, {**IMAGE, "size": 64}, 400, "size"),
    (IMAGES, {**IMAGE, "num_inference_steps": 0}, 400, "num_inference_steps"),
    (IMAGES, {**IMAGE, "num_inference_steps": 51}, 400, "num_inference_steps"),
    (IMAGES, {"model": "other-flux", "prompt": "x"}, 400, "size"),
    (IMAGES, {"model": "other-flux", "prompt": "x", "width": 16}, 400, "size"),
    (IMAGES, {**IMAGE, "guidance_scale": NAN}, 400, "guidance_scale"),
    (IMAGES, {**IMAGE, "guidance_scale": INF}, 400, "guidance_scale"),
    (IMAGES, {**IMAGE, "guidance_scale": -1}, 400, "guidance_scale"),
    (IMAGES, {**IMAGE, "true_cfg_scale": NAN}, 400, "true_cfg_scale"),
    (IMAGES, {**IMAGE, "seed": -2}, 400, "seed"),
    (IMAGES, {**IMAGE, "seed": 2**63}, 400, "seed"),
    (IMAGES, {**IMAGE, "seed": NAN}, 400, "seed"),
    (IMAGES, {**IMAGE, "response_format": "link"}, 400, "response_format"),
    (IMAGES, {**IMAGE, "output_compression": 101}, 400, "output_compression"),
    (IMAGES, {**IMAGE, "output_format": "gif"}, 400, "output_format"),
    (IMAGES, {**IMAGE, "lora": [{"name": "nothing"}]}, 404, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "thin"}]}, 404, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "flux"}]}, 404, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "torn"}]}, 503, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold", "scale": NAN}]}, 400, "lora.0.scale"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold", "scale": 11}]}, 400, "lora.0.scale"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold", "strength": 1}]}, 400, "lora.0.strength"),
    (IMAGES, {**IMAGE, "lora": "bold"}, 400, "lora"),
    (IMAGES, {**IMAGE, "\ud800": 1}, 400, None),
    (IMAGES, {**IMAGE, "prompt": "\ud800"}, 400, "prompt"),
    (IMAGES, {**IMAGE, "model": "\ud800"}, 400, "model"),
    (IMAGES, {**IMAGE, "model": "x" * 257}, 400, "model"),
    (IMAGES, {**IMAGE, "user": "x" * 1025}, 400, "user"),
    (IMAGES, {**IMAGE, "width": 2**31}, 400, "width"),
    (IMAGES, {**IMAGE, "max_sequence_length": 10**30}, 400, "max_sequence_length"),
    (IMAGES, {**IMAGE, "lora": [{"name": "bold"}] * 17}, 400, "lora"),
    (IMAGES, {**IMAGE, "lora": [{"name": "x" * 257}]}, 400, "lora.0.name"),
    (CHATS, {**CHAT, "model": "nothing"}, 404, "model"),
    (CHATS, {**CHAT, "model": "flux"}, 400, "model"),
    (CHATS, {**CHAT, "lora": [{"name": "nothing"}]}, 404, "lora"),
    (CHATS, {**CHAT, "lora": [{"name": "bold"}]}, 404, "lora"),
    (CHATS, {**CHAT, "lora": [{"name": "polite"}] * 2}, 400, "lora"),
    (CHATS, {**CHAT, "lora": [{"name": "polite", "scale": NAN}]}, 400, "lora.0.scale"),
    (COMPLETIONS, {**COMPLETION, "lora": [{"name": str(i)} for i in range(17)]}, 400, "lora"),
    (COMPLETIONS, {**COMPLETION, "lora": "polite"}, 400, "lora"),
    (CHATS, {**CHAT, "n": 65}, 400, "n"),
    (CHATS, {**CHAT, "logprobs": "many"}, 400, "logprobs"),
    (CHATS, {**CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
    (CHATS, {**CHAT, "tools": [{"type": "function"}]}, 400, "tools.0.function"),
    (CHATS, {**CHAT, "presence_penalty": 2.5}, 400, "presence_penalty"),
    (CHATS, {**CHAT, "frequency_penalty": NAN}, 400, "frequency_penalty"),
    (CHATS, {**CHAT, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    (CHATS, {**CHAT, "temperature": NAN}, 400, "temperature"),
    (CHATS, {**CHAT, "temperature": 2.5}, 400, "temperature"),
    (CHATS, {**CHAT, "temperature": "hot"}, 400, "temperature"),
    (CHATS, {**CHAT, "top_p": -0.5}, 400, "top_p"),
    (CHATS, {**CHAT, "top_p": NAN}, 400, "top_p"),
    (CHATS, {**CHAT, "top_k": -2}, 400, "top_k"),
    (CHATS, {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
    (CHATS, {**CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHATS, {**CHAT, "stop": ["a"] * 65}, 400, "stop"),
    (CHATS, {**CHAT, "stop": [1]}, 400, "stop.0"),
    (CHATS, {**CHAT, "stream": "maybe"}, 400, "stream"),
    (CHATS, {**CHAT, "messages": []}, 400, "messages"),
    (CHATS, {**CHAT, "messages": "x"}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
    (CHATS, {**CHAT, "messages": [{"role": "user"}]}, 400, "messages.0.content"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": None}]}, 400, "messages.0.content"),
    (
        CHATS,
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content.0.image_url",
    ),
    (CHATS, {**CHAT, "logit_bias": {"5": 101}}, 400, "logit_bias.5"),
    (CHATS, {**CHAT, "logit_bias": {"word": 1}}, 400, "logit_bias.word"),
    (COMPLETIONS, {**COMPLETION, "prompt": ["1", 5]}, 400, "prompt.1"),
    (COMPLETIONS, {**COMPLETION, "prompt": [5, 1.0]}, 400, "prompt.1"),
    (COMPLETIONS, {**COMPLETION, "prompt": ["1", ""]}, 400, "prompt.1"),
    (COMPLETIONS, {**COMPLETION, "prompt": [5, -5]}, 400, "prompt.1"),
    (
        "responses",
        {"model": "chatty", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        400,
        "input.0.content.0.type",
    ),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x" * 60}] * 2}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": ""}] * 1025}, 400, "messages"),
    (CHATS, {**CHAT, "messages": [{"role": "user", "content": "x", "name": "x" * 257}]}, 400, "messages.0.name"),
    (CHATS, {**CHAT, "max_tokens": 10**30}, 400, "max_tokens"),
    (CHATS, {**CHAT, "max_completion_tokens": 10**30}, 400, "max_completion_tokens"),
    (CHATS, {**CHAT, "top_k": 10**30}, 400, "top_k"),
    (CHATS, {**CHAT, "stop": "x" * 257}, 400, "stop"),
    (CHATS, {**CHAT, "metadata": {str(key): "" for key in range(17)}}, 400, "metadata"),
    (CHATS, {**CHAT, "metadata": {"x": "x" * 513}}, 400, "metadata.x"),
    (CHATS, {**CHAT, "logit_bias": {"5": 101}}, 400, "logit_bias.5"),
    (CHATS, {**CHAT, "min_p": 1.5}, 400, "min_p"),
    (COMPLETIONS, {**COMPLETION, "model": "clip"}, 400, "model"),
    (COMPLETIONS, {**COMPLETION, "prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {**COMPLETION, "prompt": []}, 400, "prompt"),
    (COMPLETIONS, {**COMPLETION, "prompt": "x" * 101}, 400, "prompt"),
    (COMPLETIONS, {**COMPLETION, "logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, {**COMPLETION, "best_of": 2}, 400, "best_of"),
    (EMBEDDINGS, {**EMBEDDING, "model": "flux"}, 400, "model"),
    (EMBEDDINGS, {**EMBEDDING, "model": "nothing"}, 404, "model"),
    (EMBEDDINGS, {**EMBEDDING, "input": ""}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": []}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [""]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [[]]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": 5}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [1.0]}, 400, "input.0"),
    (EMBEDDINGS, {**EMBEDDING, "input": [True]}, 400, "input.0"),
    (EMBEDDINGS, {**EMBEDDING, "input": ["a", 1]}, 400, None),
    (EMBEDDINGS, {**EMBEDDING, "input": ["x"] * 2049}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": "x" * 101}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [[1] * 101]}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": ["x" * 100] * 41}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "input": [[1] * 100] * 41}, 400, "input"),
    (EMBEDDINGS, {**EMBEDDING, "encoding_format": "hex"}, 400, "encoding_format"),
    (EMBEDDINGS, {**EMBEDDING, "dimensions": 2}, 400, "dimensions"),
    (EMBEDDINGS, {**EMBEDDING, "dimensions": 0}, 400, "dimensions"),
]


@pytest.fixture(scope="module")
def unasked() -> Replicas:
    """The replicas behind `refusing`, which nothing reaches."""
    return Replicas()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing(unasked: Replicas, open_http: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of one application for all requests that are refused before a replica is asked."""
    async with open_http(unasked) as client:
        yield client


@pytest.mark.drawn(34)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("path", "body", "status", "param"), BAD, ids=[f"{b[0]} {str(b[1])[:70]}" for b in BAD])
async def test_a_bad_request_is_refused_with_its_field(
    refusing: httpx.AsyncClient, unasked: Replicas, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    unasked.requests.clear()
    for options in ({}, {"stream": True}) if "completions" in path else ({},):
        content = json.dumps({**options, **body})
        response = await refusing.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
        error = problem(response)
        assert response.status_code == status, error
        if param:
            assert error["param"] == param, error
        assert len(error["message"]) < 500
        assert error["type"] == ("server_error" if status == 503 else "invalid_request_error")
        assert ("retry-after" in response.headers) == (status == 503)
    assert "dimensions" in body or not unasked.requests


async def test_defaults_of_a_family_are_bounded_by_every_way_in(replicas: Replicas) -> None:
    """`other-flux` draws 1,024 x 1,024 when nobody says otherwise, and 64 x 64 are allowed."""
    step = {"name": "digit_image", "model": "other-flux", "inputs": {"prompt": "$prompt"}}
    pipeline = {"id": "p", "inputs": {"prompt": "text"}, "stages": [step], "outputs": {"image": "$digit_image"}}
    config = ClusterConfig.model_validate(CONFIG.model_dump(mode="json") | {"pipelines": [pipeline]})
    watch = RegistrySnapshot(NamedActor(lambda: replicas))
    service = Service(config, watch, replicas, replicas)
    for model in ("other-flux", "p"):
        with pytest.raises(InvalidRequest, match=r"size: 262144 pixels .the model's default., at most 4096"):
            await service.generate({"model": model, "prompt": "x"})
    async with client_over(create_http_app(service, config)) as http:
        for model in ("other-flux", "p"):
            prompt = {"name": "prompt", "shape": [1], "datatype": "BYTES", "data": ["x"]}
            response = await http.post(f"/v2/models/{model}/infer", json={"inputs": [prompt]})
            assert response.status_code == 400
            assert "262144 pixels (the model's default)" in response.json()["error"]
    watch.close()
    assert not replicas.requests


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'model': 1}",
        b"[]",
        b"[1]",
        b"3",
        b'"x"',
        b"null",
        b"\xff\xfe",
        b"[" * 60_000,
        b'{"model": "flux", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    ],
    ids=lambda content: content[:20],
)
@pytest.mark.parametrize("path", [IMAGES, CHATS, COMPLETIONS, EMBEDDINGS])
@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_no_json_object_is_a_400(refusing: httpx.AsyncClient, path: str, content: bytes) -> None:
    response = await refusing.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert problem(response)["type"] == "invalid_request_error"
    assert response.status_code == 400


async def test_a_model_that_changes_images_is_given_as_many_as_it_takes(replicas: Replicas) -> None:
    replicas.states["flux"] = replace(replicas.states["flux"], class_name="QwenImageEditPipeline")
    service = Service(CONFIG, RegistrySnapshot(NamedActor(lambda: replicas)), replicas, replicas)
    file, asked = io.BytesIO(), {**IMAGE, "width": 16, "height": 8}
    PIL.Image.new("RGB", (8, 8)).save(file, "PNG")
    image = base64.b64encode(file.getvalue()).decode()
    async with client_over(create_http_app(service, CONFIG)) as http:
        for given, words in (
            ({}, "init_image: model 'flux' (QwenImageEditPipeline) changes images, and the request has none"),
            ({"images": {"image": [image] * 2}}, "images: 2 of them, and model 'flux' (QwenImageEditPipeline) takes 1"),
        ):
            response = await http.post(f"/v1/{IMAGES}", json=asked | given)
            assert response.status_code == 400
            assert problem(response)["message"] == words
        assert not replicas.requests
        for given in ({"init_image": image}, {"images": {"image": [image]}}):
            response = await http.post(f"/v1/{IMAGES}", json=asked | given)
            assert response.status_code == 200, response.text
            assert len(replicas.requests.pop().references) == 1


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "multipart/form-data", "application/x-www-form-urlencoded", "junk"]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_another_content_type_is_a_400(refusing: httpx.AsyncClient, kind: str | None) -> None:
    headers = {"content-type": kind} if kind else {}
    response = await refusing.post(f"/v1/{IMAGES}", content=json.dumps(IMAGE).encode(), headers=headers)
    assert response.status_code == 400
    problem(response)


async def chunks(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 2**16):
        yield b" " * 2**16


async def test_a_body_over_the_limit_is_a_413_announced_or_not(http: httpx.AsyncClient, replicas: Replicas) -> None:
    large = CONFIG.ingress.limits.max_body_bytes + 2**16
    json_type = {"content-type": "application/json"}
    announced = await http.post(f"/v1/{CHATS}", content=b" " * large, headers=json_type)
    chunked = await http.post(f"/v1/{CHATS}", content=chunks(large), headers=json_type)
    assert "content-length" in announced.request.headers
    assert "content-length" not in chunked.request.headers
    for response in (announced, chunked):
        error = problem(response)
        assert (response.status_code, error["code"]) == (413, "request_too_large")
        assert "at most 2097152 are allowed" in error["message"]
    assert replicas.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_url"),
        ("POST", "/v1/nothing", 404, "unknown_url"),
        ("GET", f"/v1/{IMAGES}", 405, "method_not_allowed"),
        ("GET", "/v1/models/nothing", 404, "model_not_found"),
        ("GET", "/v1/models/%ED%A0%80", 404, "model_not_found"),
    ],
)
@pytest.mark.asyncio(loop_scope="module")
async def test_urls_that_are_not_there(
    refusing: httpx.AsyncClient, method: str, path: str, status: int, code: str
) -> None:
    response = await refusing.request(method, path)
    assert (response.status_code, problem(response)["code"]) == (status, code)


@pytest.mark.drawn(5)
@pytest.mark.parametrize("path", [IMAGES, CHATS, COMPLETIONS, EMBEDDINGS])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (KeyError("secret_module.py"), 500, "internal"),
        (RayTaskError("f", "Traceback: secret", ZeroDivisionError("secret")), 500, "internal"),
        (RayTaskError("f", "Traceback: secret", Overloaded("no room")), 503, "overloaded"),
        (RayTaskError("f", "Traceback: secret", GenerationFailed("not finite")), 500, "generation_failed"),
        (RayActorError(), 503, "replica_unavailable"),
    ],
    ids=["own", "task", "overloaded", "failed", "actor"],
)
async def test_what_a_replica_raises(
    http: httpx.AsyncClient, replicas: Replicas, path: str, error: Exception, status: int, code: str
) -> None:
    replicas.error = error
    body = {IMAGES: IMAGE, CHATS: CHAT, COMPLETIONS: COMPLETION, EMBEDDINGS: EMBEDDING}[path]
    for stream in (False, True) if "completions" in path else (False,):
        response = await http.post(f"/v1/{path}", json={**body, "stream": True} if stream else body)
        assert (response.status_code, problem(response)["code"]) == (status, code)
        assert "secret" not in response.text
        assert problem(response)["type"] == "server_error"


async def test_an_error_in_the_middle_of_a_stream_is_an_event(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    replicas.error_after = 1
    stream = await client.chat.completions.create(model="chatty", messages=CHAT["messages"], stream=True)
    pieces: list[str | None] = []

    async def listen() -> None:
        async for chunk in stream:
            pieces.append(chunk.choices[0].delta.content)

    with pytest.raises(openai.APIError, match="failed at token 2") as caught:
        await listen()
    assert (pieces, caught.value.code) == (["", "Hel"], "generation_failed")
    response = await http.post(f"/v1/{CHATS}", json={**CHAT, "stream": True})
    assert response.status_code == 200
    assert "[DONE]" not in response.text
    whole = await http.post(f"/v1/{CHATS}", json=CHAT)
    assert (whole.status_code, problem(whole)["code"]) == (500, "generation_failed")


@pytest.mark.parametrize(
    ("path", "body", "class_"), [(CHATS, CHAT, ChatChunk), (COMPLETIONS, COMPLETION, CompletionChunk)]
)
async def test_pieces_of_a_stream_are_of_their_class(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], class_: type[ChatChunk | CompletionChunk]
) -> None:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post(f"/v1/{path}", json=asked)
    *events, end = [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]
    pieces = [class_.model_validate_json(event, strict=True) for event in events]
    assert end == "[DONE]"
    assert {piece.id for piece in pieces} == {pieces[0].id}
    assert [bool(piece.choices) for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert pieces[-1].usage
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-2].timings_ms


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_fields_are_ignored_and_named(http: httpx.AsyncClient, stream: bool) -> None:
    messages = [{**CHAT["messages"][0], "audio": None}]
    body = {**CHAT, "messages": messages, "service_tier": "auto", "grün": 1, "stream": stream}
    response = await http.post(f"/v1/{CHATS}", json=body)
    assert response.status_code == 200
    warning = "unknown fields were ignored: 'gr?n', 'messages.audio', 'service_tier'"
    assert response.headers["X-Atelier-Warning"] == warning
    if not stream:
        assert response.json()["warnings"] == [warning.replace("?", "ü")]
    assert "X-Atelier-Warning" not in (await http.post(f"/v1/{CHATS}", json=CHAT)).headers


async def test_answers_and_refusals_have_the_id_of_their_request(http: httpx.AsyncClient, replicas: Replicas) -> None:
    headers = {"x-request-id": "job-1"}
    asked = [(f"/v1/{path}", body) for path, body, *_ in (*BAD[:9], (CHATS, CHAT), (CHATS, CHAT | {"stream": True}))]
    for path, body in [*asked, ("/v2/models/nothing/infer", {}), ("/nothing", {})]:
        answer = await http.post(path, json=body, headers=headers)
        assert answer.headers.get_list("x-request-id") == ["job-1"], path
    assert len((await http.get("/v1/models")).headers["x-request-id"]) == 36
