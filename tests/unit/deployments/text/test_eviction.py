"""The choice of encodings that stay: against a plain list that is looked through each time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.counting import operations

from deployments.text.eviction import CostAwareEviction
from weights.residency import contents
from weights.residency.policy import HALF_LIFE_S, NEVER_USED, Popularity, class_rate, rate_class


class Oracle:
    """All entries valued anew at every question, and kept or not."""

    def __init__(self, max_bytes: int, max_kept_bytes: int) -> None:
        self.max_bytes, self.max_kept_bytes = max_bytes, max_kept_bytes
        self.sizes: dict[str, tuple[int, float]] = {}
        self.uses: dict[str, Popularity] = {}
        self.last_used: dict[str, int] = {}
        self.kept: set[str] = set()

    def nbytes(self, keys: Iterable[str]) -> int:
        return sum(self.sizes[key][0] for key in keys)

    def value(self, key: str, now_s: float) -> tuple[float, int]:
        nbytes, cost_s = self.sizes[key]
        rate = class_rate(rate_class(cost_s, nbytes)) or 0.0
        return rate * self.uses[key].value(now_s), self.last_used[key]

    def use(self, key: str, now_s: float, keep: bool) -> None:
        self.uses[key] = self.uses.get(key, NEVER_USED).touch(now_s)
        self.last_used[key] = max(self.last_used.values(), default=0) + 1
        if keep and self.sizes[key][0] <= self.max_kept_bytes:
            self.kept.add(key)
            while self.nbytes(self.kept) > self.max_kept_bytes:
                self.kept.remove(min(self.kept, key=lambda key: self.value(key, now_s)))

    def add(self, key: str, nbytes: int, cost_s: float, now_s: float, keep: bool) -> list[str]:
        self.sizes[key] = nbytes, cost_s
        self.use(key, now_s, keep)
        gone: list[str] = []
        for other in sorted(self.sizes.keys() - self.kept, key=lambda key: self.value(key, now_s)):
            if self.nbytes(self.sizes.keys() - set(gone)) > self.max_bytes:
                gone.append(other)
        for other in reversed(list(gone)):  # what need not go
            if self.nbytes(self.sizes.keys() - set(gone)) + self.sizes[other][0] <= self.max_bytes:
                gone.remove(other)
        for other in gone:
            del self.sizes[other]
        return gone


# Costs from a continuum: two entries of exactly the same value may go in either order.
steps = st.tuples(
    st.sampled_from("abcdefghijklm"),
    st.integers(1, 60),
    st.floats(0.001, 10.0).map(lambda cost_s: cost_s * math.sqrt(2)),
    st.floats(0.01, 80.0),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, max_size=80))
def test_the_least_valuable_goes_and_what_is_kept_stays_within_its_share(script: list[tuple]) -> None:
    queue = CostAwareEviction(100)
    oracle = Oracle(100, 25)
    now_s = 1e6
    for number, (key, nbytes, cost_s, pause_s, keep) in enumerate(script):
        now_s += pause_s
        cost_s += number * 1e-4
        if key in queue:
            queue.touch(key, now_s, keep=keep)
            oracle.use(key, now_s, keep)
        else:
            gone = queue.add(key, nbytes, cost_s, now_s, keep=keep)
            expected = oracle.add(key, nbytes, cost_s, now_s, keep)
            assert gone == expected
        assert queue.nbytes == oracle.nbytes(oracle.sizes) <= 100
        assert queue.kept_bytes == oracle.nbytes(oracle.kept) <= 25
        assert (len(queue), queue.num_kept) == (len(oracle.sizes), len(oracle.kept))


def test_a_text_that_becomes_popular_gets_in_although_each_time_it_is_worth_less_at_first() -> None:
    queue = CostAwareEviction(2)
    for key in ("old", "older"):
        queue.add(key, 1, 1.0, 0.0)
        for _ in range(4):
            queue.touch(key, 0.0)
    gone = [queue.add("new", 1, 1.0, now_s) for now_s in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert gone[0] == ["new"]
    assert "new" in queue
    assert gone[-1] in (["old"], ["older"])


def test_what_was_popular_once_does_not_stay_for_ever() -> None:
    queue = CostAwareEviction(1)
    queue.add("old", 1, 1.0, 0.0)
    for _ in range(7):
        queue.touch("old", 0.0)
    assert queue.add("new", 1, 1.0, 2.8 * HALF_LIFE_S, keep=False) == ["new"]
    assert queue.add("other", 1, 1.0, 3.0 * HALF_LIFE_S) == ["old"]


def test_counts_of_what_went_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "MAX_REMEMBERED", 10)
    queue = CostAwareEviction(1)
    for key in range(100):
        queue.add(str(key), 1, 1.0, float(key))
    assert sum(queue._table.past.of(str(key)) != NEVER_USED for key in range(100)) == 10
    assert queue.num_evicted == 99


def test_an_insertion_into_very_many_does_not_look_at_all_of_them() -> None:
    def costs(num_entries: int) -> int:
        """Count the operations of a hundred insertions."""
        queue = CostAwareEviction(num_entries)
        for key in range(num_entries):
            queue.add(str(key), 1, 1.0 + key % 7, float(key))

        def insert() -> None:
            for key in range(num_entries, num_entries + 100):
                assert len(queue.add(str(key), 1, 9.0, float(key))) == 1
                if str(key) in queue:
                    queue.touch(str(key), float(key))

        return operations(insert)

    assert costs(10_000) < 5 * costs(50)


def test_places_of_removed_entries_do_not_pile_up() -> None:
    queue = CostAwareEviction(10**6)
    for key in range(1000):
        queue.add(str(key % 3), 1, 1.0, float(key))
        queue.touch(str(key % 3), float(key), keep=True)
    assert len(queue) == 3
    assert sum(len(heap._places) for pair in queue._table.order._heaps.values() for heap in pair) < 200
