"""Which call comes next and how long it waits: single decisions, each with its rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from configs.merging import MergeConfig
from deployments.batching.policy import Call, CallForming
from deployments.batching.queue import QueuedRequest, RequestQueue
from deployments.errors import InvalidRequest, QueueFull

Forming = CallForming[QueuedRequest]


def forming_of(**settings: Any) -> Forming:
    return CallForming(RequestQueue(MergeConfig(**settings)))


def add(forming: Forming, num_items: int = 1, at: float = 0.0, **more: Any) -> QueuedRequest:
    settings = {"costs": None, "group": None, "priority": 1, **more}
    request = QueuedRequest(items=range(num_items), arrived_s=at, **settings)
    forming.add(request)
    return request


def taken(forming: Forming, now: float = 0.0, num_free: int = 1) -> list[tuple[QueuedRequest, int, int]]:
    call = forming.next_call(now, num_free)
    assert isinstance(call, Call)
    return [(part.request, part.start, part.stop) for part in call.parts]


def test_requests_of_several_items_merge_whole() -> None:
    forming = forming_of(max_batch_size=8)
    one, four, other_four, small = (add(forming, size) for size in (1, 4, 4, 1))
    assert taken(forming) == [(one, 0, 1), (four, 0, 4)]  # the second four does not fit, and nobody slips past it
    assert taken(forming) == [(other_four, 0, 4), (small, 0, 1)]
    assert forming.next_call(0.0, 1) == math.inf


def test_a_request_larger_than_a_call_is_served_in_several() -> None:
    forming = forming_of(max_batch_size=4)
    large, small = add(forming, 10), add(forming, 2)
    assert taken(forming) == [(large, 0, 4)]
    assert taken(forming) == [(large, 4, 8)]
    assert taken(forming) == [(large, 8, 10), (small, 0, 2)]


def test_costs_bound_a_call_and_one_above_the_budget_runs_alone() -> None:
    forming = forming_of(max_batch_cost=10)
    huge = add(forming, 1, costs=[25])
    mixed = add(forming, 3, costs=[4, 40, 5])
    last = add(forming, 2, costs=[2, 3])
    assert [taken(forming) for _ in range(4)] == [
        [(huge, 0, 1)],
        [(mixed, 0, 1)],
        [(mixed, 1, 2)],
        [(mixed, 2, 3), (last, 0, 2)],
    ]


def test_requests_whose_costs_do_not_fit_together_run_apart() -> None:
    forming = forming_of(max_batch_cost=10)
    six, five, other_five = (add(forming, 1, costs=[cost]) for cost in (6, 5, 5))
    assert [taken(forming), taken(forming)] == [[(six, 0, 1)], [(five, 0, 1), (other_five, 0, 1)]]


def test_without_costs_each_item_costs_one() -> None:
    forming = forming_of(max_batch_cost=3)
    large = add(forming, 4)
    assert [taken(forming), taken(forming)] == [[(large, 0, 3)], [(large, 3, 4)]]


def test_a_call_has_one_group_and_the_oldest_goes_first() -> None:
    forming = forming_of(max_batch_size=8)
    first, other, second = (add(forming, group=group) for group in ("a", "b", "a"))
    assert [request for request, *_ in taken(forming)] == [first, second]
    assert [request for request, *_ in taken(forming)] == [other]


def test_the_more_urgent_goes_first_and_the_rest_of_its_call_is_for_others() -> None:
    forming = forming_of(max_batch_size=8, priority_levels=3)
    low, high, middle = (add(forming, priority=priority) for priority in (3, 1, 2))
    other_group = add(forming, priority=1, group="other")
    assert [request for request, *_ in taken(forming)] == [high, middle, low]
    assert [request for request, *_ in taken(forming)] == [other_group]


def test_nobody_is_passed_more_often_than_allowed() -> None:
    forming = forming_of(max_batch_size=1, priority_levels=2, max_overtakes=2)
    low = add(forming, priority=2)
    high = [add(forming, priority=1) for _ in range(4)]
    assert [taken(forming)[0][0] for _ in range(5)] == [high[0], high[1], low, high[2], high[3]]


def test_no_overtakes_is_the_order_of_coming() -> None:
    forming = forming_of(max_batch_size=8, max_overtakes=0, priority_levels=2)
    requests = [
        add(forming, group=group, priority=priority)
        for group, priority in ("a2", "b1", "a1", "a1")
        for priority in [int(priority)]
    ]
    assert [[request for request, *_ in taken(forming)] for _ in range(3)] == [
        requests[:1],
        requests[1:2],
        requests[2:],
    ]


def test_an_idle_merger_starts_at_once() -> None:
    forming = forming_of(max_queue_delay_us=0)
    add(forming)
    assert isinstance(forming.next_call(0.0, 1), Call)


def test_no_slot_no_call() -> None:
    forming = forming_of()
    add(forming)
    assert forming.next_call(0.0, 0) == math.inf


def test_prefer_batch_waits_out_the_delay_for_a_preferred_size() -> None:
    forming = forming_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, preferred_batch_sizes=(2, 4))
    first = add(forming, at=10.0)
    assert forming.next_call(10.5, 1) == pytest.approx(11.0)
    second, third = add(forming, at=10.6), add(forming, at=10.7)
    assert [request for request, *_ in taken(forming, 10.8)] == [first, second]  # exactly two; the third waits on
    assert forming.next_call(10.8, 1) == pytest.approx(11.7)
    assert [request for request, *_ in taken(forming, 11.7)] == [third]


def test_prefer_batch_does_not_wait_for_a_size_that_is_out_of_reach() -> None:
    forming = forming_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, preferred_batch_sizes=(4,))
    add(forming, 3)
    assert forming.next_call(0.0, 1) == pytest.approx(1.0)
    add(forming, 3)
    assert len(taken(forming)) == 2
    forming = forming_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, max_batch_size=4)
    add(forming, 3)
    add(forming, 2)
    assert len(taken(forming)) == 1


def test_while_one_group_waits_for_company_another_starts() -> None:
    forming = forming_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, max_batch_size=2)
    add(forming, group="lonely")
    pair = [add(forming, group="pair", at=0.1) for _ in range(2)]
    assert [request for request, *_ in taken(forming, 0.2)] == pair
    assert forming.next_call(0.2, 1) == pytest.approx(1.0)


def learn_bursts(forming: Forming, fixed: float = 1.0, spread: float = 0.01, size: int = 4) -> float:
    """Bursts, each served as a call of one and one of the rest. Returns the time after."""
    now = 0.0
    for _ in range(4):
        for index in range(size):
            add(forming, at=now + index * spread)
            if index in (0, size - 1):
                call = forming.next_call(now + index * spread, 2)
                assert isinstance(call, Call)
                forming.served(call, fixed)
        now += 100.0
    return now


def test_what_was_learned_makes_it_wait_no_longer_than_pays() -> None:
    forming = forming_of()
    now = learn_bursts(forming)
    add(forming, at=now)
    look_again = forming.next_call(now, 1)
    assert isinstance(look_again, float)
    assert now + 0.01 <= look_again <= now + 0.05  # about the gap within a burst, not the one between bursts
    assert isinstance(forming.next_call(look_again, 1), Call)


@pytest.mark.parametrize(
    "settings", [{"max_queue_delay_us": 0}, {"preferred_batch_sizes": (1,)}, {"max_batch_size": 4}, {}]
)
def test_what_ends_the_waiting(settings: dict[str, Any]) -> None:
    forming = forming_of(**settings)
    now = learn_bursts(forming)
    add(forming, at=now)
    if "max_batch_size" in settings:
        add(forming, 3, at=now)
    if not settings:
        assert isinstance(forming.next_call(now, 2), Call)  # another slot stays free for who comes
    else:
        assert isinstance(forming.next_call(now, 1), Call)


def test_max_queue_delay_bounds_the_waiting() -> None:
    forming = forming_of(max_queue_delay_us=3_000)
    now = learn_bursts(forming)
    add(forming, at=now)
    assert forming.next_call(now, 1) == pytest.approx(now + 0.003)


def test_where_merging_gains_nothing_calls_stay_small() -> None:
    forming = forming_of()
    for size in (1, 4, 2, 4, 1):
        add(forming, size)
        call = forming.next_call(0.0, 1)
        assert isinstance(call, Call)
        forming.served(call, 0.01 + size)  # nearly all of it is per item
    for _ in range(8):
        add(forming)
    assert len(taken(forming)) == 1


def test_unknown_priorities_and_full_levels_are_refused() -> None:
    forming = forming_of(
        priority_levels=2, default_queue_policy={"max_queue_size": 2}, queue_policies={2: {"max_queue_size": 1}}
    )
    for priority in (1, 1, 2):
        add(forming, priority=priority)
    for priority in (1, 2):
        with pytest.raises(QueueFull, match=f"priority {priority}"):
            add(forming, priority=priority)
    for priority in (-1, 3):
        with pytest.raises(InvalidRequest, match="known: 1, most urgent, to 2"):
            add(forming, priority=priority)
    assert len(forming.queue) == 3


def test_the_shorter_time_counts_if_requests_may_shorten_it() -> None:
    forming = forming_of(
        priority_levels=2,
        default_queue_policy={"timeout_us": 2_000_000},
        queue_policies={2: {"timeout_us": 2_000_000, "allow_timeout_override": False}},
    )
    requests = [add(forming, timeout_s=timeout, priority=priority) for timeout in (1.0, 3.0) for priority in (1, 2)]
    assert [request.deadline_s for request in requests] == [1.0, 2.0, 2.0, 2.0]
    assert forming.queue.expire(0.999) == []
    assert forming.queue.expire(1.0) == requests[:1]
    assert forming.queue.next_deadline_s() == 2.0
    assert len(forming.queue.expire(2.0)) == 3
    assert len(forming.queue) == 0


def test_deferred_requests_are_served_when_there_are_no_others() -> None:
    forming = forming_of(
        max_batch_size=1, priority_levels=2, default_queue_policy={"timeout_us": 1_000_000, "timeout_action": "defer"}
    )
    late = add(forming, priority=1)
    in_time = add(forming, at=0.5, priority=2)
    assert forming.queue.expire(1.2) == []
    assert [taken(forming, 1.2)[0][0] for _ in range(2)] == [in_time, late]


def test_retuning_moves_requests_of_a_level_that_is_gone() -> None:
    forming = forming_of(priority_levels=3, max_batch_size=1)
    low, high = add(forming, priority=3), add(forming, priority=1)
    forming.queue.retune(MergeConfig(priority_levels=2, max_batch_size=1))
    assert (low.priority, dict(forming.queue.num_by_priority)) == (2, {2: 1, 1: 1})
    assert [taken(forming)[0][0] for _ in range(2)] == [high, low]


def test_deadlines_of_those_who_left_do_not_pile_up() -> None:
    forming = forming_of()
    for _ in range(1000):
        forming.queue.remove(add(forming, timeout_s=60.0))
    assert len(forming.queue._deadlines) <= 66
    assert forming.queue.next_deadline_s() == math.inf
