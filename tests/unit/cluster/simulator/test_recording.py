"""A simulated run as a page shows it, beside what the simulator's world says."""

from __future__ import annotations

from collections import Counter

import pytest

from cluster.placement.state import Components
from cluster.simulator import recording
from cluster.simulator.multiplexed import policies_and_multiplexed
from cluster.simulator.recording import recording_of, why_not_recorded
from cluster.simulator.running import simulate
from cluster.simulator.scenario import Fault, Scenario, SimModel, SimRequest, SimWorker

GB = 10**9


def scenario(*faults: Fault) -> Scenario:
    models = tuple(SimModel(name, Components({"shared": 4 * GB, f"own-{name}": GB})) for name in "abc")
    requests = tuple(SimRequest(1.5 * number, "abc"[number % 3]) for number in range(12))
    return Scenario(models, (SimWorker("w", "n", 6 * GB, attach_bytes_per_s=GB),), requests, faults)


def test_a_recording_has_every_request_and_the_bytes_that_each_switch_moved() -> None:
    for policy in ("latency-first", "serve.multiplexed"):
        figures, world = simulate(scenario(), policy, policies_and_multiplexed())
        found = recording_of(world, figures)
        assert (found["title"], found["figures"]["served"]) == (policy, 12)
        assert Counter(one[0] for one in found["requests"]) == Counter("abc" * 4)
        assert all(arrived <= started < ended for _, _, arrived, started, ended in found["requests"])
        assert len(found["switches"]) == figures.switches
        assert sum(one[4] for one in found["switches"]) == figures.moved_bytes
        worker, model, start_s, end_s, nbytes = found["switches"][0]
        assert (worker, model, nbytes) == ("w", "a", 5 * GB)
        assert end_s - start_s == pytest.approx(5.0)
        for worker, model, start_s, end_s in found["spans"]:
            assert (worker, start_s <= end_s <= found["end_s"]) == ("w", True)
            assert any(model == one[1] and one[3] == start_s for one in found["switches"])


def test_requests_that_nobody_served_have_no_times() -> None:
    figures, world = simulate(scenario(Fault(6.0, "worker_lost", "w")), "latency-first")
    requests = recording_of(world, figures)["requests"]
    lost = [one for one in requests if one[4] is None]
    assert len(requests) == 12
    assert len(lost) == 12 - figures.served > 0
    assert {(one[1], one[3]) for one in lost} == {("", None)}


def test_a_run_that_is_too_large_for_a_page_is_told(monkeypatch) -> None:
    _, world = simulate(scenario(), "latency-first")
    assert why_not_recorded(world) == ""
    monkeypatch.setattr(recording, "MAX_REQUESTS", 11)
    assert why_not_recorded(world) == "12 requests; a page shows at most 11"
