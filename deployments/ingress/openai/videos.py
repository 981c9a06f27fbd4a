"""/v1/videos: jobs in OpenAI's form of videos. POST /v1/audio/generations answers at once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from pydantic import Field, field_validator
from pydantic_core import from_json
from starlette.responses import Response

from cluster.jobs.records import Job, JobError, JobFilter
from configs.cluster import LimitsConfig
from deployments.ingress.jobs.desk import JobDesk
from deployments.ingress.jobs.routes import INNER, result_response
from deployments.ingress.messages.bodies import ClientPart, Seed, warning_header
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    Answer,
    Failure,
    TimesMs,
    call_aside,
    documented,
    failure_response,
    json_response,
    rounded,
    server_timing,
)
from deployments.ingress.messages.running_job import current_job
from deployments.ingress.openai.image_bodies import NAMED, NamedFiles, Size, from_form, sides_of
from deployments.ingress.openai.image_decoders import ImageReaders
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
    Name,
    UserName,
    VideoOptions,
    as_record,
)
from deployments.records.errors import InvalidRequest

VideoStatus = Literal["queued", "in_progress", "completed", "failed"]
_REFERENCE: Final = "input_reference"
_FIRST_IMAGE, _VIDEO = "image", "video"  # the parameters of diffusers' classes for it
_AUDIO: Final = (
    "WAV files by the names of the class's parameters, in base64 or as data URLs; a data URL may be in `extra` as well"
)
_FILE: Final = "a PNG, JPEG or WebP file, or an MP4 or WebM of a video, in base64, or a data URL of it"

_GONE: Final = {"_404": "no such video: it was deleted, has ended, or is another key's", "_503": "no video is kept now"}
_PATH: Final = "/v1/videos"
_FACTS: Final = f"{INNER}facts"  # of the answer to a job
_STATUSES: Final[Mapping[str, VideoStatus]] = {
    "queued": "queued",
    "running": "in_progress",
    "done": "completed",
    "failed": "failed",
    "cancelled": "failed",
}
_NO_FACTS: Final[Mapping[str, Any]] = {
    **{"model": "", "prompt": "", "size": "auto", "seconds": "auto", "warnings": (), "timings_ms": {}},
    **dict.fromkeys(("fps", "num_frames", "seed", "num_inference_steps")),
}
_BodyT = TypeVar("_BodyT", bound="_ClipBody")
NamedAudio = Annotated[dict[Name, str], Field(max_length=MAX_NAMED_IMAGES)]


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

    def audio_fields(self, files: Mapping[str, Sequence[bytes]], limits: LimitsConfig) -> dict[str, Any]:
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
        fields |= self.audio_fields(heard, limits)
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
        return as_record(ClipRequest, fields | self.audio_fields(files, limits))


class VideoError(Answer):
    """The reason of a video's failure."""

    code: str
    message: str


class VideoAnswer(Answer):
    """A video in OpenAI's form, with its facts once it is completed."""

    id: str
    object: Literal["video"]
    model: str
    status: VideoStatus
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


