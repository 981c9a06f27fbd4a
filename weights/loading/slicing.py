"""Slices of tensors for one rank of a tensor-parallel group, read from their byte ranges alone."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from weights.dtypes import BLOCK_SIZES
from weights.errors import ExtentCorrupt, WeightsError
from weights.loading.external_memory import bytes_tensor
from weights.loading.views import memory_form, view_of
from weights.manifest import Manifest, TensorRef
from weights.reading.blocks import resolve_pack
from weights.reading.extents import read_extent

__all__ = ["TensorSlice", "read_slice", "slice_view"]

# Two runs with no more than this between them are one read: storage gives whole blocks of 4 KiB in any case.
MAX_GAP_BYTES: Final = 4096
_MAX_BUFFERS: Final = 1024  # IOV_MAX of Linux: runs and gaps of one preadv

Preadv = Callable[[int, list[memoryview], int], int]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Part `rank` of `world` equal parts along `dim` (negative: from the end).

    Parts must be equal, as in Megatron: ranks of unequal shape fail far from here, in the first collective.
    """

    dim: int
    rank: int
    world: int

    def __post_init__(self) -> None:
        if self.world < 1 or not 0 <= self.rank < self.world:
            raise WeightsError(f"slice of rank {self.rank} in a world of {self.world}: expected 0 <= rank < world")

    def bounds(self, name: str, shape: Sequence[int], dtype: str | None = None) -> tuple[int, int, int]:
        """Return (dim, start, length) in elements. Raises WeightsError when the dimension cannot be divided.

        The last dimension of a block-quantized `dtype` is divided into whole blocks only.
        """
        if not -len(shape) <= self.dim < len(shape):
            raise WeightsError(f"tensor {name!r} of shape {list(shape)} has no dimension {self.dim}")
        dim = self.dim % len(shape)
        unit = BLOCK_SIZES[dtype][0] if dtype in BLOCK_SIZES and dim == len(shape) - 1 else 1
        if shape[dim] // unit % self.world or shape[dim] % unit:
            blocks = f" in blocks of {unit}" if unit > 1 else ""
            raise WeightsError(
                f"tensor {name!r} of shape {list(shape)}: dimension {dim}{blocks} does not divide into "
                f"{self.world} equal parts"
            )
        length = shape[dim] // self.world
        return dim, self.rank * length, length


def slice_view(tensor: torch.Tensor, part: TensorSlice, name: str = "") -> torch.Tensor:
    """Return the slice of a tensor in memory as a view: nothing is read or copied.

    A block-quantized tensor is sliced as what it is in memory, bytes: along its last axis a slice that `read_slice`
    would refuse (half a block) is not noticed here.
    """
    return tensor.narrow(*part.bounds(name, tensor.shape))


def read_slice(
    packs: Path,
    manifest: Manifest,
    component: str,
    name: str,
    part: TensorSlice,
    *,
    verified: bool = False,
    preadv: Preadv = os.preadv,
) -> torch.Tensor:
    """Read the slice from the pack file into private, contiguous memory, without what lies beside it.

    Along dimension 0 it is one range; along others one run per row, and runs less than MAX_GAP_BYTES apart are read
    together (the gaps go into a scratch buffer). HAZARD: the checksum covers an extent, so a part of it cannot be
    verified; `verified` reads and verifies the whole extent instead. Block-quantized tensors come as their bytes.
    Raises WeightsError (unknown names, uneven division) and ExtentCorrupt (missing or short file).
    """
    ref = _find(manifest, component, name)
    dim, start, length = part.bounds(f"{component}.{name}", ref.shape, ref.dtype)
    extent = manifest.extents[ref.extent]
    dtype, shape = memory_form(ref.dtype, ref.shape)
    if ref.shape[dim]:
        start, length = (number * shape[dim] // ref.shape[dim] for number in (start, length))  # blocks in bytes
    if verified:
        whole = view_of(bytes_tensor(read_extent(packs, extent)), ref)
        return whole.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
    out = torch.empty((*shape[:dim], length, *shape[dim + 1 :]), dtype=dtype)
    row_bytes = math.prod(shape[dim + 1 :]) * dtype.itemsize  # of one index of `dim`
    runs = _Runs(extent.offset + ref.offset + start * row_bytes, length * row_bytes, shape[dim] * row_bytes)
    if out.nbytes:
        _read(resolve_pack(packs, extent.pack), runs, memoryview(out.view(-1).view(torch.uint8).numpy().data), preadv)
    return out


@dataclass(frozen=True, slots=True)
class _Runs:
    """Byte ranges of a file: `nbytes` each, beginning at `offset` and every `stride` bytes after it."""

    offset: int
    nbytes: int
    stride: int

    def reads(self, out: memoryview) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield file positions with the buffers to fill from there, so that runs fill `out` one after another."""
        num_runs, gap_bytes = len(out) // self.nbytes, self.stride - self.nbytes
        if gap_bytes == 0:
            yield self.offset, [out]
            return
        per_read = _MAX_BUFFERS // 2 if gap_bytes <= MAX_GAP_BYTES else 1
        gap = memoryview(bytearray(gap_bytes)) if per_read > 1 else memoryview(b"")
        for first in range(0, num_runs, per_read):
            buffers = []
            for run in range(first, min(first + per_read, num_runs)):
                buffers += [out[run * self.nbytes : (run + 1) * self.nbytes], gap]
            yield self.offset + first * self.stride, buffers[:-1]


def _read(path: Path, runs: _Runs, out: memoryview, preadv: Preadv) -> None:
    try:
        with path.open("rb", buffering=0) as file:
            for position, buffers in runs.reads(out):
                while buffers:
                    read = preadv(file.fileno(), buffers, position)
                    if not read:
                        raise ExtentCorrupt(f"{path}: ends at byte {position}, a slice needs bytes beyond it")
                    position += read
                    buffers = _rest(buffers, read)
    except OSError as error:
        raise ExtentCorrupt(f"{path}: reading a slice failed: {error.strerror or error}") from None


def _rest(buffers: list[memoryview], read: int) -> list[memoryview]:
    """Return the parts of the buffers that a short read has left to fill."""
    for index, buffer in enumerate(buffers):
        if read < len(buffer):
            return [buffer[read:], *buffers[index + 1 :]]
        read -= len(buffer)
    return []


def _find(manifest: Manifest, component: str, name: str) -> TensorRef:
    if component not in manifest.components:
        known = ", ".join(manifest.components)
        raise WeightsError(f"{manifest.model} has no component {component!r} (known: {known})")
    tensors = manifest.components[component].tensors
    if name not in tensors:
        near = difflib.get_close_matches(name, tensors, n=3) or list(tensors)[:3]
        raise WeightsError(f"{manifest.model}: {component} has no tensor {name!r} (near names: {', '.join(near)})")
    return tensors[name]
