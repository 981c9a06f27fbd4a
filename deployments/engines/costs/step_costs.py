"""Seconds of forwards, decodes and steps by kind and rows, as measured, for the choice of their sizes. Free of torch.

A kind is anything that takes the same time for the same rows: an image size and a text length, say. For rows that were
not measured the seconds lie on the line between the nearest ones that were. Beyond the largest the cost is believed to
rise half as fast as the rows, which is friendly enough for a larger batch to be tried, and found out.

What was measured while others had the cores is too much, and a batch size that seems dear is not chosen, so that
nothing would ever correct it. So a size that seems dearer than a friendly guess by the others, or than a larger batch,
counts as unknown once it was not measured for some time, and is tried again.

What was measured is remembered in a small file, by what it was measured on: a new worker chooses batch sizes well from
its first step. That saves time only: whatever is wrong with the file, it is empty.
"""

from __future__ import annotations

import bisect
import json
import statistics
import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weights.platform.private_folder import cache_folder, recall, remember

MAX_KINDS: Final = 512
MAX_ROWS_KEPT: Final = 64  # sizes of one kind
NUM_KEPT: Final = 5  # seconds of one size; their median counts, so that one slow turn says nothing
GROWTH: Final = 2  # a batch is at most so many times the largest that was measured
TRUSTED_CALLS: Final = 512  # of the same kind, for which a size is believed whatever others say
MAX_EXCESS: Final = 1.1  # times what is guessed by smaller sizes, or was measured of a larger one
MAX_SUBJECTS: Final = 32  # in the file, newest last
MAX_SUBJECT_BYTES: Final = 2**14
VERSION: Final = 1