def create_videos_router(service: Service, desk: JobDesk, readers: ImageReaders, limits: LimitsConfig) -> APIRouter:
    """Return the routes of videos."""
    router = APIRouter(tags=["videos"])

    async def found(video_id: str) -> Job | None:
        job = await desk.find(video_id)
        return job if job is not None and job.endpoint == _PATH else None

    @router.post(_PATH, response_model=VideoAnswer, responses=documented(*INFERENCE_ERRORS), openapi_extra=_BODY)
    async def create(request: Request) -> Response:
        """Begin a video. It is made beside this request: ask for it by its id until its status is `completed`."""
        await request.body()  # kept for the job: a form is read only once
        body, files = await _read(VideoBody, request, limits)
        record = await readers.read(body.to_record, files, limits)
        checked = await service.checked_clip(record, "video")
        warnings = body.warnings()
        if current_job.get() is not None:
            result = await service.make_clip(checked)
            return Response(result.file, media_type=result.media_type, headers={_FACTS: json.dumps(_facts_of(result))})
        job = await desk.begin(request, _first_facts(body, checked.seed, warnings), prefix="video")
        return json_response(_answer_of(job), headers=warning_header(warnings))

    @router.get(_PATH, response_model=VideosAnswer, responses=documented(400, **_GONE))
    async def page(
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """The videos of this key, the newest first."""
        jobs = await desk.page(JobFilter(endpoint=_PATH), after, limit + 1, order)
        if jobs is None:
            return _not_found(after or "", "after")
        videos = [_answer_of(job) for job in jobs[:limit]]
        ends = (videos[0].id, videos[-1].id) if videos else (None, None)
        has_more = len(jobs) > limit
        answer = VideosAnswer(object="list", data=videos, first_id=ends[0], last_id=ends[1], has_more=has_more)
        return json_response(answer)

    @router.get(_PATH + "/{video_id}", response_model=VideoAnswer, responses=documented(**_GONE))
    async def retrieve(video_id: str) -> Response:
        """A video: how far it is, and what became of it."""
        job = await found(video_id)
        return _not_found(video_id) if job is None else json_response(_answer_of(job))

    @router.get(
        _PATH + "/{video_id}/content",
        response_class=Response,
        responses=documented(400, _409="the video is not completed", _416="no such range", **_GONE),
    )
    async def content(video_id: str, request: Request, variant: Literal["video"] = "video") -> Response:
        """The file of a completed video."""
        job = await found(video_id)
        if job is None:
            return _not_found(video_id)
        if job.status != "done":
            return _not_completed(job)
        response = await result_response(desk, job, request)
        if response.status_code in (200, 206):
            suffix = response.headers["content-type"].partition("/")[2]
            response.headers["Content-Disposition"] = f'attachment; filename="{job.id}.{suffix}"'
            response.headers["Cache-Control"] = "private"
            response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @router.delete(_PATH + "/{video_id}", response_model=VideoDeleted, responses=documented(**_GONE))
    async def delete(video_id: str) -> Response:
        """Delete a video; one that is being made is made no further."""
        if await found(video_id) is None or not await desk.forget(video_id):
            return _not_found(video_id)
        return json_response(VideoDeleted(id=video_id, object="video.deleted", deleted=True))

    return router


def create_audio_router(service: Service, readers: ImageReaders, limits: LimitsConfig) -> APIRouter:
    """Return the route of audio."""
    router = APIRouter(tags=["audio"])
    file: dict[int | str, dict[str, Any]] = {200: {"content": {"audio/wav": {}}, "description": "a WAV file"}}

    @router.post(
        "/v1/audio/generations",
        response_class=Response,
        responses=documented(*INFERENCE_ERRORS) | file,
        openapi_extra=_AUDIO_BODY,
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


def _answer_of(job: Job) -> VideoAnswer:
    facts, ended_s = {**_NO_FACTS, **job.facts}, job.ended_s
    if job.answer is not None and (found := dict(job.answer.headers).get(_FACTS)):
        facts |= json.loads(found)
    status = _STATUSES[job.status]
    if job.status == "running" and job.progress is None:  # it waits for a worker
        status = "queued"
    return VideoAnswer(
        id=job.id,
        object="video",
        model=facts["model"],
        status=status,
        progress=100 if status == "completed" else job.progress or 0,
        created_at=int(job.created_s),
        completed_at=int(ended_s) if ended_s is not None and status == "completed" else None,
        expires_at=None if job.expires_s is None else int(job.expires_s),
        error=_error_of(job) if status == "failed" else None,
        prompt=facts["prompt"],
        size=facts["size"],
        seconds=facts["seconds"],
        remixed_from_video_id=None,
        fps=facts["fps"],
        num_frames=facts["num_frames"],
        seed=facts["seed"],
        num_inference_steps=facts["num_inference_steps"],
        timings_ms=facts["timings_ms"],
        warnings=tuple(facts["warnings"]),
    )


def _error_of(job: Job) -> VideoError:
    error = job.error or JobError("cancelled", "the job was cancelled")
    return VideoError(code=error.code, message=error.message)


def _not_completed(job: Job) -> Response:
    message = f"video {job.id!r} has no file: it is {_answer_of(job).status}"
    return failure_response(Failure(409, message, "invalid_request_error", "video_not_completed", "video_id"))


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
_AUDIO_BODY: Final = _body_schema(AudioBody)


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
