"""The frame of the REST side: routes with and without a version, errors, classes of bodies, the codec of inference.

A body of inference is JSON alone, or JSON followed by raw tensors. Sources: KServe v2, "Inference Request JSON
Object"; Triton, "Binary Tensor Data Extension". Errors are `{"error": "what is wrong"}`, with the statuses and texts of
the one table in `deployments/ingress/messages/responses.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from typing import Annotated, Any, Final, Literal, NoReturn, TypeVar

from fastapi import APIRouter, Path
from pydantic import BaseModel, Field, GetCoreSchemaHandler, JsonValue, ValidationError
from pydantic_core import CoreSchema, to_json
from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.kserve import tensors
from deployments.ingress.kserve.tensors import (
    MAX_TENSORS,
    SHARED_MEMORY,
    VERSION,
    InferRequest,
    InferResponse,
    OutputWish,
    Parameters,
    SharedTensor,
    read_part,
    read_wish,
)
from deployments.ingress.messages.bodies import check_json_size
from deployments.ingress.messages.responses import (
    Answer,
    Failure,
    documented_as,
    json_response,
    json_text,
    json_with_list,
)
from deployments.pipelines.records import Datatype, TensorValue
from deployments.records.errors import InvalidRequest
from deployments.records.requests import failing_fast

PREFIX: Final = "/v2"
Handler = Callable[[Request, str, str], Awaitable[Response]]
ModelName = Annotated[str, Path(description="a name of GET /v1/models, or of a pipeline")]
_ModelVersion = Annotated[str, Path(description=f"{VERSION!r}, the one that is served", examples=[VERSION])]
_PIECE_ELEMENTS: Final = 2**14
BodyT = TypeVar("BodyT", bound=BaseModel)
Scalar = bool | int | float | str
# The members are checked one by one as they are read, so that a wrong one gets an error of its own.
ParametersBody = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"additionalProperties": {"type": ["string", "number", "boolean"]}}),
]
TensorData = Annotated[list[Any], Field(description="the elements in row-major order, flat or nested like the shape")]


class ProtocolError(Answer):
    """The form of every error under /v2."""

    error: str


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route."""
    return documented_as(ProtocolError, *statuses)


def protocol_failure_response(failure: Failure) -> Response:
    """Return `failure` in the protocol's form."""
    return json_response(ProtocolError(error=failure.message), failure.status, failure.headers)


def create_protocol_router() -> APIRouter:
    """Return a router of the protocol's routes, whose errors `error_forms.py` puts into its form."""
    return APIRouter(tags=["open inference protocol"])


def add_model_route(router: APIRouter, method: str, suffix: str, handler: Handler, **docs: Any) -> None:
    """Add a route of one model twice, as in the protocol: with a version in the path and without.

    `handler` gets the request, the model's name and the version, "" for a path without one.
    """

    async def unversioned(request: Request, model: ModelName) -> Response:
        return await handler(request, model, "")

    async def versioned(request: Request, model: ModelName, version: _ModelVersion) -> Response:
        return await handler(request, model, version)

    name = handler.__name__.strip("_")
    docs = {"summary": name.replace("_", " "), "description": handler.__doc__} | docs
    path = f"{PREFIX}/models/{{model}}"
    router.add_api_route(path + suffix, unversioned, methods=[method], name=name, **docs)
    router.add_api_route(
        f"{path}/versions/{{version}}{suffix}", versioned, methods=[method], name=f"{name}_of_version", **docs
    )


