"""Videos by the real OpenAI client: begun, followed, listed, fetched and deleted; each key has its own."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from kit.waiting import until
from PIL import Image
from unit.deployments.ingress.http_fakes import CONFIG, STATUSES, SWITCH, Replicas, problem
from unit.deployments.ingress.jobs.job_fakes import config_with_jobs, ingress_over, owner_in

from cluster.jobs.owner import JobOwner
from configs.access import AccessConfig
from deployments.engines.records.clip_files import encode_audio, encode_video
from deployments.ingress.access.keys import KeyEntry, add_key, hash_of
from deployments.records import ClipRequest, ClipResult, ImageProgress
from deployments.records.errors import GenerationFailed

WAN: dict[str, Any] = {"model": "wan", "prompt": "a cat"}
STEPS = 4
CLASSES = {"wan": "WanPipeline", "sound": "StableAudioPipeline", "pag": "StableDiffusionPAGPipeline"}


class Makers(Replicas):
    """Replicas of which a clip's steps wait until `may_step` lets them."""

    def __init__(self) -> None:
        super().__init__()
        for name, class_name in {**CLASSES, "flux": "FluxPipeline"}.items():
            self.states[name] = replace(STATUSES["flux"], id=name, class_name=class_name)
        self.may_step = asyncio.Semaphore(10**6)
        self.num_ended = 0

    async def on_stream_clip(self, request: ClipRequest) -> AsyncIterator[ImageProgress | ClipResult]:
        self._arrived(request)
        try:
            for step in range(1, STEPS + 1):
                await self.may_step.acquire()
                if request.reports_steps:
                    yield ImageProgress(step, STEPS)
            is_sound = request.model == "sound"
            yield ClipResult(
                request.model, b"file of %d" % (request.seed or 0), "audio/wav" if is_sound else "video/mp4", 48, 16.0,
                32, 16, request.seed, STEPS, {"denoise": 2.0, "total": 3.0}, SWITCH, ("a note",),
            )  # fmt: skip
        finally:
            self.num_ended += 1


Open = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def makers() -> Makers:
    return Makers()


@pytest.fixture
def open_videos(as_described: Any, makers: Makers, tmp_path: Path, quick_jobs: None) -> Iterator[Open]:
    """Return a function that makes a client of one more ingress replica of the same cluster."""
    owners: list[JobOwner] = []

    @asynccontextmanager
    async def opened(keys: Path | None = None, **jobs: Any) -> AsyncIterator[httpx.AsyncClient]:
        if not owners:
            owners.append(owner_in(tmp_path, **jobs))
        access = AccessConfig(keys_file=keys, allowed_hosts=["test"])
        config = config_with_jobs(CONFIG.model_copy(update={"access": access}), **jobs)
        async with ingress_over(makers, owners[0], as_described, config) as client:
            yield client

    yield opened
    for owner in owners:
        owner.close()


@pytest.fixture
async def http(open_videos: Open) -> AsyncIterator[httpx.AsyncClient]:
    async with open_videos() as client:
        yield client


def client_of(http: httpx.AsyncClient, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=http, max_retries=0)


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return client_of(http)


