"""The Open Inference Protocol over REST: health, metadata, configuration and inference under /v2.

Sources: KServe v2 REST; Triton's binary, classification, schedule policy and model configuration extensions.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from configs.cluster import LimitsConfig
from deployments.errors import ModelUnavailable
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.models import ModelConfiguration
from deployments.ingress.kserve.records import (
    InferRequest,
    InferResponse,
    ModelMetadata,
    ServerMetadata,
    server_metadata,
)
from deployments.ingress.kserve.rest.compression import compressed_if_accepted, read_body
from deployments.ingress.kserve.rest.generate import add_generate_routes
from deployments.ingress.kserve.rest.messages import (
    InferAnswer,
    InferBody,
    LiveAnswer,
    ModelReadyAnswer,
    ServerReadyAnswer,
    read_request,
    write_response,
)
from deployments.ingress.kserve.rest.routing import (
    INFERENCE_ERRORS,
    PREFIX,
    ProtocolError,
    add_model_route,
    create_protocol_router,
    documented,
    request_body,
)
from deployments.ingress.responses import call_aside, json_response, server_timing

_JSON_LENGTH_HEADER: Final = "Inference-Header-Content-Length"
_LENGTH_HEADER: Final = {
    _JSON_LENGTH_HEADER: {"description": "bytes of JSON, when raw bytes follow", "schema": {"type": "integer"}}
}
_UNSUPPORTED: Final = {
    "/systemsharedmemory": "shared memory",
    "/cudasharedmemory": "shared memory",
    "/trace": "tracing",
    "/logging": "changing the log",
}


def create_inference_router(inference: Inference, limits: LimitsConfig) -> APIRouter:
    """Return the routes of /v2. Those of statistics come before: `/v2/models/stats` is not a model."""
    router = create_protocol_router()
    _add_server_routes(router, inference)
    _add_model_routes(router, inference)
    add_generate_routes(router, inference, limits.max_body_bytes)

    async def infer(request: Request, model: str, version: str) -> Response:
        """Named tensors in, named tensors out: as JSON, or as JSON with raw bytes behind it."""
        await inference.metadata(model, version)  # for an unknown model no tensors are read
        body = await read_body(request, limits.max_body_bytes)
        json_length = request.headers.get(_JSON_LENGTH_HEADER)
        asked = await call_aside(len(body), read_request, model, version, body, json_length)
        return await _written(request, asked, await inference.infer(asked))

    add_model_route(
        router,
        "POST",
        "/infer",
        infer,
        response_model=InferAnswer,
        responses=documented(*INFERENCE_ERRORS)
        | {200: {"content": {"application/octet-stream": {}}, "headers": _LENGTH_HEADER}},
        openapi_extra=request_body(InferBody),
    )
    _add_unsupported(router)
    return router


def _add_server_routes(router: APIRouter, inference: Inference) -> None:
    async def metadata() -> Response:
        """Return name, version and extensions of this server."""
        return json_response(server_metadata())

    @router.get(f"{PREFIX}/health/live", response_model=LiveAnswer)
    async def live() -> Response:
        """Answer 200 as soon as the server runs."""
        return json_response(LiveAnswer(live=True))

    @router.get(f"{PREFIX}/health/ready", response_model=ServerReadyAnswer, responses=documented(503))
    async def ready() -> Response:
        """Answer 200 when models can be asked; 503 while configured ones are still entering the store."""
        if not await inference.server_ready():
            raise ModelUnavailable("models are still entering the store, or none could")
        return json_response(ServerReadyAnswer(ready=True))

    router.add_api_route(PREFIX, metadata, response_model=ServerMetadata)
    router.add_api_route(f"{PREFIX}/", metadata, include_in_schema=False)


def _add_model_routes(router: APIRouter, inference: Inference) -> None:
    async def model_metadata(_: Request, model: str, version: str) -> Response:
        """Return what the model takes and gives; -1 is any size. Optional inputs may be left out."""
        return json_response(await inference.metadata(model, version))

    async def model_ready(_: Request, model: str, version: str) -> Response:
        """Answer 200 when the model can be asked, 503 when not (yet)."""
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


async def _written(request: Request, asked: InferRequest, response: InferResponse) -> Response:
    num_bytes = sum(value.data.nbytes for value in response.outputs)
    body, json_length = await call_aside(num_bytes, write_response, asked, response)
    headers = server_timing(response.timings_ms)
    if json_length is not None:
        headers[_JSON_LENGTH_HEADER] = str(json_length)
    body = await compressed_if_accepted(request, body, headers)
    media_type = "application/json" if json_length is None else "application/octet-stream"
    return Response(body, headers=headers, media_type=media_type)