@cache  # one for all applications of a process: tests build hundreds
def request_body(class_: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads its body itself: the schema with its parts written out."""
    schema = class_.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, dict):
            part = node.get("$ref", "").removeprefix("#/$defs/") if isinstance(node.get("$ref"), str) else ""
            return inlined(parts[part]) if part else {key: inlined(value) for key, value in node.items()}
        return [inlined(item) for item in node] if isinstance(node, list) else node

    content = {"application/json": {"schema": inlined(schema)}}
    return {"requestBody": {"required": required, "content": content}}


class _Body(BaseModel, extra="forbid", strict=True, protected_namespaces=()):
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return failing_fast(handler(source))


class InputBody(_Body):
    """An input: `data`, or the parameter `binary_data_size` and that many bytes after the JSON."""

    name: str
    datatype: str = Field(examples=["BYTES"])
    shape: list[Any] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})
    parameters: ParametersBody | None = None
    data: TensorData | None = None


class OutputBody(_Body):
    """A wanted output. Parameters: `binary_data` (bool), `classification` (number of classes)."""

    name: str
    parameters: ParametersBody | None = None


class InferBody(_Body):
    """A request for inference. Parameters: `priority`, `timeout` (microseconds), `binary_data_output`, options of the
    model. Others are ignored.
    """

    id: str | None = None
    model_name: str | None = Field(None, description="if given, that of the path")
    model_version: str | None = Field(None, description="if given, that of the path")
    parameters: ParametersBody | None = None
    inputs: list[InputBody] = Field(max_length=MAX_TENSORS)
    outputs: list[OutputBody] | None = Field(None, max_length=MAX_TENSORS)


class LiveAnswer(Answer):
    live: Literal[True]


class ServerReadyAnswer(Answer):
    ready: bool


class ModelReadyAnswer(Answer):
    name: str
    ready: bool


class OutputAnswer(Answer):
    """An output: `data`, or the parameter `binary_data_size` and that many bytes after the JSON."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    parameters: dict[str, Scalar] | None = None
    data: list[JsonValue] | None = None


class InferAnswer(Answer):
    """The outputs, and the parameters `warnings` and `triton_final_response` if there are any."""

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, Scalar] | None = None
    outputs: list[OutputAnswer]


def read_request(model: str, version: str, body: bytes, json_length: str | None = None) -> InferRequest:
    """Return the record of a body. `json_length` is the header Inference-Header-Content-Length.

    Raises InvalidRequest for any wrong body, and no other error.
    """
    num_json_bytes = _json_length(json_length, len(body))
    form = read_json(InferBody, body[:num_json_bytes])
    if form.model_name not in (None, model) or form.model_version not in (None, "", version or VERSION):
        raise InvalidRequest("model_name, model_version: the body names another model than the path", "model_name")
    parameters = read_parameters("parameters", form.parameters)
    default = _flag("binary_data_output", parameters)
    return InferRequest(
        model=model,
        version=version,
        id=form.id or "",
        parameters=parameters,
        inputs=_inputs([one for one in form.inputs if not _is_shared(one)], memoryview(body)[num_json_bytes:]),
        shared_inputs=tuple(_shared_input(one) for one in form.inputs if _is_shared(one)),
        outputs=tuple(_wish(output, default) for output in form.outputs or ()),
    )


