"""Footprints: lines through recorded peaks, and rooms that are lent by them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.graph.footprint import ROUNDING_BYTES, Footprint, fit_footprint
from deployments.engines.graph.workspace import UNBOUNDED, Workspace

PIECES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5)), min_size=1, max_size=4)


@given(PIECES, st.integers(3, 64), st.integers(0, 10**7))
def test_no_peak_is_above_its_line(pieces: list[tuple[int, int]], most: int, nbytes: int) -> None:
    def peak(rows: int) -> int:
        return max(fixed + slope * rows for fixed, slope in pieces)

    found = fit_footprint(peak, [1, 2, most])
    assert all(found.bytes_of(rows) >= peak(rows) for rows in range(1, most + 1))
    assert [found.bytes_of(rows) for rows in (1, 2, most)] == [peak(1), peak(2), peak(most)]
    few = fit_footprint(peak, [1, 2])
    assert all(few.bytes_of(rows) >= peak(rows) for rows in range(1, most + 1))
    rows = found.rows_within(nbytes, most)
    assert all(found.bytes_of(fewer) <= nbytes for fewer in range(1, rows + 1))
    assert rows == most or found.bytes_of(rows + 1) > nbytes


def test_beyond_its_last_point_a_peak_grows_in_proportion() -> None:
    found = Footprint(((1, 10_000), (4, 28_000)))
    assert [found.bytes_of(rows) for rows in (1, 4, 8)] == [10_000, 28_000, 56_000 + ROUNDING_BYTES]


class Memory:
    """`lent` are the bytes of the forwards that run."""

    def __init__(self, room: float) -> None:
        self.room = room
        self.lent: list[int] = []

    def room_bytes(self) -> float:
        return self.room

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[None]:
        self.lent.append(nbytes)
        yield
        self.lent.pop()


@pytest.mark.parametrize(("room", "rows"), [(1000, 8), (460, 4), (459, 3), (50, 1), (float("inf"), 8)])
def test_as_many_rows_run_as_have_room(room: float, rows: int) -> None:
    memory = Memory(room)
    workspace = Workspace(memory, {"kind": Footprint(((1, 100), (2, 220), (3, 340), (4, 460), (8, 900)))})
    with workspace.lend("kind", 20, 8) as allowed:
        assert allowed == rows == workspace.most_rows("kind", 8)
        assert memory.lent == [workspace._footprints["kind"].bytes_of(rows)]
    assert memory.lent == []
    with workspace.lend("kind", 1, 8) as allowed:
        assert (allowed, memory.lent) == (1, [100])
    with workspace.lend("another kind", 20, 8) as allowed:  # that nobody has planned
        assert (allowed, memory.lent) == (8, [])
    with UNBOUNDED.lend("kind", 20, 8) as allowed:
        assert allowed == 8


def test_a_mixed_batch_counts_as_the_largest_of_its_kinds() -> None:
    small, large = Footprint(((1, 100), (2, 200))), Footprint(((1, 150), (2, 300)))
    workspace = Workspace(Memory(1000), {"plain": small, "adapted": large})
    assert workspace.largest({"plain", "adapted", "unknown"}, 2) == "adapted"
    assert workspace.largest({"unknown"}, 2) == "unknown"
