"""The border between tensors and the source of their bytes: extent ids in, read-only buffers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from weights.reading.extents import ByteArray, ExtentReader, Progress
from weights.reading.planning import ReadPlanner
from weights.reading.report import LoadReport
from weights.records.manifest import ExtentRef

__all__ = ["ExtentProvider", "LocalExtents"]


class ExtentProvider(Protocol):
    """Gives the bytes of extents. Loaders and engines cannot tell a local store from a node's shared memory."""

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        """Return read-only uint8 arrays by extent id, valid as long as they are referenced.

        Raises ExtentCorrupt when storage does not have the bytes, BudgetExceeded when they do not fit.
        """
        ...


class LocalExtents:
    """Reads the store of this machine, extents in parallel, straight into memory that is the caller's to keep."""

    def __init__(self, packs: Path, *, progress: Progress | None = None) -> None:
        self._reader = ExtentReader(packs, None, ReadPlanner())
        self._progress = progress
        self._last_report: LoadReport | None = None

    @property
    def last_report(self) -> LoadReport | None:
        """Report of the latest `fetch` that succeeded."""
        return self._last_report

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        arrays, self._last_report = self._reader.read_all(extents, self._progress)
        for array in arrays.values():
            array.flags.writeable = False
        return arrays
