"""The Open Inference Protocol over REST: health, metadata, configuration, inference, generation, extensions, under /v2.

Sources: KServe v2 REST; Triton's binary, classification, schedule policy, model configuration, model repository,
statistics and system shared memory extensions. The router of the extensions goes
before that of the protocol, in whose paths `stats` would be a model's name. If shared memory is switched off, its
paths answer 501.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from cluster.door.haproxy_rules import CLIENT
from configs.cluster import LimitsConfig
from deployments.ingress.access.callers import current_tenant
from deployments.ingress.kserve import tensors
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.models import LLM, ModelConfiguration
from deployments.ingress.kserve.repository import ModelIndex, ModelStatistics, Repository, Statistics, statistics_of
from deployments.ingress.kserve.rest.messages import (
    PREFIX,
    InferAnswer,
    InferBody,
    LiveAnswer,
    ModelName,
    ModelReadyAnswer,
    ParametersBody,
    ProtocolError,
    ServerReadyAnswer,
    add_model_route,
    create_protocol_router,
    documented,
    read_json,
    read_parameters,
    read_request,
    request_body,
    write_response,
)
from deployments.ingress.kserve.shared_memory import Owner, RegionStatus, SharedMemory, uid_of_client
from deployments.ingress.kserve.tensors import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    Parameters,
    ServerMetadata,
)
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    Answer,
    call_aside,
    event_of,
    failure_of,
    json_response,
    json_text,
    server_timing,
    stream_events,
)
from deployments.records.errors import InvalidRequest, ModelUnavailable, RequestTooLarge

_PATH = f"{PREFIX}/systemsharedmemory"
_RegionName = Annotated[str, Path(description="the name that the client gave the region")]
_JSON_LENGTH_HEADER: Final = "Inference-Header-Content-Length"
_LENGTH_HEADER: Final = {
    _JSON_LENGTH_HEADER: {"description": "bytes of JSON, when raw bytes follow", "schema": {"type": "integer"}}
}
_UNSUPPORTED: Final = {
    "/cudasharedmemory": "shared memory of CUDA",
    "/trace": "tracing",
    "/logging": "changing the log",
}
_GENERATE_OPTIONS: Final = {spec.name: spec for spec in LLM.inputs if spec.optional}
_GENERATE_EVENT: Final = {
    "type": "object",
    "properties": {"data": {"type": "string", "contentMediaType": "application/json"}},
}
# Clients send `stream` out of habit: the endpoint's name decides already.
_GENERATE_STEERING: Final = ("priority", "timeout", "stream")
_JSON_TYPES: Final = {"BYTES": "string", "BOOL": "boolean", "INT32": "integer", "INT64": "integer", "FP32": "number"}
_MIN_COMPRESSED_BYTES: Final = 1024  # a smaller answer would hardly shrink
_WINDOW_BITS: Final = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_LEVEL: Final = 1  # tensors gain little from more


class IndexBody(BaseModel):
    """The request for the index."""

    ready: bool = Field(False, description="only models that are")


class LoadBody(BaseModel):
    """The request to load or unload a model."""

    parameters: dict[str, Any] = {}


class StatisticsAnswer(Answer):
    """The statistics of this ingress replica since it started. Durations are cumulative, in nanoseconds."""

    model_stats: list[ModelStatistics]


def create_repository_router(repository: Repository, statistics: Statistics) -> APIRouter:
    """Return the routes that list, load and unload models, and show their statistics."""
    router = create_protocol_router()
    _add_repository_routes(router, repository)
    _add_statistics_routes(router, repository, statistics)
    return router


def _add_repository_routes(router: APIRouter, repository: Repository) -> None:
    @router.post(
        f"{PREFIX}/repository/index",
        response_model=list[ModelIndex],
        responses=documented(400, 503),
        openapi_extra=request_body(IndexBody, required=False),
    )
    async def index(request: Request) -> Response:
        """Every model and pipeline with its state."""
        body = await _object(request)
        ready = body.get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequest(f"ready: expected true or false, got {ready!r}", "ready")
        return json_response(await repository.index(ready=ready))

    @router.post(
        f"{PREFIX}/repository/models/{{model}}/load",
        response_class=Response,  # empty, as Triton's
        responses=documented(400, 404, 503),
        openapi_extra=request_body(LoadBody, required=False),
    )
    async def load(request: Request, model: ModelName) -> Response:
        """Bring the model to the replicas that run it; answers when it is usable."""
        await repository.load(model, _parameters(await _object(request)))
        return Response()

    @router.post(
        f"{PREFIX}/repository/models/{{model}}/unload",
        response_class=Response,
        responses=documented(400, 404, 409, 503),
        openapi_extra=request_body(LoadBody, required=False),
    )
    async def unload(request: Request, model: ModelName) -> Response:
        """Take the model out of memory; the next request for it, or `load`, brings it back."""
        await repository.unload(model, _parameters(await _object(request)))
        return Response()


def _add_statistics_routes(router: APIRouter, repository: Repository, statistics: Statistics) -> None:
    async def stats(_: Request, model: str, version: str) -> Response:
        """Return the statistics of a model: counts and cumulative durations of this ingress replica."""
        found = await statistics_of(repository, statistics, model, version)
        return json_response(StatisticsAnswer(model_stats=found))

    @router.get(f"{PREFIX}/models/stats", response_model=StatisticsAnswer, responses=documented(503))
    async def all_stats(request: Request) -> Response:
        """Return the statistics of every model and pipeline."""
        return await stats(request, "", "")

    errors = documented(400, 404, 503)
    add_model_route(router, "GET", "/stats", stats, response_model=StatisticsAnswer, responses=errors)


async def _object(request: Request) -> dict[str, Any]:
    """Return the body as a JSON object; clients without parameters send none."""
    text = await request.body()
    try:
        body = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body is a JSON {type(body).__name__}, expected an object")
    return body


def _parameters(body: dict[str, Any]) -> Parameters:
    parameters = body.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters: expected an object", "parameters")
    return parameters


class RegisterBody(BaseModel, strict=True):
    """A region: `byte_size` bytes from `offset` on of the file `key` in /dev/shm, which is the client's own."""

    key: str
    offset: int = Field(0, ge=0)
    byte_size: int = Field(ge=1)