def write_response(request: InferRequest, response: InferResponse) -> tuple[bytes, int | None]:
    """Return the body, and the length of its JSON part when raw tensors follow.

    Raises InvalidRequest for a tensor that JSON cannot express and that is not wanted as binary data.
    """
    default = _flag("binary_data_output", request.parameters)
    binary = {wish.name: wish.binary for wish in request.outputs}
    outputs, raw = [], []
    for value in response.outputs:
        output = OutputAnswer(name=value.name, datatype=value.datatype, shape=value.shape)
        if binary.get(value.name, default):
            raw.append(tensors.to_bytes(value))
            output.parameters = {"binary_data_size": len(raw[-1])}
            outputs.append(json_text(output).encode())
        else:
            outputs.append(json_with_list(output, "data", _data_parts(value)))
    for tensor in response.shared_outputs:
        output = OutputAnswer(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        output.parameters = dict(tensor.part.parameters())
        outputs.append(json_text(output).encode())
    answer = InferAnswer(model_name=response.model, model_version=response.version, outputs=[])
    if response.id:
        answer.id = response.id
    if response.parameters:
        answer.parameters = dict(response.parameters)
    head = json_with_list(answer, "outputs", outputs)
    return b"".join((head, *raw)), len(head) if raw else None


def _data_parts(value: TensorValue) -> Iterator[bytes]:
    """Yield the elements as JSON, some at a time: their writer holds Python's lock while it writes."""
    tensors.check_json(value)
    flat = value.data.reshape(-1)
    for start in range(0, flat.size, _PIECE_ELEMENTS):
        piece = flat[start : start + _PIECE_ELEMENTS]
        yield to_json(tensors.to_json(TensorValue(value.name, value.datatype, piece)))[1:-1]


def read_json(class_: type[BodyT], body: bytes) -> BodyT:
    """Return strict JSON of that form. Raises InvalidRequest naming the member, RequestTooLarge for too many values."""
    check_json_size(body)
    try:
        return class_.model_validate(json.loads(body.decode(), parse_constant=_not_json))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        text = "unknown member" if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidRequest(f"{where}: {text}", where) from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, numbers of thousands of digits
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None


def read_parameters(where: str, parameters: dict[str, Any] | None) -> Parameters:
    """Return the parameters. Raises InvalidRequest for values that are no plain ones."""
    for name, value in (parameters or {}).items():
        if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidRequest(
                f"{where}: {name!r} takes text, a finite number, true or false; got {tensors.shown(value)}", name
            )
    return parameters or {}


def _inputs(forms: list[InputBody], raw: memoryview) -> tuple[TensorValue, ...]:
    values, position = [], 0
    for form in forms:
        name = form.name
        parameters = read_parameters(f"input {name!r}", form.parameters)
        datatype, shape = tensors.checked_datatype(name, form.datatype), tensors.checked_shape(name, form.shape)
        if "binary_data_size" in parameters:
            size = parameters["binary_data_size"]
            if form.data is not None:
                raise InvalidRequest(f"input {name!r} has data and binary_data_size; only one can be", name)
            if type(size) is not int or not 0 <= size <= len(raw) - position:
                raise InvalidRequest(
                    f"input {name!r}: binary_data_size is {tensors.shown(size)}, "
                    f"{len(raw) - position} bytes are left after the JSON (is Inference-Header-Content-Length set?)",
                    name,
                )
            values.append(tensors.from_bytes(name, datatype, shape, raw[position : position + size]))
            position += size
        elif form.data is None:
            raise InvalidRequest(f"input {name!r} has neither data nor the parameter binary_data_size", name)
        else:
            values.append(tensors.from_json(name, datatype, shape, form.data))
    if position != len(raw):
        raise InvalidRequest(f"{len(raw) - position} bytes of the body belong to no input")
    return tuple(values)


def _is_shared(form: InputBody) -> bool:
    return SHARED_MEMORY in (form.parameters or {})


def _shared_input(form: InputBody) -> SharedTensor:
    name = form.name
    parameters = read_parameters(f"input {name!r}", form.parameters)
    if form.data is not None or "binary_data_size" in parameters:
        raise InvalidRequest(f"input {name!r} has data and {SHARED_MEMORY}; only one can be", name)
    datatype, shape = tensors.checked_datatype(name, form.datatype), tensors.checked_shape(name, form.shape)
    return SharedTensor(name, datatype, shape, read_part(name, parameters))


def _wish(form: OutputBody, default: bool) -> OutputWish:
    parameters = read_parameters(f"output {form.name!r}", form.parameters)
    return read_wish(form.name, parameters, binary=_flag("binary_data", parameters, default))


def _flag(name: str, parameters: Parameters, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: expected true or false, got {tensors.shown(value)}", name)
    return value


def _json_length(header: str | None, num_bytes: int) -> int:
    if header is None:
        return num_bytes
    text = header.strip()
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= num_bytes):
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {tensors.shown(header)}, expected the bytes of JSON "
            f"at the beginning of the {num_bytes} bytes of the body"
        )
    return int(text)


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
