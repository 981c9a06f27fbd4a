"""The controller on Ray, with workers that fit one model each. Without Ray: unit/cluster/placement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.controller_scenario import NUM_REQUESTS, SHARES
from integration.harness import SCENARIO_S, run_scenario

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("controller_scenario.py"), tmp_path_factory.mktemp("store"))


def test_the_same_requests_need_fewer_switches_with_it(observed: dict[str, Any]) -> None:
    on, off = observed["on"], observed["off"]
    assert on["answers"] == off["answers"] == {"200": NUM_REQUESTS}
    assert on["switches"] < off["switches"], (on, off)


def test_every_switch_has_its_reason(observed: dict[str, Any]) -> None:
    found = observed["decisions"]
    switches = [one for one in found["decisions"] if one["action"] == "switch"]
    assert {one["model"] for one in switches} <= set(SHARES)  # most start freely
    assert all(one["reason"] for one in switches)
    assert {one["state"] for one in switches} <= {"done", "taken", "given"}
    assert found["notes"] == []


@pytest.mark.parametrize("what", ["drain", "controller killed", "worker killed", "config changed"])
def test_every_request_is_answered_while(observed: dict[str, Any], what: str) -> None:
    assert observed[what]["answers"].keys() == {"200"}, observed[what]


def test_another_config_holds_after_it_was_deployed(observed: dict[str, Any]) -> None:
    assert observed["config changed"]["seen"] == "throughput-first"
