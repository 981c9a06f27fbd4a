"""Another config of a cluster deployed over the first, on a Ray that others started, beside a cluster of another name.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the stores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import ray
from integration.harness import DEMO_MODELS, free_port, replica_processes, wait_for
from ray import serve
from ray.cluster_utils import Cluster

from cluster.actor_names import APP_NAME, cluster_key
from cluster.ending import named_actors
from cluster.registry.actor import connect_registry
from cluster.session import ray_session
from configs.cluster import ClusterConfig
from deployments.app import AppArgs, build_app

STORE_BYTES = 256 * 2**20
GONE_S = 90.0
ROLES = ["admission", "controller", "encodings", "keeper", "registry"]


def main(folder: Path) -> None:
    shared = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": STORE_BYTES})
    observed: dict[str, Any] = {}
    old, new = (config("one", folder, shared.address, max_tokens) for max_tokens in (64, 65))
    other = config("other", folder, shared.address, 64)
    try:
        with ray_session(old):
            port = free_port()
            serve.start(http_options={"port": port})
            keeper = ray.get(begin(other).keeper.remote(ray.get_runtime_context().get_node_id()))
            ray.get(keeper.stats.remote())
            begin(old)
            deploy(old)
            wait_for(lambda: roles_of(old) == ROLES, "the whole control plane")
            observed["one alone"] = ask(port)
            begin(new)
            observed |= supersede(old, new, port)
            observed["other"] = roles_of(other)
            serve.shutdown()
    finally:
        shared.shutdown()
    print(json.dumps(observed))


def supersede(old: ClusterConfig, new: ClusterConfig, port: int) -> dict[str, Any]:
    """Deploy the new config, and look at the old one's actors until they are gone."""
    before = {process for name in ("worker", "text_encoder", "ingress") for process in replica_processes(name)}
    kept = roles_of(old) == ROLES
    deploy(new)
    while any(process.is_running() for process in before):
        left = roles_of(old)
        kept = kept and (left == ROLES or not any(process.is_running() for process in before))
    wait_for(lambda: not roles_of(old), "the end of the old control plane", GONE_S)
    return {"kept while it drained": kept, "new": roles_of(new), "new answers": ask(port)}


def config(name: str, folder: Path, address: str, max_tokens: int) -> ClusterConfig:
    fields = {
        "name": name,
        "ray": {"address": address},
        "store": {"path": str(folder / name), "node_budget_bytes": "64 MiB"},
        "models": [{"id": "adder", "path": str(DEMO_MODELS / "adder")}],
        "ingress": {"num_replicas": 2, "num_cpus": 0.1},
        "text_encoder": {"num_cpus": 0.1, "shared_cache_bytes": "1 MiB"},
        "worker": {"num_cpus": 0.1, "kv_cache_bytes": f"{max_tokens} MiB"},
    }
    return ClusterConfig.model_validate(fields)


def begin(config: ClusterConfig) -> Any:
    """Start a config's registry, and let it look often and be patient for moments only."""
    registry = connect_registry(config)
    ray.get(registry.__ray_call__.remote(lambda _: look_often()))
    return registry


def look_often() -> None:
    sys.modules["cluster.registry.actor"]._NODE_POLL_S = 0.2  # type: ignore[attr-defined]
    superseding = sys.modules["cluster.registry.superseding"]
    superseding.UNUSED_S, superseding.EXPECTED_S = 3.0, 6.0  # type: ignore[attr-defined]


def deploy(config: ClusterConfig) -> None:
    serve.run(build_app(AppArgs(config=config.model_dump(mode="json"))), name=APP_NAME, route_prefix="/")


def ask(port: int) -> str:
    body = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"])


def roles_of(config: ClusterConfig) -> list[str]:
    key = cluster_key(config)
    return sorted(name.split(":")[0] for name in named_actors() if f"{name}:".find(f":{key}:") > 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
