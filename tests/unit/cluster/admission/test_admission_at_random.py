"""The queue under random events, beside a naive model that only counts."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Placement, Refused
from configs.admission import AdmissionConfig

POOLS = {"worker": ("flux", "adder"), "encoder": ("clip",)}
TENANTS = ("a", "b", "c")


class AtRandom(RuleBasedStateMachine):
    """`state` knows where every ticket is; `runs` on which replica."""

    def __init__(self) -> None:
        super().__init__()
        self.config = AdmissionConfig.model_validate(
            {
                "max_waiting": 9,
                "max_waiting_per_model": 5,
                "max_overtakes": 3,
                "tenants": {"a": {"weight": 3}},
            }
        )
        self.queue = AdmissionQueue(self.config)
        self.now_s = 0.0
        self.asks: dict[int, Demand] = {}
        self.state: dict[int, str] = {}
        self.runs: dict[int, str] = {}
        self.returned: set[int] = set()
        self.bound_free: set[int] = set()
        self.replicas: dict[str, set[str]] = {pool: set() for pool in POOLS}
        self.held: set[str] = set()
        self.patience: dict[int, int] = {}
        self.starts: Counter[str] = Counter()

    def pump(self) -> None:
        for event in self.queue.pump(self.now_s):
            before = self.state[event.ticket]
            if isinstance(event, Refused):
                assert before == "waiting"
                self.state[event.ticket] = "refused"
                retry_s = event.refusal.retry_after_s
                assert retry_s is None or 0 <= retry_s < math.inf
                assert (event.refusal.reason in ("expired", "hopeless")) == (retry_s is None)
                continue
            ask = self.asks[event.ticket]
            assert before == "waiting"
            assert ask.deadline_s > self.now_s
            assert ask.model not in self.held
            assert event.replica in self.replicas[ask.pool]
            beside = [self.asks[other].share for other, name in self.runs.items() if name == event.replica]
            assert not beside or sum(beside) + ask.share <= 1 + 1e-6
            self.state[event.ticket] = "running"
            self.runs[event.ticket] = event.replica
            if event.ticket not in self.returned:
                self.starts[ask.pool] += 1
            self.returned.discard(event.ticket)

    def pick(self, data: st.DataObject, state: str) -> int:
        return data.draw(st.sampled_from([ticket for ticket, is_ in self.state.items() if is_ == state]))

    @rule(
        pool=st.sampled_from(sorted(POOLS)),
        data=st.data(),
        share=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
        work=st.floats(0.1, 10),
        priority=st.integers(1, 3),
        tenant=st.sampled_from(TENANTS),
        patience_s=st.one_of(st.just(math.inf), st.floats(-1, 20)),
        is_inner=st.booleans(),
    )
    def submit(
        self,
        pool: str,
        data: st.DataObject,
        share: float,
        work: float,
        priority: int,
        tenant: str,
        patience_s: float,
        is_inner: bool,
    ) -> None:
        model = data.draw(st.sampled_from(POOLS[pool]))
        ticket = len(self.asks)
        ask = Demand(pool, model, work, share, priority, tenant, self.now_s + patience_s, is_inner)
        self.asks[ticket], self.state[ticket] = ask, "waiting"
        older = sum(is_ == "waiting" and self.asks[other].pool == pool for other, is_ in self.state.items())
        self.patience[ticket] = self.starts[pool] + older * (self.config.max_overtakes + 1)
        self.queue.submit(ticket, ask, self.now_s)
        self.pump()

    @precondition(lambda self: "waiting" in self.state.values())
    @rule(data=st.data())
    def cancel_waiting(self, data: st.DataObject) -> None:
        ticket = self.pick(data, "waiting")
        self.state[ticket] = "left"
        self.returned.discard(ticket)
        self.queue.leave(ticket, self.now_s)
        self.pump()

    @precondition(lambda self: "running" in self.state.values())
    @rule(data=st.data(), is_answered=st.booleans(), switch_s=st.sampled_from([0.0, 0.5]))
    def end(self, data: st.DataObject, is_answered: bool, switch_s: float) -> None:
        ticket = self.pick(data, "running")
        self.state[ticket] = "left"
        del self.runs[ticket]
        self.queue.leave(ticket, self.now_s, is_answered=is_answered, switch_s=switch_s)
        self.pump()

    @precondition(lambda self: any(is_ in ("left", "refused") for is_ in self.state.values()))
    @rule(data=st.data())
    def leave_twice(self, data: st.DataObject) -> None:
        gone = [ticket for ticket, is_ in self.state.items() if is_ in ("left", "refused")]
        self.queue.leave(data.draw(st.sampled_from(gone)), self.now_s)

    @precondition(lambda self: "running" in self.state.values())
    @rule(data=st.data())
    def replica_dies_under(self, data: st.DataObject) -> None:
        """All that run on it come back, in any order."""
        replica = self.runs[self.pick(data, "running")]
        lost = [ticket for ticket, name in self.runs.items() if name == replica]
        pool = self.asks[lost[0]].pool
        self.replicas[pool].discard(replica)
        self.queue.set_replicas(pool, self.replicas[pool], self.now_s)
        for ticket in data.draw(st.permutations(lost)):
            self.state[ticket] = "waiting"
            self.returned.add(ticket)
            self.patience.pop(ticket, None)
            del self.runs[ticket]
            self.queue.give_back(ticket, self.now_s)
        self.pump()

    @rule(pool=st.sampled_from(sorted(POOLS)), names=st.sets(st.sampled_from("uvwx")))
    def set_replicas(self, pool: str, names: set[str]) -> None:
        self.replicas[pool] = {f"{pool}-{name}" for name in names}
        self.queue.set_replicas(pool, self.replicas[pool], self.now_s)
        self.pump()

    @rule(models=st.sets(st.sampled_from(["flux", "clip"])))
    def hold(self, models: set[str]) -> None:
        self.held = models
        if models:  # who is held waits for as long as the controller likes
            self.patience.clear()
        self.queue.set_placement(Placement({(pool, model): () for model in models for pool in POOLS}))
        self.pump()

    @rule(passed_s=st.floats(0.01, 5))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.pump()

    @invariant()
    def none_is_lost_or_doubled(self) -> None:
        count = Counter(self.state.values())
        assert self.queue.num_waiting == count["waiting"]
        assert self.queue.num_running == count["running"]
        snapshot = self.queue.snapshot(self.now_s)
        for load in snapshot.models:
            mine = [t for t, ask in self.asks.items() if ask.model == load.model]
            assert load.waiting == sum(self.state[t] == "waiting" for t in mine)
            assert load.running == sum(self.state[t] == "running" for t in mine)
        assert sum(snapshot.tenants.values()) == count["waiting"]
        waiting = Counter((ask.model, ask.tenant) for t, ask in self.asks.items() if self.state[t] == "waiting")
        assert Counter({(each.model, each.tenant): each.waiting for each in snapshot.shares}) == waiting
        assert sum(each.refused for each in snapshot.shares) == sum(load.refused for load in snapshot.models)
        assert sum(each.started for each in snapshot.shares) == sum(load.started for load in snapshot.models)
        for pool, replicas in snapshot.replicas.items():
            running = {replica.name: sum(replica.running.values()) for replica in replicas if replica.running}
            assert running == Counter(name for t, name in self.runs.items() if self.asks[t].pool == pool)

    @invariant()
    def bounds_hold(self) -> None:
        """Parts of requests that were let in, and those whose replica died, are beyond them."""
        waiting = [
            ask
            for ticket, ask in self.asks.items()
            if self.state[ticket] == "waiting" and ticket not in self.returned and not ask.is_inner
        ]
        assert len(waiting) <= self.config.max_waiting
        assert max(Counter(ask.model for ask in waiting).values(), default=0) <= self.config.max_waiting_per_model

    @invariant()
    def nobody_waits_beside_an_idle_replica(self) -> None:
        for pool, names in self.replicas.items():
            idle = names - set(self.runs.values())
            waits = [t for t, ask in self.asks.items() if self.state[t] == "waiting" and ask.pool == pool]
            assert not idle or all(self.asks[ticket].model in self.held for ticket in waits)

    @invariant()
    def nobody_starves(self) -> None:
        """No more starts than `max_overtakes` for each one that was there before, and itself."""
        for ticket, most in self.patience.items():
            if self.state[ticket] == "waiting":
                assert self.starts[self.asks[ticket].pool] <= most + 1


TestAtRandom = AtRandom.TestCase
TestAtRandom.settings = settings(max_examples=20, stateful_step_count=60, deadline=None)
