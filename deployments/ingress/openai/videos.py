"""/v1/videos: jobs that one request begins and others fetch. POST /v1/audio/generations answers at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field, field_validator
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from cluster.admission.fair_slots import release_read_slot
from configs.cluster import LimitsConfig, VideosConfig
from deployments.ingress.access.callers import current_max_concurrent, current_tenant
from deployments.ingress.messages.bodies import ClientPart, Seed, warning_header
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    Answer,
    Failure,
    TimesMs,
    call_aside,
    documented,
    failure_of,
    failure_response,
    json_response,
    rounded,
    server_timing,
)
from deployments.ingress.messages.terms import Terms, current_terms
from deployments.ingress.openai.image_bodies import NAMED, NamedFiles, Size, from_form, sides_of
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.kept import KeptVideo, KeptVideos, Status
from deployments.ingress.openai.uploads import (
    AudioFile,
    decode_audio,
    decode_named,
    is_wav,
    read_form,
    split_extra,
    validated,
)
from deployments.ingress.service.service import Service
from deployments.records import (
    MAX_NAMED_IMAGES,
    ClipOptions,
    ClipRequest,
    ClipResult,
    ImageProgress,
    Name,
    UserName,
    VideoOptions,
    as_record,
)
from deployments.records.errors import InvalidRequest, Overloaded
from deployments.records.tasks import shared_task
from weights.platform.panics import panics_as_errors

_REFERENCE: Final = "input_reference"
_FIRST_IMAGE, _VIDEO = "image", "video"  # the parameters of diffusers' classes for it
_AUDIO: Final = (
    "WAV files by the names of the class's parameters, in base64 or as data URLs; a data URL may be in `extra` as well"
)
_FILE: Final = "a PNG, JPEG or WebP file, or an MP4 or WebM of a video, in base64, or a data URL of it"

_GONE: Final = {"_404": "no such video: it was deleted, has ended, or is another key's", "_503": "no video is kept now"}
_FILE_TYPES: Final = {"mp4": "video/mp4", "webm": "video/webm"}
_ResultT = TypeVar("_ResultT")
_BodyT = TypeVar("_BodyT", bound="_ClipBody")
NamedAudio = Annotated[dict[Name, str], Field(max_length=MAX_NAMED_IMAGES)]

BEAT_S: Final = 4.0  # well below `LOST_S`

logger = logging.getLogger("atelier.ingress")


class ReferenceBody(ClientPart):
    """An image or a video in OpenAI's form. It is in the request: nothing is fetched."""

    image_url: str = Field(description="a data URL of a PNG, JPEG or WebP file, or of a video")


class _ClipBody(ClipOptions, ClientPart):
    """The common fields of videos and audio. In a form, `extra`, `lora` and `scheduler_options` are JSON."""

    seed: Seed = None
    audio: NamedAudio = Field({}, description=_AUDIO)
    user: UserName | None = None

    @field_validator("extra", "lora", "scheduler_options", mode="before")
    @classmethod
    def _from_json(cls, value: object) -> object:
        return from_form(value)

    def hears(self, files: Mapping[str, Sequence[bytes]], limits: LimitsConfig) -> dict[str, Any]:
        """Return the fields `audio` and `extra` of the record. Blocks: it reads WAV files. Raises InvalidRequest."""
        extra, found = split_extra(self.extra)
        given = [(name, AudioFile(f"audio.{name}", file)) for name, file in self.audio.items()]
        given += [(name, AudioFile(name, file)) for name, several in files.items() for file in several]
        for name, file in given:
            if name in found:
                raise InvalidRequest(f"{file.field}: more than one file of audio, expected one", file.field)
            found[name] = file
        return {"extra": extra, "audio": decode_audio(found, limits)}


