"""A cluster of which another config is deployed, on a Ray that others started, beside a cluster of another name.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the stores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import ray
from integration.harness import DEMO_MODELS
from kit.waiting import wait_until
from ray import serve
from ray.cluster_utils import Cluster

from cluster.process.ray_calls import named_actors
from cluster.records.actor_names import cluster_key
from cluster.registry.actor import connect_registry
from cluster.start.session import ray_session
from configs.cluster import ClusterConfig
from deployments.app import AppArgs, build_app
from infra.ports import free_port

STORE_BYTES = 256 * 2**20
GONE_S = 60.0
ROLES = ["controller", "keeper", "registry"]


def main(folder: Path) -> None:
    shared = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": STORE_BYTES})
    observed: dict[str, Any] = {}
    port = free_port()
    old, new = (config("one", folder, shared.address, port, num_mib) for num_mib in (64, 65))
    other = config("other", folder, shared.address, port, 64)
    try:
        with ray_session(old):
            serve.start(http_options={"port": port})
            keeper = ray.get(connect_registry(other).keeper.remote(ray.get_runtime_context().get_node_id()))
            ray.get(keeper.stats.remote())
            deploy(old)
            wait_until(lambda: roles_of(old) == ROLES, "the whole control plane")
            observed["one alone"] = ask(port)
            observed |= replace(old, new, port)
            observed["kept registry"] = change_models(new)
            serve.delete("one")
            wait_until(lambda: not roles_of(new), "the end of the last control plane", GONE_S)
            observed["other"] = roles_of(other)
            serve.shutdown()
    finally:
        shared.shutdown()
    print(json.dumps(observed))


def replace(old: ClusterConfig, new: ClusterConfig, port: int) -> dict[str, Any]:
    """Deploy the new config while one of the old one's replicas still drains. Look at the old one's actors."""
    registry = connect_registry(old)
    draining = Draining.options(name="draining").remote()
    ray.get(registry.keeper.remote(ray.get_runtime_context().get_node_id(), ray.get(draining.name.remote())))
    deploy(new)
    answers = ask(port)
    wait_until(lambda: ray.get(registry.__ray_call__.remote(users_of)) == ["draining"], "the end of the other replicas")
    kept = roles_of(old)
    ray.kill(draining)
    wait_until(lambda: not roles_of(old), "the end of the old control plane", GONE_S)
    return {"kept": kept, "new": roles_of(new), "new answers": [answers, ask(port)]}


def change_models(new: ClusterConfig) -> list[Any]:
    """Deploy a config that differs in its models. Return whether the same registry goes on, and with which models."""
    registry = connect_registry(new)
    epoch = ray.get(registry.watch.remote(0, "", 0.0)).epoch
    models = tuple(model.model_copy(update={"id": id_}) for model in new.models for id_ in (model.id, "second"))
    deploy(new.model_copy(update={"models": models}))
    known = [record.id for record in ray.get(connect_registry(new).list_models.remote())]
    return [ray.get(registry.watch.remote(0, "", 0.0)).epoch == epoch, known]


@ray.remote(num_cpus=0)
class Draining:
    """An actor that is to Ray what a replica is that finishes its requests."""

    def name(self) -> str | None:
        return ray.get_runtime_context().get_actor_name()


def users_of(registry: Any) -> list[str]:
    return sorted(registry._users.names)


def config(name: str, folder: Path, address: str, port: int, num_mib: int) -> ClusterConfig:
    fields = {
        "name": name,
        "http": {"port": port},
        "ray": {"address": address},
        "store": {"path": str(folder / name), "node_budget_bytes": f"{num_mib} MiB"},
        "models": [{"id": "adder", "path": str(DEMO_MODELS / "adder")}],
        "ingress": {"num_replicas": 2, "num_cpus": 0.1},
        "text_encoder": {"num_cpus": 0.1},
        "worker": {"num_replicas": 2, "num_cpus": 0.1, "kv_cache_bytes": "64 MiB"},
    }
    return ClusterConfig.model_validate(fields)


def deploy(config: ClusterConfig) -> None:
    serve.run(build_app(AppArgs(config=config.model_dump(mode="json"))), name=config.name, route_prefix="/")


def ask(port: int) -> str:
    body = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


def roles_of(config: ClusterConfig) -> list[str]:
    key = cluster_key(config)
    return sorted(name.split(":")[0] for name in named_actors() if f"{name}:".find(f":{key}:") > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
