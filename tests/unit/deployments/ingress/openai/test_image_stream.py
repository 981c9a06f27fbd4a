"""Images that are streamed: OpenAI's events as its own client reads them, and what they are refused for."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types import ImageEditCompletedEvent, ImageGenCompletedEvent, ImageGenPartialImageEvent
from PIL import Image
from unit.deployments.ingress.http_fakes import IMAGE, Replicas, problem

from deployments.ingress.openai.image_bodies import GenerationBody
from deployments.ingress.openai.image_stream import ImageEvents
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult

URL = "/v1/images/generations"


def opened(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


async def test_partial_images_come_before_the_image(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    stream = await client.images.generate(
        model="flux", prompt="x", size="24x16", stream=True, partial_images=2, output_format="webp"
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]
    for index, event in enumerate(events[:2]):
        assert isinstance(event, ImageGenPartialImageEvent)
        assert (event.partial_image_index, event.size, event.output_format) == (index, "24x16", "webp")
        image = opened(event.b64_json)
        assert (image.format, image.size) == ("WEBP", (24, 16))
        assert abs(image.convert("RGB").getpixel((0, 0))[0] - 10 * (index + 1)) <= 2  # type: ignore[index]
    last = events[2]
    assert isinstance(last, ImageGenCompletedEvent)
    assert last.usage.total_tokens == 0
    assert last.to_dict()["switch"]["built"] == ["vae"]  # type: ignore[index]
    (request,) = replicas.requests
    assert (request.partial_images, request.reports_steps, request.num_inference_steps) == (2, False, 3)


async def test_a_jpeg_says_that_it_lost_transparency(
    client: openai.AsyncOpenAI, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    opaque = replicas.on_generate

    async def transparent(request: ImageRequest) -> ImageResult:
        made = await opaque(request)
        return replace(made, images=[np.dstack([one, np.full(one.shape[:2], 9, np.uint8)]) for one in made.images])

    monkeypatch.setattr(replicas, "on_generate", transparent)
    for format_, mode, is_told in (("jpeg", "RGB", True), ("png", "RGBA", False)):
        found = await client.images.generate(**IMAGE, output_format=format_, size="24x16")  # type: ignore[call-overload]
        image = opened(found.data[0].b64_json)
        assert (image.format, image.mode, image.size) == (format_.upper(), mode, (24, 16))
        assert any("a JPEG has no transparency" in one for one in found.to_dict()["warnings"]) == is_told


async def test_an_edit_has_events_of_its_own(client: openai.AsyncOpenAI) -> None:
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((16, 24, 3), np.uint8)).save(buffer, "PNG")
    stream = await client.images.edit(
        model="flux", image=("in.png", buffer.getvalue()), prompt="x", stream=True, partial_images=1
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert isinstance(events[1], ImageEditCompletedEvent)
    assert json.loads(opened(events[1].b64_json).info["Description"])["task"] == "image-to-image"


async def test_progress_is_told_to_who_asks(http: httpx.AsyncClient) -> None:
    response = await http.post(URL, json={**IMAGE, "stream": True, "progress": True, "partial_images": 1})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    names = [lines[0].removeprefix("event: ").removeprefix("image_generation.") for lines in events]
    assert names == ["progress", "partial_image", "progress", "progress", "completed"]
    steps = [json.loads(lines[1].removeprefix("data: ")).get("step") for lines in events]
    assert steps == [1, 1, 2, 3, None]


async def test_the_time_left_is_at_the_pace_so_far() -> None:
    body = GenerationBody(model="m", prompt="x", stream=True, progress=True)
    times = iter([10.0, 12.0, 16.0])
    events = ImageEvents("image_generation", body, ImageRequest(model="m", prompt="x"), lambda: next(times))

    async def pieces() -> Any:
        yield ImageProgress(2, 8)
        yield ImageProgress(3, 8)
        yield ImageProgress(5, 8)
        yield ImageResult("m", [np.zeros((8, 8, 3), np.uint8)], 1, 8, {}, None, CacheUse(0, 0))

    told = [json.loads(text.split("data: ")[1]) async for text in events.events_of(pieces())]
    assert [event.get("eta_s") for event in told] == [None, 10.0, 6.0, None]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"partial_images": 1}, "partial_images"),
        ({"progress": True}, "progress"),
        ({"stream": True, "partial_images": 4}, "partial_images"),
        ({"stream": True, "partial_images": -1}, "partial_images"),
        ({"stream": True, "n": 2}, "n"),
        ({"stream": True, "response_format": "url"}, "response_format"),
        ({"stream": True, "size": "9999x8"}, "size"),
        ({"stream": True, "model": "chatty"}, "model"),
    ],
)
async def test_a_stream_that_cannot_be_is_refused_with_a_status(
    http: httpx.AsyncClient, replicas: Replicas, fields: dict[str, Any], param: str
) -> None:
    response = await http.post(URL, json=IMAGE | fields)
    assert (response.status_code, problem(response)["param"]) == (400, param)
    assert replicas.requests == []


async def test_an_error_on_the_way_is_the_last_event(client: openai.AsyncOpenAI, replicas: Replicas) -> None:
    replicas.error_after = 2
    stream = await client.images.generate(**IMAGE, stream=True, partial_images=3)
    assert (await anext(stream)).type == "image_generation.partial_image"
    with pytest.raises(openai.APIError, match="the model failed at token 2"):
        await anext(stream)
