"""Trace files, charts, and generated arrivals."""

from __future__ import annotations

import json
import math
import random
import xml.etree.ElementTree as ElementTree
from collections import Counter
from itertools import pairwise

import pytest
from kit.drawing import seeds
from unit.infra.simulator.random_scenarios import random_scenario

from infra.simulator.chart import chart_of
from infra.simulator.running import simulate
from infra.simulator.scenario import bursts, diurnal, poisson, read_trace, trace_lines, zipf_shares


@seeds(50)
def test_a_scenario_comes_back_from_its_file(seed: int) -> None:
    scenario = random_scenario(seed, with_faults=True)
    trace, problems = read_trace(trace_lines(scenario))
    assert problems == []
    assert (trace.models, trace.workers, trace.requests) == (scenario.models, scenario.workers, scenario.requests)
    assert trace.faults == scenario.faults


BROKEN = {
    "{": "no JSON",
    "[1]": "expected an object, got list",
    '{"kind": "request", "at_s": 1}': "model is missing",
    '{"kind": "request", "at_s": NaN, "model": "a"}': "at_s is nan",
    '{"kind": "request", "at_s": -1, "model": "a"}': "at_s is -1",
    '{"kind": "request", "at_s": 1e400, "model": "a"}': "at_s is inf",
    '{"kind": "request", "at_s": 1, "model": "b"}': "'b' has no line",
    '{"kind": "request", "at_s": 1, "model": 7}': "model is 7; expected a string",
    '{"kind": "request", "at_s": 1, "model": "a", "colour": 3}': "unknown ['colour']",
    '{"kind": "meteor", "at_s": 1}': "kind 'meteor'; known: model",
    '{"kind": ["x"]}': "unhashable",
    '{"kind": "model", "id": "a", "components": {}}': "is repeated",
    '{"kind": "model", "id": "c", "components": {"x": -1}}': "'x' has -1 bytes",
    '{"kind": "model", "id": "c", "components": {}, "slo": "gold"}': "slo is 'gold'; known: interactive",
    '{"kind": "worker", "id": "w", "node": "n", "budget_bytes": 1.5}': "budget_bytes is 1.5; expected an integer",
    '{"kind": "worker", "id": "w", "node": "n", "budget_bytes": 1, "speed": 0}': "speed is 0",
    '{"kind": "worker_lost", "at_s": 1}': "",
    "[" * 100_000: "",
}


def test_broken_lines_are_named_and_the_others_count() -> None:
    good = ['{"kind": "model", "id": "a", "components": {"x": 5}}', '{"kind": "request", "at_s": 2, "model": "a"}', ""]
    lines = [*good, *BROKEN, '{"kind": "request", "at_s": 1, "model": "a", "priority": 3}']
    trace, problems = read_trace(lines)
    assert [request.at_s for request in trace.requests] == [1, 2]
    named = {int(problem.split(":")[0].removeprefix("line ")): problem for problem in problems}
    for number, (line, reason) in enumerate(BROKEN.items(), len(good) + 1):
        if reason:
            assert reason in named[number], line[:80]
    assert {number for number in named if number <= len(good)} == set()


def test_zipf_poisson_diurnal_and_bursts_have_the_rates_that_they_say() -> None:
    chance = random.Random(0)
    shares = zipf_shares(["a", "b", "c", "d"])
    assert shares["a"] / shares["d"] == pytest.approx(4)
    requests = poisson(50.0, shares, 200.0, chance)
    assert len(requests) == pytest.approx(10_000, rel=0.05)
    counts = Counter(request.model for request in requests)
    for name, share in shares.items():
        assert counts[name] / len(requests) == pytest.approx(share, rel=0.08)
    gaps = [b.at_s - a.at_s for a, b in pairwise(requests)]
    assert sum(gap > 0.02 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)
    day = diurnal(50.0, 0.9, 200.0, shares, 200.0, chance)
    first, second = sum(r.at_s < 100 for r in day), sum(r.at_s >= 100 for r in day)
    assert first / second == pytest.approx((1 + 0.9 * 2 / math.pi) / (1 - 0.9 * 2 / math.pi), rel=0.15)
    burst = bursts(7, 10.0, ["a", "b"], 40.0, chance)
    assert Counter(request.model for request in burst) == {"a": 14, "b": 14}
    assert all(request.at_s % 10 <= 1 for request in burst)


@seeds(50)
def test_the_chart_shows_every_switch_at_its_place(seed: int) -> None:
    _, world = simulate(random_scenario(seed, with_faults=True), "latency-first", patience=40.0)
    root = ElementTree.fromstring(chart_of(world, 'a & b < "c"'))
    name = "{http://www.w3.org/2000/svg}"
    switches = [span for span in world.spans if span.is_switch]
    assert len([rect for rect in root.iter(f"{name}rect") if rect.get("class") == "s"]) == len(switches)
    tips = [tip.text for tip in root.iter(f"{name}title")]
    for span in world.spans:
        what = "switches to" if span.is_switch else "has"
        assert f"{span.worker} {what} {span.model}, {span.start_s:.1f} to {span.end_s:.1f} s" in tips
    assert len(list(root.iter(f"{name}polyline"))) == 2
    assert json.dumps(root.find(f"{name}text").text)  # type: ignore[union-attr]
    assert root.find(f"{name}text").text == 'a & b < "c"'  # type: ignore[union-attr]
