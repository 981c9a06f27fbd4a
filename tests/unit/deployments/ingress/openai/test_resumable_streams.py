"""Image streams that are gone on with: the same events in the same order, made once, and nothing kept for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from kit.waiting import until
from starlette.responses import Response
from unit.deployments.ingress.http_fakes import IMAGE, Replicas, problem

from configs.cluster import ImageStreamsConfig
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.openai.image_bodies import GenerationBody
from deployments.ingress.openai.image_stream import PATH, ImageEvents, ImagePieces, ResumableStreams
from deployments.records import CacheUse, ImageProgress, ImageRequest, ImageResult
from deployments.records.errors import GenerationFailed, InvalidRequest, Overloaded
from deployments.replicas.output_channel import OutputChannel

URL = "/v1/images/generations"
ASKED = {**IMAGE, "stream": True, "progress": True, "partial_images": 2, "resumable": True}
STEPS = 6


def parsed(text: str) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (id, name, data) of the events."""
    events = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return events


class Image:
    """The pieces of an image of STEPS steps; each waits until `may_step` lets it. `is_closed` after their end."""

    def __init__(self, fails_first: Exception | None = None) -> None:
        self.may_step = asyncio.Semaphore(0)
        self.is_closed = False
        self.num_steps = 0
        self.fails_first = fails_first

    def pieces(self) -> ImagePieces:
        return OutputChannel(self._make)

    async def _make(self, pieces: ImagePieces) -> None:
        try:
            if self.fails_first:
                raise self.fails_first
            for step in range(1, STEPS):
                await self.may_step.acquire()
                self.num_steps = step
                await pieces.send(ImageProgress(step, STEPS))
            await self.may_step.acquire()
            await pieces.send(ImageResult("m", [np.zeros((8, 8, 3), np.uint8)], 1, STEPS, {}, None, CacheUse(0, 0)))
        finally:
            self.is_closed = True

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            self.may_step.release()


def events() -> ImageEvents:
    body = GenerationBody(model="m", prompt="x", stream=True, progress=True)
    return ImageEvents("image_generation", body, ImageRequest(model="m", prompt="x"))


def streams_of(**settings: Any) -> ResumableStreams:
    return ResumableStreams(ImageStreamsConfig(**settings))


async def begin(streams: ResumableStreams, image: Image) -> Response:
    image.go_on(1)
    return await streams.begin(image.pieces(), events())


async def read(response: Any, num_events: int | None = None) -> list[str]:
    """Return the ids of the next events, all without `num_events`, and leave as a client does."""
    ids: list[str] = []
    async with contextlib.aclosing(response.body_iterator) as body:
        while num_events is None or len(ids) < num_events:
            try:
                ids += [id_ for id_, _, _ in parsed(await anext(body))]
            except StopAsyncIteration:
                break
    return ids


def name_of(response: Response) -> str:
    return response.headers["content-location"].removeprefix(PATH)


async def test_a_client_that_reconnects_gets_the_events_that_follow(
    http: httpx.AsyncClient, replicas: Replicas
) -> None:
    whole = await http.post(URL, json=ASKED)
    sent = parsed(whole.text)
    assert [name.removeprefix("image_generation.") for _, name, _ in sent] == [
        *("progress", "partial_image", "progress", "partial_image", "progress", "completed")
    ]
    place = whole.headers["content-location"]
    assert [id_ for id_, _, _ in sent] == [f"{place.removeprefix(PATH)}.{number}" for number in range(1, 7)]
    for number, (id_, _, _) in enumerate(sent[:-1], 1):
        headers = {"Last-Event-ID": id_}
        again, fetched = await http.post(URL, json=ASKED, headers=headers), await http.get(place, headers=headers)
        assert parsed(again.text) == parsed(fetched.text) == sent[number:]
    assert parsed((await http.get(place)).text) == sent
    for ended in (
        await http.post(URL, json=ASKED, headers={"Last-Event-ID": sent[-1][0]}),
        await http.get(place, headers={"Last-Event-ID": sent[-1][0]}),
    ):
        assert (ended.status_code, ended.content) == (204, b"")
    assert len(replicas.requests) == 1


@pytest.mark.drawn(2)
@pytest.mark.parametrize("last_id", ["x", "x.1", "{name}.7", "{name}.-1", "{name}.1.1", "{name}.²", "{name}", ".1"])
async def test_an_id_that_is_not_known_is_answered_with_404(
    http: httpx.AsyncClient, replicas: Replicas, last_id: str
) -> None:
    place = (await http.post(URL, json=ASKED)).headers["content-location"]
    headers = {"Last-Event-ID": last_id.replace("{name}", place.removeprefix(PATH)).encode()}
    for response in (await http.post(URL, json=ASKED, headers=headers), await http.get(place, headers=headers)):
        assert (response.status_code, problem(response)["code"]) == (404, "stream_not_found")
    assert len(replicas.requests) == 1
    assert (await http.delete(place)).status_code == 204
    for gone in (await http.get(place), await http.delete(place)):
        assert (gone.status_code, problem(gone)["code"]) == (404, "stream_not_found")


async def test_without_being_asked_for_events_have_no_ids(http: httpx.AsyncClient, replicas: Replicas) -> None:
    asked = {**ASKED, "resumable": False}
    response = await http.post(URL, json=asked, headers={"Last-Event-ID": "of.1"})
    assert response.status_code == 200
    assert "id:" not in response.text
    refused = await http.post(URL, json={**IMAGE, "resumable": True})
    assert (refused.status_code, problem(refused)["param"]) == (400, "resumable")
    replicas.error = GenerationFailed("it broke")
    assert (await http.post(URL, json=ASKED)).status_code == 500  # nothing has begun: no stream


