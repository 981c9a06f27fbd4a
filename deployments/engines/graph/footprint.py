"""The bytes that a forward takes beside its weights: lines through its peaks of a few rows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

ROUNDING_BYTES: Final = 8 * 512  # of the buffers that live at once, few have odd sizes


@dataclass(frozen=True, slots=True)
class Footprint:
    """The peaks of a forward by its rows, at `points` (rows, bytes) that ascend.

    A peak is the largest of sums of buffers, and each buffer has a part for all rows and one for each. So it lies on
    the line between two points or below, and beyond the last one below its multiple, but for what an allocator rounds.
    `workspace_bytes` is what kernels take beside tensors, measured where there is a device that has some.
    """

    points: tuple[tuple[int, int], ...]
    workspace_bytes: int = 0

    def bytes_of(self, rows: int) -> int:
        """Return the bytes that so many rows take, from 1 on; beyond the last point in proportion to it."""
        (few, low), (many, high) = (0, 0), self.points[-1]
        for left, right in pairwise(self.points):
            if rows <= right[0]:
                (few, low), (many, high) = left, right
                break
        rounding = 0 if rows in (few, many) else ROUNDING_BYTES
        return low - (low - high) * (rows - few) // (many - few) + rounding + self.workspace_bytes

    def rows_within(self, nbytes: int, most: int) -> int:
        """Return the most rows, up to `most`, that take at most `nbytes`, as all fewer do; maybe 0."""
        rows = 0
        while rows < most and self.bytes_of(rows + 1) <= nbytes:
            rows += 1
        return rows


def fit_footprint(peak_of: Callable[[int], int], rows: Sequence[int]) -> Footprint:
    """Return the footprint by the peaks of these numbers of rows, ascending from 1."""
    return Footprint(tuple((count, peak_of(count)) for count in rows))
