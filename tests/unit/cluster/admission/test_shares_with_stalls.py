"""Shares of tenants whose models have no worker for a while: nobody saves up turns."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict

import pytest
from kit.drawing import seeds
from unit.cluster.admission.simulated_replicas import Simulation, ask

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Placement, Started
from configs.admission import AdmissionConfig

POOL, END_S, WINDOW_S = "worker", 400.0, 30.0


class _Drawn:
    """Drawn tenants ask for drawn models, which have the only worker or none by turns. It runs one request at a time.

    `served` has the tenant and the end of each request, `stalled_s` the times at which a tenant had nothing to start.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.weights = {f"t{number}": rng.choice([0.5, 1.0, 2.0, 4.0]) for number in range(rng.randint(2, 4))}
        self.models = [f"m{number}" for number in range(rng.randint(2, 4))]
        tenants = {tenant: {"weight": weight} for tenant, weight in self.weights.items()}
        self.queue = AdmissionQueue(AdmissionConfig(tenants=tenants, max_overtakes=10**6))
        self.queue.set_replicas(POOL, ["w0"], 0.0)
        self.served: list[tuple[str, float, float]] = []
        self.stalled_s: dict[str, list[float]] = defaultdict(list)
        self.waiting: dict[tuple[str, str], int] = defaultdict(int)
        self.of_ticket: dict[int, tuple[str, str]] = {}
        self.placed = set(self.models)

    def run(self) -> None:
        now_s, rng = 0.0, self.rng
        self._measure()
        self._place(now_s)
        while now_s < END_S:
            if rng.random() < 0.05:
                self._place(now_s)
            self._ask(now_s)
            for tenant in self.weights:
                if not any(self.waiting[tenant, model] for model in self.placed):
                    self.stalled_s[tenant].append(now_s)
            started = [event for event in self.queue.pump(now_s) if isinstance(event, Started)]
            if not started:
                now_s += 0.5
            for event in started:
                tenant, model = self.of_ticket[event.ticket]
                self.waiting[tenant, model] -= 1
                now_s += 1.0
                self.queue.leave(event.ticket, now_s, is_answered=True)
                self.served.append((tenant, now_s - 1.0, now_s))

    def _measure(self) -> None:
        for number, model in enumerate(self.models * 3):
            self.queue.submit(-1 - number, Demand(POOL, model, 1.0, 1.0, 2, "t0", 1e9), number - 99.0)
            self.queue.pump(number - 99.0)
            self.queue.leave(-1 - number, number - 98.0, is_answered=True)

    def _place(self, now_s: float) -> None:
        self.placed = {model for model in self.models if self.rng.random() < 0.6} or {self.models[0]}
        self.queue.set_placement(Placement({(POOL, m): ("w0",) if m in self.placed else () for m in self.models}))

    def _ask(self, now_s: float) -> None:
        for tenant in self.weights:
            model = self.rng.choice(self.models)
            if self.waiting[tenant, model] < 20:
                ticket = len(self.of_ticket)
                self.of_ticket[ticket] = tenant, model
                self.waiting[tenant, model] += 1
                self.queue.submit(ticket, Demand(POOL, model, 1.0, 1.0, 2, tenant, 1e9), now_s)


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(12))
def test_while_two_tenants_have_startable_work_they_share_by_weight(seed: int) -> None:
    drawn = _Drawn(seed)
    drawn.run()
    tenants, num_windows = list(drawn.weights), 0
    for begin in range(0, int(END_S - WINDOW_S), 5):
        busy = [t for t in tenants if not any(begin <= at <= begin + WINDOW_S for at in drawn.stalled_s[t])]
        parts = {
            t: sum(1.0 for who, at, end in drawn.served if who == t and begin <= at and end <= begin + 30) for t in busy
        }
        for one in busy:
            for other in busy:
                apart = abs(parts[one] / drawn.weights[one] - parts[other] / drawn.weights[other])
                assert apart <= 2 * (1 / drawn.weights[one] + 1 / drawn.weights[other]) + 1e-6  # one at each end
                num_windows += one != other
    assert num_windows > 10


def test_who_waited_for_a_model_without_a_worker_gets_no_more_than_its_share_afterwards() -> None:
    queue = AdmissionQueue(AdmissionConfig(tenants={"a": {}, "b": {}}))
    queue.set_replicas(POOL, ["w0"], 0.0)
    queue.set_placement(Placement({(POOL, "absent"): (), (POOL, "usual"): ("w0",)}))
    owners: dict[int, str] = {}

    def ask(tenant: str, model: str, now_s: float) -> None:
        owners[len(owners)] = tenant
        queue.submit(len(owners) - 1, Demand(POOL, model, 1.0, 1.0, 2, tenant, 1e9), now_s)

    ask("a", "absent", 0.0)
    order = []
    for second in range(700):
        ask("b", "usual", float(second))
        if second == 600:
            for _ in range(100):
                ask("a", "usual", float(second))
        for event in queue.pump(float(second)):
            assert isinstance(event, Started)
            order.append(owners[event.ticket])
            queue.leave(event.ticket, second + 1.0, is_answered=True)
    late = order[600:]
    assert max(len(run) for run in "".join(late).split("b")) <= 3


