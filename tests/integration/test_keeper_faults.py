"""Keepers on a real Ray: killed, starved, written to, and two of them on two nodes.

The scenarios run in one process of their own (`keeper_scenarios.py`), which only reports what it saw.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from integration.harness import SCENARIO_S, run_scenario

EXTENT_BYTES = 8 * 2**20

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(SCENARIO_S)]


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("keeper_scenarios.py"), tmp_path_factory.mktemp("packs"))


def test_64_callers_of_one_cold_model_read_it_once(observed: dict[str, Any]) -> None:
    found = observed["one_read_for_many"]
    assert found["sound"]
    assert found["read_bytes"] == found["model_bytes"] == 4 * EXTENT_BYTES


def test_a_killed_keeper_gets_back_what_replicas_hold_without_reading_storage(observed: dict[str, Any]) -> None:
    """Views stay valid, new replicas attach, and the bytes outlive the replica that kept them."""
    found = observed["keeper_killed_idle"]
    assert found["sound"] == [True, True, True]
    assert found["read_bytes"] == 0
    assert found["holders"] == ["late", "old"]
    assert found["leased"]
    assert found["adopted_s"] < 15


def test_under_load_nobody_notices_that_the_keeper_was_killed(observed: dict[str, Any]) -> None:
    assert observed["keeper_killed_under_load"] == {"wrong": [], "lives": 3}


def test_the_leases_of_a_killed_replica_end(observed: dict[str, Any]) -> None:
    assert observed["holder_dies"]["freed_s"] < 15


def test_the_budget_changes_at_run_time(observed: dict[str, Any]) -> None:
    found = observed["budget_changes"]
    assert found["leased"] == 4 * EXTENT_BYTES  # over the new budget, but leased
    assert "75% of its object store of 402653184" in found["refusal"]


def test_two_models_that_do_not_fit_together_take_turns(observed: dict[str, Any]) -> None:
    found = observed["models_take_turns"]
    assert found["turns"] == [10, 10]
    assert found["seconds"] < 60  # 22 beside a busy core


def test_kept_models_change_places_on_a_node_that_is_too_small_for_them(observed: dict[str, Any]) -> None:
    """Nobody waits long, the node's budget holds, and a new keeper calls back what the old one had lent."""
    found = observed["kept_models_take_turns"]
    assert found["wrong"] == []
    assert found["over_bytes"] <= 0
    assert found["num_recalled"] > 0
    assert found["longest_s"] < 1
    assert found["after_kill_s"] < 15
    assert found["again_ms"] < 50


def test_a_write_into_a_shared_weight_is_caught_told_and_replaced(observed: dict[str, Any]) -> None:
    found = observed["shared_weight_is_written"]
    assert not found["before"]  # it did reach the other replica
    assert found["corrupt"] == ["written1"]
    assert found["told"] == [["written1"], ["written1"], []]
    assert found["again"]
    assert found["read_bytes"] == 3 * EXTENT_BYTES


def test_a_full_object_store_is_refused_instead_of_falling_back_to_disk(observed: dict[str, Any]) -> None:
    found = observed["store_is_full"]
    assert re.search("has no room (in memory )?for 67108864 bytes", found.get("refusal", "")), found  # or on disk
    assert found["leased"] == 0
    assert found["sound"]  # once there is room


def test_an_extent_larger_than_the_staging_memory_goes_through_it_in_pieces(observed: dict[str, Any]) -> None:
    """`in_place` rests on how Ray maps its store; without it, each extent takes private memory of its size.

    That nothing `clears` it before rests on how Ray sizes objects.
    """
    found = observed["extent_larger_than_staging"]
    assert found == {
        "sound": True,
        "staging_bytes": 2 * 2**20,
        "copied_bytes": 32 * 2**20,
        "in_place": True,
        "clears": False,
    }


def test_storage_is_read_once_for_two_nodes(observed: dict[str, Any]) -> None:
    """The second takes from the first; what both want at once is read by one; without a registry each reads.

    A node without the store's folder reads nothing: another one reads for it.
    """
    found = observed["two_nodes"]
    assert found["sound"] == [True] * 6
    assert found["sources"] == {"peer": found["model_bytes"]}
    assert found["without_storage"] == [False, 0, {"peer": found["model_bytes"] * 2 // 3}]
    both_bytes = 2 * found["model_bytes"]
    assert found["read"] == [both_bytes, 0]
    assert found["peer"] == [0, both_bytes]
    assert found["served"] == [both_bytes, 0]
