"""A cluster on a Ray that others started: what a killed `up` has left there, a keeper that cannot start, and a node
with other code.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the stores.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

import ray
from integration.harness import ROOT
from kit.waiting import wait_until
from ray.cluster_utils import Cluster

from cluster.registry.actor import connect_registry, registry_class
from cluster.start.node_checks import Wanted, node_problems
from cluster.start.session import ray_session
from configs.cluster import ClusterConfig
from configs.model import ModelConfig
from deployments.console.running import _left_clean

STORE_BYTES = 192 * 2**20


def main(folder: Path) -> None:
    os.chdir(folder)  # Ray lets workers import from the driver's own folder
    shared = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE_BYTES})
    observed: dict[str, Any] = {}
    try:
        with ray_session(config(folder / "old", shared.address)):
            watching = config(folder / "watched", shared.address)
            registry = registry_class(max_calls=2).remote(watching, b"x" * 32)  # starts while the others do
            observed["killed"] = roles(leave_behind(config(folder / "old", shared.address)))
            observed["beside watchers"] = watched(registry, watching)
        new = config(folder / "new", shared.address)
        with ray_session(new):
            with _left_clean(new):
                observed["at start"] = actors()
                observed |= serve(new, folder / "new")
                observed |= join_with_other_code(new, shared, folder / "code")
            observed["at end"] = actors()
    finally:
        shared.shutdown()
    print(json.dumps(observed))


def config(store: Path, address: str) -> ClusterConfig:
    models = [{"id": "m", "path": str(store / "nothing")}]
    return ClusterConfig.model_validate(
        {"name": "shared", "ray": {"address": address}, "store": {"path": str(store)}, "models": models}
    )


def leave_behind(old: ClusterConfig) -> list[str]:
    """Leave as an `up` does that was killed: nobody ends the detached actors."""
    registry = connect_registry(old)
    keeper = ray.get(registry.keeper.remote(ray.get_runtime_context().get_node_id()))
    ray.get(keeper.stats.remote())
    return actors()


def watched(registry: Any, config: ClusterConfig) -> dict[str, Any]:
    """A registry that may have two calls of a sort at once, and twelve who watch it."""
    (first,) = ray.get([registry.watch.remote(0, "", 30.0)], timeout=60)
    wait_until(lambda: ray.get(registry.list_models.remote(), timeout=30)[0].state == "unavailable")
    now = ray.get(registry.watch.remote(0, "", 30.0), timeout=30)
    watchers = [registry.watch.remote(now.revision, now.epoch, 60.0) for _ in range(12)]
    found = [record.id for _ in range(5) for record in ray.get(registry.list_models.remote(), timeout=30)]
    waiting = len(ray.wait(watchers, num_returns=len(watchers), timeout=0)[1])
    model = ModelConfig(id="later", path=config.allowed_roots[0] / "nowhere")
    ray.get(registry.register.remote(model), timeout=30)
    heard = [change.changed[0].id for change in ray.get(watchers, timeout=60)]
    ray.kill(registry)
    return {"first": len(first.changed), "found": found, "waiting": waiting, "heard": heard}


def serve(new: ClusterConfig, store: Path) -> dict[str, Any]:
    """The keeper's constructor fails as long as the store's folder of packs leads nowhere."""
    packs = store / "packs"
    store.mkdir()
    packs.symlink_to("packs")
    registry, node_id = connect_registry(new), ray.get_runtime_context().get_node_id()
    ray.get(registry.__ray_call__.remote(lambda _: look_often()))
    alone = roles(wait_until(lambda: ray.get(registry.list_models.remote()) and actors()))
    ray.get(registry.keeper.remote(node_id))

    reason = wait_until(lambda: why_no_keeper(registry))
    packs.unlink()
    packs.mkdir()

    def budget_bytes() -> int:
        return next((node.get("budget_bytes", 0) for node in ray.get(registry.residency.remote([], 0, 10))["nodes"]), 0)

    return {"without replicas": alone, "reason": reason, "budget_bytes": wait_until(budget_bytes)}


def join_with_other_code(new: ClusterConfig, shared: Cluster, code: Path) -> dict[str, Any]:
    """A node joins whose Atelier has one file otherwise, and where somebody listens on a port of the config."""
    for room in ("cluster", "configs", "deployments", "weights"):
        shutil.copytree(ROOT / room, code / room, ignore=shutil.ignore_patterns("__pycache__"))
    (code / "configs" / "__init__.py").open("a").write("# another\n")
    paths = {"PYTHONPATH": f"{code}:{ROOT / 'tests'}"}
    node = shared.add_node(num_cpus=1, object_store_memory=STORE_BYTES, env_vars=paths)
    wait_until(lambda: sum(one["Alive"] for one in ray.nodes()) == 2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        problems = node_problems(Wanted({"http.port": ("127.0.0.1", taken)}, needs_haproxy=False))
    registry = connect_registry(new)
    ray.get(registry.keeper.remote(node.node_id))
    why = wait_until(lambda: why_no_keeper(registry))
    elsewhere = ModelConfig(id="elsewhere", path=new.allowed_roots[0] / "elsewhere")
    ray.get(registry.register.remote(elsewhere), timeout=30)
    record = ray.get(registry.find_model.remote("elsewhere"), timeout=60)
    return {"nodes": problems, "taken": taken, "no keeper": why, "elsewhere": record.error}


def why_no_keeper(registry: Any) -> str:
    nodes = ray.get(registry.residency.remote([], 0, 10))["nodes"]
    return next((node["unreachable"] for node in nodes if "cannot start" in node.get("unreachable", "")), "")


def look_often() -> None:
    """In the registry's process: look at the nodes, and try a keeper again, after a moment instead of seconds."""
    sys.modules["cluster.registry.node_rounds"].NODE_POLL_S = 0.2  # type: ignore[attr-defined]
    sys.modules["cluster.registry.node_keepers"].FIRST_PAUSE_S = 0.2  # type: ignore[attr-defined]


def actors() -> list[str]:
    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return sorted(name for name in names if ":shared:" in name)


def roles(names: list[str]) -> list[str]:
    return [name.split(":")[0] for name in names]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