class _Shared:
    """Drawn tenants ask workers with slots for their models; works differ. By turns a model has no worker for a while.

    `had_s` are the replica seconds of each tenant at the end of each step, `startable` who had startable work there.
    """

    STEP_S, NUM_STEPS = 0.5, 160

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.weights = {f"t{number}": rng.choice([0.5, 1.0, 2.0, 4.0]) for number in range(rng.randint(2, 4))}
        self.models = [f"m{number}" for number in range(rng.randint(2, 4))]
        self.wanted = {tenant: rng.sample(self.models, rng.randint(1, 2)) for tenant in self.weights}
        self.num_workers, self.slots = rng.randint(1, 3), rng.choice([1, 2, 4])
        self.most_s = rng.uniform(0.2, 1.5)  # of a request
        tenants = {tenant: {"weight": weight} for tenant, weight in self.weights.items()}
        roomy = {"max_waiting": 10**6, "max_waiting_per_model": 10**6}
        self.queue = AdmissionQueue(AdmissionConfig.model_validate({"tenants": tenants} | roomy))
        self.sim = Simulation(self.queue, self.num_workers, lambda asked: asked.work)
        self.had_s: list[dict[str, float]] = []
        self.startable: list[set[str]] = []

    @property
    def batch_s(self) -> float:
        """Return the most that all slots take when each runs one request."""
        return self.num_workers * self.slots * self.most_s

    def run(self) -> None:
        for number in range(40 * len(self.models)):
            self._ask(number * self.most_s, "t0", self.models[number % len(self.models)])
        self.sim.run_until()
        placed, changes = set(self.models), 0
        begin_s = self.sim.now_s
        for step in range(self.NUM_STEPS):
            if step == changes:  # the windows after a stall tell whether it was worth anything
                is_stall = len(placed) == len(self.models)
                placed = self._place(self.rng.choice(self.models) if is_stall else None)
                changes += self.rng.randint(6, 30) if is_stall else self.rng.randint(64, 80)
            waiting = {(each.tenant, each.model): each.waiting for each in self.queue.snapshot(self.sim.now_s).shares}
            for tenant in self.weights:
                model = self.rng.choice(self.wanted[tenant])
                for _ in range(max(0, self._enough() - waiting.get((tenant, model), 0))):
                    self._ask(self.sim.now_s, tenant, model)
            self.sim.run_until(begin_s + (step + 1) * self.STEP_S)
            shares = self.queue.snapshot(self.sim.now_s).shares
            self.startable.append({each.tenant for each in shares if each.waiting and each.model in placed})
            self.had_s.append(dict(self.sim.busy_s))

    def _enough(self) -> int:
        """As many as nobody gets done in a step."""
        return 2 + math.ceil(8 * self.num_workers * self.STEP_S / self.most_s) + self.num_workers * self.slots

    def _ask(self, when_s: float, tenant: str, model: str) -> None:
        work = self.rng.uniform(0.3, 1.0) * self.most_s
        self.sim.at(when_s, lambda now: ask(tenant, model=model, work=work, share=1 / self.slots))

    def _place(self, stalled: str | None) -> set[str]:
        placed = set(self.models) - {stalled}
        workers = tuple(f"r{number}" for number in range(self.num_workers))
        self.queue.set_placement(Placement({(POOL, m): workers if m in placed else () for m in self.models}))
        return placed


@seeds(50)
def test_within_a_window_in_which_two_tenants_have_startable_work_shares_are_within_a_batch(seed: int) -> None:
    drawn = _Shared(seed)
    drawn.run()
    window = round(WINDOW_S / drawn.STEP_S)
    num_windows = 0
    for begin in range(drawn.NUM_STEPS - window):
        busy = set.intersection(*drawn.startable[begin : begin + window + 1])
        first, last = drawn.had_s[begin], drawn.had_s[begin + window]
        for one, other in itertools.combinations(sorted(busy), 2):
            got = {t: (last.get(t, 0.0) - first.get(t, 0.0)) / drawn.weights[t] for t in (one, other)}
            batch = drawn.batch_s * (1 / drawn.weights[one] + 1 / drawn.weights[other])
            assert abs(got[one] - got[other]) <= batch, (one, other, begin, got, batch)
            num_windows += 1
    assert num_windows > 0
