"""A cluster's record of its requests as a scenario, and the log behind it."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from cluster.admission.outcomes import MAX_KEPT, EndedLog
from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Started, Waiting
from cluster.admission.replica_slots import Ended
from cluster.placement.state import Components
from configs.admission import AdmissionConfig
from infra.simulator.recorded import note_sizes, recorded_scenario
from infra.simulator.running import simulate
from infra.simulator.scenario import Scenario, SimModel, SimWorker, poisson, read_trace, trace_lines


def test_a_recorded_trace_goes_through_its_file_and_runs() -> None:
    """Record what a queue with one replica serves; the scenario has the same requests with their times and sizes."""
    queue = AdmissionQueue(AdmissionConfig())
    queue.set_replicas("worker", ["r"], 0.0)
    chance = random.Random(0)
    given = []
    for ticket in range(40):
        at_s, work = 100.0 + ticket, chance.choice([1.0, 2.0, 4.0])
        ask = Demand("worker", f"m{ticket % 2}", work, 0.25, 2, "default", 1e9)
        queue.submit(ticket, ask, at_s)
        assert [type(event) for event in queue.pump(at_s)] == [Started]
        queue.leave(ticket, at_s + work / 8, is_answered=True, switch_s=0.1 if ticket < 4 else 0.0)
        given.append((at_s, f"m{ticket % 2}", work))
    ended = queue.ended.after(0, 140.0)
    loads = [asdict(load) for load in queue.snapshot(140.0).models]
    switches = {"m1": {"attached_bytes": 40, "reused_bytes": 40}}
    modules = [
        {"models": ["m0", "m1"], "key": "shared", "bytes": 5},
        {"models": ["m0"], "key": "own", "bytes": 7},
    ]
    worker = {"name": "r", "budget_bytes": 1000, "modules": modules, "last_switches": switches}
    sizes: dict[str, dict[str, int]] = {}
    note_sizes(sizes, [worker, {"unreachable": "gone"}])
    note_sizes(sizes, [worker | {"modules": modules[:1]}])  # m0 is about to go
    scenario = recorded_scenario(
        [asdict(one) for one in ended.requests], loads, [worker, {"unreachable": "gone"}], 102.0, sizes
    )
    trace, problems = read_trace(trace_lines(scenario))
    assert problems == []
    assert (trace.models, trace.workers, trace.requests) == (scenario.models, scenario.workers, scenario.requests)
    assert [(one.at_s + 102.0, one.model) for one in trace.requests] == [(at_s, name) for at_s, name, _ in given[2:]]
    for one, (_, name, work) in zip(trace.requests, given[2:], strict=True):
        mean = sum(w for _, other, w in given[2:] if other == name) / 19
        assert one.work == pytest.approx(work / mean)
        assert one.ended_s - one.started_s == pytest.approx(work / 8)
        assert one.worker == trace.workers[0].id
    assert [one.switch_s for one in trace.requests] == [0.1, 0.1, *[None] * 36]
    assert {model.id: dict(model.components.sizes) for model in trace.models} == {
        "m0": {"shared": 5, "own": 7},
        "m1": {"own-m1": 40},
    }
    (only,) = trace.workers
    assert (only.budget_bytes, only.slots, only.fixed_switch_s) == (1000, 4, pytest.approx(0.1))
    figures, _ = simulate(scenario, "latency-first")
    assert figures.served == 38


def test_the_log_forgets_the_oldest_and_goes_on_after_any_number() -> None:
    log = EndedLog()
    chance = random.Random(1)
    number, seen = log.after(None, 0.0).next_number, []
    for index in range(MAX_KEPT + 500):
        ask = Demand("worker", str(index), 1.0, 1.0, 1, "default", 1e9)
        log.note_end(Ended(Waiting(index, ask, index, 0.0, 1.0), "r", 1.0, 1.0), float(index), 0.0, True)
        if chance.random() < 0.01:
            page = log.after(number, 0.0)
            seen += [one.model for one in page.requests]
            number = page.next_number
    seen += [one.model for one in log.after(number, 0.0).requests]
    assert seen == [str(index) for index in range(MAX_KEPT + 500)]
    assert log.after(0, 0.0).requests[0].model == "500"
    assert len(log.after(10**9, 0.0).requests) == MAX_KEPT  # a queue that was restarted counts from 0 again


@pytest.mark.parametrize("growth", [0.0, 0.4, 1.0])
def test_what_requests_cost_is_found_again_in_what_they_took(growth: float) -> None:
    """Simulate a trace with known costs on workers that need no switch, and fit the costs to its record."""
    times = {"a": 0.2, "b": 0.5}
    models = tuple(SimModel(id_, Components({id_: 1}), time_s, growth) for id_, time_s in times.items())
    workers = tuple(SimWorker(f"w{number}", "n", 1, 8) for number in range(2))
    requests = tuple(poisson(5.0, {"a": 0.6, "b": 0.4}, 60.0, random.Random(3)))
    _, world = simulate(Scenario(models, workers, requests), "static")
    records = [
        {"pool": "worker", "model": one.request.model, "arrived_s": one.request.at_s, "started_s": one.started_s,
         "ended_s": one.ended_s, "work": 1.0, "share": 0.125, "priority": 1, "replica": one.worker, "switch_s": 0.0,
         "is_answered": True}
        for one in world.served
    ]  # fmt: skip
    found = {model.id: model for model in recorded_scenario(records, [], [], 0.0, {}).models}
    for id_, time_s in times.items():
        assert found[id_].service_s == pytest.approx(time_s, rel=0.12)
        assert found[id_].batch_growth == pytest.approx(growth, abs=0.2)