class RegionAnswer(TypedDict):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int


async def _owner_of(request: Request) -> Owner:
    """Return the calling user and tenant. Raises NotAllowed for a client on another machine."""
    peer = (request.client.host, request.client.port) if request.client else None
    uid = await asyncio.to_thread(uid_of_client, peer, request.headers.get(CLIENT))
    return Owner(uid, current_tenant.get())


def create_shared_memory_router(memory: SharedMemory) -> APIRouter:
    """Return the routes."""
    router = create_protocol_router()
    if not memory.is_on:
        for path in (_PATH, f"{_PATH}/{{rest:path}}"):
            router.add_api_route(path, _switched_off, methods=["GET", "POST"], include_in_schema=False)
        return router
    errors = documented(400, 403, 503)

    @router.get(f"{_PATH}/status", response_model=list[RegionAnswer], responses=errors)
    async def list_all(request: Request) -> Response:
        """The regions of the caller."""
        return json_response([one._asdict() for one in memory.list_regions(await _owner_of(request))])

    @router.get(f"{_PATH}/region/{{region}}/status", response_model=list[RegionAnswer], responses=errors)
    async def list_one(request: Request, region: _RegionName) -> Response:
        """One region of the caller."""
        return json_response([one._asdict() for one in memory.list_regions(await _owner_of(request), region)])

    @router.post(
        f"{_PATH}/region/{{region}}/register",
        response_class=Response,  # empty, as Triton's
        responses=errors,
        openapi_extra=request_body(RegisterBody),
    )
    async def register(request: Request, region: _RegionName) -> Response:
        """Register a region of a file of the client's user."""
        owner, body = await _owner_of(request), read_json(RegisterBody, await request.body())
        await memory.register(owner, RegionStatus(region, body.key, body.offset, body.byte_size))
        return Response()

    @router.post(f"{_PATH}/region/{{region}}/unregister", response_class=Response, responses=errors)
    async def unregister(request: Request, region: _RegionName) -> Response:
        """Forget a region of the caller."""
        await memory.unregister(await _owner_of(request), region)
        return Response()

    @router.post(f"{_PATH}/unregister", response_class=Response, responses=errors)
    async def unregister_all(request: Request) -> Response:
        """Forget all regions of the caller."""
        await memory.unregister(await _owner_of(request))
        return Response()

    return router


