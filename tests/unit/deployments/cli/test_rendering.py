"""`atelier render`: plain Serve YAML that carries the whole config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.cli.cluster import _render_serve_yaml

PRESETS = sorted((Path(__file__).parents[4] / "configs/clusters").glob("*.yaml"))
FULL: dict[str, Any] = {
    "name": "x",
    "http": {"host": "0.0.0.0", "port": 9001, "request_timeout_s": 7},
    "ray": {"object_store_bytes": "1 GiB", "address": "auto"},
    "store": {"path": "/s", "node_budget_bytes": 77},
    "ingress": {"num_replicas": 2, "limits": {"max_images": 3}},
    "worker": {"num_replicas": 3, "num_gpus": 0.5, "num_cpus": 2, "max_ongoing_requests": 9, "device": "cuda"},
    "models": [{"id": "m", "path": "/m", "dtype": "bfloat16", "defaults": {"width": 64}, "description": "a: [b] 'c'"}],
    "adapters": [{"id": "a", "path": "/a", "base": ["m"]}],
}


def configs() -> list[ClusterConfig]:
    return [*map(load_cluster_config, PRESETS), ClusterConfig.model_validate(FULL)]


@pytest.mark.parametrize("config", configs(), ids=lambda config: config.name)
def test_the_rendered_yaml_is_valid_and_gives_the_config_back(config: ClusterConfig) -> None:
    document = yaml.safe_load(_render_serve_yaml(config))
    schema = ServeDeploySchema.model_validate(document)
    (application,) = schema.applications
    assert application.import_path == "deployments.app:build_app"
    assert ClusterConfig(**application.args["config"]) == config


def test_resources_and_replicas_are_serves_own() -> None:
    schema = ServeDeploySchema.model_validate(yaml.safe_load(_render_serve_yaml(ClusterConfig.model_validate(FULL))))
    deployments = {deployment.name: deployment for deployment in schema.applications[0].deployments}
    assert set(deployments) == {"ingress", "text_encoder", "worker"}
    worker = deployments["worker"]
    assert (worker.num_replicas, worker.max_ongoing_requests) == (3, 9)
    assert worker.ray_actor_options.num_cpus == 2
    assert worker.ray_actor_options.num_gpus == 0.5
    assert schema.http_options.port == 9001
    assert not schema.applications[0].external_scaler_enabled


def test_ray_reserves_a_gpu_for_each_cuda_device_of_a_replica() -> None:
    document = FULL | {"worker": {"num_replicas": 2, "devices": ["cuda:0", "cuda:1", "cpu"]}}
    schema = ServeDeploySchema.model_validate(
        yaml.safe_load(_render_serve_yaml(ClusterConfig.model_validate(document)))
    )
    gpus = {one.name: one.ray_actor_options.num_gpus for one in schema.applications[0].deployments}
    assert gpus == {"ingress": 0, "text_encoder": 0, "worker": 2}


def test_a_plan_of_the_controller_can_be_carried_out_by_serve() -> None:
    document = FULL | {"controller": {"scaling": {"max_workers": 4}}}
    text = _render_serve_yaml(ClusterConfig.model_validate(document))
    assert ServeDeploySchema.model_validate(yaml.safe_load(text)).applications[0].external_scaler_enabled


def test_replicas_go_to_the_nodes_that_the_config_names() -> None:
    placement = {"resources": {"fast": 0.5}, "accelerator_type": "H100", "labels": {"market": "!spot"}}
    document = FULL | {"worker": {"num_gpus": 1, "device": "cuda", "placement": placement}}
    schema = ServeDeploySchema.model_validate(
        yaml.safe_load(_render_serve_yaml(ClusterConfig.model_validate(document)))
    )
    worker, ingress = (
        next(found for found in schema.applications[0].deployments if found.name == name)
        for name in ("worker", "ingress")
    )
    assert worker.ray_actor_options.resources == {"fast": 0.5}
    assert worker.ray_actor_options.accelerator_type == "H100"
    assert worker.ray_actor_options.label_selector == {"market": "!spot"}
    assert not ingress.ray_actor_options.resources


@pytest.mark.parametrize(
    ("placement", "place"),
    [
        ({"labels": {"zone": "in("}}, "labels.zone"),
        ({"labels": {"zone": "a b"}}, "labels.zone"),
        ({"resources": {"fast": 0}}, "resources.fast"),
        ({"nodes": ["a"]}, "nodes"),
    ],
)
def test_a_placement_that_ray_would_not_take_is_refused(placement: dict[str, Any], place: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ClusterConfig.model_validate(FULL | {"ingress": {"placement": placement}})
    assert ".".join(map(str, refused.value.errors()[0]["loc"])) == f"ingress.placement.{place}"


@pytest.mark.parametrize("proxy", ["haproxy", "serve"])
def test_the_proxy_is_the_one_of_the_config(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files and the HAProxy of this machine do not matter to the machines that the YAML is for."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/only/here/haproxy")
    http = {
        "host": "0.0.0.0",
        "port": 9001,
        "proxy": proxy,
        "haproxy": {"stats_port": 8410, "replica_host": "10.0.0.1"},
    }
    document = yaml.safe_load(_render_serve_yaml(ClusterConfig.model_validate(FULL | {"http": http})))
    schema = ServeDeploySchema.model_validate(document)
    assert schema.controller_options is not None
    environment = schema.controller_options.runtime_env["env_vars"]
    if proxy == "serve":
        assert schema.http_options.host == "0.0.0.0"
        assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment
        return
    assert schema.http_options.host == "10.0.0.1"
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environment["ATELIER_HTTP_ADDRESS"] == "0.0.0.0:9001"
    assert environment["RAY_SERVE_HAPROXY_STATS_PORT"] == "8410"
    assert environment["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] == "30000"
    assert not [value for value in environment.values() if value.startswith("/")]
