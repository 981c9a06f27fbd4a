"""Tensors packed for other processes, without torch: bytes with dtype and shape.

Ray moves numpy arrays out of band and maps them without a copy; torch tensors it would pickle, at seconds per GiB,
and numpy itself has no bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["ALIGN_BYTES", "ByteArray", "Layout", "PackedTensor", "TensorPlace", "join_tensors", "split_tensors"]

ALIGN_BYTES: Final = 64

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as bytes: `data` in C order; `dtype` by its torch name, "bfloat16" say."""

    data: ByteArray
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in an array that holds several."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


Layout = tuple[TensorPlace, ...]


def join_tensors(tensors: Mapping[str, PackedTensor]) -> tuple[Layout, ByteArray]:
    """Copy all of them into one array, read-only: one object for Ray, and nobody else's memory."""
    places: list[TensorPlace] = []
    end = 0
    for name, tensor in tensors.items():
        offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
        places.append(TensorPlace(name, tensor.dtype, tensor.shape, offset, tensor.data.nbytes))
        end = offset + tensor.data.nbytes
    data = np.zeros(end, np.uint8)
    for place in places:
        data[place.offset : place.offset + place.nbytes] = tensors[place.name].data
    data.flags.writeable = False
    return tuple(places), data


def split_tensors(layout: Layout, data: ByteArray) -> dict[str, PackedTensor]:
    """Return views of `data`."""
    return {
        place.name: PackedTensor(data[place.offset : place.offset + place.nbytes], place.dtype, place.shape)
        for place in layout
    }
