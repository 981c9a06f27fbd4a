"""JSON bodies of the REST side. Also what the OpenAPI page shows of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from deployments.pipelines.records import Datatype

# The members are checked one by one where they are read, so that a wrong one gets a sentence of its own.
ParametersBody = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"additionalProperties": {"type": ["string", "number", "boolean"]}}),
]
TensorData = Annotated[list[Any], Field(description="the elements in row-major order, flat or nested like the shape")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class InputBody(_Body):
    """`data`, or the parameter `binary_data_size` and that many bytes after the JSON."""

    name: str
    datatype: str = Field(examples=["BYTES"])
    shape: list[Any] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})
    parameters: ParametersBody | None = None
    data: TensorData | None = None


class OutputBody(_Body):
    """Parameters: `binary_data` (bool), `classification` (number of classes)."""

    name: str
    parameters: ParametersBody | None = None


class InferBody(_Body):
    """Parameters: `priority`, `timeout` (microseconds), `binary_data_output`, options of the model.

    Parameters that are nobody's are ignored.
    """

    id: str | None = None
    model_name: str | None = Field(None, description="if given, that of the path")
    model_version: str | None = Field(None, description="if given, that of the path")
    parameters: ParametersBody | None = None
    inputs: list[InputBody]
    outputs: list[OutputBody] | None = None


class TensorMetadata(BaseModel):
    name: str
    datatype: Datatype
    shape: list[int]
    optional: bool = False


class ModelMetadataBody(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, str]


class ServerMetadataBody(BaseModel):
    name: str
    version: str
    extensions: list[str]


class LiveBody(BaseModel):
    live: Literal[True]


class ServerReadyBody(BaseModel):
    ready: bool


class ModelReadyBody(BaseModel):
    name: str
    ready: bool


class ResponseOutput(BaseModel):
    name: str
    datatype: Datatype
    shape: list[int]
    parameters: dict[str, JsonValue] | None = None
    data: list[JsonValue] | None = None


class InferResponseBody(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    model_name: str
    model_version: str
    id: str | None = None
    parameters: dict[str, JsonValue] | None = None
    outputs: list[ResponseOutput]
