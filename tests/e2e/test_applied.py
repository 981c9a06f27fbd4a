"""A cluster follows its changed config while it serves: see `applied_scenario.py`, which only reports what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.harness import SCENARIO_S, run_scenario
from ray.serve.schema import DeploymentSchema

pytestmark = [pytest.mark.ray, pytest.mark.long, pytest.mark.timeout(SCENARIO_S)]

ALL = {"registry", "controller", "keeper", "ingress", "text_encoder", "worker"}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_scenario(Path(__file__).with_name("applied_scenario.py"), tmp_path_factory.mktemp("applied"))


def same(before: dict[str, list[int]], after: dict[str, list[int]]) -> set[str]:
    """Return the roles whose processes have all stayed."""
    return {role for role, pids in before.items() if set(pids) & set(after[role])}


def test_no_request_fails_whatever_changes(observed: dict[str, Any]) -> None:
    assert observed["wrong"] == []


def test_models_descriptions_and_limits_change_while_every_process_stays(observed: dict[str, Any]) -> None:
    code, said = observed["plan"]
    assert code == 0
    assert [
        key for key in ("models.second", "models.adder.description", "admission.max_waiting") if key not in said
    ] == []
    assert observed["models before"] == {"adder": ""}, "a plan changes nothing"
    assert observed["with a second"][0] == 0
    assert observed["models"] == {"adder": "adds", "second": ""}
    assert (observed["answer"], observed["max_waiting"]) == ("19.", 77)
    assert observed["after models"] == observed["at first"]
    assert observed["without it"][0] == 0
    assert observed["models after"] == {"adder": "adds"}


def test_the_same_again_changes_nothing_and_a_registry_that_dies_comes_back_with_what_was_applied(
    observed: dict[str, Any],
) -> None:
    code, said = observed["again"]
    assert (code, "nothing to change" in said) == (0, True)
    assert observed["after a restart"] == [["adder", "second"], 77]


def test_what_the_controller_goes_by_changes_what_it_does_while_every_process_stays(observed: dict[str, Any]) -> None:
    first, second, _ = observed["controller"]
    assert [code for code, _ in observed["controller"]] == [0, 0, 0]
    lines = {line.split()[0]: line for line in first[1].splitlines() if line.startswith("controller.")}
    assert lines.keys() == {"controller.policy", "controller.scaling"}
    assert all("set while it serves" in line for line in lines.values())
    assert "controller.scaling.min_workers" in second[1]
    assert observed["policy"] == "throughput-first"
    before, after = observed["before the controller"], observed["after the controller"]
    assert {**after, "worker": []} == {**before, "worker": []}
    assert (len(after["worker"]), set(before["worker"]) < set(after["worker"])) == (2, True), "by the other number"


def test_only_the_replicas_that_a_value_concerns_are_replaced(observed: dict[str, Any]) -> None:
    first, second, third = (observed[when] for when in ("before replicas", "after a worker", "after an ingress"))
    assert observed["another worker"][0] == observed["another ingress"][0] == 0
    assert same(first, second) == ALL - {"worker"}
    assert same(second, third) == ALL - {"ingress"}
    assert [len(when["worker"]) for when in (first, second, third)] == [1, 1, 2]


@pytest.mark.skipif("max_surge_percent" not in DeploymentSchema.model_fields, reason="Serve ends a replica first")
def test_a_worker_ends_after_its_successor_runs(observed: dict[str, Any]) -> None:
    assert observed["workers meanwhile"][:1] == [1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("not taken", "store.verify: no running cluster takes another value, and nothing was changed"),
        ("elsewhere", "store.path: another value makes it another cluster"),
        ("another name", "no cluster 'two' is up: there are 'applied'; another name is another cluster"),
    ],
)
def test_what_no_running_cluster_takes_is_refused_by_its_key(
    observed: dict[str, Any], change: str, reason: str
) -> None:
    code, said = observed[change]
    assert (code, reason in said) == (1, True), said
