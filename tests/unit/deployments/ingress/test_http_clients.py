"""The HTTP edge over fake replicas, asked by the real OpenAI client."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from kit.seeding import seeded_rng
from PIL import Image
from ray.exceptions import RayTaskError
from unit.deployments.ingress.http_fakes import (
    CONFIG,
    EMBEDDING,
    EMBEDDINGS,
    IMAGE,
    IMAGES,
    Replicas,
    problem,
)

from deployments.ingress.openai import embeddings as openai_embeddings
from deployments.ingress.openai import images as openai_images
from deployments.records.errors import InvalidRequest


async def test_images(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    extra = {"seed": 5, "num_inference_steps": 2, "lora": [{"name": "bold", "scale": 0.5}]}
    found = await client.images.generate(model="flux", prompt="a seven", n=2, size="24x16", extra_body=extra)  # type: ignore[call-overload]
    images = [Image.open(io.BytesIO(base64.b64decode(item.b64_json))) for item in found.data]
    assert [(image.size, image.format, image.getpixel((0, 0))) for image in images] == [
        ((24, 16), "PNG", (0, 0, 0)),
        ((24, 16), "PNG", (10, 10, 10)),
    ]
    (request,) = replicas.requests
    assert (request.width, request.height, request.n, request.seed, request.num_inference_steps) == (24, 16, 2, 5, 2)
    assert [(use.name, use.scale) for use in request.lora] == [("bold", 0.5)]
    details = found.to_dict()
    assert (details["seed"], details["warnings"], details["switch"]["built"]) == (5, ["a note"], ["vae"])


async def test_a_word_that_a_text_encoder_has_learned(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    for name in ("bold", "thin"):  # of this model, and of another one
        replicas.states[name] = replace(replicas.states[name], class_name="TextualInversion")
    for prompt in ("a bold seven, thin", "a boldly drawn seven", "BREAK (bold:1.2)"):
        await client.images.generate(model="flux", prompt=prompt, extra_body={"negative_prompt": "no bold-face"})
    await client.images.generate(model="flux", prompt="x", extra_body={"negative_prompt": "BOLD"})
    uses = [[(use.name, use.scale) for use in request.lora] for request in replicas.requests]
    assert uses == [[("bold", 1.0)], [], [("bold", 1.0)], [("bold", 1.0)]]
    assert replicas.requests[0].adapter_versions == {"bold": "version of bold"}


async def test_an_image_request_gets_the_models_defaults_and_a_seed(
    client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    found = await client.images.generate(model="flux", prompt="x", output_format="jpeg")
    (request,) = replicas.requests
    assert (request.width, request.height, request.num_inference_steps) == (16, 8, 3)
    assert found.to_dict()["seed"] == request.seed
    assert found.data
    assert found.data[0].b64_json
    assert Image.open(io.BytesIO(base64.b64decode(found.data[0].b64_json))).format == "JPEG"


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
async def test_embeddings(client: openai.AsyncOpenAI, replicas: Replicas, encoding_format: Any) -> None:
    found = await client.embeddings.create(model="clip", input=["a", "b"], encoding_format=encoding_format)
    vectors = [item.embedding for item in found.data]
    if encoding_format == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4").tolist() for vector in vectors]  # type: ignore[arg-type]
    np.testing.assert_array_equal(np.float32(vectors), np.float32([[0, 0.1, -2.5], [1, 0.1, -2.5]]))
    assert found.usage.prompt_tokens == 7
    assert replicas.requests[0].input == ("a", "b")


@pytest.mark.parametrize(
    ("given", "arrived"),
    [("a", ("a",)), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
async def test_embedding_inputs(client: openai.AsyncOpenAI, replicas: Replicas, given: Any, arrived: Any) -> None:
    found = await client.embeddings.create(model="clip", input=given)
    assert replicas.requests[0].input == arrived
    assert len(found.data[0].embedding) == 3


async def test_a_language_model_embeds_too_and_pooling_is_its_alone(
    client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    await client.embeddings.create(model="chatty", input="a")
    await client.embeddings.create(model="chatty", input="a", extra_body={"pooling": "mean"})
    await client.embeddings.create(model="clip", input="a")
    asked = [(request.pooling, request.by_language_model) for request in replicas.requests]
    assert asked == [(None, True), ("mean", True), (None, False)]
    with pytest.raises(openai.BadRequestError, match="pooling: 'clip' has its own"):
        await client.embeddings.create(model="clip", input="a", extra_body={"pooling": "mean"})
    with pytest.raises(openai.BadRequestError, match="pooling"):
        await client.embeddings.create(model="chatty", input="a", extra_body={"pooling": "max"})


async def test_dimensions_arrive_and_unknown_fields_of_embeddings_are_warned_of(
    client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    found = await client.embeddings.create(model="clip", input="a", dimensions=3, extra_body={"novel": 1})
    assert replicas.requests[0].dimensions == 3
    assert found.to_dict()["warnings"] == ["unknown fields were ignored: 'novel'"]


async def test_chat(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    parts = [{"type": "text", "text": "12 "}, {"type": "text", "text": "+ 7?"}]
    found = await client.chat.completions.create(
        model="chatty",
        messages=[{"role": "system", "content": "add"}, {"role": "user", "content": parts}],
        max_tokens=9,  # type: ignore[list-item]
    )
    assert (found.choices[0].message.content, found.choices[0].finish_reason) == ("Hello", "stop")
    assert found.usage
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (4, 3, 7)
    (request,) = replicas.requests
    assert [(message.role, message.content) for message in request.messages] == [("system", "add"), ("user", "12 + 7?")]
    assert (request.max_tokens, request.temperature) == (9, 0.0)


async def test_a_temperature_that_nobody_says_is_left_to_the_models_own_defaults(
    client: openai.AsyncOpenAI, replicas: Replicas
) -> None:
    for options in ({}, {"temperature": 0.3}, {"stop": "x"}, {"max_completion_tokens": 5}):
        await client.chat.completions.create(model="plain", messages=[{"role": "user", "content": "x"}], **options)  # type: ignore[call-overload]
    assert [request.temperature for request in replicas.requests] == [None, 0.3, None, None]
    assert (replicas.requests[2].stop, replicas.requests[3].max_tokens) == (("x",), 5)


async def test_completions(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    found = await client.completions.create(model="chatty", prompt="x", stop=["a", "b"], seed=3)
    assert (found.choices[0].text, found.choices[0].finish_reason, found.object) == ("Hello", "stop", "text_completion")
    assert (replicas.requests[0].stop, replicas.requests[0].seed) == (("a", "b"), 3)


async def test_chat_as_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="chatty", messages=[{"role": "user", "content": "x"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 7)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completions_as_a_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model="chatty", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"


async def test_models(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    listed = [model async for model in client.models.list()]
    assert [model.id for model in listed] == [entry.id for entry in CONFIG.models]
    paths = {model.id: model.to_dict()["endpoints"] for model in listed}
    text = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    assert paths["flux"] == ["/v1/images/generations"]
    assert (paths["chatty"], paths["clip"], paths["broken"]) == (text, ["/v1/embeddings"], [])
    everything = [model async for model in client.models.list(extra_query={"all": True})]
    assert [model.id for model in everything] == [entry.id for entry in (*CONFIG.models, *CONFIG.adapters)]
    assert [model.to_dict()["endpoints"] for model in everything[len(listed) :]] == [[]] * len(CONFIG.adapters)
    one = (await client.models.retrieve("bold")).to_dict()
    assert (one["object"], one["kind"], one["base"], one["state"]) == ("model", "adapter", ["flux"], "ready")
    broken = (await client.models.retrieve("broken")).to_dict()
    assert (broken["state"], broken["error"]) == ("unavailable", "model.safetensors: tensor 'w' is torn")
    assert (await http.get("/admin/cluster")).json()["cluster"] == "atelier"


async def test_errors_are_the_clients_own_types(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    with pytest.raises(openai.NotFoundError, match="known: flux") as unknown:
        await client.images.generate(model="nothing", prompt="x")
    assert (unknown.value.code, unknown.value.param, unknown.value.type) == (
        "model_not_found",
        "model",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nothing")
    with pytest.raises(openai.BadRequestError, match="does not make images; models that do: flux, other-flux") as wrong:
        await client.images.generate(model="chatty", prompt="x")
    assert wrong.value.param == "model"
    with pytest.raises(openai.InternalServerError, match="torn") as unavailable:
        await client.completions.create(model="broken", prompt="x")
    assert unavailable.value.status_code == 503
    replicas.error = RayTaskError("generate", "Traceback of the replica", InvalidRequest("n: too many", "n"))
    with pytest.raises(openai.BadRequestError, match="too many"):
        await client.images.generate(model="flux", prompt="x")


async def test_large_embeddings_are_written_beside_the_event_loop(
    http: httpx.AsyncClient, replicas: Replicas, calls_on_loop: Any
) -> None:
    written = calls_on_loop(openai_embeddings, "to_json")
    vectors = seeded_rng().standard_normal((20, 1024)).astype(np.float32)
    replicas.vectors = vectors
    for format_ in ("float", "base64"):
        written.clear()
        answer = await http.post(
            f"/v1/{EMBEDDINGS}", json={**EMBEDDING, "input": ["x"] * 20, "encoding_format": format_}
        )
        assert written == [False] * 20
        found = [item["embedding"] for item in answer.json()["data"]]
        if format_ == "base64":
            found = [np.frombuffer(base64.b64decode(item), "<f4") for item in found]
        np.testing.assert_array_equal(np.float32(found), vectors)
    written.clear()
    assert (await http.post(f"/v1/{EMBEDDINGS}", json=EMBEDDING)).status_code == 200
    assert set(written) == {True}  # a thread would cost more than the writing


async def test_images_are_written_beside_the_event_loop(
    http: httpx.AsyncClient, replicas: Replicas, calls_on_loop: Any
) -> None:
    encoded, joined = calls_on_loop(openai_images, "encode_image"), calls_on_loop(openai_images, "json_with_list")
    answer = await http.post(f"/v1/{IMAGES}", json={**IMAGE, "n": 2, "width": 64, "height": 64})
    (image, _) = (Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))) for item in answer.json()["data"])
    assert image.size == (64, 64)
    assert (encoded, joined) == ([False] * 2, [False])


@pytest.mark.parametrize("format_", ["float", "base64"])
async def test_an_embedding_that_is_no_number_is_an_error_and_not_an_answer(
    http: httpx.AsyncClient, replicas: Replicas, format_: str
) -> None:
    replicas.vectors = np.array([[0.5, np.nan]], np.float32)
    answer = await http.post(f"/v1/{EMBEDDINGS}", json={**EMBEDDING, "encoding_format": format_})
    assert (answer.status_code, problem(answer)["code"]) == (500, "generation_failed")
