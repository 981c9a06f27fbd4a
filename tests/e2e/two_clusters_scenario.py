"""Two clusters on one Ray that others started: neither ends what the other one has, and each ends whole, from anywhere.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for stores and configs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml
from integration.harness import DEMO_MODELS
from kit.waiting import wait_until
from ray import serve
from ray.cluster_utils import Cluster

from cluster.process.ray_calls import named_actors
from cluster.ray_seam.serve_control import running_serve
from cluster.records.actor_names import names_of_cluster
from cluster.records.errors import SessionError
from cluster.start.session import ray_session
from configs.cluster import ClusterConfig
from deployments.app import AppArgs, build_app
from deployments.console.running import cluster_up
from infra.ports import free_port

STORE_BYTES = 256 * 2**20
GONE_S = 60.0


def main(folder: Path) -> None:
    shared = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": STORE_BYTES})
    port = free_port()
    one, two = (fields(name, folder, shared.address, port) for name in ("one", "two"))
    (folder / "one.yaml").write_text(yaml.safe_dump(one))
    environments = [
        os.environ | {"XDG_RUNTIME_DIR": str(folder / name), "COLUMNS": "200"} for name in ("here", "there")
    ]
    for name in ("here", "there"):
        (folder / name).mkdir(mode=0o700)
    observed: dict[str, Any] = {}
    try:
        up = atelier("up", str(folder / "one.yaml"), "--detach", environment=environments[0])
        observed["up"] = [up.returncode, up.stderr]
        observed |= beside(port, one, two)
        observed["down by name"] = down(environments[1], "two", "--address", shared.address)
        with ray_session(ClusterConfig.model_validate(one)):
            observed["after"] = [left("two"), ask(f"http://127.0.0.1:{port}")]
            observed["unknown"] = down(environments[1], "two", "--address", shared.address)
            observed["down where it was started"] = down(environments[0], "one")
            observed["at end"] = left("one")
    finally:
        shared.shutdown()
    print(json.dumps(observed))


def beside(port: int, one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Bring the second one up beside the first, end it, and deploy it again as `serve deploy` does."""
    first, found = f"http://127.0.0.1:{port}", {}
    try:
        with cluster_up(ClusterConfig.model_validate(two), "none"):
            found["refused"] = ""
    except SessionError as error:
        found["refused"] = str(error)
    second = ClusterConfig.model_validate(two | {"http": two["http"] | {"route_prefix": "/two"}})
    with cluster_up(second, "none") as url:
        found["url"] = url.removeprefix(first)
        handle = serve.get_app_handle("two")
        said = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
        found["both"] = [ask(first), ask(url), handle.chat.remote(said).result(timeout_s=60).text]
        found["health"] = httpx.get(f"{url}/healthz", timeout=60).json()["status"]
        found["nowhere"] = httpx.get(f"{first}/two/nowhere", timeout=60).status_code
    with ray_session(second):
        found["one alone"] = [left("two"), ask(first)]
        application = build_app(AppArgs(config=second.model_dump(mode="json")))
        serve.run(application, name="two", route_prefix="/two")
        found["deployed"] = [len(left("two")) > 0, ask(f"{first}/two")]
        serve.delete("two")
        wait_until(lambda: not left("two"), "the end of a control plane with its application", GONE_S)
        serve.run(application, name="two", route_prefix="/two")
    return found


def fields(name: str, folder: Path, address: str, port: int) -> dict[str, Any]:
    return {
        "name": name,
        "http": {"port": port},
        "ray": {"address": address},
        "store": {"path": str(folder / f"{name}-store"), "node_budget_bytes": "64 MiB"},
        "models": [{"id": "adder", "path": str(DEMO_MODELS / "adder")}],
        "ingress": {"num_cpus": 0.1},
        "text_encoder": {"num_cpus": 0.1},
        "worker": {"num_cpus": 0.1, "kv_cache_bytes": "64 MiB"},
    }


def atelier(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "atelier"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)


def down(environment: dict[str, str], *arguments: str) -> list[Any]:
    done = atelier("down", *arguments, environment=environment)
    return [done.returncode, done.stdout + done.stderr]


def ask(url: str) -> str:
    body = {"model": "adder", "messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    return str(answer["choices"][0]["message"]["content"]) if "choices" in answer else str(answer)


def left(name: str) -> list[str]:
    """Return the actors of a cluster, and its application."""
    running = running_serve()
    return [
        *names_of_cluster(name, named_actors()),
        *(app for app in (running.routes if running else ()) if app == name),
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
