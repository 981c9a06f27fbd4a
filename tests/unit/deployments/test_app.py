"""The composition root binds every deployment; the control plane starts apart, for who ends it."""

from __future__ import annotations

from typing import Any

import pytest

from configs.cluster import ClusterConfig
from deployments import app as root
from deployments.app import AppArgs, build_app, start_control_plane, versioned_app

pytestmark = pytest.mark.slow  # imports the services

CONFIG: dict[str, Any] = {"name": "one", "models": [{"id": "m", "path": "/m"}]}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the actor kinds that were started."""
    names: list[str] = []
    for kind in ("registry", "controller"):
        monkeypatch.setattr(root, f"connect_{kind}", lambda config, kind=kind: names.append(kind))
    return names


def test_every_deployment_is_bound_and_no_actor_starts_whom_nobody_would_end(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[ClusterConfig] = []
    monkeypatch.setattr(root, "tell_registry", told.append)
    application = build_app(AppArgs(config=CONFIG))
    assert started == []
    assert told == [ClusterConfig.model_validate(CONFIG)], "a registry that goes on knows the config"
    ingress = application._bound_deployment
    config, encoder, worker = ingress.init_args
    bound = [ingress, encoder._bound_deployment, worker._bound_deployment]
    assert [deployment.name for deployment in bound] == ["ingress", "text_encoder", "worker"]
    assert config.name == "one"


@pytest.fixture(scope="module")
def before() -> dict[str, str | None]:
    return versions(versioned_app(ClusterConfig.model_validate(CONFIG)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"models": [{"id": "other", "path": "/other"}]}, set()),
        ({"admission": {"max_waiting": 3}}, set()),
        ({"worker": {"num_replicas": 3}}, set()),
        ({"worker": {"kv_cache_bytes": "64 MiB"}}, {"worker"}),
        ({"worker": {"max_num_seqs": 7}}, {"worker", "ingress"}),
        ({"worker": {"ranks": {"tensor": 2}}}, {"worker"}),
        ({"text_encoder": {"cache_bytes": "3 MiB"}}, {"text_encoder"}),
        ({"http": {"web": False}}, {"ingress"}),
        ({"store": {"verify": False}}, {"ingress", "text_encoder", "worker"}),
    ],
)
def test_serve_replaces_only_the_replicas_whose_part_of_the_config_has_changed(
    before: dict[str, str | None], change: dict[str, Any], expected: set[str]
) -> None:
    after = versions(versioned_app(ClusterConfig.model_validate(CONFIG | change)))
    assert {name for name in before if before[name] != after[name]} == expected
    assert all(before.values())


def test_a_config_that_is_deployed_by_others_has_no_versions_and_their_environment_is_kept() -> None:
    assert set(versions(build_app(AppArgs(config=CONFIG))).values()) == {None}
    app = versioned_app(ClusterConfig.model_validate(CONFIG), {"worker": {"A": "1"}})
    found = {name: one.ray_actor_options.get("runtime_env") for name, one in deployments(app).items()}
    assert found == {"worker": {"env_vars": {"A": "1"}}, "text_encoder": None, "ingress": None}


def test_each_rank_has_a_place_of_its_own_beside_the_others() -> None:
    worker = {
        "num_cpus": 2,
        "ranks": {"cfg": 2, "tensor": 2},
        "placement": {"resources": {"spot": 0.5}, "labels": {"zone": "a"}, "accelerator_type": "H100"},
    }
    found = deployments(versioned_app(ClusterConfig.model_validate(CONFIG | {"worker": worker}), {}))
    replica = found["worker"]._replica_config
    assert replica.placement_group_bundles == [{"CPU": 2.0, "spot": 0.5, "accelerator_type:H100": 0.001}] * 4
    assert replica.placement_group_strategy == "STRICT_PACK"
    assert replica.placement_group_bundle_label_selector == [{"zone": "a"}] * 4
    assert replica.ray_actor_options["num_cpus"] == 2
    assert "label_selector" not in replica.ray_actor_options
    assert found["ingress"]._replica_config.placement_group_bundles is None


def test_a_replica_of_one_process_has_no_places_of_ranks() -> None:
    found = deployments(versioned_app(ClusterConfig.model_validate(CONFIG | {"worker": {"ranks": {"tensor": 1}}}), {}))
    assert found["worker"]._replica_config.placement_group_bundles is None


def deployments(app: Any) -> dict[str, Any]:
    ingress = app._bound_deployment
    _, encoder, worker = ingress.init_args
    return {found.name: found for found in (ingress, encoder._bound_deployment, worker._bound_deployment)}


def versions(app: Any) -> dict[str, str | None]:
    return {name: found._version for name, found in deployments(app).items()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["registry", "controller"]),
        ({"controller": {"enabled": False}}, ["registry"]),
        ({"controller": {"enabled": False}, "ingress": {"num_replicas": 2}}, ["registry", "controller"]),
    ],
)
def test_the_control_plane_is_what_the_replicas_would_start(
    started: list[str], settings: dict[str, Any], expected: list[str]
) -> None:
    start_control_plane(ClusterConfig.model_validate(CONFIG | settings))
    assert started == expected
