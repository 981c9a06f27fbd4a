"""Records of the Open Inference Protocol, the same for REST and gRPC.

The codecs (`tensors.py`, `rest/messages.py`, `grpc/codec.py`) make and read them; `inference.py` answers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata as packages
from typing import Final, TypeAlias

from deployments.errors import InvalidRequest
from deployments.ingress.kserve.tensors import shown
from deployments.pipelines.records import Datatype, TensorSpec, TensorValue

Parameters: TypeAlias = Mapping[str, bool | int | float | str]
# The only version of every model: a changed model takes its place, requests under way finish on the old one.
VERSION: Final = "1"
SHARED_MEMORY: Final = "shared_memory_region"  # the parameter of tensors that do not travel
_SHARED_OFFSET: Final = "shared_memory_offset"
_SHARED_SIZE: Final = "shared_memory_byte_size"
_MAX_CLASSES: Final = 2**31 - 1
MAX_TENSORS: Final = 256  # that a request has, or asks for: no more are looked at
# Triton's names of what this server does beyond the protocol itself.
_EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)


@dataclass(frozen=True, slots=True)
class RegionPart:
    """A part of a region of shared memory: `nbytes` from `offset` on."""

    region: str
    offset: int
    nbytes: int

    def parameters(self) -> Parameters:
        """Return the parameters of a tensor that lies there."""
        return {SHARED_MEMORY: self.region, _SHARED_OFFSET: self.offset, _SHARED_SIZE: self.nbytes}


@dataclass(frozen=True, slots=True)
class SharedTensor:
    """A named tensor in shared memory."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    part: RegionPart


@dataclass(frozen=True, slots=True)
class OutputWish:
    """An output that the request names.

    `binary`: its data is to travel as raw bytes (REST only). `num_classes` above 0 asks for the classification
    extension: the so many highest values with their indices, as text, instead of the tensor. With `part`, the data goes
    there.
    """

    name: str
    binary: bool = False
    num_classes: int = 0
    parameters: Parameters = field(default_factory=dict)
    part: RegionPart | None = None


def read_part(name: str, parameters: Parameters) -> RegionPart:
    """Return the part of a region that the parameters of tensor `name` say. Raises InvalidRequest."""
    region, offset = parameters[SHARED_MEMORY], parameters.get(_SHARED_OFFSET, 0)
    nbytes = parameters.get(_SHARED_SIZE)
    if not isinstance(region, str) or type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
        expected = f"{SHARED_MEMORY} takes a name, {_SHARED_OFFSET} and {_SHARED_SIZE} take numbers of bytes"
        raise InvalidRequest(f"{name}: {expected}; got {shown([region, offset, nbytes])}", name)
    return RegionPart(region, offset, nbytes)


def read_wish(name: str, parameters: Parameters, *, binary: bool) -> OutputWish:
    """Return the wish for an output by its parameters. Raises InvalidRequest for what is not served."""
    part = read_part(name, parameters) if SHARED_MEMORY in parameters else None
    num_classes = parameters.get("classification", 0)
    if type(num_classes) is not int or not 0 <= num_classes <= _MAX_CLASSES:
        raise InvalidRequest(
            f"output {name!r}: classification takes a number of classes, got {shown(num_classes)}", name
        )
    return OutputWish(name, binary, num_classes, parameters, part)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for inference. `version` "" is the one that is served. No `outputs` means all of them.

    Where tensors are in shared memory, `owner` is the uid and the tenant whose it is.
    """

    model: str
    inputs: tuple[TensorValue, ...]
    version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    outputs: tuple[OutputWish, ...] = ()
    shared_inputs: tuple[SharedTensor, ...] = ()
    owner: tuple[int, str] | None = None

    @property
    def has_shared(self) -> bool:
        """Return whether tensors are in shared memory, or go there."""
        return bool(self.shared_inputs) or any(wish.part is not None for wish in self.outputs)


@dataclass(frozen=True, slots=True)
class InferResponse:
    """The answer to one request, or a piece of it. `id` is the request's.

    `outputs` are in the order that the request named them, or in the model's own.
    `timings_ms` by phase, of the slowest part where the request had several; "queue" and "total" are always there.
    """

    model: str
    version: str
    outputs: tuple[TensorValue, ...]
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    shared_outputs: tuple[SharedTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """The metadata of a model: what it takes and gives. Shapes include the batch dimension; -1 is any size.

    `parameters` is text about the model that the protocol leaves to the server: kind, fingerprint, description.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    """The metadata of the server: its version, and the extensions of the protocol that it has."""

    name: str
    version: str
    extensions: tuple[str, ...]


def server_metadata(*more_extensions: str) -> ServerMetadata:
    """Return the metadata of this server, which has more extensions where its config wants them."""
    try:
        version = packages.version("atelier")
    except packages.PackageNotFoundError:  # run from a tree that is not installed
        version = "0"
    return ServerMetadata("atelier", version, (*_EXTENSIONS, *more_extensions))
