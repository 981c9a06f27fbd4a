"""Two clusters on one Ray: see `two_clusters_scenario.py`, which only reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.harness import SCENARIO_S, run_scenario

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("two_clusters_scenario.py"), tmp_path_factory.mktemp("clusters"))


def test_the_second_one_needs_a_path_of_its_own_and_serves_below_it(observed: dict[str, Any]) -> None:
    assert observed["up"] == [0, ""]
    assert "the path / of this Ray's Serve belongs to 'one'" in observed["refused"]
    assert "route_prefix: /two" in observed["refused"]
    assert observed["url"] == "/two"
    assert observed["both"] == ["19."] * 3
    assert observed["health"] == "ok"
    assert observed["nowhere"] == 404


def test_neither_ends_what_the_other_one_has(observed: dict[str, Any]) -> None:
    assert observed["one alone"] == [[], "19."]
    assert observed["after"] == [[], "19."]


def test_one_that_serve_deployed_ends_with_its_application_or_by_its_name_from_anywhere(
    observed: dict[str, Any],
) -> None:
    assert observed["deployed"] == [True, "19."]  # the scenario has waited for its end
    assert observed["down by name"] == [0, "cluster 'two' is down\n"]
    code, told = observed["unknown"]
    assert code == 1
    assert "no cluster 'two' is up: there are 'one'" in told


def test_down_where_it_was_started_leaves_nothing_of_it(observed: dict[str, Any]) -> None:
    assert observed["down where it was started"] == [0, "cluster 'one' is down\n"]
    assert observed["at end"] == []
