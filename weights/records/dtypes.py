"""Element types by their safetensors names, with sizes, and the casts that the store can do. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import ml_dtypes
import numpy as np

# In the safetensors library's own order, by which its writer sorts.
ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}

# `quant_method` in the config.json of what `infra/offline/group_int8.py` writes.
GROUP_INT8_METHOD = "int8-group"

# Block-quantized types of ggml, as (elements, bytes) of one block along the last axis. Source: ggml-common.h.
# Without Q8_1: no file has it, and ggml (36 bytes) and gguf-py (40 bytes) disagree on its size.
BLOCK_SIZES: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
}

_FLOATS: dict[str, np.dtype[np.generic]] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_AUTO_WITHOUT = "auto without "
_BY_CONFIG_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def tensor_nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor. Raises ValueError for an unknown dtype or a last axis of no whole blocks."""
    if dtype in ITEM_BYTES:
        return math.prod(shape) * ITEM_BYTES[dtype]
    if dtype not in BLOCK_SIZES:
        raise ValueError(f"unknown dtype {dtype!r} (known: {', '.join([*ITEM_BYTES, *BLOCK_SIZES])})")
    elements, nbytes = BLOCK_SIZES[dtype]
    if not shape or shape[-1] % elements:
        raise ValueError(
            f"{dtype} takes blocks of {elements} elements, shape {list(shape)} has no whole number of them"
        )
    return math.prod(shape) // elements * nbytes


def config_name(dtype: str) -> str:
    """Return the config's name of a floating type, "" of any other."""
    return next((name for name, type_ in _BY_CONFIG_NAME.items() if type_ == dtype), "")


def auto_without(types: Iterable[str]) -> str:
    """Return the name of an `auto` by which tensors of these types become float32, and all others stay."""
    names = sorted(types)
    return _AUTO_WITHOUT + " and ".join(names) if names else "auto"


def types_without(wanted: str) -> frozenset[str]:
    """Return the types of an `auto_without`, none of any other name."""
    return frozenset(wanted.removeprefix(_AUTO_WITHOUT).split(" and ") if wanted.startswith(_AUTO_WITHOUT) else ())


def cast_target(dtype: str, wanted: str) -> str:
    """Return the dtype that a tensor of `dtype` has in the store when the config asks for `wanted`.

    Only floating tensors are cast; integer tables and 8-bit floats keep their meaning and their type. `wanted` is a
    name of the config's, or one of `auto_without`.
    """
    if wanted.startswith(_AUTO_WITHOUT):
        return "F32" if dtype in types_without(wanted) else dtype
    return _BY_CONFIG_NAME[wanted] if wanted != "auto" and dtype in _FLOATS else dtype


def cast(data: bytes | memoryview, dtype: str, target: str) -> bytes | memoryview:
    """Convert little-endian elements of `dtype` to `target`, rounded to nearest even."""
    if dtype == target:
        return data
    with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite, as in torch
        return np.frombuffer(data, _FLOATS[dtype]).astype(_FLOATS[target]).tobytes()
