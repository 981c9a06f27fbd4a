"""The next batch and how long it waits: single decisions, each with its rule."""

from __future__ import annotations

import math
from typing import Any

import pytest

from configs.batching import BatchingConfig
from deployments.batching.policy import Batch, BatchPolicy
from deployments.batching.queue import QueuedRequest, RequestQueue
from deployments.records.errors import InvalidRequest, QueueFull

Policy = BatchPolicy[QueuedRequest]


def policy_of(**settings: Any) -> Policy:
    return BatchPolicy(RequestQueue(BatchingConfig(**settings)))


def add(policy: Policy, num_items: int = 1, at: float = 0.0, is_busy: bool = True, **more: Any) -> QueuedRequest:
    settings = {"costs": None, "group": None, "priority": 1, **more}
    request = QueuedRequest(items=range(num_items), arrived_s=at, **settings)
    policy.add_request(request, is_busy=is_busy)
    return request


def taken(policy: Policy, now: float = 0.0, num_free: int = 1) -> list[tuple[QueuedRequest, int, int]]:
    batch = policy.next_batch(now, num_free)
    assert isinstance(batch, Batch)
    return [(part.request, part.start, part.stop) for part in batch.parts]


def test_requests_of_several_items_run_whole() -> None:
    policy = policy_of(max_batch_size=8)
    one, four, other_four, small = (add(policy, size) for size in (1, 4, 4, 1))
    assert taken(policy) == [(one, 0, 1), (four, 0, 4)]  # the second four does not fit, and nobody slips past it
    assert taken(policy) == [(other_four, 0, 4), (small, 0, 1)]
    assert policy.next_batch(0.0, 1) == math.inf


def test_a_request_larger_than_a_batch_is_served_in_several() -> None:
    policy = policy_of(max_batch_size=4)
    large, small = add(policy, 10), add(policy, 2)
    assert taken(policy) == [(large, 0, 4)]
    assert taken(policy) == [(large, 4, 8)]
    assert taken(policy) == [(large, 8, 10), (small, 0, 2)]


def test_costs_bound_a_batch_and_one_above_the_budget_runs_alone() -> None:
    policy = policy_of(max_batch_cost=10)
    huge = add(policy, 1, costs=[25])
    mixed = add(policy, 3, costs=[4, 40, 5])
    last = add(policy, 2, costs=[2, 3])
    assert [taken(policy) for _ in range(4)] == [
        [(huge, 0, 1)],
        [(mixed, 0, 1)],
        [(mixed, 1, 2)],
        [(mixed, 2, 3), (last, 0, 2)],
    ]


def test_requests_whose_costs_do_not_fit_together_run_apart() -> None:
    policy = policy_of(max_batch_cost=10)
    six, five, other_five = (add(policy, 1, costs=[cost]) for cost in (6, 5, 5))
    assert [taken(policy), taken(policy)] == [[(six, 0, 1)], [(five, 0, 1), (other_five, 0, 1)]]


def test_without_costs_each_item_costs_one() -> None:
    policy = policy_of(max_batch_cost=3)
    large = add(policy, 4)
    assert [taken(policy), taken(policy)] == [[(large, 0, 3)], [(large, 3, 4)]]


def test_a_batch_has_one_group_and_the_oldest_goes_first() -> None:
    policy = policy_of(max_batch_size=8)
    first, other, second = (add(policy, group=group) for group in ("a", "b", "a"))
    assert [request for request, *_ in taken(policy)] == [first, second]
    assert [request for request, *_ in taken(policy)] == [other]


def test_groups_take_turns_and_nobody_waits_for_the_backlog_of_another() -> None:
    policy = policy_of(max_batch_size=2)
    backlog = [add(policy, group="a") for _ in range(8)]
    assert [request for request, *_ in taken(policy)] == backlog[:2]
    others = [add(policy, group=group) for group in "bcb"]
    served = [[request for request, *_ in taken(policy)] for _ in range(5)]
    assert served == [[others[0], others[2]], [others[1]], backlog[2:4], backlog[4:6], backlog[6:8]]


