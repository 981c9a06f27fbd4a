"""Two ingress replicas that share slots, on Ray. Without it: unit/cluster/placement/test_slots.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.several_ingresses_scenario import MAX_RUNNING, MAX_WAITING, NUM_AT_ONCE
from integration.harness import SCENARIO_S, run_scenario

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("several_ingresses_scenario.py"), tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("when", ["burst", "burst after"])
def test_slots_and_bounds_hold_for_both_together(observed: dict[str, Any], when: str) -> None:
    seen = observed[when]
    max_waiting = MAX_WAITING if when == "burst" else 10
    assert seen["running"] == MAX_RUNNING
    # Bounds are divided by what came of late: who had more may have some of it still. Reports are of two moments.
    assert seen["waiting"] <= 1.25 * max_waiting
    assert seen["answers"].keys() == {"200", "429"}
    # Two queues would let twice as many in. Some more may come in while the first ones are answered.
    assert seen["answers"]["200"] < 2 * (MAX_RUNNING + max_waiting)
    assert sum(seen["answers"].values()) == NUM_AT_ONCE


def test_settings_hold_for_both_and_outlive_the_controller(observed: dict[str, Any]) -> None:
    assert observed["settings"] == observed["settings after"] == [10] * 6


@pytest.mark.parametrize("who", ["ingress", "controller"])
def test_every_request_is_answered_when_one_is_killed(observed: dict[str, Any], who: str) -> None:
    answers = observed[f"{who} killed"]
    assert answers.keys() <= {"200", "429", "503"}, answers
    assert answers["200"] > 30
