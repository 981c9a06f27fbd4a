"""Turning away: the time after which to come back, and the longest wait that is allowed."""

from __future__ import annotations

import random

import pytest

from cluster.control.turning_away import MAX_TOLD_S, FairWait, ReturnRate, ToldTimes


def clients(told: ToldTimes, _share_back: float, number: int, rng: random.Random) -> None:
    """Turn clients away, one each second; a part of them comes back when told."""
    coming: list[tuple[float, int]] = []
    for mark in range(1, number + 1):
        now_s = float(mark)
        for at_s, again in [one for one in coming if one[0] <= now_s]:
            told.note_arrival(again, at_s)
            coming.remove((at_s, again))
        told.note_arrival(mark, now_s)
        after_s = told.tell(mark, "t", 1.0, 0.1, now_s)
        if rng.random() < _share_back:
            coming.append((now_s + after_s, mark))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_part_of_those_that_come_back_is_learned(share: float) -> None:
    returns = ReturnRate()
    assert returns.share == 1
    clients(ToldTimes(returns), share, 600, random.Random(0))
    assert returns.share == pytest.approx(share, abs=0.06)


@pytest.mark.parametrize(("share", "places"), [(0.0, 0.02), (1.0, 1.0)])
def test_a_place_is_kept_for_each_that_is_likely_to_come(share: float, places: float) -> None:
    told = ToldTimes(ReturnRate())
    clients(told, share, 600, random.Random(0))
    after_s = [told.tell(10_000 + n, "other", 2.0, 0.5, 1000.0) for n in range(100)]
    assert after_s[0] == 2.0
    assert after_s == sorted(after_s)
    assert after_s[-1] - 2.0 == pytest.approx(99 * 0.5 * places, abs=1.0)


def test_who_asks_too_early_keeps_the_place_and_another_one_with_the_same_words_has_its_own() -> None:
    told = ToldTimes(ReturnRate())
    first_s = [told.tell(mark, "t", 1.0, 1.0, 0.0) for mark in (1, 2, 3)]
    assert first_s == [1.0, 2.0, 3.0]
    assert told.tell(3, "t", 1.0, 1.0, 0.0) == 4.0  # at the same moment: nobody's second try
    told.note_arrival(2, 1.0)
    assert told.tell(2, "t", 0.5, 1.0, 1.0) == 1.0
    assert told.tell(2, "t", 0.5, 1.0, 1.75) == 0.5  # not in time even then
    assert told.tell(9, "t", 0.5, 1.0, 2.0) == 2.5  # and it was counted once


def test_marks_that_nobody_knows_are_all_believed_and_nobody_is_told_to_wait_for_ever() -> None:
    told = ToldTimes(ReturnRate())
    for n in range(20_000):
        after_s = told.tell(0, "t", 1.0, 1.0, 0.0)
        assert after_s <= MAX_TOLD_S
        if n < 5:
            assert after_s == 1.0 + n
    told.free_places()
    assert told.tell(0, "t", 1.0, 1.0, 0.0) == 1.0
    for n in range(1, 40_000):  # somebody hammers: what is remembered is bounded
        told.tell(n, f"tenant {n}", 1.0, 1.0, 0.0)
    assert len(told._promises) < 20_000
    assert len(told._kept) < 2_000


def test_nobody_waits_for_a_larger_part_of_its_time_than_the_slowest_may() -> None:
    fair = FairWait()
    assert fair.bound_s(3.0, 0.3, 0.0) == pytest.approx(2.7)
    assert fair.bound_s(3.0, 1.5, 0.1) == pytest.approx(1.5)
    assert fair.bound_s(3.0, 0.3, 0.2) == pytest.approx(1.5, rel=0.05)
    assert fair.bound_s(10.0, 0.3, 0.2) == pytest.approx(5.0, rel=0.05)  # who has time may wait for longer
    assert fair.bound_s(3.0, 2.95, 0.3) == pytest.approx(0.05)  # one that can hardly wait holds nobody back
    assert fair.bound_s(3.0, 0.3, 0.4) == pytest.approx(1.5, rel=0.1)
    assert fair.bound_s(3.0, 0.3, 100.0) == pytest.approx(2.7)  # it came long ago


def test_what_is_learned_of_the_clients_of_some_replicas_holds_for_those_of_others() -> None:
    returns = ReturnRate()
    clients(ToldTimes(returns), 0.0, 600, random.Random(0))
    others = ToldTimes(returns)
    after_s = [others.tell(mark, "t", 1.0, 0.5, 0.0) for mark in range(1, 101)]
    assert after_s[-1] < 3.0  # and not 50