def test_the_more_urgent_goes_first_and_the_rest_of_its_batch_is_for_others() -> None:
    policy = policy_of(max_batch_size=8, priority_levels=3)
    low, high, middle = (add(policy, priority=priority) for priority in (3, 1, 2))
    other_group = add(policy, priority=1, group="other")
    assert [request for request, *_ in taken(policy)] == [high, middle, low]
    assert [request for request, *_ in taken(policy)] == [other_group]


def test_nobody_is_passed_more_often_than_allowed() -> None:
    policy = policy_of(max_batch_size=1, priority_levels=2, max_overtakes=2)
    low = add(policy, priority=2)
    high = [add(policy, priority=1) for _ in range(4)]
    assert [taken(policy)[0][0] for _ in range(5)] == [high[0], high[1], low, high[2], high[3]]


def test_no_overtakes_is_the_order_of_coming() -> None:
    policy = policy_of(max_batch_size=8, max_overtakes=0, priority_levels=2)
    requests = [
        add(policy, group=group, priority=priority)
        for group, priority in ("a2", "b1", "a1", "a1")
        for priority in [int(priority)]
    ]
    assert [[request for request, *_ in taken(policy)] for _ in range(3)] == [
        requests[:1],
        requests[1:2],
        requests[2:],
    ]


def test_an_idle_batcher_starts_at_once() -> None:
    policy = policy_of(max_queue_delay_us=0)
    add(policy)
    assert isinstance(policy.next_batch(0.0, 1), Batch)


def test_no_slot_no_batch() -> None:
    policy = policy_of()
    add(policy)
    assert policy.next_batch(0.0, 0) == math.inf


def test_prefer_batch_waits_out_the_delay_for_a_preferred_size() -> None:
    policy = policy_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, preferred_batch_sizes=(2, 4))
    first = add(policy, at=10.0)
    assert policy.next_batch(10.5, 1) == pytest.approx(11.0)
    second, third = add(policy, at=10.6), add(policy, at=10.7)
    assert [request for request, *_ in taken(policy, 10.8)] == [first, second]  # exactly two; the third waits on
    assert policy.next_batch(10.8, 1) == pytest.approx(11.7)
    assert [request for request, *_ in taken(policy, 11.7)] == [third]


def test_prefer_batch_does_not_wait_for_a_size_that_is_out_of_reach() -> None:
    policy = policy_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, preferred_batch_sizes=(4,))
    add(policy, 3)
    assert policy.next_batch(0.0, 1) == pytest.approx(1.0)
    add(policy, 3)
    assert len(taken(policy)) == 2
    policy = policy_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, max_batch_size=4)
    add(policy, 3)
    add(policy, 2)
    assert len(taken(policy)) == 1


def test_while_one_group_waits_for_batch_mates_another_starts() -> None:
    policy = policy_of(strategy="prefer_batch", max_queue_delay_us=1_000_000, max_batch_size=2)
    add(policy, group="lonely")
    pair = [add(policy, group="pair", at=0.1) for _ in range(2)]
    assert [request for request, *_ in taken(policy, 0.2)] == pair
    assert policy.next_batch(0.2, 1) == pytest.approx(1.0)


def learn_bursts(
    policy: Policy, fixed: float = 1.0, spread: float = 0.01, size: int = 4, is_busy: bool = True
) -> float:
    """Bursts, each served as a batch of one and one of the rest. Returns the time after."""
    now = 0.0
    for _ in range(4):
        for index in range(size):
            add(policy, at=now + index * spread, is_busy=is_busy)
            if index in (0, size - 1):
                batch = policy.next_batch(now + index * spread, 2)
                assert isinstance(batch, Batch)
                policy.note_served(batch, fixed)
        now += 100.0
    return now


@pytest.mark.parametrize("is_busy", [True, False])
def test_what_was_learned_makes_it_wait_no_longer_than_pays(is_busy: bool) -> None:
    policy = policy_of()
    now = learn_bursts(policy, is_busy=is_busy)
    add(policy, at=now, is_busy=is_busy)
    look_again = policy.next_batch(now, 1)
    assert isinstance(look_again, float)
    assert now + 0.01 <= look_again <= now + 0.05  # about the gap within a burst, not the one between bursts
    assert isinstance(policy.next_batch(look_again, 1), Batch)


