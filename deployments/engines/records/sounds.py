"""Audio that a request brings, and the form in which a model hears it. Free of torch: the ingress makes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MAX_RATE: Final = 192_000  # samples a second, of the best sound cards
MAX_CHANNELS: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Sound:
    """Samples of audio, float32 (channels, number) from -1 to 1, of which each channel has `rate` a second."""

    samples: npt.NDArray[np.float32]
    rate: int

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.samples.shape[1] / self.rate

    def fitted(self, rate: int, channels: int | None) -> Sound:
        """Return it at another rate, and with so many channels; None keeps those that it has.

        One channel is repeated, and several become one by their mean.
        """
        samples = self.samples
        if channels is not None and channels != len(samples):
            samples = np.repeat(samples.mean(axis=0, keepdims=True), channels, axis=0)
        return Sound(_resampled(samples, self.rate, rate), rate)


def why_no_sound(samples: npt.NDArray[Any], rate: Any) -> str | None:
    """Return why these are no samples that a request can bring, None where they are."""
    if samples.dtype.kind != "f" or samples.ndim != 2:
        return f"{samples.dtype} of shape {samples.shape}, expected floats (channels, samples)"
    if reason := why_no_form(samples.shape[0], rate, samples.shape[1]):
        return reason
    return None if np.isfinite(samples).all() else "samples that are not finite"


def why_no_form(channels: int, rate: Any, number: int) -> str | None:
    """Return why audio of this form is not taken: so many channels, samples a second and samples of a channel."""
    if not 1 <= channels <= MAX_CHANNELS:
        return f"{channels} channels, expected 1 or {MAX_CHANNELS}"
    if isinstance(rate, bool) or not isinstance(rate, int) or not 1 <= rate <= MAX_RATE:
        return f"{rate} samples a second, expected 1 to {MAX_RATE}"
    return None if number else "no sample is in it"


def _resampled(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    """Return samples at another rate: what both rates can say of their spectrum, and nothing else.

    Silence behind them makes the lengths of both spectra exact, and keeps the end from sounding in the beginning.
    """
    if rate == new_rate:
        return samples
    common = math.gcd(rate, new_rate)
    before, after = rate // common, new_rate // common
    number = samples.shape[1]
    groups = -(-(number + rate // 10) // before)
    spectrum = np.fft.rfft(samples, groups * before)
    audible = spectrum[:, : (groups * min(before, after) + 1) // 2]
    found = np.fft.irfft(audible, groups * after) * (after / before)
    return found[:, : -(-number * after // before)].astype(np.float32)
