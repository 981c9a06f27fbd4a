"""A simulated run as a page shows it, beside what the simulator's world says."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cluster.placement.state import Components, SloClass
from infra.simulator import running
from infra.simulator.multiplexed import policies_and_multiplexed
from infra.simulator.running import least_workers, recording_of, simulate, why_not_recorded
from infra.simulator.scenario import Fault, Scenario, SimModel, SimRequest, SimWorker, poisson, zipf_shares

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
    assert why_not_recorded(scenario()) == ""
    monkeypatch.setattr(running, "MAX_REQUESTS", 11)
    assert why_not_recorded(scenario()) == "12 requests; a page shows at most 11"


MAX = 7


@pytest.mark.drawn
@pytest.mark.parametrize("seed", range(2))
def test_one_worker_less_does_not_suffice(seed: int) -> None:
    slo = SloClass("test", 6.0)
    models = tuple(SimModel(f"m{n}", Components({f"c{n}": GB}), 1.0, 0.6, slo) for n in range(4))
    requests = tuple(poisson(1.5 + seed, zipf_shares([m.id for m in models]), 40.0, random.Random(seed)))

    def scenario_of(num: int) -> Scenario:
        workers = tuple(SimWorker(f"w{n}", "n", GB, attach_bytes_per_s=GB / 1.5) for n in range(num))
        return Scenario(models, workers, requests)

    found = least_workers(scenario_of, "latency-first", 0.9, MAX)
    enough = [num for num in range(1, MAX + 1) if simulate(scenario_of(num), "latency-first")[0].slo_attainment >= 0.9]
    assert found in enough
    assert found - 1 not in enough
    assert least_workers(scenario_of, "latency-first", 0.9, found - 1 or 1) is (None if found > 1 else 1)
