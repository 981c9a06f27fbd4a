"""Triton's generate extension: text models asked with one plain JSON object, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from deployments.errors import InvalidRequest
from deployments.ingress.kserve import tensors
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.models import LLM
from deployments.ingress.kserve.records import InferRequest, InferResponse
from deployments.ingress.kserve.rest.compression import read_body
from deployments.ingress.kserve.rest.messages import ParametersBody, read_json, read_parameters
from deployments.ingress.kserve.rest.routing import (
    INFERENCE_ERRORS,
    add_model_route,
    documented,
    protocol_error_response,
)
from deployments.ingress.responses import Answer, EventStream, event_of, json_response, json_text, server_timing

_OPTIONS: Final = {spec.name: spec for spec in LLM.inputs if spec.optional}
_EVENT: Final = {"type": "object", "properties": {"data": {"type": "string", "contentMediaType": "application/json"}}}
# `stream` is what clients send out of habit: the endpoint's name has decided already.
_STEERING: Final = ("priority", "timeout", "stream")
_JSON_TYPES: Final = {"BYTES": "string", "BOOL": "boolean", "INT32": "integer", "INT64": "integer", "FP32": "number"}


class GenerateBody(BaseModel):
    """A text to go on with. Options of the model may stand in `parameters` or beside it."""

    model_config = ConfigDict(extra="allow", strict=True)

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


def add_generate_routes(router: APIRouter, inference: Inference, max_body_bytes: int) -> None:
    """Add the routes `/generate` and `/generate_stream` of each model."""

    async def generate(request: Request, model: str, version: str) -> Response:
        """The whole continuation of a text."""
        await inference.metadata(model, version)  # an unknown model is said before anything about the body
        response = await inference.infer(_asked(model, version, await read_body(request, max_body_bytes)))
        return json_response(_answer(response), headers=server_timing(response.timings_ms))

    async def generate_stream(request: Request, model: str, version: str) -> Response:
        """The continuation of a text, piece by piece, as server-sent events. An error in between is an event too."""
        await inference.metadata(model, version)
        pieces = inference.infer_stream(_asked(model, version, await read_body(request, max_body_bytes)))
        opening = await anext(pieces)  # awaited here: a refused request is a 4xx and not an event in a 200
        return EventStream(_events(opening, pieces), pieces)

    docs: dict[str, Any] = {
        "responses": documented(*INFERENCE_ERRORS),
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": _schema()}}}},
    }
    add_model_route(router, "POST", "/generate", generate, response_model=GenerateAnswer, **docs)
    stream_docs = {"content": {"text/event-stream": {"schema": _EVENT}}}
    docs["responses"] = docs["responses"] | {200: stream_docs}
    add_model_route(router, "POST", "/generate_stream", generate_stream, response_class=StreamingResponse, **docs)


def _asked(model: str, version: str, body: bytes) -> InferRequest:
    form = read_json(GenerateBody, body)
    beside, inside = form.model_extra or {}, form.parameters or {}
    options = beside | inside
    for name in options:
        if name not in _OPTIONS and name not in _STEERING:
            raise InvalidRequest(f"unknown option {name!r} (known: {', '.join((*_OPTIONS, *_STEERING))})", name)
        if name in beside and name in inside:
            raise InvalidRequest(f"{name}: given in parameters and beside them", name)
    inputs = [tensors.from_json("text_input", "BYTES", (1,), [form.text_input])]
    if isinstance(options.get("stop"), list):  # the one option of which a text can have several
        stop = options.pop("stop")
        inputs.append(tensors.from_json("stop", "BYTES", (len(stop),), stop))
    if not isinstance(options.pop("stream", False), bool):
        raise InvalidRequest("stream: expected true or false", "stream")
    return InferRequest(model, tuple(inputs), version, form.id, read_parameters("parameters", options))


def _answer(response: InferResponse) -> GenerateAnswer:
    fields: dict[str, Any] = {value.name: tensors.to_json(value)[0] for value in response.outputs}
    if response.id:
        fields["id"] = response.id
    return GenerateAnswer(model_name=response.model, model_version=response.version, **fields)


def _schema() -> dict[str, Any]:
    """Return the schema of a request with the options that text models have, for the OpenAPI page."""
    options: dict[str, Any] = {name: {"type": _JSON_TYPES[spec.datatype]} for name, spec in _OPTIONS.items()}
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


async def _events(opening: InferResponse, pieces: AsyncIterator[InferResponse]) -> AsyncIterator[str]:
    yield event_of(json_text(_answer(opening)))
    try:
        async for piece in pieces:
            yield event_of(json_text(_answer(piece)))
    except Exception as error:
        yield event_of(bytes(protocol_error_response(error).body).decode())
