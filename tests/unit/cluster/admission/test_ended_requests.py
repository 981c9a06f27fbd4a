"""The log of ended requests: what is asked for by number, and those of another log, whose clock is another one."""

from __future__ import annotations

import pytest

from cluster.admission.outcomes import MAX_KEPT, EndedLog, EndedRequest, EndedRequests


def request(at_s: float) -> EndedRequest:
    """Return a request that arrived then, started a second later and took two."""
    return EndedRequest("images", "m", "t", 0, 1.0, 1.0, "replica", at_s, at_s + 1.0, at_s + 3.0, 0.5, is_answered=True)


def test_times_of_another_log_become_those_of_this_clock() -> None:
    log, others = EndedLog(), (request(100.0), request(103.0))
    log.take_over(EndedRequests(others, 2, now_s=110.0), now_s=10.0, known=0)
    found = log.after(0, now_s=11.0)
    assert [(one.arrived_s, one.started_s, one.ended_s) for one in found.requests] == [(0.0, 1.0, 3.0), (3.0, 4.0, 6.0)]
    assert (found.next_number, found.now_s) == (2, 11.0)


def test_requests_of_another_log_that_were_taken_over_before_are_not_taken_again() -> None:
    log = EndedLog()
    log.take_over(EndedRequests((request(0.0), request(1.0)), 2, now_s=5.0), now_s=5.0, known=0)
    log.take_over(EndedRequests((request(1.0), request(2.0)), 3, now_s=6.0), now_s=6.0, known=2)
    assert [one.arrived_s for one in log.after(0, 6.0).requests] == [0.0, 1.0, 2.0]
    # One that begins anew has lost what was before: all that it tells counts.
    log.take_over(EndedRequests((request(3.0),), 8, now_s=7.0), now_s=7.0, known=3)
    assert [one.arrived_s for one in log.after(3, 7.0).requests] == [3.0]


@pytest.mark.parametrize(
    ("number", "first"), [(None, None), (0, 3), (3, 3), (5, 5), (MAX_KEPT + 3, None), (MAX_KEPT + 4, 3)]
)
def test_the_oldest_are_forgotten(number: int | None, first: int | None) -> None:
    """`first` is the number of the first that is told. One that is not reached yet is of another queue: all count."""
    log = EndedLog()
    requests = tuple(request(float(at)) for at in range(MAX_KEPT + 3))
    log.take_over(EndedRequests(requests, len(requests), now_s=0.0), now_s=0.0, known=0)
    found = log.after(number, 0.0)
    assert found.next_number == MAX_KEPT + 3
    assert [one.arrived_s for one in found.requests[:1]] == ([] if first is None else [float(first)])
