"""A cluster on a Ray that was there before: see `shared_ray_scenario.py`, which only reports what it saw."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from integration.harness import SCENARIO_S, run_scenario
from integration.shared_ray_scenario import STORE_BYTES

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]  # a Ray of its own


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("shared_ray_scenario.py"), tmp_path_factory.mktemp("stores"))


def test_what_a_killed_up_has_left_is_gone_before_the_next_one_begins_and_nothing_stays_after(
    observed: dict[str, Any],
) -> None:
    assert observed["killed"] == ["keeper", "registry"]
    assert observed["at start"] == observed["at end"] == []


def test_a_keeper_starts_for_a_replica_and_takes_its_share_of_its_own_node(observed: dict[str, Any]) -> None:
    assert observed["without replicas"] == ["registry"]
    assert observed["budget_bytes"] == STORE_BYTES * 7 // 10


def test_a_keeper_that_cannot_start_says_why_and_is_replaced_when_it_can(observed: dict[str, Any]) -> None:
    assert "cannot start: RuntimeError: Symlink loop" in observed["reason"]


def test_nodes_with_other_code_or_a_port_that_is_taken_are_named_with_what_to_do(observed: dict[str, Any]) -> None:
    others = lines_on_code(observed)
    taken = [line for line in observed["nodes"] if f":{observed['taken']} (Address already in use)" in line]
    assert (len(others), len(taken), len(observed["nodes"])) == (1, 2, 3), observed["nodes"]
    assert others[0].endswith("install the same there, and start Ray of that node again")
    assert all(line.endswith("end the program there, or choose another `http.port`") for line in taken)


def test_a_node_with_other_code_than_the_registrys_gets_no_keeper(observed: dict[str, Any]) -> None:
    (line,) = lines_on_code(observed)
    assert f"KeeperFailed: {line}" in observed["no keeper"]


def test_a_model_that_the_registrys_node_lacks_is_named_with_that_node(observed: dict[str, Any]) -> None:
    told = r"elsewhere: No such file or directory on node \S+, where the registry reads"
    assert re.search(told, observed["elsewhere"])


def lines_on_code(observed: dict[str, Any]) -> list[str]:
    return [line for line in observed["nodes"] if " has Atelier " in line]


def test_who_watches_the_directory_takes_no_turn_from_other_calls(observed: dict[str, Any]) -> None:
    assert observed["beside watchers"] == {"first": 1, "found": ["m"] * 5, "waiting": 12, "heard": ["later"] * 12}