async def _switched_off() -> Response:
    return json_response(ProtocolError(error="shared memory is not supported by this server"), 501)


def create_server_router(inference: Inference) -> APIRouter:
    """Return the routes of the server itself: what it is, and whether it lives and is ready."""
    router = create_protocol_router()

    async def metadata() -> Response:
        """Return name, version and extensions of this server."""
        return json_response(inference.server_metadata())

    @router.get(f"{PREFIX}/health/live", response_model=LiveAnswer)
    async def live() -> Response:
        """Answer 200 as soon as the server runs."""
        return json_response(LiveAnswer(live=True))

    @router.get(f"{PREFIX}/health/ready", response_model=ServerReadyAnswer, responses=documented(503))
    async def ready() -> Response:
        """Answer 200 when models can be used; 503 while configured ones are still entering the store."""
        if not await inference.server_ready():
            raise ModelUnavailable("models are still entering the store, or none could")
        return json_response(ServerReadyAnswer(ready=True))

    router.add_api_route(PREFIX, metadata, response_model=ServerMetadata)
    router.add_api_route(f"{PREFIX}/", metadata, include_in_schema=False)
    return router


def create_inference_router(inference: Inference, limits: LimitsConfig) -> APIRouter:
    """Return the routes of models. Those of statistics come before: `/v2/models/stats` is not a model."""
    router = create_protocol_router()
    _add_model_routes(router, inference)
    _add_generate_routes(router, inference, limits.max_body_bytes)

    async def infer(request: Request, model: str, version: str) -> Response:
        """Named tensors in, named tensors out: as JSON, or as JSON followed by raw bytes."""
        await inference.metadata(model, version)  # for an unknown model no tensors are read
        body = await _read_body(request, limits.max_body_bytes)
        json_length = request.headers.get(_JSON_LENGTH_HEADER)
        asked = await call_aside(len(body), read_request, model, version, body, json_length)
        if asked.has_shared:
            asked = replace(asked, owner=await _owner_of(request))
        return await _infer_response(request, asked, await inference.infer(asked))

    add_model_route(
        router,
        "POST",
        "/infer",
        infer,
        response_model=InferAnswer,
        responses=documented(403, *INFERENCE_ERRORS)
        | {200: {"content": {"application/octet-stream": {}}, "headers": _LENGTH_HEADER}},
        openapi_extra=request_body(InferBody),
    )
    _add_unsupported(router)
    return router


def _add_model_routes(router: APIRouter, inference: Inference) -> None:
    async def model_metadata(_: Request, model: str, version: str) -> Response:
        """Return the model's inputs and outputs; -1 is any size. Optional inputs may be left out."""
        return json_response(await inference.metadata(model, version))

    async def model_ready(_: Request, model: str, version: str) -> Response:
        """Answer 200 when the model can be used, 503 when not (yet)."""
        if not await inference.ready(model, version):
            raise ModelUnavailable(f"model {model!r} is not ready")
        return json_response(ModelReadyAnswer(name=model, ready=True))

    async def model_config(_: Request, model: str, version: str) -> Response:
        """Return Triton's model configuration."""
        return json_response(await inference.configuration(model, version))

    errors = documented(400, 404, 503)
    add_model_route(router, "GET", "", model_metadata, response_model=ModelMetadata, responses=errors)
    add_model_route(router, "GET", "/ready", model_ready, response_model=ModelReadyAnswer, responses=errors)
    add_model_route(router, "GET", "/config", model_config, response_model=ModelConfiguration, responses=errors)


