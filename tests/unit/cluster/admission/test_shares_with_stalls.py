"""Shares of tenants whose models have no worker for a while: nobody saves up turns."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

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


@pytest.mark.drawn(3)
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
