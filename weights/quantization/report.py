"""The cost of quantization, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One matrix: bits per weight with its scales, and errors relative to the root mean square of its elements."""

    name: str
    num_elements: int
    bits_per_weight: float
    rms_error: float
    max_error: float


def tensor_error(
    name: str, original: npt.NDArray[np.float32], restored: npt.NDArray[np.float32], nbytes: int
) -> QuantizedTensor:
    """Compare a matrix with what its `nbytes` packed bytes stand for."""
    size = float(np.sqrt(np.mean(np.square(original, dtype=np.float64)))) or 1.0
    difference = np.abs(original - restored)
    rms = float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))
    return QuantizedTensor(name, original.size, 8 * nbytes / original.size, rms / size, float(difference.max()) / size)
