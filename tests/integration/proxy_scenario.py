"""Two ingress replicas behind HAProxy on a Ray that others started: one is killed under load, another one drains.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the store.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from integration.harness import DEMO_MODELS, replica_processes
from kit.waiting import wait_until
from ray.cluster_utils import Cluster
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from configs.cluster import ClusterConfig
from deployments.console.running import cluster_up
from infra.ports import free_port

NUM_CLIENTS = 8
SOME_REQUESTS = 60


class Load:
    """Clients that ask for embeddings, each over a connection of its own, and count what they get."""

    def __init__(self, url: str) -> None:
        self.answers: Counter[str] = Counter()
        self._url = url
        self._stop = threading.Event()

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)
        self._clients = [self._pool.submit(self._ask, number) for number in range(NUM_CLIENTS)]
        self.more()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def more(self) -> None:
        """Return after some more requests of every client have been answered."""
        goal = self.answers.total() + SOME_REQUESTS
        wait_until(lambda: self.answers.total() >= goal, "answers", 60)

    def _ask(self, number: int) -> None:
        with httpx.Client(timeout=60) as http:
            while not self._stop.is_set():
                body = {"model": "clip", "input": [f"a handwritten {number}"] * 3}
                try:
                    answer = http.post(f"{self._url}/v1/embeddings", json=body)
                    self.answers[str(answer.status_code)] += 1
                except httpx.HTTPError as error:
                    self.answers[repr(error)] += 1


def main(folder: Path) -> None:
    shared = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "object_store_memory": 192 * 2**20})
    observed: dict[str, Any] = {}
    try:
        config = config_of(folder, shared.address)
        with cluster_up(config, "none") as url:
            wait_until(lambda: len(replica_ports()) == 2, "two ingress replicas")
            observed["kill"] = under_load(url, kill_one)
            observed["drain"] = under_load(url, drain_one)
            observed["only one"] = under_load(url, kill_one)
        observed["left"] = [process.name() for process in psutil.Process().children(recursive=True)]
        observed["left"] = [name for name in observed["left"] if "haproxy" in name]
    finally:
        shared.shutdown()
    print(json.dumps(observed))


def config_of(folder: Path, address: str) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "name": "proxy",
            "http": {"port": free_port()},
            "ray": {"address": address},
            "store": {"path": str(folder)},
            "ingress": {"num_replicas": 2, "num_cpus": 0.2},
            "text_encoder": {"num_cpus": 0.2},
            "worker": {"num_cpus": 0.2},
            # With scaling, Serve lets others set the number of replicas: `drain_one` does.
            "controller": {"scaling": {"min_workers": 1, "max_workers": 1}},
            "models": [
                {"id": "clip", "path": str(DEMO_MODELS / "digits-flux"), "component": "text_encoder", "preload": True}
            ],
        }
    )


def under_load(url: str, disturb: Callable[[], None]) -> dict[str, int]:
    with Load(url) as load:
        disturb()
        load.more()
    return dict(load.answers)


def kill_one() -> None:
    victim, count = replica_processes("ingress")[0], len(replica_ports())
    port = next(iter(ports_of(victim)))
    victim.kill()
    wait_until(lambda: port not in replica_ports() and len(replica_ports()) == count, "another in its place", 60)


def drain_one() -> None:
    """Scale down to one, as an operator does with `serve deploy`."""
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    ray.get(controller.update_deployment_replicas.remote(DeploymentID("ingress", "proxy"), 1))
    wait_until(lambda: len(replica_ports()) == 1, "one replica less", 60)


def replica_ports() -> set[int]:
    return {port for replica in replica_processes("ingress") for port in ports_of(replica)}


def ports_of(replica: psutil.Process) -> set[int]:
    try:
        listening = [c for c in replica.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    except psutil.NoSuchProcess:
        return set()
    return {c.laddr.port for c in listening if 30_000 <= c.laddr.port <= 32_767}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