@dataclass(slots=True)
class _Size:
    """The last seconds of one size, and the number of the call that was the last."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_KEPT))
    call: int = 0


@dataclass(slots=True)
class _KindCosts:
    """The sizes of one kind, and how many calls there were in all."""

    sizes: dict[int, _Size] = field(default_factory=dict)
    num_calls: int = 0

    def curve(self, trusted_calls: int) -> tuple[list[int], list[float]]:
        """Return the sizes that are believed, ascending, and their medians."""
        measured = [(rows, statistics.median(size.seconds)) for rows, size in sorted(self.sizes.items())]
        least_of_larger = [float("inf")] * len(measured)
        for place in range(len(measured) - 1, 0, -1):
            least_of_larger[place - 1] = min(least_of_larger[place], measured[place][1])
        found: tuple[list[int], list[float]] = [], []
        for (rows, seconds), of_larger in zip(measured, least_of_larger, strict=True):
            guess = _grown(found[0][-1], found[1][-1], rows) if found[0] else float("inf")
            is_dear = seconds > MAX_EXCESS * min(guess, of_larger)
            if is_dear and self.num_calls - self.sizes[rows].call >= trusted_calls:
                continue
            found[0].append(rows)
            found[1].append(seconds)
        return found


class StepCosts:
    """Measured seconds, newest last. A size that seems dear is believed for `trusted_calls` calls of its kind."""

    def __init__(self, trusted_calls: int = TRUSTED_CALLS) -> None:
        self._trusted_calls = trusted_calls
        self._kinds: OrderedDict[str, _KindCosts] = OrderedDict()
        self._medians: dict[str, tuple[list[int], list[float]]] = {}  # of `_kinds`, by ascending rows

    def note_call(self, kind: str, rows: int, seconds: float) -> None:
        """Take in that a call of `rows` rows took `seconds`."""
        is_believed = rows in self._curve(kind)[0]
        measured = self._kinds.setdefault(kind, _KindCosts())
        self._kinds.move_to_end(kind)
        if not is_believed:
            measured.sizes.pop(rows, None)
            if len(measured.sizes) >= MAX_ROWS_KEPT:
                del measured.sizes[next(iter(measured.sizes))]
        measured.num_calls += 1
        size = measured.sizes.setdefault(rows, _Size())
        size.seconds.append(seconds)
        size.call = measured.num_calls
        self._medians.pop(kind, None)
        if len(self._kinds) > MAX_KINDS:
            forgotten, _ = self._kinds.popitem(last=False)
            self._medians.pop(forgotten, None)

    def seconds(self, kind: str, rows: int) -> float:
        """Return the seconds of a call; 0 for a kind of which nothing is known."""
        sizes, medians = self._curve(kind)
        if not sizes:
            return 0.0
        place = bisect.bisect_left(sizes, rows)
        if place < len(sizes) and sizes[place] == rows:
            return medians[place]
        if place == len(sizes):
            return _grown(sizes[-1], medians[-1], rows)
        if place == 0:  # fewer rows than were ever measured: at most as long, and hardly in proportion
            return medians[0] * (1 + rows / sizes[0]) / 2
        low, high = sizes[place - 1], sizes[place]
        share = (rows - low) / (high - low)
        return medians[place - 1] * (1 - share) + medians[place] * share

    def least_seconds(self, kind: str, rows: int) -> float:
        """Return the seconds of a call, no more than a larger one took: few rows may be measured in a bad moment."""
        sizes, medians = self._curve(kind)
        return min([self.seconds(kind, rows), *medians[bisect.bisect_left(sizes, rows) :]])

    def is_measured(self, kind: str, rows: int) -> bool:
        """Return whether the seconds of a call are measured ones, and not a guess."""
        return rows in self._curve(kind)[0]

    def friendly_guess(self, kind: str, rows: int, measured_rows: int) -> float:
        """Return a friendly guess by the seconds of `measured_rows` alone, which are fewer."""
        return _grown(measured_rows, self.seconds(kind, measured_rows), rows)

    def seconds_per_row(self, kind: str) -> float:
        """Return the least seconds that a row was seen to take; 0 for a kind of which nothing is known."""
        sizes, medians = self._curve(kind)
        return min((median / size for size, median in zip(sizes, medians, strict=True)), default=0.0)

    def max_rows_to_try(self, kind: str) -> int:
        """Return the rows up to which the estimate is good enough to act on."""
        sizes, _ = self._curve(kind)
        return GROWTH * sizes[-1] if sizes else 1

    def figures(self) -> dict[str, dict[str, float]]:
        """Return the medians as JSON can say them, for `begin_with`."""
        return {
            kind: {str(size): median for size, median in zip(*self._curve(kind), strict=True)} for kind in self._kinds
        }

    def begin_with(self, figures: Any) -> None:
        """Take in the `figures` of an earlier run, all at once; what does not look like such is left out."""
        for kind, sizes in figures.items() if isinstance(figures, dict) else ():
            for size, seconds in sizes.items() if isinstance(sizes, dict) else ():
                is_usable = isinstance(seconds, int | float) and 0 < seconds < float("inf")
                if is_usable and str(size).isdecimal() and int(size) > 0:
                    self.note_call(str(kind), int(size), float(seconds))
        for known in self._kinds.values():
            known.num_calls += self._trusted_calls
        self._medians.clear()

    def _curve(self, kind: str) -> tuple[list[int], list[float]]:
        if kind not in self._kinds:
            return [], []
        if kind not in self._medians:
            self._medians[kind] = self._kinds[kind].curve(self._trusted_calls)
        return self._medians[kind]


def _grown(size: int, seconds: float, rows: int) -> float:
    """Return a friendly guess of what more rows take than a size that was measured."""
    return seconds * (1 + (rows / size - 1) / 2)


class RememberedCosts:
    """The file of one user, whose processes all write it; of two that write at once, one may be lost. Thread-safe."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = (folder or cache_folder()) / "step_costs.json"
        self._lock = threading.Lock()

    def recall_costs(self, subject: str) -> StepCosts:
        """Return the costs that are remembered of a subject: a pipeline's structure on a kind of device."""
        costs = StepCosts()
        costs.begin_with(self._read().get(subject))
        return costs

    def keep_figures(self, subject: str, figures: dict[str, dict[str, float]]) -> None:
        """Remember figures in place of the earlier ones: the newest kinds, as many as there is room for."""
        kept: dict[str, dict[str, float]] = {}
        room_bytes = MAX_SUBJECT_BYTES
        for kind, sizes in reversed(figures.items()):
            room_bytes -= len(json.dumps({kind: sizes}))
            if room_bytes < 0:
                break
            kept = {kind: sizes} | kept
        with self._lock:
            subjects = self._read()
            subjects.pop(subject, None)
            subjects[subject] = kept
            newest = dict(list(subjects.items())[-MAX_SUBJECTS:])
            remember(self._file, json.dumps({"version": VERSION, "subjects": newest}).encode())

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(recall(self._file))
        except ValueError:  # JSON's and Unicode's
            return {}
        if not isinstance(content, dict) or content.get("version") != VERSION:
            return {}
        subjects = content.get("subjects")
        return subjects if isinstance(subjects, dict) else {}
