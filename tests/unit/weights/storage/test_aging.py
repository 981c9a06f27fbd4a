"""Clocks of ranges, against a reference that has one clock per byte."""

from __future__ import annotations

from kit.seeding import seeded_random

from weights.operations.maintenance import _aged
from weights.storage.index import Unneeded


def test_each_byte_keeps_its_clock_while_it_is_unneeded() -> None:
    chance = seeded_random()
    clocks: list[Unneeded] = []
    expected: dict[tuple[str, int], float] = {}
    for now_s in range(1, 30):
        unneeded = {}
        for path in "ab":
            borders = sorted(chance.sample(range(40), 2 * chance.randint(0, 4)))
            unneeded[path] = list(zip(borders[::2], borders[1::2], strict=True))
        chance.shuffle(clocks)
        clocks = _aged(unneeded, clocks, now_s)
        dead = {
            (path, byte) for path, ranges in unneeded.items() for begin, end in ranges for byte in range(begin, end)
        }
        expected = {byte: expected.get(byte, now_s) for byte in dead}
        found = {(path, byte): since for path, begin, end, since in clocks for byte in range(begin, end)}
        assert found == expected
        assert sum(clock.end - clock.begin for clock in clocks) == len(dead)


def test_a_clock_that_is_ahead_begins_anew() -> None:
    assert _aged({"a": [(0, 9)]}, [Unneeded("a", 0, 9, 500.0)], 100.0) == [Unneeded("a", 0, 9, 100.0)]
