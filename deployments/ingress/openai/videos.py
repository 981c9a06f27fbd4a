"""/v1/videos: jobs, begun by one request and fetched by others. POST /v1/audio/generations answers at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import from_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from configs.cluster import LimitsConfig, VideosConfig
from deployments.errors import InvalidRequest, Overloaded
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.errors import INFERENCE_ERRORS, Failure, documented, failure_response
from deployments.ingress.json_route import JsonRoute
from deployments.ingress.openai.answers import TimesMs, warning_header
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.image_uploads import read_form
from deployments.ingress.openai.kept_videos import KeptVideo, KeptVideos, Status
from deployments.ingress.openai.video_bodies import AudioBody, VideoBody
from deployments.ingress.openai.video_jobs import VideoJobs
from deployments.ingress.responses import Answer, call_aside, json_response, server_timing
from deployments.ingress.service import Service

_GONE: Final = {"_404": "no such video: it was deleted, has ended, or is another key's", "_503": "no video is kept now"}
_FILE_TYPES: Final = {"mp4": "video/mp4", "webm": "video/webm"}
ResultT = TypeVar("ResultT")


class VideoError(Answer):
    """The reason why a video could not be made."""

    code: str
    message: str


class VideoAnswer(Answer):
    """A video as OpenAI has it, and what it was made with once it is completed."""

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
    """The end of a video."""

    id: str
    object: Literal["video.deleted"]
    deleted: Literal[True]


def create_videos_router(
    service: Service, config: VideosConfig, cluster: str, readers: ImageReaders, limits: LimitsConfig
) -> APIRouter:
    """Return the routes of videos."""
    router = APIRouter(tags=["videos"])
    kept = KeptVideos(config, cluster)
    jobs = VideoJobs(service, kept, config)

    def answer_of(video: KeptVideo) -> VideoAnswer:
        return _answer_of(video, config.ttl_s)

    @router.post("/v1/videos", response_model=VideoAnswer, responses=documented(*INFERENCE_ERRORS), openapi_extra=_BODY)
    async def create(request: Request) -> Response:
        """Begin a video. It is made beside this request: ask for it by its id until its status is `completed`."""
        body, files = await _read(request, limits)
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
        """A video: how far it is, and what became of it."""
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
        """Delete a video; one that is being made is made no further."""
        if not await _asked(kept.forget, current_tenant.get(), video_id):
            return _not_found(video_id)
        jobs.end_job(video_id)
        return json_response(VideoDeleted(id=video_id, object="video.deleted", deleted=True))

    return router


def create_audio_router(service: Service) -> APIRouter:
    """Return the route of audio."""
    router = APIRouter(tags=["audio"], route_class=JsonRoute)
    file: dict[int | str, dict[str, Any]] = {200: {"content": {"audio/wav": {}}, "description": "a WAV file"}}

    @router.post("/v1/audio/generations", response_class=Response, responses=documented(*INFERENCE_ERRORS) | file)
    async def generate(body: AudioBody) -> Response:
        """Music or sounds of a prompt, as a WAV file."""
        result = await service.make_clip(await service.checked_clip(body.to_record(), "audio"))
        warnings = (*result.warnings, *body.warnings())
        headers = server_timing(result.timings_ms) | warning_header(warnings) | {"X-Atelier-Seed": str(result.seed)}
        return Response(result.file, media_type=result.media_type, headers=headers)

    return router


async def _asked(method: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Return what the kept videos answer. Raises Overloaded where their folder cannot be used."""
    try:
        return await run_in_threadpool(method, *arguments)
    except OSError as error:
        raise Overloaded(f"the folder of videos cannot be used now: {error}") from None


async def _read(request: Request, limits: LimitsConfig) -> tuple[VideoBody, dict[str, list[bytes]]]:
    """Return the fields and files of a body, JSON or a form. Raises what FastAPI raises for a field that is wrong."""
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
    try:
        return await call_aside(num_bytes, VideoBody.model_validate, fields), files
    except ValidationError as error:
        problems = [detail | {"loc": ("body", *detail["loc"])} for detail in error.errors()]
        raise RequestValidationError(problems, body=fields) from None


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


def _form_schema() -> dict[str, Any]:
    schema = VideoBody.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs", {})
    schema["properties"][_INPUT] = {"anyOf": [{"type": "string"}, parts["ReferenceBody"]]}
    form = json.loads(json.dumps(schema))
    form["properties"][_INPUT] = {"type": "string", "format": "binary"}
    for name in ("extra", "scheduler_options"):
        form["properties"][name] = {"type": "string", "description": "JSON"}
    return {"application/json": {"schema": schema}, "multipart/form-data": {"schema": form}}


_INPUT: Final = "input_reference"
_BODY: Final = {"requestBody": {"required": True, "content": _form_schema()}}