class VideoBody(VideoOptions, _ClipBody):
    """OpenAI's request for a video and more. In a form, `extra`, `lora` and `scheduler_options` are JSON.

    `input_reference` is the first or guiding image of the video, or the video that it is made from: a file in a
    form. It goes to the parameter `image` or `video` of the class.
    """

    size: Size = "auto"
    input_reference: str | ReferenceBody | None = Field(None, description=_FILE)
    images: NamedFiles = Field({}, description=f"further {NAMED}; a video (MP4 or WebM) goes as an image does")

    def to_record(self, files: dict[str, list[bytes]], limits: LimitsConfig) -> ClipRequest:
        """Return the request with the files of its form. Blocks: it decodes images. Raises InvalidRequest."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in VideoOptions.model_fields} | sides_of(self)
        heard = {name: found for name, found in files.items() if name != _REFERENCE and all(map(is_wav, found))}
        fields |= self.hears(heard, limits)
        files = {name: found for name, found in files.items() if name not in heard}
        given: dict[str, Any] = {f"images.{name}": found for name, found in self.images.items()}
        given |= {name: found if len(found) > 1 else found[0] for name, found in files.items()}
        reference = self.input_reference
        reference = reference.image_url if isinstance(reference, ReferenceBody) else reference
        if reference is not None:
            given[_REFERENCE] = reference
        if isinstance(several := given.get(_REFERENCE), list):
            raise InvalidRequest(f"{_REFERENCE}: {len(several)} files given, expected one", _REFERENCE)
        decoded = decode_named(given, limits)
        images = {field.removeprefix("images."): found for field, found in decoded.items() if field != _REFERENCE}
        if (first := decoded.get(_REFERENCE)) is not None:
            images = {_VIDEO if isinstance(first, tuple) else _FIRST_IMAGE: first} | images
        return as_record(ClipRequest, fields | {"images": images, "reports_steps": True})


class AudioBody(_ClipBody):
    """A request for audio: music and sounds by a prompt, or from other audio."""

    def to_record(self, files: dict[str, list[bytes]], limits: LimitsConfig) -> ClipRequest:
        """Return the request with the files of its form. Blocks: it reads WAV files. Raises InvalidRequest."""
        fields = {name: getattr(self, name) for name in ClipOptions.model_fields}
        return as_record(ClipRequest, fields | self.hears(files, limits))


class VideoError(Answer):
    """The reason of a video's failure."""

    code: str
    message: str


class VideoAnswer(Answer):
    """A video in OpenAI's form, with its facts once it is completed."""

    id: str
    object: Literal["video"]
    model: str
    status: Status
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    error: VideoError | None
    prompt: str
    size: str
    seconds: str
    remixed_from_video_id: None
    fps: float | None
    num_frames: int | None
    seed: int | None
    num_inference_steps: int | None
    timings_ms: TimesMs
    warnings: tuple[str, ...]


class VideosAnswer(Answer):
    """A page of videos."""

    object: Literal["list"]
    data: list[VideoAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(Answer):
    """The deletion of a video."""

    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]


