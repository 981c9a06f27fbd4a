"""Codec of gRPC messages to the records of the Open Inference Protocol, and back. Pure.

The only error, for any input, is InvalidRequest. Answers carry their tensors raw, as Triton's do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from google.protobuf.json_format import ParseDict

from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.repository import ModelStatistics
from deployments.ingress.kserve.tensors import (
    MAX_TENSORS,
    SHARED_MEMORY,
    InferRequest,
    InferResponse,
    ModelMetadata,
    SharedTensor,
    check_count,
    check_range,
    checked_datatype,
    checked_shape,
    from_bytes,
    read_part,
    read_wish,
    to_bytes,
)
from deployments.pipelines.records import NUMPY_DTYPES, Datatype, TensorSpec, TensorValue
from deployments.records.errors import InvalidRequest

# By datatype, the one field of InferTensorContents that may hold its values.
_CONTENTS: Final[dict[Datatype, str]] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_MAX_INT64: Final = 2**63 - 1
Scalar = bool | int | float | str


def read_request(message: messages.ModelInferRequest) -> InferRequest:
    """Return the record of a request. Raises InvalidRequest naming the tensor or parameter."""
    for field, tensors in (("inputs", message.inputs), ("outputs", message.outputs)):
        if len(tensors) > MAX_TENSORS:
            raise InvalidRequest(f"{field}: {len(tensors)} tensors, at most {MAX_TENSORS} are allowed", field)
    return InferRequest(
        model=message.model_name,
        inputs=tuple(_inputs(message)),
        shared_inputs=tuple(_shared_input(one) for one in message.inputs if SHARED_MEMORY in one.parameters),
        version=message.model_version,
        id=message.id,
        parameters=read_parameters(message.parameters),
        outputs=tuple(
            read_wish(output.name, read_parameters(output.parameters), binary=True) for output in message.outputs
        ),
    )


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return the parameters. Raises InvalidRequest for one without a value.

    `bytes_param`, which only repositories know, is no scalar and counts as none.
    """
    values: dict[str, Scalar] = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None or choice == "bytes_param":
            expected = "a bool, an integer, a double or a string"
            raise InvalidRequest(f"parameter {name!r} has {choice or 'no value'}, expected {expected}", name)
        values[name] = getattr(parameter, choice)
    return values


def write_response(response: InferResponse) -> messages.ModelInferResponse:
    """Return the message of a response, its tensors raw."""
    message = messages.ModelInferResponse(
        model_name=response.model,
        model_version=response.version,
        id=response.id,
        outputs=[{"name": out.name, "datatype": out.datatype, "shape": out.shape} for out in response.outputs],
        raw_output_contents=[to_bytes(out) for out in response.outputs],
    )
    for tensor in response.shared_outputs:  # after the others: raw contents are found by their place
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        for name, value in tensor.part.parameters().items():
            _set_parameter(output.parameters[name], value)
    for name, value in response.parameters.items():
        _set_parameter(message.parameters[name], value)
    return message


def write_metadata(metadata: ModelMetadata) -> messages.ModelMetadataResponse:
    """Return the message of a model's metadata."""
    return messages.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=[_tensor_metadata(spec) for spec in metadata.inputs],
        outputs=[_tensor_metadata(spec) for spec in metadata.outputs],
    )


def write_config(configuration: Mapping[str, Any]) -> messages.ModelConfig:
    """Return Triton's model configuration, which REST writes as JSON, as a message."""
    return ParseDict(configuration, messages.ModelConfig())


def write_statistics(found: Iterable[ModelStatistics]) -> messages.ModelStatisticsResponse:
    """Return statistics as a message. The records have its field names."""
    return messages.ModelStatisticsResponse(model_stats=[asdict(model) for model in found])


def _inputs(message: messages.ModelInferRequest) -> Iterable[TensorValue]:
    raw = message.raw_input_contents
    own = [tensor for tensor in message.inputs if SHARED_MEMORY not in tensor.parameters]
    if raw and len(raw) != len(own):
        raise InvalidRequest(f"{len(raw)} raw_input_contents for {len(own)} inputs: expected one for each, or none")
    for position, tensor in enumerate(own):
        name = tensor.name
        datatype, shape = checked_datatype(name, tensor.datatype), checked_shape(name, list(tensor.shape))
        if not raw:
            yield _from_contents(name, datatype, shape, tensor.contents)
        elif tensor.HasField("contents"):
            raise InvalidRequest(f"{name}: has contents although the request has raw_input_contents", name)
        else:
            yield from_bytes(name, datatype, shape, raw[position])


def _shared_input(tensor: Any) -> SharedTensor:
    name = tensor.name
    if tensor.HasField("contents"):
        raise InvalidRequest(f"{name}: has contents and {SHARED_MEMORY}; only one can be", name)
    datatype, shape = checked_datatype(name, tensor.datatype), checked_shape(name, list(tensor.shape))
    return SharedTensor(name, datatype, shape, read_part(name, read_parameters(tensor.parameters)))


def _from_contents(name: str, datatype: Datatype, shape: tuple[int, ...], contents: Any) -> TensorValue:
    if datatype not in _CONTENTS:
        raise InvalidRequest(f"{name}: {datatype} travels in raw_input_contents only", name)
    field = _CONTENTS[datatype]
    wrong = [given.name for given, _ in contents.ListFields() if given.name != field]
    if wrong:
        raise InvalidRequest(f"{name}: {datatype} goes into {field}, got {', '.join(wrong)}", name)
    values = getattr(contents, field)
    check_count(name, shape, len(values))
    dtype = NUMPY_DTYPES[datatype]
    # Small integers arrive in fields of 32 bits: 64 bits of the same sign have room to check whether they fit.
    array = np.empty(len(values), f"{dtype.kind}8" if dtype.kind in "iu" else dtype)
    array[:] = list(values)
    if dtype.kind in "iu" and array.size:
        check_range(name, datatype, int(array.min()), int(array.max()))
    return TensorValue(name, datatype, array.astype(dtype, copy=False).reshape(shape))


def _set_parameter(parameter: Any, value: Scalar) -> None:
    if isinstance(value, bool):  # before int, which it is one of
        parameter.bool_param = value
    elif isinstance(value, int):
        if value > _MAX_INT64:
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _tensor_metadata(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": spec.shape}
