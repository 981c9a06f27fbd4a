"""Records of a pipeline's callers: named tensors, signatures, requests and results. Free of Ray, HTTP and torch.

Datatypes and shapes are those of the Open Inference Protocol (KServe v2, "Tensor Data"). A text is a BYTES element, an
image UINT8 (height, width, 3). The first dimension of every tensor of a pipeline counts the items of the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.programs.signature import ProgramSignature, ProgramTensor

Datatype: TypeAlias = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
    "BF16",
    "BYTES",
]
# BYTES elements are Python bytes in an object array; numpy has no bfloat16 of its own.
NUMPY_DTYPES: Final[dict[Datatype, np.dtype[Any]]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(np.object_),
}

_DATATYPES: Final[Mapping[str, Datatype]] = {
    "BOOL": "BOOL",
    "U8": "UINT8",
    "U16": "UINT16",
    "U32": "UINT32",
    "U64": "UINT64",
    "I8": "INT8",
    "I16": "INT16",
    "I32": "INT32",
    "I64": "INT64",
    "F16": "FP16",
    "BF16": "BF16",
    "F32": "FP32",
    "F64": "FP64",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that a model takes or gives. `shape` has -1 where any size goes, batch dimension included.

    `optional` inputs may be left out of a request.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TensorValue:
    """A named tensor. `data` has the dtype of NUMPY_DTYPES[datatype] and its shape is the tensor's."""

    name: str
    datatype: Datatype
    data: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data."""
        return self.data.shape


def bytes_data(elements: Sequence[bytes]) -> npt.NDArray[np.object_]:
    """Return the data of a BYTES tensor of shape (len(elements),)."""
    # np.array(list of bytes) would make a fixed-width dtype that drops trailing zero bytes.
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def fits_shape(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Return whether a shape is the wanted one, where -1 is any size."""
    return len(shape) == len(wanted) and all(want in (-1, size) for size, want in zip(shape, wanted, strict=True))


def text_tensor(name: str, texts: Sequence[str]) -> TensorValue:
    """Return BYTES of shape (len(texts),): UTF-8, a question mark for half of a surrogate pair."""
    return TensorValue(name, "BYTES", bytes_data([text.encode(errors="replace") for text in texts]))


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model or pipeline, of the latter in the order of its config.

    Optional inputs have a default in the config.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    description: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRequest:
    """A request for a pipeline.

    `priority` 1 is the most urgent, 0 every stage's default; `timeout_s` bounds the whole run, and `tenant` is whose
    share of the cluster it takes.
    """

    pipeline: str
    inputs: Mapping[str, TensorValue]
    priority: int = 0
    timeout_s: float | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineResult:
    """The answer of a pipeline.

    `timings_ms` has one entry per stage, by its name, and "total". `warnings` begin with their stage's name.
    """

    outputs: dict[str, TensorValue]
    timings_ms: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def program_specs(signature: ProgramSignature) -> Signature:
    """Return the program's inputs and outputs, with -1 for each dynamic size."""
    return Signature(
        inputs=tuple(_program_spec(one, optional=one.name in signature.may_lack) for one in signature.inputs),
        outputs=tuple(_program_spec(one) for one in signature.outputs),
    )


def _program_spec(tensor: ProgramTensor, *, optional: bool = False) -> TensorSpec:
    """Return one input or output."""
    shape = tuple(size if isinstance(size, int) else -1 for size in tensor.shape)
    return TensorSpec(tensor.name, _DATATYPES[tensor.dtype], shape, optional)
