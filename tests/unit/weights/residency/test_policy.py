"""Popularity, rate classes and the order of eviction: against looking through everything, and on traces."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.counting import operations

from infra.bench.eviction import _moved_bytes_ratios
from weights.residency.policy import (
    EvictionCandidate,
    EvictionOrder,
    Popularity,
    class_rate,
    origin_rates,
    rate_class,
    value_of,
)


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=20), st.floats(0.1, 1e4), st.floats(0, 1e5))
def test_popularity_is_a_use_count_that_only_a_use_raises(at: list[float], half_life: float, later: float) -> None:
    popularity = Popularity(half_life)
    times = sorted(at)
    for now in times:
        before = popularity.value(now)
        popularity = popularity.touch(now)
        assert popularity.value(now) >= before + 1
    counted = sum(2.0 ** (-(times[-1] - now) / half_life) for now in times)
    assert popularity.value(times[-1]) == pytest.approx(counted)
    assert popularity.value(times[-1] + later) <= popularity.value(times[-1] + later / 2) <= counted * (1 + 1e-9)


def test_one_use_halves_in_a_half_life() -> None:
    assert Popularity(60.0).touch(1000.0).value(1060.0) == pytest.approx(0.5)
    assert Popularity(60.0).value(1000.0) == 0.0


def test_what_was_used_often_and_is_not_any_more_falls_sooner_than_its_count_does() -> None:
    often = Popularity(1000.0)
    for second in range(1000):
        often = often.touch(float(second))
    assert often.value(999.0) > 600
    assert often.value(1099.0) < 30  # no use in 100 s: not more than one in 50 s is believed of it


def test_a_clock_that_goes_back_does_no_harm() -> None:
    popularity = Popularity(10.0).touch(100.0).touch(50.0)
    assert popularity == Popularity(10.0, 2.0, 100.0)
    assert popularity.value(0.0) == 2.0


@pytest.mark.parametrize(("share", "goal"), [(0.75, 3.0), (1.0, 6.0)])
def test_a_heavy_tailed_trace_moves_a_third_of_the_bytes_of_a_count(share: float, goal: float) -> None:
    by_count, by_bytes = _moved_bytes_ratios(share, None)
    assert by_count >= goal
    assert by_bytes >= 1.1


@pytest.mark.parametrize("share", [0.75, 1.0])
def test_it_follows_when_other_models_become_popular(share: float) -> None:
    by_count, by_bytes = _moved_bytes_ratios(share, change_every=500)
    assert by_count >= 2.5
    assert by_bytes >= 1.0


def test_shared_components_move_once() -> None:
    assert _moved_bytes_ratios(0.75, None, shared_bytes=0.5)[1] > _moved_bytes_ratios(0.75, None)[1]


@given(st.floats(1e-6, 1e5), st.integers(1, 2**40))
def test_a_rate_class_is_within_an_eighth_of_an_octave(reload_s: float, nbytes: int) -> None:
    rate = class_rate(rate_class(reload_s, nbytes))
    assert rate is not None
    assert 2 ** (-1 / 8) * (1 - 1e-9) <= rate / (reload_s / nbytes) <= 2 ** (1 / 8) * (1 + 1e-9)


def test_an_unknown_rate_is_that_of_the_others_per_byte() -> None:
    cheap, dear = rate_class(1.0, 16), rate_class(4.0, 16)
    assert origin_rates({cheap: 10, dear: 30, None: 5}) == {cheap: 1 / 16, dear: 1 / 4, None: pytest.approx(13 / 64)}
    assert origin_rates({None: 5}) == {None: 1.0}


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_is_that_of_looking_through_everything(rng: random.Random) -> None:
    """The same holds after any additions, uses, discards and returns, at any time."""
    rates = {"disk": 3.0, "peer": 1.0, None: 2.0}
    order: EvictionOrder[EvictionCandidate] = EvictionOrder()
    now_s, ticks = 0.0, itertools.count()
    everything = [EvictionCandidate(str(i), 1, rng.choice(list(rates)), last_used=next(ticks)) for i in range(12)]
    inside: set[EvictionCandidate] = set()
    for _ in range(300):
        now_s += rng.choice([0.0, 1.0, 300.0])
        candidate = rng.choice(everything)
        match rng.randrange(4):
            case 0:
                order.add(candidate)
                inside.add(candidate)
            case 1:
                order.discard(candidate)
                inside.discard(candidate)
            case 2:
                candidate.popularity = candidate.popularity.touch(now_s)
                candidate.last_used = next(ticks)
            case _:
                num_taken = rng.randint(1, 4)
                with order.ascending(rates, now_s) as candidates:
                    taken = list(itertools.islice(candidates, num_taken))
                ascending = sorted(inside, key=lambda one: (value_of(one, rates, now_s), one.last_used))
                values = [value_of(one, rates, now_s) for one in ascending]
                found = [value_of(one, rates, now_s) for one in taken]
                assert found == pytest.approx(values[:num_taken]), "equal but for the rounding of their sums"
        assert len(order) == len(inside)


def test_taking_the_least_of_very_many_does_not_look_at_all_of_them() -> None:
    def costs(count: int) -> int:
        """Count the operations of fifty victims."""
        order: EvictionOrder[EvictionCandidate] = EvictionOrder()
        for number in range(count):
            order.add(EvictionCandidate(str(number), 1, number % 5, Popularity().touch(float(number)), number))
        rates = origin_rates(dict.fromkeys(range(5), 1))

        def take() -> None:
            with order.ascending(rates, 1e6) as candidates:
                assert len(list(itertools.islice(candidates, 50))) == 50

        return operations(take)

    assert costs(20_000) < 5 * costs(60)
