"""Messages on the wire: numbers and types as every client of the protocol has them, values as numpy has them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.seeding import seeded_rng

from configs.batching import BatchingConfig
from deployments.ingress.kserve.grpc import codec as grpc_codec
from deployments.ingress.kserve.grpc.protos import POOL, health
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.models import model_configuration
from deployments.ingress.kserve.tensors import InferResponse, ModelMetadata
from deployments.pipelines.records import NUMPY_DTYPES, TensorSpec, TensorValue
from deployments.records.errors import InvalidRequest

# Of the published protocols: "<number> <name> <type>", with * for repeated and {} for a map of messages.
WIRE = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": "1 name string, 2 version string",
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions string*",
    "ModelMetadataRequest": "1 name string, 2 version string",
    "ModelMetadataResponse": "1 name string, 2 versions string*, 3 platform string, 4 inputs "
    "ModelMetadataResponse.TensorMetadata*, 5 outputs ModelMetadataResponse.TensorMetadata*",
    "ModelMetadataResponse.TensorMetadata": "1 name string, 2 datatype string, 3 shape int64*",
    "InferParameter": "1 bool_param bool, 2 int64_param int64, 3 string_param string, 4 double_param double, "
    "5 uint64_param uint64",
    "InferTensorContents": "1 bool_contents bool*, 2 int_contents int32*, 3 int64_contents int64*, "
    "4 uint_contents uint32*, 5 uint64_contents uint64*, 6 fp32_contents float*, 7 fp64_contents double*, "
    "8 bytes_contents bytes*",
    "ModelInferRequest": "1 model_name string, 2 model_version string, 3 id string, 4 parameters InferParameter{}, "
    "5 inputs ModelInferRequest.InferInputTensor*, 6 outputs ModelInferRequest.InferRequestedOutputTensor*, "
    "7 raw_input_contents bytes*",
    "ModelInferRequest.InferInputTensor": "1 name string, 2 datatype string, 3 shape int64*, "
    "4 parameters InferParameter{}, 5 contents InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 name string, 2 parameters InferParameter{}",
    "ModelInferResponse": "1 model_name string, 2 model_version string, 3 id string, 4 parameters InferParameter{}, "
    "5 outputs ModelInferResponse.InferOutputTensor*, 6 raw_output_contents bytes*",
    "ModelInferResponse.InferOutputTensor": "1 name string, 2 datatype string, 3 shape int64*, "
    "4 parameters InferParameter{}, 5 contents InferTensorContents",
    "ModelStreamInferResponse": "1 error_message string, 2 infer_response ModelInferResponse",
    "ModelConfigRequest": "1 name string, 2 version string",
    "ModelConfigResponse": "1 config ModelConfig",
    "ModelConfig": "1 name string, 2 platform string, 3 version_policy ModelVersionPolicy, 4 max_batch_size int32, "
    "5 input ModelInput*, 6 output ModelOutput*, 11 dynamic_batching ModelDynamicBatching, "
    "14 parameters ModelParameter{}, 17 backend string, 19 model_transaction_policy ModelTransactionPolicy",
    "ModelVersionPolicy": "1 latest ModelVersionPolicy.Latest",
    "ModelVersionPolicy.Latest": "1 num_versions uint32",
    "ModelDynamicBatching": "1 preferred_batch_size int32*, 2 max_queue_delay_microseconds uint64, "
    "4 priority_levels uint64, 5 default_priority_level uint64",
    "ModelInput": "1 name string, 2 data_type DataType, 4 dims int64*, 8 optional bool",
    "ModelOutput": "1 name string, 2 data_type DataType, 3 dims int64*",
    "ModelParameter": "1 string_value string",
    "ModelTransactionPolicy": "1 decoupled bool",
    "ModelStatisticsRequest": "1 name string, 2 version string",
    "ModelStatisticsResponse": "1 model_stats ModelStatistics*",
    "ModelStatistics": "1 name string, 2 version string, 3 last_inference uint64, 4 inference_count uint64, "
    "5 execution_count uint64, 6 inference_stats InferStatistics, 7 batch_stats InferBatchStatistics*",
    "StatisticDuration": "1 count uint64, 2 ns uint64",
    "InferStatistics": "1 success StatisticDuration, 2 fail StatisticDuration, 3 queue StatisticDuration, "
    "4 compute_input StatisticDuration, 5 compute_infer StatisticDuration, 6 compute_output StatisticDuration, "
    "7 cache_hit StatisticDuration, 8 cache_miss StatisticDuration",
    "InferBatchStatistics": "1 batch_size uint64, 2 compute_input StatisticDuration, "
    "3 compute_infer StatisticDuration, 4 compute_output StatisticDuration",
    "ModelRepositoryParameter": "1 bool_param bool, 2 int64_param int64, 3 string_param string, 4 bytes_param bytes",
    "RepositoryIndexRequest": "1 repository_name string, 2 ready bool",
    "RepositoryIndexResponse": "1 models RepositoryIndexResponse.ModelIndex*",
    "RepositoryIndexResponse.ModelIndex": "1 name string, 2 version string, 3 state string, 4 reason string",
    "RepositoryModelLoadRequest": "1 repository_name string, 2 model_name string, "
    "3 parameters ModelRepositoryParameter{}",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "1 repository_name string, 2 model_name string, "
    "3 parameters ModelRepositoryParameter{}",
    "RepositoryModelUnloadResponse": "",
    "SystemSharedMemoryStatusRequest": "1 name string",
    "SystemSharedMemoryStatusResponse": "1 regions SystemSharedMemoryStatusResponse.RegionStatus{}",
    "SystemSharedMemoryStatusResponse.RegionStatus": "1 name string, 2 key string, 3 offset uint64, 4 byte_size uint64",
    "SystemSharedMemoryRegisterRequest": "1 name string, 2 key string, 3 offset uint64, 4 byte_size uint64",
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "1 name string",
    "SystemSharedMemoryUnregisterResponse": "",
}
DATA_TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"
STREAMED = {"ModelStreamInfer": (True, True)}


def wire_of(message: Any) -> str:
    """A descriptor in the notation of WIRE."""
    scalars = {1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string", 12: "bytes"}
    scalars[13] = "uint32"
    fields = []
    for field in sorted(message.fields, key=lambda field: field.number):
        named = field.message_type or field.enum_type
        if field.message_type and field.message_type.GetOptions().map_entry:
            value = field.message_type.fields_by_name["value"].message_type
            type_ = value.full_name.removeprefix("inference.") + "{}"
        else:
            type_ = named.full_name.removeprefix("inference.") if named else scalars[field.type]
            type_ += "*" if field.is_repeated else ""
        fields.append(f"{field.number} {field.name} {type_}")
    return ", ".join(fields)


def test_the_wire_is_the_published_one() -> None:
    file = messages.DESCRIPTOR
    found = {}
    for name, message in file.message_types_by_name.items():
        found[name] = wire_of(message)
        found |= {
            f"{name}.{inner.name}": wire_of(inner) for inner in message.nested_types if not inner.GetOptions().map_entry
        }
    assert found == WIRE
    expected = {f"TYPE_{name}": number for number, name in enumerate(DATA_TYPES.split())}
    assert {value.name: value.number for value in file.enum_types_by_name["DataType"].values} == expected
    for method in POOL.FindServiceByName("inference.GRPCInferenceService").methods:
        assert (method.client_streaming, method.server_streaming) == STREAMED.get(method.name, (False, False))
        prefix = "ModelInfer" if method.name == "ModelStreamInfer" else method.name
        assert method.input_type.full_name == f"inference.{prefix}Request"
        assert method.output_type.full_name == f"inference.{method.name}Response"
    assert wire_of(health.HealthCheckRequest.DESCRIPTOR) == "1 service string"
    assert dict(health.HealthCheckResponse.ServingStatus.items()) == {
        "UNKNOWN": 0,
        "SERVING": 1,
        "NOT_SERVING": 2,
        "SERVICE_UNKNOWN": 3,
    }


@pytest.mark.slow
@pytest.mark.parametrize("order", ["ours first", "theirs first"])
def test_another_client_of_the_protocol_may_live_in_the_same_process(order: str) -> None:
    """Do what a generated module of another package does at import: the same names, of another file, otherwise made."""
    theirs = """