def _add_unsupported(router: APIRouter) -> None:
    """Extensions that clients ask for by habit: a plain answer instead of an unknown path."""

    async def unsupported(request: Request) -> Response:
        what = next(what for part, what in _UNSUPPORTED.items() if part in request.url.path)
        return json_response(ProtocolError(error=f"{what} is not supported by this server"), 501)

    paths = [f"{PREFIX}{part}" for part in _UNSUPPORTED] + [f"{PREFIX}/models/{{model}}/trace"]
    for path in paths:
        for suffix in ("", "/{rest:path}"):
            router.add_api_route(path + suffix, unsupported, methods=["GET", "POST"], include_in_schema=False)


async def _infer_response(request: Request, asked: InferRequest, response: InferResponse) -> Response:
    num_bytes = sum(value.data.nbytes for value in response.outputs)
    body, json_length = await call_aside(num_bytes, write_response, asked, response)
    headers = server_timing(response.timings_ms)
    if json_length is not None:
        headers[_JSON_LENGTH_HEADER] = str(json_length)
    body = await _compressed_if_accepted(request, body, headers)
    media_type = "application/json" if json_length is None else "application/octet-stream"
    return Response(body, headers=headers, media_type=media_type)


class _GenerateBody(BaseModel, extra="allow", strict=True):
    """A text to continue. Options of the model may stand in `parameters` or beside it."""

    text_input: str
    id: str = ""
    parameters: ParametersBody | None = None


class GenerateAnswer(Answer):
    """A text, or the next piece of one."""

    model_name: str
    model_version: str
    id: str | None = None
    text_output: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


def _add_generate_routes(router: APIRouter, inference: Inference, max_body_bytes: int) -> None:
    """Add the routes `/generate` and `/generate_stream` of each model."""

    async def asked_of(request: Request, model: str, version: str) -> InferRequest:
        body = await _read_body(request, max_body_bytes)
        return await call_aside(len(body), _generate_request, model, version, body)

    async def generate(request: Request, model: str, version: str) -> Response:
        """The whole continuation of a text."""
        await inference.metadata(model, version)  # an unknown model is reported before errors of the body
        response = await inference.infer(await asked_of(request, model, version))
        return json_response(_generate_answer(response), headers=server_timing(response.timings_ms))

    async def generate_stream(request: Request, model: str, version: str) -> Response:
        """The continuation of a text, piece by piece, as server-sent events. An error in between is an event too."""
        await inference.metadata(model, version)
        pieces = inference.infer_stream(await asked_of(request, model, version))
        return await stream_events(pieces, _generate_events, _error_event)

    docs: dict[str, Any] = {
        "responses": documented(*INFERENCE_ERRORS),
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _generate_schema()}}}
        },
    }
    add_model_route(router, "POST", "/generate", generate, response_model=GenerateAnswer, **docs)
    stream_docs = {"content": {"text/event-stream": {"schema": _GENERATE_EVENT}}}
    docs["responses"] = docs["responses"] | {200: stream_docs}
    add_model_route(router, "POST", "/generate_stream", generate_stream, response_class=StreamingResponse, **docs)


def _generate_request(model: str, version: str, body: bytes) -> InferRequest:
    form = read_json(_GenerateBody, body)
    beside, inside = form.model_extra or {}, form.parameters or {}
    options = beside | inside
    for name in options:
        if name not in _GENERATE_OPTIONS and name not in _GENERATE_STEERING:
            raise InvalidRequest(
                f"unknown option {name!r} (known: {', '.join((*_GENERATE_OPTIONS, *_GENERATE_STEERING))})", name
            )
        if name in beside and name in inside:
            raise InvalidRequest(f"{name}: given both in parameters and outside of them", name)
    inputs = [tensors.from_json("text_input", "BYTES", (1,), [form.text_input])]
    if isinstance(options.get("stop"), list):  # the only option with several values for one text
        stop = options.pop("stop")
        inputs.append(tensors.from_json("stop", "BYTES", (len(stop),), stop))
    if not isinstance(options.pop("stream", False), bool):
        raise InvalidRequest("stream: expected true or false", "stream")
    return InferRequest(model, tuple(inputs), version, form.id, read_parameters("parameters", options))


