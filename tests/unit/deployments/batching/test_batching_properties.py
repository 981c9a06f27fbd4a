"""Any traffic, on a clock that jumps: what holds of every schedule that the queue gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from configs.batching import BatchingConfig
from deployments.batching.policy import Batch, BatchPolicy
from deployments.batching.queue import QueuedRequest, RequestQueue
from deployments.records.errors import QueueFull


@dataclass(eq=False)
class Schedule:
    """A record of what happened, told by the test itself."""

    config: BatchingConfig
    batches: list[tuple[float, Batch[QueuedRequest]]] = field(default_factory=list)
    refused: list[QueuedRequest] = field(default_factory=list)
    cancelled: list[QueuedRequest] = field(default_factory=list)
    requests: list[QueuedRequest] = field(default_factory=list)
    started: list[QueuedRequest] = field(default_factory=list)  # in order, each once


POLICIES = st.fixed_dictionaries(
    {},
    optional={
        "max_queue_size": st.integers(1, 12),
        "timeout_us": st.integers(1, 4_000_000),
        "timeout_action": st.sampled_from(["reject", "defer"]),
    },
)


@st.composite
def configs(draw: st.DrawFn) -> BatchingConfig:
    max_batch_size = draw(st.integers(1, 9))
    return BatchingConfig(
        max_batch_size=max_batch_size,
        preferred_batch_sizes=tuple(draw(st.sets(st.integers(1, max_batch_size), max_size=2))),
        strategy=draw(st.sampled_from(["prefer_latency", "prefer_batch"])),
        max_queue_delay_us=draw(st.integers(0, 2_000_000)),
        max_batch_cost=draw(st.none() | st.integers(1, 20)),
        max_concurrent_batches=draw(st.integers(1, 3)),
        priority_levels=3,
        default_priority=2,
        max_overtakes=draw(st.integers(0, 5)),
        default_queue_policy=draw(POLICIES),
        queue_policies=draw(st.dictionaries(st.integers(1, 3), POLICIES, max_size=2)),
    )


COME = st.tuples(
    st.just("come"),
    st.lists(st.integers(0, 12), min_size=1, max_size=12),  # costs of its items
    st.sampled_from("ab"),
    st.integers(1, 3),
    st.none() | st.floats(0.0, 4.0),
)
EVENTS = st.lists(
    st.one_of(
        COME,
        COME,
        COME,  # most of them, so that some wait
        st.tuples(st.just("pass"), st.floats(0.0, 2.0)),
        st.tuples(st.just("end")),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("retune"), configs()),
    ),
    min_size=10,
    max_size=50,
)


class Run:
    def __init__(self, config: BatchingConfig) -> None:
        self.policy: BatchPolicy[QueuedRequest] = BatchPolicy(RequestQueue(config))
        self.schedule = Schedule(config)
        self.now = 0.0
        self.running: list[tuple[float, Batch[QueuedRequest]]] = []
        self.max_overtakes = config.max_overtakes

    def do(self, name: str, *more: Any) -> None:
        schedule = self.schedule
        if name == "come":
            costs, group, priority, timeout = more
            request = QueuedRequest(range(len(costs)), costs, group, priority, self.now, timeout)
            try:
                self.policy.add_request(request)
                schedule.requests.append(request)
            except QueueFull:
                pass
        elif name == "pass":
            self.now += more[0]
        elif name == "end" and self.running:
            start, batch = self.running.pop(0)
            self.policy.note_served(batch, self.now - start)
        elif name == "cancel" and more[0] < len(schedule.requests) and schedule.requests[more[0]].is_queued:
            schedule.cancelled.append(schedule.requests[more[0]])
            self.policy.queue.remove_request(schedule.requests[more[0]])
        elif name == "retune":
            schedule.config = more[0]
            self.max_overtakes = max(self.max_overtakes, more[0].max_overtakes)
            self.policy.queue.retune(more[0])
        self.pump()

    def pump(self) -> None:
        schedule, config = self.schedule, self.schedule.config
        for request in self.policy.queue.expire(self.now):
            assert request.deadline_s <= self.now
            schedule.refused.append(request)
        while True:
            waiting = {request for request in schedule.requests if request.is_queued}
            num_free = max(0, config.max_concurrent_batches - len(self.running))
            batch = self.policy.next_batch(self.now, num_free)
            if not isinstance(batch, Batch):
                assert batch > self.now
                return
            assert num_free
            self.check(batch, waiting)
            self.running.append((self.now, batch))
            schedule.batches.append((self.now, batch))

    def check(self, batch: Batch[QueuedRequest], waiting: set[QueuedRequest]) -> None:
        schedule, config = self.schedule, self.schedule.config
        costs = [sum(part.request.costs[part.start : part.stop]) for part in batch.parts if part.request.costs]
        assert 1 <= sum(part.stop - part.start for part in batch.parts) <= config.max_batch_size
        if config.max_batch_cost is not None and sum(costs) > config.max_batch_cost:
            (part,) = batch.parts
            assert part.stop - part.start == 1  # one item above the budget, alone
        assert batch.cost == sum(costs)
        requests = [part.request for part in batch.parts]
        assert {request.group for request in requests} == {batch.group}
        assert set(requests) <= waiting
        for request in requests:
            # Whose time is over is started only where it defers.
            assert request.deadline_s > self.now or request.is_deferred
            for other in waiting - set(requests):
                same_line = (other.group, other.priority, other.is_deferred) == (
                    request.group,
                    request.priority,
                    request.is_deferred,
                )
                assert not (same_line and not request.is_deferred and other.number < request.number)
        schedule.started += [part.request for part in batch.parts if not part.start]
        for other in schedule.requests:
            if other.is_queued:
                passed = sum(request.number > other.number for request in schedule.started)
                assert passed <= self.max_overtakes


@settings(max_examples=30, deadline=None)
@given(configs(), EVENTS)
def test_every_schedule(config: BatchingConfig, events: list[Any]) -> None:
    run = Run(config)
    for name, *more in events:
        run.do(name, *more)
    for _ in range(2000):  # until nobody waits: nobody does for ever
        if not len(run.policy.queue):
            break
        run.do("pass", 2.5)
        run.do("end")
    assert len(run.policy.queue) == 0
    schedule = run.schedule
    gone = set(schedule.refused) | set(schedule.cancelled)
    assert len(schedule.refused) + len(schedule.cancelled) == len(gone)
    for request in schedule.requests:
        parts = [
            (part.start, part.stop) for _, batch in schedule.batches for part in batch.parts if part.request is request
        ]
        # In order and without a gap; whole unless its time was over or it was cancelled.
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts)][: len(parts)]
        assert (parts[-1][1] if parts else 0) == request.next_item
        assert (request.next_item == len(request.items)) != (request in gone)
    assert not any(run.policy.queue.num_by_priority.values())
    assert not run.policy.queue._groups
    assert not run.policy.queue._lines
    assert len(run.policy.queue._overtaking) == 0
