"""8-bit floats (E4M3, no infinities) with one scale per tensor: w = value * scale. Format: OCP 8-bit floating point."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.errors import WeightsError

MAX_E4M3 = 448.0


def quantize_fp8(array: npt.NDArray[np.float32]) -> tuple[bytes, float]:
    """The elements as F8_E4M3 in C order, rounded to nearest even, and the scale amax / 448 (1 for zeros).

    Raises WeightsError for infinities and NaNs.
    """
    values = np.ascontiguousarray(array, np.float32)
    amax = np.abs(values).max(initial=0)
    if not np.isfinite(amax):
        raise WeightsError(f"fp8 cannot express the infinities or NaNs of a tensor of shape {list(array.shape)}")
    # A tensor too small for a float32 scale keeps scale 1 and becomes zeros, as it is to 8 bits.
    scale = amax / np.float32(MAX_E4M3) or np.float32(1)
    # Beyond 448 the cast gives NaN, and a rounded scale may lead there.
    return (values / scale).clip(-MAX_E4M3, MAX_E4M3).astype(ml_dtypes.float8_e4m3fn).tobytes(), float(scale)
