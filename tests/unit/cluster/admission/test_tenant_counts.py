"""Waits and refusals by model and tenant, of one queue and of several."""

from __future__ import annotations

from dataclasses import replace

from cluster.admission.outcomes import MAX_TENANT_LOADS, joined_loads
from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, TenantLoad
from configs.admission import AdmissionConfig


def ask(tenant: str, model: str = "m") -> Demand:
    return Demand("worker", model, 1.0, 0.25, 2, tenant, 1e9)


def test_a_queue_tells_who_waits_how_long_and_who_was_refused() -> None:
    queue = AdmissionQueue(AdmissionConfig(max_waiting=3))
    for ticket, tenant in enumerate(["gold", "gold", "tin"]):
        queue.submit(ticket, ask(tenant), float(ticket))
    queue.submit(3, ask("tin"), 3.0)  # more than its share of a full queue
    queue.pump(3.0)
    loads = {load.tenant: load for load in queue.snapshot(5.0).shares}
    assert (loads["gold"].waiting, loads["gold"].oldest_age_s, loads["gold"].refused) == (2, 5.0, 0)
    assert (loads["tin"].waiting + loads["tin"].refused, loads["tin"].refused) == (2, 1)
    queue.set_replicas("worker", ["r"], 6.0)
    queue.pump(6.0)
    loads = {load.tenant: load for load in queue.snapshot(7.0).shares}
    assert loads["gold"] == TenantLoad("worker", "m", "gold", started=2, waited_s=6.0 + 5.0)
    assert (loads["tin"].started, loads["tin"].waited_s, loads["tin"].waiting) == (1, 4.0, 0)


def test_those_who_came_last_are_kept_and_who_waits_comes_first() -> None:
    queue = AdmissionQueue(AdmissionConfig())
    queue.submit(0, ask("old"), 1.0)
    for number in range(1, 3 * MAX_TENANT_LOADS):
        queue.submit(number, replace(ask(f"t{number}"), deadline_s=0.0), 2.0)  # refused
    queue.submit(1000, ask("old"), 3.0)
    loads = queue.snapshot(4.0).shares
    assert len(loads) == MAX_TENANT_LOADS
    assert loads[0] == TenantLoad("worker", "m", "old", waiting=2, oldest_age_s=3.0)
    latest = {f"t{number}" for number in range(2 * MAX_TENANT_LOADS, 3 * MAX_TENANT_LOADS)}
    assert {load.tenant for load in loads[1:]} < latest


def test_loads_of_several_queues_are_sums() -> None:
    one = TenantLoad("worker", "m", "gold", 2, 3.0, 4, 5.0, 6)
    other = TenantLoad("worker", "m", "gold", 1, 7.0, 1, 1.0, 1)
    apart = TenantLoad("worker", "other", "gold", 1)
    assert joined_loads([one, apart, other]) == (TenantLoad("worker", "m", "gold", 3, 7.0, 5, 6.0, 7), apart)
