"""What one call of the Open Inference Protocol says, whichever way it came: REST, gRPC or a handle.

The codecs (`tensors.py`, `rest.py`, gRPC's) make these values and read them; `inference.py` answers them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from deployments.pipelines.records import TensorSpec, TensorValue

Parameters: TypeAlias = Mapping[str, bool | int | float | str]
SERVER_NAME: Final = "atelier"
# The only version of every model: a changed model takes its place, requests under way finish on the old one.
VERSION: Final = "1"
# Triton's names of what this server does beyond the protocol itself.
EXTENSIONS: Final = (
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
)


@dataclass(frozen=True, slots=True)
class OutputWish:
    """One output that the request names.

    `binary`: its data is to travel as raw bytes (REST only). `num_classes` above 0 asks for the classification
    extension: the so many highest values with their indices, as text, instead of the tensor.
    """

    name: str
    binary: bool = False
    num_classes: int = 0
    parameters: Parameters = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """`version` "" is the one that is served. No `outputs` means all of them."""

    model: str
    inputs: tuple[TensorValue, ...]
    version: str = ""
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    outputs: tuple[OutputWish, ...] = ()


@dataclass(frozen=True, slots=True)
class InferResponse:
    """`outputs` in the order that the request named them, or in the model's own; `id` is the request's.

    `timings_ms` by stage, of the slowest part where the request had several; "queue" and "total" are always there.
    """

    model: str
    version: str
    outputs: tuple[TensorValue, ...]
    id: str = ""
    parameters: Parameters = field(default_factory=dict)
    timings_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """What a model takes and gives. Shapes include the batch dimension; -1 is any size.

    `parameters` is text about the model that the protocol leaves to the server: kind, fingerprint, description.
    """

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    parameters: Mapping[str, str] = field(default_factory=dict)
