"""A config that is deployed over another takes its place: see `replaced_scenario.py`, which only reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.harness import SCENARIO_S, run_scenario
from integration.replaced_scenario import ROLES

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("replaced_scenario.py"), tmp_path_factory.mktemp("stores"))


def test_the_old_control_plane_ends_once_its_replicas_have_and_the_new_one_serves(observed: dict[str, Any]) -> None:
    assert observed["one alone"] == "19."
    assert observed["kept"] == ROLES  # while one drained
    assert observed["new"] == ROLES  # the old ones are gone, and those with the application: the scenario has waited
    assert observed["new answers"] == ["19.", "19."]


def test_a_config_with_other_models_keeps_the_control_plane_which_learns_of_them(observed: dict[str, Any]) -> None:
    assert observed["kept registry"] == [True, ["adder", "second"]]


def test_a_cluster_of_another_name_stays_though_nobody_uses_it(observed: dict[str, Any]) -> None:
    assert observed["other"][-1:] == ["registry"], "its keeper ends after a minute without a replica"
