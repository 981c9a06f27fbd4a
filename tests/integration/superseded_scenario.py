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
from integration.harness import DEMO_MODELS, free_port, wait_for
from ray import serve
from ray.cluster_utils import Cluster

from cluster.actor_names import APP_NAME, cluster_key
from cluster.ending import named_actors
from cluster.keeper.ray_extents import RayExtents
from cluster.registry.actor import connect_registry
from cluster.session import ray_session
from configs.cluster import ClusterConfig
from deployments.app import AppArgs, build_app

STORE_BYTES = 256 * 2**20
GONE_S = 60.0
LOOK_S, UNUSED_S = 0.2, 3.0
NUM_LOOKS = 2 * int(UNUSED_S / LOOK_S)
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
    """Deploy the new config while one of the old one's replicas still drains. Look at the old one's actors."""
    registry = connect_registry(old)
    draining = Draining.remote(ray.get(registry.keeper.remote(ray.get_runtime_context().get_node_id())))
    ray.get(draining.beat.remote())
    deploy(new)
    answers = ask(port)
    num_looks = ray.get(registry.__ray_call__.remote(count_looks))
    wait_for(lambda: ray.get(registry.__ray_call__.remote(count_looks)) >= num_looks + NUM_LOOKS, "looks")
    kept = roles_of(old)
    ray.kill(draining)
    wait_for(lambda: not roles_of(old), "the end of the old control plane", GONE_S)
    return {"kept": kept, "new": roles_of(new), "new answers": [answers, ask(port)]}


@ray.remote(num_cpus=0)
class Draining:
    """A process that is to the keeper what a replica is that finishes its requests."""

    def __init__(self, keeper: Any) -> None:
        self._extents = RayExtents(keeper, "draining")
        self._extents.start_beating()

    def beat(self) -> None:
        self._extents.beat()


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
    """In the registry's process: look whether it is superseded often, with little patience, and count the looks."""
    registry, superseding = sys.modules["cluster.registry.actor"], sys.modules["cluster.registry.superseding"]
    leave: Any = registry.leave_when_superseded  # type: ignore[attr-defined]

    async def look(*arguments: Any) -> None:
        await leave(*arguments)
        registry.num_looks += 1  # type: ignore[attr-defined]

    registry._NODE_POLL_S, registry.num_looks, registry.leave_when_superseded = LOOK_S, 0, look  # type: ignore[attr-defined]
    superseding.UNUSED_S, superseding.EXPECTED_S = UNUSED_S, 2 * UNUSED_S  # type: ignore[attr-defined]


def count_looks(_: Any) -> int:
    return int(sys.modules["cluster.registry.actor"].num_looks)  # type: ignore[attr-defined]


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