from google.protobuf import descriptor_pb2, descriptor_pool
for name, package in (("grpc_service.proto", "inference"), ("health.proto", "grpc.health.v1")):
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto3")
    file.message_type.add(name="ModelInferRequest")
    file.message_type.add(name="HealthCheckRequest").field.add(name="other", number=7, type=9, label=1)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
assert not descriptor_pool.Default().FindMessageTypeByName("inference.ModelInferRequest").fields
"""
    ours = """
from deployments.ingress.kserve.grpc.protos import health, open_inference
assert open_inference.ModelInferRequest(model_name="x").SerializeToString() == b"\\n\\x01x"
assert health.HealthCheckRequest(service="x").SerializeToString() == b"\\n\\x01x"
"""
    program = ours + theirs if order == "ours first" else theirs + ours
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def values_of(datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    dtype = NUMPY_DTYPES[datatype]  # type: ignore[index]
    if datatype == "BYTES":
        array = np.empty(shape, np.object_)
        for index in np.ndindex(shape):
            array[index] = seeded_rng().bytes(seeded_rng().integers(0, 9))
        return array
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        array = seeded_rng().integers(bounds.min, bounds.max, shape, dtype, endpoint=True)
        array.flat[:2] = bounds.min, bounds.max
        return array
    return (
        seeded_rng().integers(0, 2, shape).astype(bool)
        if datatype == "BOOL"
        else seeded_rng().standard_normal(shape).astype(dtype)
    )


def framed(array: np.ndarray[Any, Any]) -> bytes:
    """Raw data as the binary extension defines it, written anew."""
    if array.dtype == np.object_:
        return b"".join(len(item).to_bytes(4, "little") + item for item in array.flat)
    return array.tobytes()


def request_of(datatype: str, shape: tuple[int, ...], **fields: Any) -> messages.ModelInferRequest:
    tensor = {"name": "x", "datatype": datatype, "shape": shape}
    contents = fields.pop("contents", None)
    if contents is not None:
        tensor["contents"] = contents
    return messages.ModelInferRequest(model_name="m", inputs=[tensor], **fields)


@pytest.mark.parametrize("datatype", list(NUMPY_DTYPES))
def test_tensors_arrive_raw(datatype: str) -> None:
    array = values_of(datatype, (2, 3))
    raw = [framed(array)]
    (value,) = grpc_codec.read_request(request_of(datatype, (2, 3), raw_input_contents=raw)).inputs
    assert (value.name, value.datatype, value.shape) == ("x", datatype, (2, 3))
    assert value.data.dtype == NUMPY_DTYPES[datatype]  # type: ignore[index]
    assert (value.data == array).all()
    message = grpc_codec.write_response(InferResponse("m", "1", (value,)))
    assert list(message.raw_output_contents) == raw
    assert (message.outputs[0].datatype, list(message.outputs[0].shape)) == (datatype, [2, 3])
    assert not message.outputs[0].HasField("contents")


TYPED = {
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


@pytest.mark.parametrize("datatype", list(TYPED))
def test_tensors_arrive_as_typed_contents(datatype: str) -> None:
    array = values_of(datatype, (3, 2))
    contents = {TYPED[datatype]: array.reshape(-1).tolist()}
    (value,) = grpc_codec.read_request(request_of(datatype, (3, 2), contents=contents)).inputs
    assert value.data.dtype == NUMPY_DTYPES[datatype]  # type: ignore[index]
    assert value.data.shape == (3, 2)
    assert (value.data == array).all()


def test_an_empty_tensor_needs_no_contents() -> None:
    (value,) = grpc_codec.read_request(request_of("FP32", (0, 4))).inputs
    assert value.shape == (0, 4)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (request_of("FP32", (2,), raw_input_contents=[b"1234"]), "4 bytes"),
        (request_of("FP32", (1,), raw_input_contents=[b"1234", b""]), "2 raw_input_contents for 1 inputs"),
        (request_of("FP32", (1,), raw_input_contents=[b"1234"], contents={"fp32_contents": [1]}), "has contents"),
        (request_of("FP32", (2,), contents={"fp32_contents": [1]}), "1 elements"),
        (request_of("FP32", (1,), contents={"fp64_contents": [1]}), "FP32 goes into fp32_contents, got fp64_contents"),
        (request_of("FP16", (1,), contents={"fp32_contents": [1]}), "raw_input_contents only"),
        (request_of("INT8", (1,), contents={"int_contents": [128]}), "128 is out of range of INT8"),
        (request_of("UINT16", (2,), contents={"uint_contents": [0, 65536]}), "65536 is out of range of UINT16"),
        (request_of("FP8", (1,), contents={"fp32_contents": [1]}), "unknown datatype"),
        (request_of("FP32", (-1,), contents={"fp32_contents": [1]}), "not a size"),
        (request_of("BYTES", (1,), raw_input_contents=[b"\xff\xff\xff\xffx"]), "beyond"),
        (messages.ModelInferRequest(parameters={"p": messages.InferParameter()}), "no value"),
        (
            messages.ModelInferRequest(
                outputs=[{"name": "y", "parameters": {"classification": messages.InferParameter(string_param="2")}}]
            ),
            "number of classes",
        ),
        (
            messages.ModelInferRequest(
                inputs=[
                    {
                        "name": "x",
                        "datatype": "FP32",
                        "parameters": {"shared_memory_region": messages.InferParameter(string_param="r")},
                    }
                ]
            ),
            "take numbers of bytes",
        ),
        (messages.ModelInferRequest(inputs=[{}] * 257), "inputs: 257 tensors, at most 256"),
        (messages.ModelInferRequest(outputs=[{}] * 257), "outputs: 257 tensors, at most 256"),
    ],
)
def test_what_does_not_fit_together_is_refused(message: messages.ModelInferRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        grpc_codec.read_request(message)


def test_names_parameters_and_wishes_are_read() -> None:
    message = messages.ModelInferRequest(
        model_name="m",
        model_version="1",
        id="7",
        parameters={
            "priority": messages.InferParameter(uint64_param=2),
            "timeout": messages.InferParameter(int64_param=-5),
            "flag": messages.InferParameter(bool_param=False),
            "scale": messages.InferParameter(double_param=0.5),
            "note": messages.InferParameter(string_param=""),
        },
        outputs=[
            {"name": "a", "parameters": {"classification": messages.InferParameter(int64_param=3)}},
            {"name": "b"},
        ],
    )
    request = grpc_codec.read_request(message)
    assert (request.model, request.version, request.id) == ("m", "1", "7")
    assert request.parameters == {"priority": 2, "timeout": -5, "flag": False, "scale": 0.5, "note": ""}
    assert [(wish.name, wish.num_classes) for wish in request.outputs] == [("a", 3), ("b", 0)]


def test_parameters_of_answers_keep_their_type() -> None:
    given_parameters = {"b": True, "i": -3, "u": 2**63, "d": 0.25, "s": "text"}
    message = grpc_codec.write_response(InferResponse("m", "1", (), "9", given_parameters))
    choices = {name: value.WhichOneof("parameter_choice") for name, value in message.parameters.items()}
    expected = {"b": "bool_param", "i": "int64_param", "u": "uint64_param", "d": "double_param", "s": "string_param"}
    assert choices == expected
    assert grpc_codec.read_parameters(message.parameters) == given_parameters
    assert (message.model_name, message.model_version, message.id) == ("m", "1", "9")


def test_bfloat16_is_two_bytes() -> None:
    value = TensorValue("x", "BF16", np.array([1.5, -2], ml_dtypes.bfloat16))
    assert grpc_codec.write_response(InferResponse("m", "1", (value,))).raw_output_contents[0] == b"\xc0\x3f\x00\xc0"


@pytest.mark.parametrize(("kind", "decoupled"), [("llm", True), ("embedding", False)])
def test_the_configuration_says_whether_a_request_has_several_responses(kind: str, decoupled: bool) -> None:
    specs = (TensorSpec("text", "BYTES", (-1, 3), optional=True),)
    metadata = ModelMetadata("m", ("1",), "p", specs, (TensorSpec("y", "BF16", (-1, 4)),), {"kind": kind})
    batching = BatchingConfig(
        preferred_batch_sizes=(4, 8), max_queue_delay_us=300, priority_levels=3, default_priority=2
    )
    config = grpc_codec.write_config(model_configuration(metadata, 8, None if decoupled else batching))
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    batching = config.dynamic_batching
    figures = (list(batching.preferred_batch_size), batching.max_queue_delay_microseconds, batching.priority_levels)
    assert (*figures, batching.default_priority_level) == (([], 0, 0, 0) if decoupled else ([4, 8], 300, 3, 2))
    assert (config.name, config.platform, config.max_batch_size) == ("m", "p", 8)
    assert [(i.name, i.data_type, list(i.dims), i.optional) for i in config.input] == [("text", 13, [3], True)]
    assert [(o.name, o.data_type, list(o.dims)) for o in config.output] == [("y", 14, [4])]
    assert config.model_transaction_policy.decoupled is decoupled
    assert config.parameters["kind"].string_value == kind


CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
        "fp32_contents": st.lists(st.floats(width=32), max_size=4),
        "bytes_contents": st.lists(st.binary(max_size=4), max_size=4),
    },
)
TENSORS = st.fixed_dictionaries(
    {
        "name": st.text(max_size=3),
        "datatype": st.sampled_from([*NUMPY_DTYPES, "", "fp32"]),
        "shape": st.lists(st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), max_size=4),
        "contents": CONTENTS,
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(TENSORS, max_size=2), st.lists(st.binary(max_size=12), max_size=2))
def test_whatever_arrives_is_read_or_refused(tensors: list[Any], raw: list[bytes]) -> None:
    message = messages.ModelInferRequest(inputs=tensors, raw_input_contents=raw)
    try:
        request = grpc_codec.read_request(message)
    except InvalidRequest:
        return
    for value, tensor in zip(request.inputs, tensors, strict=True):
        assert value.shape == tuple(tensor["shape"])
        assert value.data.dtype == NUMPY_DTYPES[value.datatype]
