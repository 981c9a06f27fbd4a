"""Weights as they lie in a GGUF or Kuiper file, and their rows in float32.

Rows are unpacked by the compiled kernels, or in plain torch on any device where there are none. Block layouts:
ggml-common.h.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch

from deployments.engines.native.library import PackedMatrix, load_kernels
from deployments.engines.records.protocol import EngineError
from weights.formats.ggml_values import UNPACKED_KINDS, unpack_blocks
from weights.records.dtypes import BLOCK_SIZES

Arithmetic = Literal["fast", "deterministic", "exact"]
DENSE_KINDS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GROUP_INT8: Final = "GROUP_INT8"
_KERNEL_CHUNK: Final = 16  # elements with one scale: a kernel cannot cut a group elsewhere


class PackedWeight(NamedTuple):
    """A [rows, columns] matrix: blocks of a ggml type as uint8 (rows, bytes), floats, or int8 with flat groups."""

    kind: str
    data: torch.Tensor
    rows: int
    columns: int
    scales: torch.Tensor | None = None
    group_size: int = 0

    def selected(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows `ids` (N,) in float32."""
        if self.kind in DENSE_KINDS:
            return self.data[ids].float()
        if self.kind != GROUP_INT8:
            return unpack_blocks(self.kind, self.data[ids])
        return torch.cat([unpack_rows(self, row, row + 1) for row in ids.tolist()])


def packed_weight(name: str, kind: str, data: torch.Tensor) -> PackedWeight:
    """Return the weight of one tensor as stored. Raises EngineError naming what is not supported or does not fit."""
    if kind not in SUPPORTED_KINDS:
        raise EngineError(f"tensor {name!r} is {kind}; supported are {', '.join(SUPPORTED_KINDS)}")
    if kind in DENSE_KINDS:
        if data.dim() != 2 or data.dtype != DENSE_KINDS[kind]:
            raise EngineError(f"tensor {name!r} is {data.dtype} {list(data.shape)}, expected a matrix of {kind}")
        return PackedWeight(kind, data, data.shape[0], data.shape[1])
    elements, block_bytes = BLOCK_SIZES[kind]
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] % block_bytes or data.stride(1) != 1:
        raise EngineError(f"tensor {name!r} is {data.dtype} {list(data.shape)}, expected rows of {kind} blocks")
    return PackedWeight(kind, data, data.shape[0], data.shape[1] // block_bytes * elements)


def group_int8_weight(name: str, data: torch.Tensor, scales: torch.Tensor, group_size: int) -> PackedWeight:
    """Return an int8 matrix with a scale per `group_size` consecutive elements. Raises EngineError unless they fit."""
    if data.dtype != torch.int8 or data.dim() != 2 or scales.dtype != torch.float32:
        raise EngineError(
            f"tensor {name!r} is {data.dtype} {list(data.shape)}, expected an int8 matrix, float32 scales"
        )
    if group_size < 1 or data.numel() != scales.numel() * group_size:
        raise EngineError(f"tensor {name!r} {list(data.shape)} has {scales.numel()} scales for groups of {group_size}")
    rows, columns = data.shape
    data = data if data.stride(1) == 1 else data.contiguous()  # rows of a part lie apart
    return PackedWeight(GROUP_INT8, data, rows, columns, scales.contiguous(), group_size)


def unpack_rows(weight: PackedWeight, start: int, stop: int) -> torch.Tensor:
    """Return rows `start` to `stop` as float32 (stop - start, columns)."""
    if weight.kind in DENSE_KINDS:
        return weight.data[start:stop].float()
    kernels = load_kernels() if weight.data.device.type == "cpu" else None
    if kernels is not None and fits_kernel(weight):
        return kernels.unpack_rows(PackedMatrix(*weight), start, stop)
    if weight.scales is not None:
        return _unpack_groups(weight.data, weight.scales, start, stop, weight.group_size)
    return unpack_blocks(weight.kind, weight.data[start:stop])


def fits_kernel(weight: PackedWeight) -> bool:
    """Return whether the compiled kernels can take the weight: no group of scales ends inside a chunk of theirs."""
    return weight.kind != GROUP_INT8 or not (weight.columns % _KERNEL_CHUNK or weight.group_size % _KERNEL_CHUNK)


def _unpack_groups(data: torch.Tensor, scales: torch.Tensor, start: int, stop: int, group_size: int) -> torch.Tensor:
    """Return rows `start` to `stop` of int8 `data` (rows, columns) whose groups run across row borders."""
    columns = data.shape[1]
    flat = torch.arange(start * columns, stop * columns, device=data.device)
    return data[start:stop].float() * scales[flat // group_size].view(stop - start, columns)


WITHOUT_TRITON: Final = frozenset({"Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"})  # unpacked by torch on a card
SUPPORTED_KINDS: Final = (*DENSE_KINDS, *UNPACKED_KINDS, GROUP_INT8)
