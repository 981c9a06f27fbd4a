"""The ink of an image and the width of its strokes; ink is (32, 32) in 0..1."""

from __future__ import annotations

import numpy as np
from scipy.ndimage import distance_transform_edt
from scipy.stats import ttest_rel

INK_THRESHOLD = 0.5


def stroke_width(ink: np.ndarray) -> float:
    """Mean stroke width in pixels of (32, 32) ink: in a strip, the mean distance to the edge is a
    quarter of the width."""
    strokes = ink > INK_THRESHOLD
    if not strokes.any():
        return 0.0
    return float(4.0 * distance_transform_edt(strokes)[strokes].mean())


def ink_areas(ink: np.ndarray) -> np.ndarray:
    """(N, 32, 32) -> (N,) share of the paper that is covered."""
    return (ink > INK_THRESHOLD).mean(axis=(1, 2))


def ink_overlaps(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two times (N, 32, 32) -> (N,): the ink that both have, as a share of the ink that either has."""
    strokes = first > INK_THRESHOLD, second > INK_THRESHOLD
    either = np.logical_or(*strokes).sum(axis=(1, 2))
    return np.logical_and(*strokes).sum(axis=(1, 2)) / np.maximum(either, 1)


def compare_ink(base: np.ndarray, bold: np.ndarray) -> dict[str, float]:
    """The same prompts and seeds without and with the adapter, paired."""
    before, after = ink_areas(base), ink_areas(bold)
    return {
        "ink_ratio": float(after.mean() / before.mean()),
        "share_of_pairs_bolder": float((after > before).mean()),
        "paired_t": float(ttest_rel(after, before).statistic),
    }
