"""Types and values of the edges of a pipeline.

A *batch* is the value of one edge: one entry per item of the request. Texts are a list of str and tokens a list of
tuples, because that is what models and functions take; everything else is a numpy array, or a list of arrays where
items have unlike sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from configs.pipeline import parse_tensor_type
from deployments.errors import InvalidRequest
from deployments.pipelines.records import NUMPY_DTYPES, Datatype, TensorSpec, TensorValue, fits_shape, text_tensor

Batch: TypeAlias = list[str] | list[tuple[int, ...]] | list[npt.NDArray[Any]] | npt.NDArray[Any]
PADDING: Final = -1  # of token rows in a tensor; no token has this id


@dataclass(frozen=True, slots=True)
class EdgeType:
    """The type of an edge. `shape` counts the items first; -1 is any size."""

    datatype: Datatype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        names = {type_: name for name, type_ in _NAMED.items()}
        return names.get(self) or f"{self.datatype}[{','.join(str(size) for size in self.shape)}]"

    def accepts(self, other: EdgeType) -> bool:
        """Return whether values of `other` may be ones of this. Texts and tokens are no other types' values."""
        if self == other:
            return True
        if {self, other} & {TEXT, TOKENS} or self.datatype != other.datatype or len(self.shape) != len(other.shape):
            return False
        return all(-1 in (mine, theirs) or mine == theirs for mine, theirs in zip(self.shape, other.shape, strict=True))

    def spec(self, name: str, *, optional: bool = False) -> TensorSpec:
        """Return the tensor of that name that travels along such an edge."""
        return TensorSpec(name, self.datatype, self.shape, optional)


TEXT: Final = EdgeType("BYTES", (-1,))
INT: Final = EdgeType("INT64", (-1,))
FLOAT: Final = EdgeType("FP32", (-1,))
BOOL: Final = EdgeType("BOOL", (-1,))
TOKENS: Final = EdgeType("INT64", (-1, -1))
IMAGE: Final = EdgeType("UINT8", (-1, -1, -1, 3))
VECTOR: Final = EdgeType("FP32", (-1, -1))
_NAMED: Final = {"text": TEXT, "int": INT, "float": FLOAT, "tokens": TOKENS, "image": IMAGE}


def edge_type(text: str) -> EdgeType:
    """Return the type of a name that `configs.pipeline` has checked, without `optional`."""
    parsed = parse_tensor_type(text)
    return _NAMED[text] if parsed is None else EdgeType(cast("Datatype", parsed[0]), parsed[1])


def batch_of(tensor: TensorValue, type_: EdgeType) -> Batch:
    """Return the batch that a request gave for an input of `type_`. Raises InvalidRequest."""
    if tensor.datatype != type_.datatype or not fits_shape(tensor.shape, type_.shape):
        given = f"{tensor.datatype}{list(tensor.shape)}"
        expected = f"{type_.datatype}{list(type_.shape)}"
        raise InvalidRequest(f"input {tensor.name!r}: expected {expected}, got {given}", tensor.name)
    if type_ == TEXT:
        return [_text(element, tensor.name) for element in tensor.data.tolist()]
    if type_ == TOKENS:
        return [_unpadded(row, tensor.name) for row in tensor.data.tolist()]
    return tensor.data


def tensor_of(name: str, batch: Batch, type_: EdgeType) -> TensorValue:
    """Return a batch as a tensor. Arrays of unlike sizes have zeros behind them."""
    if type_ == TEXT:
        return text_tensor(name, cast("list[str]", batch))
    if type_ == TOKENS:
        rows = cast("list[tuple[int, ...]]", batch)
        data = np.full((len(rows), max(map(len, rows), default=0)), PADDING, dtype=np.int64)
        for index, row in enumerate(rows):
            data[index, : len(row)] = row
    elif isinstance(batch, list):
        arrays = cast("list[npt.NDArray[Any]]", batch)
        shape = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
        data = np.zeros((len(arrays), *shape), NUMPY_DTYPES[type_.datatype])
        for place, array in zip(data, arrays, strict=True):
            place[tuple(slice(size) for size in array.shape)] = array
    else:
        data = batch
    return TensorValue(name, type_.datatype, data)


def stacked(rows: Sequence[Any], type_: EdgeType) -> Batch:
    """Return one batch of the items' values. Raises ValueError for arrays of different shapes."""
    if type_ in (TEXT, TOKENS):
        return list(rows)
    arrays = [np.asarray(row, dtype=NUMPY_DTYPES[type_.datatype]) for row in rows]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ValueError(f"items of different shapes do not make one tensor: {', '.join(map(str, shapes))}")
    return np.stack(arrays)


def items_of(batch: Batch) -> list[Any]:
    """Return the items one by one: Python numbers where an item is one number, rows of the array otherwise."""
    if isinstance(batch, np.ndarray):
        return batch.tolist() if batch.ndim == 1 else list(batch)
    return list(batch)


def _text(element: Any, name: str) -> str:
    if isinstance(element, str):
        return element
    try:
        return bytes(element).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"input {name!r}: a text that is not UTF-8: {error}", name) from None


def _unpadded(row: list[int], name: str) -> tuple[int, ...]:
    ids = tuple(row[: row.index(PADDING)] if PADDING in row else row)
    if not ids or min(ids) < 0:
        raise InvalidRequest(f"input {name!r}: a row of token ids must have ids from 0 on, then only {PADDING}", name)
    return ids
