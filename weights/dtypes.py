"""Element types by their safetensors names, with sizes, and the casts that the store can do. Torch-free."""

from __future__ import annotations

import ml_dtypes
import numpy as np

ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}

_FLOATS: dict[str, np.dtype[np.generic]] = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_BY_CONFIG_NAME = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def cast_target(dtype: str, wanted: str) -> str:
    """The dtype that a tensor of `dtype` has in the store when the config asks for `wanted`.

    Only floating tensors are cast; integer tables and 8-bit floats keep their meaning and their type.
    """
    return _BY_CONFIG_NAME[wanted] if wanted != "auto" and dtype in _FLOATS else dtype


def cast(data: bytes | memoryview, dtype: str, target: str) -> bytes | memoryview:
    """Little-endian elements of `dtype` as elements of `target`, rounded to nearest even."""
    if dtype == target:
        return data
    with np.errstate(over="ignore", invalid="ignore"):  # too large becomes infinite, as in torch
        return np.frombuffer(data, _FLOATS[dtype]).astype(_FLOATS[target]).tobytes()