def create_videos_router(
    service: Service, config: VideosConfig, cluster: str, readers: ImageReaders, limits: LimitsConfig
) -> APIRouter:
    """Return the routes of videos."""
    router = APIRouter(tags=["videos"])
    kept = KeptVideos(config, cluster)
    jobs = _VideoJobs(service, kept, config)

    def answer_of(video: KeptVideo) -> VideoAnswer:
        return _answer_of(video, config.ttl_s)

    @router.post("/v1/videos", response_model=VideoAnswer, responses=documented(*INFERENCE_ERRORS), openapi_extra=_BODY)
    async def create(request: Request) -> Response:
        """Begin a video. It is made beside this request: ask for it by its id until its status is `completed`."""
        body, files = await _read(VideoBody, request, limits)
        record = await readers.read(body.to_record, files, limits)
        checked = await service.checked_clip(record, "video")
        warnings = body.warnings()
        video = await jobs.begin(checked, _first_facts(body, checked.seed, warnings))
        return json_response(answer_of(video), headers=warning_header(warnings))

    @router.get("/v1/videos", response_model=VideosAnswer, responses=documented(400, **_GONE))
    async def page(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The videos of this key, the newest first."""
        found = await _asked(kept.page, current_tenant.get(), after, limit + 1, order)
        if found is None:
            return _not_found(after or "", "after")
        videos = [answer_of(video) for video in found[:limit]]
        ids = [video.id for video in videos]
        ends = (ids[0], ids[-1]) if ids else (None, None)
        has_more = len(found) > limit
        answer = VideosAnswer(object="list", data=videos, first_id=ends[0], last_id=ends[1], has_more=has_more)
        return json_response(answer)

    @router.get("/v1/videos/{video_id}", response_model=VideoAnswer, responses=documented(**_GONE))
    async def retrieve(video_id: str) -> Response:
        """A video's progress, and its result or error."""
        video = await _asked(kept.find, current_tenant.get(), video_id)
        return _not_found(video_id) if video is None else json_response(answer_of(video))

    @router.get(
        "/v1/videos/{video_id}/content",
        response_class=FileResponse,
        responses=documented(400, _409="the video is not completed", **_GONE),
    )
    async def content(video_id: str, variant: Literal["video"] = "video") -> Response:
        """The file of a completed video."""
        video = await _asked(kept.find, current_tenant.get(), video_id)
        if video is None:
            return _not_found(video_id)
        path = await _asked(kept.file_of, video) if video.status == "completed" else None
        if path is None:
            message = f"video {video_id!r} has no file: it is {video.status}"
            return failure_response(Failure(409, message, "invalid_request_error", "video_not_completed", "video_id"))
        headers = {"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}
        return FileResponse(path, media_type=_FILE_TYPES[path.suffix[1:]], filename=path.name, headers=headers)

    @router.delete("/v1/videos/{video_id}", response_model=VideoDeleted, responses=documented(**_GONE))
    async def delete(video_id: str) -> Response:
        """Delete a video; an unfinished one is stopped."""
        if not await _asked(kept.forget, current_tenant.get(), video_id):
            return _not_found(video_id)
        jobs.end_job(video_id)
        return json_response(VideoDeleted(id=video_id, object="video.deleted", deleted=True))

    return router


def create_audio_router(service: Service, readers: ImageReaders, limits: LimitsConfig) -> APIRouter:
    """Return the route of audio."""
    router = APIRouter(tags=["audio"])
    body_schema = _body_schema(AudioBody)
    file: dict[int | str, dict[str, Any]] = {200: {"content": {"audio/wav": {}}, "description": "a WAV file"}}

    @router.post(
        "/v1/audio/generations",
        response_class=Response,
        responses=documented(*INFERENCE_ERRORS) | file,
        openapi_extra=body_schema,
    )
    async def generate(request: Request) -> Response:
        """Music or sounds by a prompt, or from other audio, as a WAV file."""
        body, files = await _read(AudioBody, request, limits)
        record = await readers.read(body.to_record, files, limits)
        result = await service.make_clip(await service.checked_clip(record, "audio"))
        warnings = (*result.warnings, *body.warnings())
        headers = server_timing(result.timings_ms) | warning_header(warnings) | {"X-Atelier-Seed": str(result.seed)}
        return Response(result.file, media_type=result.media_type, headers=headers)

    return router


async def _asked(method: Callable[..., _ResultT], *arguments: Any) -> _ResultT:
    """Call a method of the kept videos. Raises Overloaded when their folder cannot be used."""
    try:
        return await run_in_threadpool(method, *arguments)
    except OSError as error:
        raise Overloaded(f"the folder of videos cannot be used now: {error}") from None


async def _read(class_: type[_BodyT], request: Request, limits: LimitsConfig) -> tuple[_BodyT, dict[str, list[bytes]]]:
    """Return the fields and files of a body, JSON or a form. Raises FastAPI's error for a wrong field."""
    files: dict[str, list[bytes]] = {}
    fields: Any
    num_bytes = 0  # a form's fields are bounded, and small
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        fields, files = await read_form(request, limits.max_upload_bytes)
    else:
        body = await request.body()
        num_bytes = len(body)
        try:
            fields = await call_aside(num_bytes, from_json, body)
        except ValueError as error:
            raise InvalidRequest(f"the body is neither a form nor valid JSON: {error}") from None
    return await validated(class_, fields, num_bytes), files


def _first_facts(body: VideoBody, seed: int | None, warnings: tuple[str, ...]) -> dict[str, Any]:
    size = f"{body.width}x{body.height}" if body.width and body.height else body.size
    return {
        "model": body.model,
        "prompt": body.prompt,
        "size": size,
        "seconds": "auto" if body.seconds is None else f"{body.seconds:.6g}",
        "seed": seed,
        "warnings": list(warnings),
    }


def _answer_of(video: KeptVideo, ttl_s: float) -> VideoAnswer:
    facts, ended_s = video.facts, video.ended_s
    return VideoAnswer(
        id=video.id,
        object="video",
        model=facts["model"],
        status=video.status,
        progress=video.progress,
        created_at=int(video.created_s),
        completed_at=int(ended_s) if ended_s is not None and video.status == "completed" else None,
        expires_at=None if ended_s is None else int(ended_s + ttl_s),
        error=None if video.error is None else VideoError(**video.error),
        prompt=facts["prompt"],
        size=facts["size"],
        seconds=facts["seconds"],
        remixed_from_video_id=None,
        fps=facts.get("fps"),
        num_frames=facts.get("num_frames"),
        seed=facts["seed"],
        num_inference_steps=facts.get("num_inference_steps"),
        timings_ms=facts.get("timings_ms", {}),
        warnings=tuple(facts["warnings"]),
    )


def _not_found(video_id: str, param: str = "video_id") -> Response:
    message = f"no video {video_id[:80]!r} is kept here for this key: they end some time after they are completed"
    return failure_response(Failure(404, message, "invalid_request_error", "video_not_found", param))


def _body_schema(class_: type[_ClipBody]) -> dict[str, Any]:
    schema = class_.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    is_video = _REFERENCE in schema["properties"]
    if is_video:
        schema["properties"][_REFERENCE] = {"anyOf": [{"type": "string"}, parts["ReferenceBody"]]}
    form = json.loads(json.dumps(schema))
    if is_video:
        form["properties"][_REFERENCE] = {"type": "string", "format": "binary"}
    for name in ("extra", "scheduler_options"):
        form["properties"][name] = {"type": "string", "description": "JSON"}
    content = {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}
    return {"requestBody": {"required": True, "content": content}}


_BODY: Final = _body_schema(VideoBody)


@dataclass(slots=True)
class _VideoJob:
    """The progress of a video. `changed` is set whenever it is further."""

    request: ClipRequest
    facts: Mapping[str, Any]
    progress: int = 0
    has_begun: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class _VideoJobs:
    """The videos made by one ingress replica. Lives on one event loop."""

    def __init__(self, service: Service, kept: KeptVideos, config: VideosConfig) -> None:
        self._service = service
        self._kept = kept
        self._config = config
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, request: ClipRequest, facts: Mapping[str, Any]) -> KeptVideo:
        """Begin a video, and return it. `facts` are for its answer; `request` is checked.

        It has the terms of the current request. A key has no more unfinished videos than it may have requests in
        progress. Raises QueueFull; Overloaded when no video can be kept.
        """
        most = min(self._config.max_unfinished, current_max_concurrent() or self._config.max_unfinished)
        try:
            video = await asyncio.to_thread(self._kept.add, current_tenant.get(), facts, most)
        except OSError as error:
            raise Overloaded(f"no video can be kept now: {error}") from None
        task = shared_task(self._run(video.id, _VideoJob(request, facts), current_terms.get()))
        self._tasks[video.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(video.id, None))
        release_read_slot()  # the place in the queue is that task's
        return video

    def end_job(self, id_: str) -> None:
        """Stop a video, if it is made here. Elsewhere its replica finds that it is no longer wanted."""
        if task := self._tasks.get(id_):
            task.cancel()

    async def _run(self, id_: str, job: _VideoJob, terms: Terms) -> None:
        current_terms.set(replace(terms, waited_s=0.0))
        making = asyncio.ensure_future(self._make(job))
        noting = asyncio.ensure_future(self._note(id_, job, making))
        try:
            with panics_as_errors():
                result = await making
            facts = {**job.facts, **_facts_of(result)}
            suffix = result.media_type.partition("/")[2]
            await asyncio.to_thread(self._kept.complete, id_, result.file, suffix, facts)
        except Exception as error:
            failure = failure_of(error if not isinstance(error, OSError) else Overloaded(f"it cannot be kept: {error}"))
            with contextlib.suppress(OSError):  # another replica will find it lost
                await asyncio.to_thread(self._kept.fail, id_, failure.code, failure.message)
        finally:
            noting.cancel()
            making.cancel()
            await asyncio.wait([making])  # its request has ended when this has

    async def _make(self, job: _VideoJob) -> ClipResult:
        async def on_progress(progress: ImageProgress) -> None:
            job.progress = min(99, 100 * progress.step // max(1, progress.num_steps))
            job.has_begun = True
            job.changed.set()

        return await self._service.make_clip(job.request, on_progress, max_timeout_s=self._config.timeout_s)

    async def _note(self, id_: str, job: _VideoJob, making: asyncio.Future[ClipResult]) -> None:
        """Write the video's heartbeat at each step and now and then; end the video once it is no longer wanted."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await job.changed.wait()
            job.changed.clear()
            with contextlib.suppress(OSError):  # next time, perhaps
                if not await asyncio.to_thread(self._kept.note_progress, id_, job.progress, has_begun=job.has_begun):
                    making.cancel()
                    return


def _facts_of(result: ClipResult) -> dict[str, Any]:
    """Return the facts of a finished video for its answer."""
    return {
        "size": f"{result.width}x{result.height}",
        "seconds": f"{result.seconds:.6g}",
        "fps": result.rate,
        "num_frames": result.length,
        "seed": result.seed,
        "num_inference_steps": result.num_inference_steps,
        "timings_ms": rounded(result.timings_ms),
        "warnings": list(result.warnings),
    }