def test_a_lone_caller_does_not_pay_for_the_crowd_before_it() -> None:
    policy = policy_of()
    now = learn_bursts(policy)
    for _ in range(3):
        lone = add(policy, at=now, is_busy=False)
        assert [request for request, *_ in taken(policy, now)] == [lone]
        now += 1.1
    add(policy, at=now, is_busy=True)
    assert isinstance(policy.next_batch(now, 1), float), "what the crowd taught is not forgotten"


@pytest.mark.parametrize(
    "settings", [{"max_queue_delay_us": 0}, {"preferred_batch_sizes": (1,)}, {"max_batch_size": 4}, {}]
)
def test_what_ends_the_waiting(settings: dict[str, Any]) -> None:
    policy = policy_of(**settings)
    now = learn_bursts(policy)
    add(policy, at=now)
    if "max_batch_size" in settings:
        add(policy, 3, at=now)
    if not settings:
        assert isinstance(policy.next_batch(now, 2), Batch)  # another slot stays free for who comes
    else:
        assert isinstance(policy.next_batch(now, 1), Batch)


def test_max_queue_delay_bounds_the_waiting() -> None:
    policy = policy_of(max_queue_delay_us=3_000)
    now = learn_bursts(policy)
    add(policy, at=now)
    assert policy.next_batch(now, 1) == pytest.approx(now + 0.003)


def test_where_batching_gains_nothing_batches_stay_small() -> None:
    policy = policy_of()
    for size in (1, 4, 2, 4, 1):
        add(policy, size)
        batch = policy.next_batch(0.0, 1)
        assert isinstance(batch, Batch)
        policy.note_served(batch, 0.01 + size)  # nearly all of it is per item
    for _ in range(8):
        add(policy)
    assert len(taken(policy)) == 1


def test_unknown_priorities_and_full_levels_are_refused() -> None:
    policy = policy_of(
        priority_levels=2, default_queue_policy={"max_queue_size": 2}, queue_policies={2: {"max_queue_size": 1}}
    )
    for priority in (1, 1, 2):
        add(policy, priority=priority)
    for priority in (1, 2):
        with pytest.raises(QueueFull, match=f"priority {priority}"):
            add(policy, priority=priority)
    for priority in (-1, 3):
        with pytest.raises(InvalidRequest, match="known: 1, most urgent, to 2"):
            add(policy, priority=priority)
    assert len(policy.queue) == 3


def test_the_shorter_time_counts_if_requests_may_shorten_it() -> None:
    policy = policy_of(
        priority_levels=2,
        default_queue_policy={"timeout_us": 2_000_000},
        queue_policies={2: {"timeout_us": 2_000_000, "allow_timeout_override": False}},
    )
    requests = [add(policy, timeout_s=timeout, priority=priority) for timeout in (1.0, 3.0) for priority in (1, 2)]
    assert [request.deadline_s for request in requests] == [1.0, 2.0, 2.0, 2.0]
    assert policy.queue.expire(0.999) == []
    assert policy.queue.expire(1.0) == requests[:1]
    assert policy.queue.next_deadline_s() == 2.0
    assert len(policy.queue.expire(2.0)) == 3
    assert len(policy.queue) == 0


def test_deferred_requests_are_served_when_there_are_no_others() -> None:
    policy = policy_of(
        max_batch_size=1, priority_levels=2, default_queue_policy={"timeout_us": 1_000_000, "timeout_action": "defer"}
    )
    late = add(policy, priority=1)
    in_time = add(policy, at=0.5, priority=2)
    assert policy.queue.expire(1.2) == []
    assert [taken(policy, 1.2)[0][0] for _ in range(2)] == [in_time, late]


def test_retuning_moves_requests_of_a_level_that_is_gone() -> None:
    policy = policy_of(priority_levels=3, max_batch_size=1)
    low, high = add(policy, priority=3), add(policy, priority=1)
    policy.queue.retune(BatchingConfig(priority_levels=2, max_batch_size=1))
    assert (low.priority, dict(policy.queue.num_by_priority)) == (2, {2: 1, 1: 1})
    assert [taken(policy)[0][0] for _ in range(2)] == [high, low]


def test_deadlines_of_those_who_left_do_not_pile_up() -> None:
    policy = policy_of()
    for _ in range(1000):
        policy.queue.remove_request(add(policy, timeout_s=60.0))
    assert len(policy.queue._deadlines) <= 66
    assert policy.queue.next_deadline_s() == math.inf
