"""Named tensors of the Open Inference Protocol and of pipelines: what a model takes and gives, as values.

Datatypes and shapes are the protocol's (KServe v2, "Tensor Data"). Free of Ray and of HTTP; no torch, so that the
ingress stays light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model takes or gives under one name. `shape` has -1 where any size goes, batch dimension included.

    `optional` inputs may be left out of a request.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TensorValue:
    """One named tensor. `data` has the dtype of NUMPY_DTYPES[datatype] and its shape is the tensor's."""

    name: str
    datatype: Datatype
    data: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape


def bytes_data(elements: Sequence[bytes]) -> npt.NDArray[np.object_]:
    """Data of a BYTES tensor of shape (len(elements),)."""
    # np.array(list of bytes) would make a fixed-width dtype that drops trailing zero bytes.
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array


def text_tensor(name: str, texts: Sequence[str]) -> TensorValue:
    """BYTES of shape (len(texts),): UTF-8, a question mark for half of a surrogate pair."""
    return TensorValue(name, "BYTES", bytes_data([text.encode(errors="replace") for text in texts]))