async def test_openai_s_client_reads_the_events_as_before(client: openai.AsyncOpenAI) -> None:
    stream = await client.images.generate(**IMAGE, stream=True, partial_images=2, extra_body={"resumable": True})
    types = [event.type async for event in stream]
    assert types == ["image_generation.partial_image"] * 2 + ["image_generation.completed"]


async def test_an_image_is_made_on_while_nobody_reads() -> None:
    streams, image = streams_of(), Image()
    first = await begin(streams, image)
    image.go_on(2)
    assert await read(first, 2) == [f"{name_of(first)}.{number}" for number in (1, 2)]
    image.go_on(STEPS)
    await until(lambda: image.is_closed)
    assert await read(streams.resume(f"{name_of(first)}.2")) == [f"{name_of(first)}.{n}" for n in range(3, STEPS + 1)]


async def test_readers_come_and_go_and_miss_nothing() -> None:
    draw = random.Random(3)
    for _ in range(20):
        streams, image = streams_of(), Image()
        response, seen = await begin(streams, image), list[str]()
        name = name_of(response)
        while len(seen) < STEPS:
            count = draw.randint(1, STEPS - len(seen))
            reading = asyncio.ensure_future(read(response, count))
            for _ in range(draw.randint(0, 3)):
                await asyncio.sleep(0)
            image.go_on(count)
            seen += await reading
            response = streams.resume(f"{name}.{len(seen)}")
        assert seen == [f"{name}.{number}" for number in range(1, STEPS + 1)]
        await until(lambda image=image: image.is_closed)  # type: ignore[misc]
        assert streams.resume(seen[-1]).status_code == 204


async def test_a_stream_that_nobody_comes_back_for_ends_with_its_image() -> None:
    streams, image = streams_of(keep_s=0.01), Image()
    response = await begin(streams, image)
    await read(response, 1)
    await until(lambda: image.is_closed)
    assert image.num_steps == 1
    assert streams.num_bytes == 0
    assert streams.resume(f"{name_of(response)}.1").status_code == 404


async def test_a_stream_that_is_deleted_ends_for_its_reader_too() -> None:
    streams, image = streams_of(), Image()
    response = await begin(streams, image)
    reading = asyncio.ensure_future(read(response))
    await asyncio.sleep(0)
    assert streams.end_stream(name_of(response)).status_code == 204
    assert len(await reading) <= 1
    await until(lambda: image.is_closed)


async def test_who_leaves_before_anything_was_made_ends_the_request() -> None:
    streams, image = streams_of(), Image()
    asking = asyncio.ensure_future(streams.begin(image.pieces(), events()))
    await until(lambda: image.may_step.locked())
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await asyncio.sleep(0)
    assert image.num_steps == 0
    failing = Image(GenerationFailed("no"))
    with pytest.raises(GenerationFailed, match="no"):
        await streams.begin(failing.pieces(), events())
    assert streams.num_bytes == 0


async def test_kept_events_are_bounded() -> None:
    streams = streams_of(max_bytes=1500, max_streams=3)
    images = [Image() for _ in range(3)]
    answers = [await begin(streams, image) for image in images]
    with pytest.raises(Overloaded, match="3 resumable streams"):
        await begin(streams, Image())
    reading = asyncio.ensure_future(read(answers[2]))
    for image in images:
        image.go_on(STEPS)
    await until(lambda: all(image.is_closed for image in images))
    assert len(await reading) == STEPS  # one that is read goes on
    assert streams.num_bytes <= 1500
    assert streams.resume(f"{name_of(answers[0])}.1").status_code == 404  # the oldest that nobody reads went first
    await begin(streams, Image())


async def test_one_that_has_ended_goes_before_those_that_have_not() -> None:
    streams, images = streams_of(max_streams=2), [Image() for _ in range(2)]
    running, ended = [await begin(streams, image) for image in images]
    images[1].go_on(STEPS)
    await until(lambda: images[1].is_closed)
    await begin(streams, Image())
    assert streams.resume(f"{name_of(ended)}.1").status_code == 404
    assert streams.resume(f"{name_of(running)}.1").status_code == 200


async def test_events_go_that_all_readers_have_when_nothing_else_can() -> None:
    streams, image = streams_of(max_bytes=300), Image()
    response = await begin(streams, image)
    reading = asyncio.ensure_future(read(response))
    for _ in range(STEPS):
        image.go_on(1)
        await asyncio.sleep(0.001)
    assert len(await reading) == STEPS
    assert streams.resume(f"{name_of(response)}.1").status_code == 404


async def test_a_tenant_s_stream_is_not_another_s() -> None:
    streams, image = streams_of(), Image()
    current_tenant.set("one")
    response = await begin(streams, image)
    current_tenant.set("two")
    assert streams.resume("", name_of(response)).status_code == 404
    assert streams.end_stream(name_of(response)).status_code == 404
    current_tenant.set("one")
    assert streams.end_stream(name_of(response)).status_code == 204


async def test_several_ingress_replicas_refuse_it() -> None:
    streams = ResumableStreams(ImageStreamsConfig(), num_replicas=2)
    with pytest.raises(InvalidRequest, match="has 2"):
        await streams.begin(Image().pieces(), events())