def _generate_answer(response: InferResponse) -> GenerateAnswer:
    fields: dict[str, Any] = {value.name: tensors.to_json(value)[0] for value in response.outputs}
    if response.id:
        fields["id"] = response.id
    return GenerateAnswer(model_name=response.model, model_version=response.version, **fields)


def _generate_schema() -> dict[str, Any]:
    """Return the schema of a request with the options that text models have, for the OpenAPI page."""
    options: dict[str, Any] = {name: {"type": _JSON_TYPES[spec.datatype]} for name, spec in _GENERATE_OPTIONS.items()}
    options["stop"] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    options |= {"priority": {"type": "integer"}, "timeout": {"type": "integer", "description": "microseconds"}}
    options["stream"] = {"type": "boolean"}
    parameters = {"type": "object", "properties": options, "additionalProperties": False}
    own = {"text_input": {"type": "string"}, "id": {"type": "string"}, "parameters": parameters}
    return {
        "type": "object",
        "required": ["text_input"],
        "properties": own | options,
        "additionalProperties": False,
    }


async def _generate_events(pieces: AsyncIterator[InferResponse]) -> AsyncIterator[str]:
    async for piece in pieces:
        yield event_of(json_text(_generate_answer(piece)))


def _error_event(error: Exception) -> str:
    return event_of(json_text(ProtocolError(error=failure_of(error).message)))


async def _read_body(request: Request, max_bytes: int) -> bytes:
    """Return the decompressed body.

    Raises RequestTooLarge above `max_bytes`, InvalidRequest for damage and for unknown codings.
    """
    body = await request.body()
    encoding = request.headers.get("content-encoding", "")
    if not encoding:
        return body
    return await asyncio.to_thread(_decompressed, body, encoding, max_bytes)


async def _compressed_if_accepted(request: Request, body: bytes, headers: dict[str, str]) -> bytes:
    """Return the body of a response, compressed if it is worth it and the client accepts it; `headers` then say so."""
    headers["Vary"] = "Accept-Encoding"
    coding = _accepted_coding(request.headers.get("accept-encoding", ""))
    if coding is None or len(body) < _MIN_COMPRESSED_BYTES:
        return body
    headers["Content-Encoding"] = coding
    return await asyncio.to_thread(_compressed, body, coding)


def _decompressed(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """Return the decompressed body. Never makes more than `max_bytes`, however much the body would become.

    Raises RequestTooLarge for more, InvalidRequest for damage and for codings that are not known.
    """
    name = encoding.strip().lower()
    if name in ("", "identity"):
        return body
    if name not in _WINDOW_BITS:
        raise InvalidRequest(f"Content-Encoding {encoding!r} is not known (known: gzip, deflate, identity)")
    decompressor = zlib.decompressobj(_WINDOW_BITS[name])
    try:
        plain = decompressor.decompress(body, max_bytes + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {name}, as its Content-Encoding says: {error}") from None
    if len(plain) > max_bytes:
        raise RequestTooLarge(f"the body has more than {max_bytes} bytes when it is decompressed")
    if not decompressor.eof:
        raise InvalidRequest(f"the body is {name} that ends too early")
    if decompressor.unused_data:
        raise InvalidRequest(f"{len(decompressor.unused_data)} bytes follow the {name} data of the body")
    return plain


def _accepted_coding(accept_encoding: str) -> str | None:
    """Return the first known coding that the header accepts; None for no compression."""
    for part in accept_encoding.lower().split(","):
        name, _, weight = part.partition(";")
        refused = weight.replace(" ", "").rstrip("0") in ("q=", "q=0.")
        if name.strip() in ("gzip", "deflate") and not refused:
            return name.strip()
    return None


def _compressed(body: bytes, coding: str) -> bytes:
    return gzip.compress(body, _LEVEL) if coding == "gzip" else zlib.compress(body, _LEVEL)
