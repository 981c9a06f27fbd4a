"""The limits of a key beside the definition of a token bucket: what any stretch of time may hold."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.access.callers import KeyLimits, KeyUse
from deployments.records.errors import RateLimited

EIGHTHS = st.integers(1, 64).map(lambda n: n / 8)  # of seconds and of requests per second: sums of floats are exact


def asks(use: KeyUse, limits: KeyLimits, now_s: float) -> float | None:
    """Return None when the request was let in and has ended, or how long to wait."""
    try:
        use.begin_request(limits, now_s)
    except RateLimited as error:
        return error.retry_after_s or 0.0  # 0: a refusal without a time, which no test here expects
    use.end_request()
    return None


@settings(deadline=None)
@given(EIGHTHS, st.lists(st.integers(0, 16).map(lambda n: n / 8), max_size=60))
def test_a_request_is_let_in_exactly_when_no_stretch_of_time_holds_too_many(rate: float, gaps: list[float]) -> None:
    use, limits, now_s = KeyUse(), KeyLimits(rate, None), 100.0
    admitted: list[Fraction] = []
    for gap in gaps:
        now_s += gap
        now = Fraction(now_s)
        fits = all(
            len(admitted) - first + 1 <= max(1, Fraction(rate)) + Fraction(rate) * (now - since)
            for first, since in enumerate(admitted)
        )
        assert (asks(use, limits, now_s) is None) == fits
        if fits:
            admitted.append(now)


@settings(deadline=None)
@given(
    st.floats(0.001, 500),
    st.lists(st.floats(0, 10), max_size=20),
    st.floats(0.5, 0.99),
)
def test_who_waits_as_long_as_told_gets_in_and_who_comes_earlier_does_not(
    rate: float, gaps: list[float], early: float
) -> None:
    use, limits, now_s = KeyUse(), KeyLimits(rate, None), 1000.0
    for gap in gaps:
        now_s += gap
        asks(use, limits, now_s)
    while (wait_s := asks(use, limits, now_s)) is None:
        pass
    again_s = asks(use, limits, now_s + wait_s * early)
    assert again_s is not None
    assert again_s == pytest.approx(wait_s * (1 - early), rel=1e-3, abs=1e-6)
    assert asks(use, limits, now_s + wait_s + 1e-9) is None


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.booleans(), max_size=50))
def test_no_more_are_in_progress_than_may_be(most: int, begins: list[bool]) -> None:
    use, limits, running = KeyUse(), KeyLimits(None, most), 0
    for begin in begins:
        if not begin:
            if running:
                use.end_request()
                running -= 1
        elif running < most:
            use.begin_request(limits, 0.0)
            running += 1
        else:
            with pytest.raises(RateLimited, match=f"as it may \\({most}\\)"):
                use.begin_request(limits, 0.0)
        assert use.num_in_progress == running


def test_a_refusal_costs_nothing_of_the_other_limit() -> None:
    use, limits = KeyUse(), KeyLimits(1.0, 1)
    use.begin_request(limits, 0.0)
    for _ in range(5):
        with pytest.raises(RateLimited, match="in progress"):
            use.begin_request(limits, 1.0)
    use.end_request()
    use.begin_request(limits, 1.0)  # the token of the second is still there
    use.end_request()
    with pytest.raises(RateLimited, match="rate"):
        use.begin_request(limits, 1.5)
    assert use.num_in_progress == 0


def test_limits_may_change_and_go_while_a_key_is_in_use() -> None:
    use = KeyUse()
    assert asks(use, KeyLimits(1.0, None), 0.0) is None
    assert asks(use, KeyLimits(1.0, None), 0.0) == 1.0
    assert [asks(use, KeyLimits(None, None), 0.0) for _ in range(9)] == [None] * 9
    assert asks(use, KeyLimits(10.0, None), 0.5) is None


@settings(deadline=None)
@given(EIGHTHS, st.integers(1, 100), st.integers(1, 12))
def test_replicas_share_a_limit_and_each_has_some(rate: float, concurrent: int, num_replicas: int) -> None:
    share = KeyLimits.share_of(rate, concurrent, num_replicas)
    assert share.requests_per_s is not None
    assert share.max_concurrent is not None
    assert share.requests_per_s * num_replicas == pytest.approx(rate)
    assert share.max_concurrent >= 1
    assert concurrent <= share.max_concurrent * num_replicas < concurrent + num_replicas
    assert KeyLimits.share_of(None, None, num_replicas) == KeyLimits(None, None)
