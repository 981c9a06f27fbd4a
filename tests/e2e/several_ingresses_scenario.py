"""Two ingress replicas that share slots: a burst, other settings, and then an ingress and the controller are killed.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the store.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from integration.harness import DEMO_MODELS, ray_processes, replica_processes
from kit.waiting import wait_until

from configs.cluster import ClusterConfig
from deployments.console.running import cluster_up
from infra.ports import free_port

NUM_AT_ONCE = 48
MAX_RUNNING = 2
MAX_WAITING = 12
NUM_CLIENTS = 6
LONG = {"model": "digits-flux", "prompt": "a handwritten two", "num_inference_steps": 100}
SHORT = {"model": "digits-flux", "prompt": "a handwritten two", "num_inference_steps": 8}


def main(folder: Path) -> None:
    config = ClusterConfig.model_validate(
        {
            "name": "several-ingresses",
            "http": {"port": free_port()},
            "ray": {"num_cpus": 4, "object_store_bytes": "192 MiB"},
            "store": {"path": str(folder)},
            "admission": {"max_waiting_per_model": MAX_WAITING},
            "ingress": {"num_replicas": 2, "num_cpus": 0.2},
            "text_encoder": {"num_cpus": 0.2},
            "worker": {"num_cpus": 0.2, "max_running_images": MAX_RUNNING},
            "models": [
                {
                    "id": "digits-flux",
                    "path": str(DEMO_MODELS / "digits-flux"),
                    "preload": True,
                    "defaults": {"width": 32, "height": 32, "max_sequence_length": 16},
                }
            ],
        }
    )
    observed: dict[str, Any] = {}
    with cluster_up(config, "none") as url:
        wait_until(lambda: len(replica_processes("ingress")) == 2, "two ingress replicas")
        observed["burst"] = burst(url)
        observed["settings"] = changed_settings(url)
        observed["ingress killed"] = under_load(url, lambda: kill_one("ray::ServeReplica:several-ingresses:ingress", 2))
        observed["controller killed"] = under_load(url, lambda: kill_one("ray::Controller", 1))
        observed["settings after"] = [bound_of(url) for _ in range(6)]
        wait_until(lambda: counts(url) == (0, 0), "an empty queue")
        observed["burst after"] = burst(url)
    print(json.dumps(observed))


def ask(url: str, body: dict[str, Any]) -> str:
    try:
        answer = httpx.post(f"{url}/v1/images/generations", json=body, timeout=120)
    except httpx.HTTPError as error:
        return repr(error)
    return str(answer.status_code) if answer.status_code in (200, 429, 503) else answer.text


def burst(url: str) -> dict[str, Any]:
    """Ask for many images at once. Return the answers, and the most that ran in the worker and waited meanwhile."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        asked = [pool.submit(ask, url, LONG) for _ in range(NUM_AT_ONCE)]
        most_running = most_waiting = 0
        while not all(one.done() for one in asked):
            shown = httpx.get(f"{url}/admin/cluster", timeout=60).json()
            most_running = max(most_running, *(worker.get("denoising", 0) for worker in shown["workers"]))
            most_waiting = max(most_waiting, sum(load["waiting"] for load in shown["admission"]["models"]))
            time.sleep(0.02)
    return {"answers": Counter(one.result() for one in asked), "running": most_running, "waiting": most_waiting}


def changed_settings(url: str) -> list[int]:
    """Change a bound over one connection, and return it as others see it, each over a connection of its own."""
    httpx.put(f"{url}/admin/admission", json={"max_waiting_per_model": 10}, timeout=60).raise_for_status()
    return [bound_of(url) for _ in range(6)]


def bound_of(url: str) -> int:
    return int(httpx.get(f"{url}/admin/admission", timeout=60).json()["admission"]["max_waiting_per_model"])


def counts(url: str) -> tuple[int, int]:
    answer = httpx.get(f"{url}/admin/admission", timeout=60)
    models = answer.json()["models"] if answer.status_code == 200 else [{"waiting": 1, "running": 1}]
    return sum(load["waiting"] for load in models), sum(load["running"] for load in models)


def under_load(url: str, disturb: Callable[[], None]) -> dict[str, int]:
    answers: Counter[str] = Counter()
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            answers[ask(url, SHORT)] += 1

    def more() -> None:
        goal = answers.total() + 30
        wait_until(lambda: answers.total() >= goal, "answers", 60)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(client) for _ in range(NUM_CLIENTS)]
        try:
            more()
            disturb()
            more()
        finally:
            stop.set()
    assert all(one.exception() is None for one in clients)
    return dict(answers)


def kill_one(title: str, number: int) -> None:
    """Kill -9 a process, and wait until there are as many as before."""
    victim = ray_processes(title)[0]
    victim.kill()
    wait_until(
        lambda: victim not in ray_processes(title) and len(ray_processes(title)) == number, "another in its place", 60
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
