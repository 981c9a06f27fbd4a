"""A table of torch's element types by their names in manifests."""

from __future__ import annotations

import torch

from weights.records.dtypes import BLOCK_SIZES


def memory_form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return dtype and shape of a stored tensor in memory: its own, or uint8 bytes of its blocks."""
    if dtype in BLOCK_SIZES:
        elements, nbytes = BLOCK_SIZES[dtype]
        return torch.uint8, (*shape[:-1], shape[-1] // elements * nbytes)
    return TORCH_DTYPES[dtype], shape


TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "C64": torch.complex64,
}

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
