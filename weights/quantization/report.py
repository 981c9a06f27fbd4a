"""The cost of quantization, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """One tensor: bits per weight with its scales, and errors relative to the root mean square of its elements.

    `note` says why a matrix was not quantized.
    """

    name: str
    kind: str
    num_elements: int
    bits_per_weight: float
    rms_error: float
    max_error: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The tensors of a model as they were written."""

    tensors: Sequence[QuantizedTensor]

    @property
    def bits_per_weight(self) -> float:
        """The mean over all elements, those of norms and of what was left as it is included."""
        return sum(t.bits_per_weight * t.num_elements for t in self.tensors) / sum(t.num_elements for t in self.tensors)


class ErrorSum:
    """Compares a tensor with what was written of it, part by part."""

    def __init__(self) -> None:
        self._num_elements = 0
        self._squares = 0.0
        self._squared_errors = 0.0
        self._max_error = 0.0

    def add(self, original: npt.NDArray[np.float32], restored: npt.NDArray[np.float32]) -> None:
        """Compare a part with what its packed bytes stand for."""
        difference = original - restored
        self._num_elements += original.size
        self._squares += float(np.square(original, dtype=np.float64).sum())
        self._squared_errors += float(np.square(difference, dtype=np.float64).sum())
        self._max_error = max(self._max_error, float(np.abs(difference).max(initial=0)))

    def result(self, name: str, kind: str, nbytes: int, note: str = "") -> QuantizedTensor:
        """Return what has come together, for a tensor that takes `nbytes`."""
        count = self._num_elements
        size = math.sqrt(self._squares / count) or 1.0
        rms = math.sqrt(self._squared_errors / count)
        return QuantizedTensor(name, kind, count, 8 * nbytes / count, rms / size, self._max_error / size, note)