def png(size: tuple[int, int] = (24, 16)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(buffer, "png")
    return buffer.getvalue()


async def status_of(client: openai.AsyncOpenAI, id_: str) -> str:
    return (await client.videos.retrieve(id_)).status


async def test_a_video_is_begun_followed_and_fetched(client: openai.AsyncOpenAI, makers: Makers) -> None:
    makers.may_step, seed = asyncio.Semaphore(0), random.getrandbits(32)
    begun = await client.videos.create(
        **WAN, seconds="3", size="32x16", extra_body={"seed": seed, "fps": 16, "extra": '{"guidance_scale_2": 2.0}'}
    )
    assert (begun.status, begun.progress, begun.size, begun.seconds) == ("queued", 0, "32x16", "3")
    assert (begun.prompt, begun.completed_at, begun.error) == ("a cat", None, None)
    with pytest.raises(openai.ConflictError, match="it is queued"):
        await client.videos.download_content(begun.id)
    for step in range(1, STEPS):
        makers.may_step.release()
        progress = 100 * step // STEPS

        async def is_there(progress: int = progress) -> bool:
            return (await client.videos.retrieve(begun.id)).progress == progress

        await until(is_there)
    assert await status_of(client, begun.id) == "in_progress"
    makers.may_step.release()
    video = await client.videos.poll(begun.id, poll_interval_ms=1)
    assert (video.status, video.progress, video.size, video.seconds) == ("completed", 100, "32x16", "3")
    assert video.expires_at == video.completed_at + 86_400  # type: ignore[operator]
    assert video.to_dict()["seed"] == seed
    assert video.to_dict()["warnings"] == ["a note"]
    content = await client.videos.download_content(video.id)
    assert content.content == b"file of %d" % seed
    assert content.response.headers["content-type"] == "video/mp4"
    (request,) = makers.requests
    assert (request.width, request.height, request.seconds, request.fps) == (32, 16, 3.0, 16.0)
    assert (request.extra, request.num_inference_steps) == ({"guidance_scale_2": 2.0}, 3)  # the config's default


async def test_create_and_poll_with_an_image(client: openai.AsyncOpenAI, makers: Makers) -> None:
    video = await client.videos.create_and_poll(
        **WAN, input_reference=("cat.png", png(), "image/png"), poll_interval_ms=1
    )
    assert video.status == "completed"
    assert makers.requests[-1].images["image"].shape == (16, 24, 3)


@pytest.mark.parametrize("as_object", [True, False])
async def test_json_bodies_may_have_the_image(http: httpx.AsyncClient, makers: Makers, as_object: bool) -> None:
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    reference: Any = {"image_url": url} if as_object else url
    answer = await http.post("/v1/videos", json={**WAN, "input_reference": reference, "num_frames": 9})
    assert answer.status_code == 200
    await until(lambda: makers.num_ended)
    np.testing.assert_array_equal(makers.requests[-1].images["image"][0, 0], [200, 30, 30])
    assert makers.requests[-1].num_frames == 9


async def test_videos_and_lists_of_images_go_to_parameters_by_name(client: openai.AsyncOpenAI, makers: Makers) -> None:
    film = encode_video(np.zeros((3, 16, 24, 3), np.uint8), 8, "mp4")
    urls = [f"data:image/png;base64,{base64.b64encode(png()).decode()}"] * 2
    await client.videos.create_and_poll(**WAN, input_reference=("a.mp4", film, "video/mp4"), poll_interval_ms=1)
    video = base64.b64encode(film).decode()
    body = {**WAN, "images": {"pose_video": video, "reference_images": urls}}
    assert (await client.post("/videos", body=body, cast_to=httpx.Response)).status_code == 200
    await until(lambda: makers.num_ended == 2)
    first, second = (request.images for request in makers.requests)
    assert [frame.shape for frame in first["video"]] == [(16, 24, 3)] * 3
    assert [len(second["pose_video"]), len(second["reference_images"])] == [3, 2]


async def test_adapters_of_a_form_are_read_as_openai_s_client_writes_lists(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, makers: Makers
) -> None:
    for name in ("bold", "thin"):
        entry = STATUSES[name].entry.model_copy(update={"base": ["wan"]})  # type: ignore[union-attr]
        makers.states[name] = replace(STATUSES[name], entry=entry)
    loras = [{"name": "bold", "scale": 0.5}, {"name": "thin", "scale": -2}]
    for lora in (loras, loras[:1], [{"name": "bold"}, {"name": "thin"}], json.dumps(loras)):
        begun = await client.videos.create(**WAN, extra_body={"lora": lora})
        await client.videos.poll(begun.id, poll_interval_ms=1)
    sent = [[(one.name, one.scale) for one in request.lora] for request in makers.requests]
    pairs = [("bold", 0.5), ("thin", -2.0)]
    assert sent == [pairs, pairs[:1], [("bold", 1.0), ("thin", 1.0)], pairs]
    with pytest.raises(openai.BadRequestError, match=r"2 of lora\[\]\[name\] and 1 of lora\[\]\[scale\]"):
        await client.videos.create(**WAN, extra_body={"lora": [{"name": "bold"}, {"name": "thin", "scale": 1}]})
    for field in ("lora[][no]", "lora[][scale]"):
        answer = await http.post("/v1/videos", data=WAN | {field: "much"}, files={"input_reference": ("a.png", png())})
        assert answer.status_code == 400
        assert "lora" in problem(answer)["param"]


async def test_videos_are_listed_page_by_page_and_deleted(client: openai.AsyncOpenAI) -> None:
    ids = [(await client.videos.create_and_poll(**WAN, poll_interval_ms=1)).id for _ in range(5)]
    found = [video.id async for video in client.videos.list(limit=2)]
    assert found == ids[::-1]
    assert [video.id async for video in client.videos.list(order="asc", limit=3)] == ids
    assert [(await client.videos.list(limit=limit)).has_more for limit in (4, 5, 6)] == [True, False, False]
    deleted = await client.videos.delete(ids[2])
    assert (deleted.id, deleted.deleted, deleted.object) == (ids[2], True, "video.deleted")
    assert [video.id async for video in client.videos.list()] == [one for one in ids[::-1] if one != ids[2]]
    for call in (client.videos.retrieve, client.videos.delete, client.videos.download_content):
        with pytest.raises(openai.NotFoundError, match="no video"):
            await call(ids[2])
    with pytest.raises(openai.NotFoundError):
        await client.videos.list(after=ids[2])


@pytest.mark.parametrize("is_begun", [True, False])
async def test_deleting_ends_the_making_in_any_replica(open_videos: Open, makers: Makers, is_begun: bool) -> None:
    makers.may_step = asyncio.Semaphore(int(is_begun))
    async with open_videos() as one, open_videos() as other:
        begun = await client_of(one).videos.create(**WAN)
        await until(lambda: makers.requests)
        if is_begun:

            async def has_begun() -> bool:
                return await status_of(client_of(other), begun.id) == "in_progress"

            await until(has_begun)
        await client_of(one if is_begun else other).videos.delete(begun.id)
        if not is_begun:
            makers.may_step.release()  # its next step tells the replica that nobody wants it
        await until(lambda: makers.num_ended)
        with pytest.raises(openai.NotFoundError):
            await client_of(one).videos.retrieve(begun.id)


async def test_replicas_that_share_a_folder_agree(open_videos: Open) -> None:
    async with open_videos() as one, open_videos() as other:
        begun = await client_of(one).videos.create(**WAN)
        video = await client_of(other).videos.poll(begun.id, poll_interval_ms=1)
        assert (await client_of(other).videos.download_content(video.id)).content.startswith(b"file of")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (GenerationFailed("the model failed"), "generation_failed", "the model failed"),
        (RuntimeError("secret"), "internal", "internal error"),
    ],
)
async def test_a_video_that_cannot_be_made_says_why(
    client: openai.AsyncOpenAI, makers: Makers, error: Exception, code: str, words: str
) -> None:
    makers.error = error
    video = await client.videos.create_and_poll(**WAN, poll_interval_ms=1)
    assert video.status == "failed"
    assert video.error is not None
    assert video.error.code == code
    assert words in video.error.message
    assert "secret" not in video.error.message


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": "flux"}, "model 'flux', a FluxPipeline, makes images, and no video"),
        ({"model": "sound"}, "model 'sound', a StableAudioPipeline, makes audio, and no video"),
        ({"model": "chatty"}, r"model 'chatty' \(llm\) does not make images"),
        ({"prompt": ""}, "prompt"),
        ({"seconds": 0}, "seconds: Input should be greater than 0"),
        ({"num_frames": 258}, "num_frames: 258 frames, at most 257"),
        ({"seconds": 60}, "seconds: 420 frames, at most 257"),
        ({"size": "9000x9000"}, "size: 81000000 pixels"),
        ({"size": "big"}, "WIDTHxHEIGHT"),
        ({"size": "32x16", "width": 8}, "give either size"),
        ({"num_inference_steps": 51}, "num_inference_steps: 51, at most 50"),
        ({"extra": {"num_frames": 10**6}}, "extra: num_frames: a number above 257"),
        ({"extra": {"shift": [1e9]}}, "extra: shift: a number above 65536"),
        ({"output_format": "avi"}, "output_format"),
        ({"input_reference": "https://elsewhere/cat.png"}, "an address, which is not fetched"),
        ({"input_reference": "nonsense"}, "^input_reference: "),
        ({"images": {"pose_video": "http://elsewhere/a.mp4"}}, "^images.pose_video: an address, which is not fetched"),
        ({"images": {"video": []}}, "images.video"),
    ],
)
async def test_what_makes_no_sense_is_refused(http: httpx.AsyncClient, makers: Makers, more: Any, words: str) -> None:
    answer = await http.post("/v1/videos", json={**WAN, **more})
    assert answer.status_code == 400
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(problem(answer)["message"])
    assert not makers.requests


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'"text"'])
async def test_bodies_that_are_no_objects_are_refused(http: httpx.AsyncClient, body: bytes) -> None:
    answer = await http.post("/v1/videos", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert problem(answer)["message"]


async def test_images_are_not_made_of_videos(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/images/generations", json=WAN)
    assert "model 'wan', a WanPipeline, makes video, and no images" in problem(answer)["message"]


async def test_each_key_has_its_own_videos_and_its_limits(open_videos: Open, makers: Makers, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    for name, more in {"mine": {"max_concurrent": 2}, "yours": {}}.items():
        add_key(keys, KeyEntry(name=name, sha256=hash_of(f"atl_{name}"), tenant=name, **more))
    makers.may_step = asyncio.Semaphore(0)
    async with open_videos(keys, max_unfinished=3) as http:
        mine, yours = (client_of(http, f"atl_{name}") for name in ("mine", "yours"))
        begun = [await mine.videos.create(**WAN) for _ in range(3)]
        for _ in range(3):
            await yours.videos.create(**WAN)
        for client in (mine, yours):
            with pytest.raises(openai.RateLimitError, match="3 jobs of this key are not finished"):
                await client.videos.create(**WAN)
        for call in (yours.videos.retrieve, yours.videos.delete, yours.videos.download_content):
            with pytest.raises(openai.NotFoundError):
                await call(begun[0].id)
        assert {video.id async for video in mine.videos.list()} == {video.id for video in begun}
        await until(lambda: len(makers.requests) == 5)
        assert sorted(request.tenant for request in makers.requests) == ["mine"] * 2 + ["yours"] * 3
        for _ in range(6 * STEPS):
            makers.may_step.release()
        assert {(await mine.videos.poll(video.id, poll_interval_ms=1)).status for video in begun} == {"completed"}


async def test_a_folder_that_cannot_be_used_is_told(open_videos: Open, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("a file, where a folder is expected")
    async with open_videos() as http:
        for answer in (await http.post("/v1/videos", json=WAN), await http.get("/v1/videos")):
            assert answer.status_code == 503
            assert problem(answer)["code"] == "overloaded"


async def test_audio_is_answered_at_once(http: httpx.AsyncClient, makers: Makers) -> None:
    answer = await http.post(
        "/v1/audio/generations", json={"model": "sound", "prompt": "rain", "seconds": 5, "seed": 7}
    )
    assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
    assert answer.content == b"file of 7"
    assert (answer.headers["x-atelier-seed"], answer.headers["x-atelier-warning"]) == ("7", "a note")
    assert "denoise;dur=2.00" in answer.headers["server-timing"]
    assert (makers.requests[0].seconds, makers.requests[0].reports_steps) == (5.0, False)
    for body, words in [
        ({"model": "wan", "prompt": "rain"}, "makes video, and no audio"),
        ({"model": "sound", "prompt": "rain", "seconds": 301}, "seconds: 301, at most 300 are allowed"),
        ({"model": "sound"}, "prompt"),
    ]:
        answer = await http.post("/v1/audio/generations", json=body)
        assert answer.status_code == 400
        assert words in problem(answer)["message"]


def wav(value: float, rate: int = 8000) -> bytes:
    return encode_audio(np.full((2, 5), value, np.float32), rate)


def url_of(file: bytes) -> str:
    return "data:audio/wav;base64," + base64.b64encode(file).decode()


async def test_audio_is_made_of_audio_in_a_form_or_in_json(http: httpx.AsyncClient, makers: Makers) -> None:
    asked = {"model": "sound", "prompt": "rain"}
    name = "initial_audio_waveforms"
    extra = {"audio_start_in_s": 1, "reference_audio": url_of(wav(0.25, 16_000))}
    answers = [
        await http.post("/v1/audio/generations", data=asked | {"seconds": "2"}, files={name: ("a.wav", wav(0.5))}),
        await http.post("/v1/audio/generations", json=asked | {"audio": {name: url_of(wav(0.5))}, "extra": extra}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = makers.requests
    for request in (first, second):
        np.testing.assert_allclose(request.audio[name].samples, np.full((2, 5), 0.5), atol=1e-4)
        assert request.audio[name].rate == 8000
    assert (first.seconds, second.extra) == (2.0, {"audio_start_in_s": 1})
    assert (second.audio["reference_audio"].rate, set(first.audio)) == (16_000, {name})


async def test_a_video_may_be_made_of_audio_beside_an_image(http: httpx.AsyncClient, makers: Makers) -> None:
    files = {"input_reference": ("a.png", png()), "speech": ("a.wav", wav(0.5))}
    assert (await http.post("/v1/videos", data=WAN, files=files)).status_code == 200
    assert (await http.post("/v1/videos", json=WAN | {"audio": {"speech": url_of(wav(0.5))}})).status_code == 200
    await until(lambda: makers.num_ended == 2)
    for request in makers.requests:
        np.testing.assert_allclose(request.audio["speech"].samples, np.full((2, 5), 0.5), atol=1e-4)
    assert sorted(list(request.images) for request in makers.requests) == [[], ["image"]]  # jobs run side by side


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"audio": {"audio": "http://elsewhere/a.wav"}}, "audio.audio: an address, which is not fetched"),
        ({"audio": {"audio": "UklG"}}, "audio.audio: 3 bytes that are no WAV file"),
        ({"audio": {"audio": ["UklG"]}}, "audio"),
        ({"audio": "UklG"}, "audio"),
        ({"extra": {"audio": "data:audio/mpeg;base64,SUQz"}}, "extra.audio: 3 bytes that are no WAV file"),
        ({"extra": {"a": url_of(wav(0))}, "audio": {"a": url_of(wav(0))}}, "audio.a: more than one file of audio"),
        ({"audio": {"a": url_of(encode_audio(np.zeros((1, 301)), 1))}}, "audio.a: 301 seconds of audio, at most 300"),
        ({"audio": {str(n): url_of(wav(0)) for n in range(9)}}, "audio"),
    ],
)
async def test_audio_that_cannot_be_read_is_refused(
    http: httpx.AsyncClient, makers: Makers, more: Any, words: str
) -> None:
    for path, model in (("/v1/audio/generations", "sound"), ("/v1/videos", "wan")):
        answer = await http.post(path, json={"model": model, "prompt": "rain", **more})
        assert answer.status_code == 400
        assert words in problem(answer)["message"]
    assert not makers.requests


async def test_a_file_that_is_no_audio_is_none(http: httpx.AsyncClient) -> None:
    files = {"audio": ("a.png", png())}
    answer = await http.post("/v1/audio/generations", data={"model": "sound", "prompt": "rain"}, files=files)
    assert answer.status_code == 400
    assert "bytes that are no WAV file" in problem(answer)["message"]


async def test_models_say_where_they_are_asked(http: httpx.AsyncClient) -> None:
    models = {model["id"]: model for model in (await http.get("/v1/models")).json()["data"]}
    assert models["wan"]["endpoints"] == ["/v1/videos"]
    assert models["sound"]["endpoints"] == ["/v1/audio/generations"]
    assert models["pag"]["endpoints"] == ["/v1/images/generations"]
    assert [name for name, model in models.items() if model["encodes_itself"]] == ["sound"]
