"""Starts without an order: work, switch and loss are weighed, and batches end first."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest
from kit.drawing import seeds

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, OnDemandSwitch, Placement, ReplicaPart, Started, Waiting
from cluster.admission.replica_choice import HOLD_TIMES, Options, best_replica
from cluster.admission.replica_slots import ReplicaSlots
from cluster.admission.replicas import JOIN_DELAYS
from cluster.admission.service_times import BatchLatency
from configs.admission import AdmissionConfig

POOL = "worker"
SWITCH_S = 0.5


class Queue:
    """A queue of workers with room for one model each, which the controller has told of."""

    def __init__(self, ready: Mapping[str, str], models: str, share: float = 0.25, **chances: float) -> None:
        self.queue = AdmissionQueue(AdmissionConfig(max_overtakes=50))
        self.queue.set_replicas(POOL, ready, 0.0)
        self.models, self.share, self.chances = models, share, chances
        self.num = 0
        self.where: dict[int, str] = {}
        self.place({name: (model,) for name, model in ready.items()})
        for model in models:  # requests take one second
            self.ask(model, 0.0)
            self.end(self.num, 1.0)
        self.place({name: (model,) for name, model in ready.items()})

    def place(self, ready: Mapping[str, tuple[str, ...]], starts: Mapping[str, OnDemandSwitch] | None = None) -> None:
        on_demand = {(POOL, model): starts or dict.fromkeys(ready, OnDemandSwitch(SWITCH_S)) for model in self.models}
        replicas = {key: tuple(found) for key, found in on_demand.items()}
        self.queue.set_placement(Placement(replicas, on_demand=on_demand, chances=self.chances, ready=ready))

    def ask(self, model: str, now_s: float, deadline_s: float = math.inf, tenant: str = "t") -> str | None:
        self.num += 1
        self.queue.submit(self.num, Demand(POOL, model, 1.0, self.share, 1, tenant, deadline_s), now_s)
        self.pump(now_s)
        return self.where.get(self.num)

    def pump(self, now_s: float) -> list[int]:
        started = [event for event in self.queue.pump(now_s) if isinstance(event, Started)]
        self.where |= {event.ticket: event.replica for event in started}
        return [event.ticket for event in started]

    def end(self, ticket: int, now_s: float) -> list[int]:
        self.queue.leave(ticket, now_s, is_answered=True)
        return self.pump(now_s)


def test_an_idle_replica_takes_the_request_at_once_and_the_one_with_its_model_first() -> None:
    found = Queue({"v": "a", "w": "b"}, "abc")
    assert found.ask("b", 10.0) == "w"
    assert found.ask("a", 10.0) == "v"
    found.end(found.num, 11.0)
    assert found.ask("c", 11.0) == "v"
    assert found.ask("c", 11.0) == "v"  # it is there by then


def test_of_idle_replicas_that_one_switches_whose_model_is_missed_least() -> None:
    assert Queue({"v": "a", "w": "b"}, "abc", a=0.7, b=0.2).ask("c", 10.0) == "w"
    assert Queue({"v": "a", "w": "b"}, "abc", a=0.2, b=0.7).ask("c", 10.0) == "v"
    twice = Queue({"v": "a", "w": "b", "x": "a"}, "abc", a=0.7, b=0.2)
    assert twice.ask("c", 10.0) in ("v", "x")  # there is another one that has it


def test_a_batch_goes_on_until_another_model_has_waited_for_some_of_its_own_time() -> None:
    found = Queue({"v": "a"}, "ab")
    assert found.ask("a", 10.0) == "v"
    assert found.ask("b", 10.0) is None
    waits = found.num
    assert found.ask("a", 10.5) == "v"  # it joins those that run
    due_s = 10.0 + HOLD_TIMES * (SWITCH_S + 1.0)
    assert found.queue.look_again_s() <= due_s
    assert found.pump(due_s - 0.01) == []
    assert found.pump(due_s) == [waits]
    assert found.ask("a", due_s) is None  # the next switch is for it, and it waits for that in its turn


def test_what_waits_starts_when_the_replica_is_idle() -> None:
    found = Queue({"v": "a"}, "ab")
    found.ask("a", 10.0)
    running = found.num
    found.ask("b", 10.1)
    assert found.end(running, 10.2) == [found.num]


def test_a_burst_takes_a_second_replica_once_the_wait_for_the_first_exceeds_another_switch() -> None:
    found = Queue({"v": "a", "w": "b"}, "abc", b=0.5)
    assert found.ask("c", 10.0) == "v"
    found.queue.pump(10.4)
    assert found.ask("c", 10.4) == "w"  # v is ready in 0.1 s, and a request alone has it for 1 s


@seeds(50)
def test_requests_join_a_batch_until_they_delay_each_other_more_than_a_switch_takes(seed: int) -> None:
    chance = random.Random(seed)
    joining_s, switch_s = chance.uniform(0.01, 0.1), chance.uniform(0.2, 1.0)
    slots = ReplicaSlots()
    slots.set_replicas(["v", "w"], 0.0)
    slots.replicas.set_resident({"v": ["a"], "w": ["b"]})
    on_demand = {"v": OnDemandSwitch(0.0), "w": OnDemandSwitch(switch_s)}
    num_joined = 0
    for number in range(1000):
        demand = Demand(POOL, "a", 1.0, 1e-3, 1, "t", math.inf)
        where = best_replica(slots.replicas, demand, Options(None, switch_s, joining_s, on_demand), 1.0)
        assert where is not None
        if where.replica == "w":
            break
        num_joined += 1
        slots.start_request(Waiting(number, demand, number, 1.0, 1.0), where, 1.0, BatchLatency())
    assert num_joined * JOIN_DELAYS * joining_s == pytest.approx(switch_s, abs=JOIN_DELAYS * joining_s)


def test_what_fits_beside_waits_for_nobody() -> None:
    found = Queue({"v": "a"}, "ab")
    found.place({"v": ("a",)}, {"v": OnDemandSwitch(SWITCH_S, is_beside=True)})
    assert found.ask("a", 10.0) == "v"
    assert found.ask("b", 10.0) == "v"


def test_a_request_that_has_no_time_is_not_held() -> None:
    found = Queue({"v": "a"}, "ab")
    found.ask("a", 10.0)
    assert found.ask("b", 10.0, deadline_s=13.0) == "v"


def test_a_free_place_goes_to_the_model_that_is_there_but_not_past_another_tenant() -> None:
    found = Queue({"v": "a"}, "ab", share=1.0)
    found.ask("a", 10.0)
    running = found.num
    found.ask("b", 10.1)
    found.ask("a", 10.2)
    assert found.end(running, 11.0) == [found.num]  # not the older one, which would have the model switched
    other = Queue({"v": "a"}, "ab", share=1.0)
    other.ask("a", 10.0)
    running = other.num
    other.ask("b", 10.1, tenant="u")
    older = other.num
    other.ask("a", 10.2)
    assert other.end(running, 11.0) == [older]


def test_a_report_from_before_a_start_does_not_undo_it() -> None:
    found = Queue({"v": "a", "w": "b"}, "abc", b=0.9)
    assert found.ask("b", 10.0) == "w"
    assert found.ask("c", 10.0) == "v"
    found.place({"v": ("a",), "w": ("b",)})
    assert found.ask("c", 10.0) == "v"


def test_at_random_every_request_is_served_and_no_idle_replica_leaves_one_waiting() -> None:
    for seed in range(20):
        chance = random.Random(seed)
        found = Queue({"v": "a", "w": "b", "x": "c"}, "abcdef", share=chance.choice([0.25, 0.5, 1.0]))
        running: list[int] = []
        now_s = 10.0
        for _ in range(200):
            now_s += chance.expovariate(4.0)
            if chance.random() < 0.5 or not running:
                found.ask(chance.choice("abcdef"), now_s)
            else:
                found.end(running.pop(chance.randrange(len(running))), now_s)
            running = [ticket for ticket in found.where if ticket in found.queue._pool_of]
            busy = {found.where[ticket] for ticket in running}
            assert not found.queue.num_waiting or busy == {"v", "w", "x"}
        for _ in range(1000):
            if not found.queue.num_waiting and not running:
                break
            now_s += 1.0
            found.pump(now_s)
            running = [ticket for ticket in found.where if ticket in found.queue._pool_of]
            if running:
                found.end(running[0], now_s)
        assert found.queue.num_waiting == found.queue.num_running == 0


def test_what_others_run_on_a_replica_is_believed_to_be_there_once() -> None:
    slots = ReplicaSlots(is_shared=True)
    slots.set_replicas(["v", "w"], 0.0)
    for now_s in (1.0, 2.0):
        slots.set_parts({"v": ReplicaPart(0.5, {"a": 1, "b": 2})}, 0.5, now_s)
    assert [list(slots.replicas[name].recent) for name in ("v", "w")] == [["a", "b"], []]
