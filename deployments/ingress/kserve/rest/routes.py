"""The Open Inference Protocol over REST: health, metadata, configuration and inference under /v2.

Sources: KServe v2 REST; Triton's binary, classification, schedule policy and model configuration extensions.
"""

from __future__ import annotations

import asyncio
from importlib import metadata as packages
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from configs.cluster import LimitsConfig
from deployments.errors import ModelUnavailable
from deployments.ingress.json_answers import aside
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.records import EXTENSIONS, SERVER_NAME, InferRequest, InferResponse
from deployments.ingress.kserve.rest import bodies as rest_bodies
from deployments.ingress.kserve.rest.compression import (
    MIN_COMPRESSED_BYTES,
    accepted_coding,
    compressed,
    decompressed,
)
from deployments.ingress.kserve.rest.errors import PREFIX, documented
from deployments.ingress.kserve.rest.generate import add_generate_routes
from deployments.ingress.kserve.rest.messages import read_request, write_response
from deployments.ingress.kserve.rest.model_routes import add_model_route, create_protocol_router
from deployments.ingress.timing import server_timing
from deployments.pipelines.records import TensorSpec

JSON_LENGTH_HEADER: Final = "Inference-Header-Content-Length"
_UNSUPPORTED: Final = {
    "/systemsharedmemory": "shared memory",
    "/cudasharedmemory": "shared memory",
    "/trace": "tracing",
    "/logging": "changing the log",
}


def create_router(inference: Inference, limits: LimitsConfig) -> APIRouter:
    """Routes of /v2. Those of statistics come before: `/v2/models/stats` is not a model."""
    router = create_protocol_router()
    _add_server_routes(router, inference)
    _add_model_routes(router, inference)
    add_generate_routes(router, inference, lambda request: read_body(request, limits.max_body_bytes))

    async def infer(request: Request, model: str, version: str) -> Response:
        """Named tensors in, named tensors out: as JSON, or as JSON with raw bytes behind it."""
        await inference.metadata(model, version)  # for an unknown model no tensors are read
        body = await read_body(request, limits.max_body_bytes)
        json_length = request.headers.get(JSON_LENGTH_HEADER)
        asked = await aside(len(body), read_request, model, version, body, json_length)
        return await _written(request, asked, await inference.infer(asked))

    add_model_route(
        router,
        "POST",
        "/infer",
        infer,
        response_model=rest_bodies.InferResponseBody,
        responses=documented(400, 404, 413, 429, 500, 503, 504)
        | {200: {"content": {"application/octet-stream": {}}, "headers": _LENGTH_HEADER}},
        openapi_extra={"requestBody": _request_body(rest_bodies.InferBody)},
    )
    _add_unsupported(router)
    return router


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body as it was before it was compressed, never of more than `max_bytes`."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "")
    if not encoding:
        return body
    return await asyncio.to_thread(decompressed, body, encoding, max_bytes)


def server_metadata() -> dict[str, Any]:
    """Name, version and extensions, the same for every transport."""
    try:
        number = packages.version("atelier")
    except packages.PackageNotFoundError:  # run from a tree that is not installed
        number = "0"
    return {"name": SERVER_NAME, "version": number, "extensions": list(EXTENSIONS)}


def _add_server_routes(router: APIRouter, inference: Inference) -> None:
    async def metadata() -> Response:
        """What this server is."""
        return JSONResponse(server_metadata())

    @router.get(f"{PREFIX}/health/live", response_model=rest_bodies.LiveBody)
    async def live() -> Response:
        """Whether the server answers at all."""
        return JSONResponse({"live": True})

    @router.get(f"{PREFIX}/health/ready", response_model=rest_bodies.ServerReadyBody, responses=documented(503))
    async def ready() -> Response:
        """200 when models can be asked; 503 while configured ones are still entering the store."""
        if not await inference.server_ready():
            raise ModelUnavailable("models are still entering the store, or none could")
        return JSONResponse({"ready": True})

    router.add_api_route(PREFIX, metadata, response_model=rest_bodies.ServerMetadataBody)
    router.add_api_route(f"{PREFIX}/", metadata, include_in_schema=False)


def _add_model_routes(router: APIRouter, inference: Inference) -> None:
    async def model_metadata(_: Request, model: str, version: str) -> Response:
        """What the model takes and gives; -1 is any size. Optional inputs may be left out."""
        found = await inference.metadata(model, version)
        form = {"name": found.name, "versions": found.versions, "platform": found.platform}
        tensors = {"inputs": [_spec(spec) for spec in found.inputs], "outputs": [_spec(spec) for spec in found.outputs]}
        return JSONResponse(form | tensors | {"parameters": dict(found.parameters)})

    async def model_ready(_: Request, model: str, version: str) -> Response:
        """200 when the model can be asked, 503 when not (yet)."""
        if not await inference.ready(model, version):
            raise ModelUnavailable(f"model {model!r} is not ready")
        return JSONResponse({"name": model, "ready": True})

    async def model_config(_: Request, model: str, version: str) -> Response:
        """Triton's model configuration."""
        return JSONResponse(await inference.configuration(model, version))

    errors = documented(400, 404, 503)
    add_model_route(router, "GET", "", model_metadata, response_model=rest_bodies.ModelMetadataBody, responses=errors)
    add_model_route(router, "GET", "/ready", model_ready, response_model=rest_bodies.ModelReadyBody, responses=errors)
    add_model_route(router, "GET", "/config", model_config, response_model=dict[str, Any], responses=errors)


def _add_unsupported(router: APIRouter) -> None:
    """Extensions that clients ask for by habit: a plain answer instead of an unknown path."""

    async def unsupported(request: Request) -> Response:
        what = next(what for part, what in _UNSUPPORTED.items() if part in request.url.path)
        return JSONResponse({"error": f"{what} is not supported by this server"}, 501)

    paths = [f"{PREFIX}{part}" for part in _UNSUPPORTED] + [f"{PREFIX}/models/{{model}}/trace"]
    for path in paths:
        for suffix in ("", "/{rest:path}"):
            router.add_api_route(path + suffix, unsupported, methods=["GET", "POST"], include_in_schema=False)


async def _written(request: Request, asked: InferRequest, response: InferResponse) -> Response:
    num_bytes = sum(value.data.nbytes for value in response.outputs)
    body, json_length = await aside(num_bytes, write_response, asked, response)
    headers = server_timing(response.timings_ms)
    if json_length is not None:
        headers[JSON_LENGTH_HEADER] = str(json_length)
    coding = accepted_coding(request.headers.get("accept-encoding", ""))
    headers["Vary"] = "Accept-Encoding"
    if coding and len(body) >= MIN_COMPRESSED_BYTES:
        body = await asyncio.to_thread(compressed, body, coding)
        headers["Content-Encoding"] = coding
    media_type = "application/json" if json_length is None else "application/octet-stream"
    return Response(body, headers=headers, media_type=media_type)


def _spec(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape, "optional": spec.optional}


_LENGTH_HEADER: Final = {
    JSON_LENGTH_HEADER: {"description": "bytes of JSON, when raw bytes follow", "schema": {"type": "integer"}}
}


def _request_body(class_: type[BaseModel]) -> dict[str, Any]:
    """For the OpenAPI page, of a body that the route reads itself: the schema with its parts written out."""
    schema = class_.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            part = node.get("$ref", "").removeprefix("#/$defs/") if isinstance(node.get("$ref"), str) else ""
            return inlined(parts[part]) if part else {key: inlined(value) for key, value in node.items()}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    return {"required": True, "content": {"application/json": {"schema": inlined(schema)}}}
