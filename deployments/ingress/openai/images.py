"""POST /v1/images/generations, /edits and /variations. Images are read by decoder processes, and written in threads."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, TypeVar

from fastapi import APIRouter, Request
from pydantic import with_config
from pydantic_core import to_json
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from configs.cluster import LimitsConfig
from deployments.ingress.jobs.desk import JobDesk, is_for_later
from deployments.ingress.jobs.routes import BEGUN, begun_response
from deployments.ingress.messages.bodies import JsonRoute, warning_header
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    documented,
    error_event,
    json_response,
    json_with_list,
    server_timing,
    stream_events,
)
from deployments.ingress.openai.image_bodies import JSON_FIELDS, EditBody, GenerationBody, ImagesBody, VariationBody
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.image_files import ImageFormat, ImageLinks, describe_image, encode_image
from deployments.ingress.openai.image_stream import (
    LAST_EVENT_ID,
    ImageEvents,
    ImageOrigin,
    ResumableStreams,
    Task,
    origin_of,
)
from deployments.ingress.openai.uploads import read_form, validated
from deployments.ingress.service.service import Service
from deployments.records import ImageRequest, ImageResult

# With `stream`, events as in image_stream.py.
_RESPONSES: Final = (
    documented(*INFERENCE_ERRORS, _409="the idempotency key is that of another request")
    | BEGUN
    | {
        200: {"content": {"text/event-stream": {}}},
        204: {"description": "`Last-Event-ID` is that of the stream's last event: there are no more"},
    }
)
_FormT = TypeVar("_FormT", bound=VariationBody)


@with_config({"extra": "forbid"})
class ImageData(TypedDict, total=False):
    """An image file in base64, or a link to it that lasts for a while."""

    b64_json: str
    url: str


class ImagesAnswer(ImageOrigin):
    """The images of one request, and their origin."""

    created: int
    data: list[ImageData]
    output_format: ImageFormat

    @classmethod
    def without_data(cls, result: ImageResult, format_: ImageFormat) -> ImagesAnswer:
        """Return the answer without its images."""
        return cls(
            created=int(time.time()),
            data=[],
            output_format=format_,
            **origin_of(result),
        )


def create_images_router(
    service: Service,
    links: ImageLinks,
    streams: ResumableStreams,
    readers: ImageReaders,
    limits: LimitsConfig,
    desk: JobDesk,
) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["images"], route_class=JsonRoute)

    async def respond(body: ImagesBody, record: ImageRequest, request: Request, task: Task) -> Response:
        if is_for_later(body.background, is_stream=bool(body.stream)):
            return begun_response(await desk.begin(request, {"model": body.model}), body.warnings())
        if body.stream:
            pieces, image_events = service.generate_stream(record), ImageEvents(task, body, record)
            if body.resumable:
                if last_id := request.headers.get(LAST_EVENT_ID):
                    return streams.resume(last_id)
                return await streams.begin(pieces, image_events)
            return await stream_events(
                pieces, image_events.events_of, error_event, headers=warning_header(body.warnings())
            )
        result = await service.generate(record)
        result = replace(result, warnings=(*result.warnings, *body.warnings()))
        result = result.opaque("a JPEG") if body.output_format == "jpeg" else result
        write = partial(_write_image, body, record, links, str(request.base_url), result)
        images = await asyncio.gather(*(asyncio.to_thread(write, index) for index in range(len(result.images))))
        answer = ImagesAnswer.without_data(result, body.output_format)
        content = await asyncio.to_thread(json_with_list, answer, "data", images)
        headers = server_timing(result.timings_ms) | warning_header(body.warnings())
        return json_response(content, headers=headers)

    @router.post("/v1/images/generations", response_model=ImagesAnswer, responses=_RESPONSES)
    async def generate(body: GenerationBody, request: Request) -> Response:
        """Make images from a prompt, and from images where the model can."""
        record = await readers.read(body.to_record, limits) if body.has_images else body.to_record(limits)
        return await respond(body, record, request, "image_generation")

    @router.post(
        "/v1/images/edits", response_model=ImagesAnswer, responses=_RESPONSES, openapi_extra=_form_of(EditBody)
    )
    async def edit(request: Request) -> Response:
        """Paint the masked or transparent part of an image anew by a prompt, or all of it without such a part."""
        body, files = await _read(EditBody, request, limits)
        return await respond(body, await readers.read(body.to_record, files, limits), request, "image_edit")

    @router.post(
        "/v1/images/variations",
        response_model=ImagesAnswer,
        responses=_RESPONSES,
        openapi_extra=_form_of(VariationBody),
    )
    async def vary(request: Request) -> Response:
        """Make images like a given image."""
        body, files = await _read(VariationBody, request, limits)
        return await respond(body, await readers.read(body.to_record, files, limits), request, "image_edit")

    return router


def _write_image(
    body: ImagesBody, record: ImageRequest, links: ImageLinks, base_url: str, result: ImageResult, index: int
) -> bytes:
    """Return the item of the answer's `data` for one image, as the body asks for it. Blocks: it compresses, or writes
    a file.
    """
    description = describe_image(record, result, index)
    file = encode_image(
        result.images[index], body.output_format, compression=body.output_compression, description=description
    )
    if body.response_format == "url":
        return to_json(ImageData(url=links.keep_file(file, body.output_format, base_url)))
    return to_json(ImageData(b64_json=base64.b64encode(file).decode()))


async def _read(class_: type[_FormT], request: Request, limits: LimitsConfig) -> tuple[_FormT, dict[str, list[bytes]]]:
    """Return the fields and files of a form. Raises what FastAPI raises for a field that is wrong."""
    await request.body()  # kept for a job: a form is read only once
    fields, files = await read_form(request, limits.max_upload_bytes)
    return await validated(class_, fields, sum(map(len, fields.values()))), files


@cache  # one for all applications of a process: tests build hundreds
def _form_of(class_: type[VariationBody]) -> dict[str, Any]:
    """Return the OpenAPI schema of a form's body."""
    schema = class_.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    for name in JSON_FIELDS:
        schema["properties"][name] = {
            "type": "string",
            "description": f"JSON, as in `{name}` of /v1/images/generations",
        }
    files = {"image": {"type": "string", "format": "binary"}, "mask": {"type": "string", "format": "binary"}}
    schema["properties"] = files | schema["properties"]
    schema["required"] = ["image", *schema["required"]]
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
