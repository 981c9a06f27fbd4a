"""Matrices in low precision: how some of their rows become float32, and the elements of their forms.

E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and its sign in bit 3. Scales of blocks that are "swizzled" lie
in tiles of 128 rows and 4 columns, in the order of NVIDIA's matrix units. A rotation multiplies each group of columns
with a symmetric Hadamard matrix, which is its own inverse. Sources: comfy-kitchen, `backends/eager`; the Open Compute
Project's "Microscaling Formats".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.formats.tensors import FileTensor, SourceTensor

Array = npt.NDArray[Any]
FLOATS: Final = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
FLOATS8: Final = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
_STORED: Final = {**FLOATS8, **FLOATS, "F8_E8M0": ml_dtypes.float8_e8m0fnu, "I8": np.int8, "U8": np.uint8}
_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_TILE_ROWS: Final = 128
_TILE_COLUMNS: Final = 4
_HADAMARD: Final = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float64)


class Form(Protocol):
    """A tensor as one of the formats has it."""

    def compute(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in float32, in any shape."""
        ...


@dataclass(frozen=True, slots=True)
class Quantized:
    """A tensor in low precision, or a run of its rows from `first` on."""

    file: Path
    shape: tuple[int, ...]
    form: Form
    first: int = 0

    def rows(self, start: int, stop: int) -> Quantized:
        """Return some of the rows."""
        return replace(self, shape=(stop - start, *self.shape[1:]), first=self.first + start)

    def wide(self) -> Array:
        """Compute the elements in float32."""
        return self.form.compute(self.first, self.first + _num_rows(self.shape)).reshape(self.shape)


def read_rows(tensor: SourceTensor, start: int, stop: int, dtype: str = "") -> Array:
    """Read rows [start, stop) of a tensor, flat, as elements of its type or of another one of as many bytes."""
    step = tensor.nbytes // max(1, _num_rows(tensor.shape))
    if isinstance(tensor, FileTensor):
        run = replace(tensor, offset=tensor.offset + start * step, nbytes=(stop - start) * step)
        data: bytes | memoryview = run.read()
    else:
        data = memoryview(tensor.read())[start * step : stop * step]
    return np.frombuffer(data, _STORED[dtype or tensor.dtype])


def _num_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if shape else 1


def read_all(tensor: SourceTensor, dtype: str = "") -> Array:
    """Read the elements of a small tensor, flat, in float32."""
    return np.frombuffer(tensor.read(), _STORED[dtype or tensor.dtype]).astype(np.float32)


def round_to(values: Array, dtype: str) -> Array:
    """Round to a floating type; what is too large becomes infinite, as in torch."""
    with np.errstate(over="ignore"):
        return values.astype(FLOATS[dtype])


def nibbles(packed: Array, *, high_first: bool) -> Array:
    """Return the two halves of each byte, in turn along the last axis."""
    low, high = packed & 15, packed >> 4
    pair = (high, low) if high_first else (low, high)
    return np.stack(pair, axis=-1).reshape(*packed.shape[:-1], -1)


def e2m1(codes: Array) -> Array:
    """Return the values of 4-bit floats."""
    return _E2M1[codes]


def from_tiles(flat: Array, rows: int, columns: int) -> Array:
    """Return scales (rows, columns) that lie in tiles; their number is `num_tiled(rows, columns)`."""
    down, across = -(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS)
    tiles = flat.reshape(down, across, 32, _TILE_ROWS // 32, _TILE_COLUMNS)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(down * _TILE_ROWS, across * _TILE_COLUMNS)[:rows, :columns]


def num_tiled(rows: int, columns: int) -> int:
    """Return the number of scales in tiles, padding included."""
    return -(-rows // _TILE_ROWS) * _TILE_ROWS * -(-columns // _TILE_COLUMNS) * _TILE_COLUMNS


def is_rotation_size(size: object) -> bool:
    """Return whether a rotation has groups of that size: a power of 4 up to 4096."""
    return type(size) is int and size in (4, 16, 64, 256, 1024, 4096)


def rotated(values: Array, group: int) -> Array:
    """Multiply each group of columns with the Hadamard matrix of its size."""
    parts = values.astype(np.float64).reshape(len(values), -1, group) @ _rotation(group)
    return parts.astype(np.float32).reshape(values.shape)


@functools.cache
def _rotation(group: int) -> Array:
    found: Array = np.ones((1, 1))
    while len(found) < group:
        found = np.kron(found, _HADAMARD)
    return found / np.sqrt(group)
