"""Templates that are killed while a cluster answers, clusters without standby processes and without templates.

What is left of all three is told as well.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the stores.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import psutil
from integration.harness import DEMO_MODELS, replica_processes
from kit.waiting import wait_until

from configs.cluster import ClusterConfig
from deployments.console.running import cluster_up
from infra.ports import free_port

NUM_CALLERS = 4
DEPLOYMENTS = ("worker", "text_encoder", "ingress")


def main(folder: Path) -> None:
    found: dict[str, Any] = {}
    family: list[psutil.Process] = []
    for options, observe in (
        ({}, observed),
        ({"worker": {"standby": False}}, observed_without_standby),
        ({"ray": {"templates": False}}, observed_without_templates),
    ):
        with cluster_up(config_of(folder, options), "none") as url:
            family += psutil.Process().children(recursive=True)
            found |= observe(url)
            family += psutil.Process().children(recursive=True)
    _, left = psutil.wait_procs(family, timeout=20)
    print(json.dumps(found | {"left": [str(process) for process in left]}))


def config_of(folder: Path, options: dict[str, dict[str, Any]]) -> ClusterConfig:
    return ClusterConfig.model_validate(
        {
            "name": "templates",
            "http": {"port": free_port()},
            "ray": {"num_cpus": 4, "object_store_bytes": "256 MiB"} | options.get("ray", {}),
            "store": {"path": str(folder / "store")},
            "worker": options.get("worker", {}),
            "models": [{"id": "adder", "path": str(DEMO_MODELS / "adder"), "dtype": "float32"}],
        }
    )


def observed(url: str) -> dict[str, Any]:
    shown = templates_shown(url)
    with under_load(url) as answers:
        started_by = [kind_of_parent(name) for name in DEPLOYMENTS]
        (replica,) = replica_processes("worker")
        template = replica.parent()
        template.kill()
        before = sum(answers.values())
        wait_until(lambda: sum(answers.values()) >= before + 20, "answers after a template was killed")
        adopted_by = kind_of_parent("worker")
    again = successor(replica, url)
    started_again_by = kind_of_parent("worker")
    shown_again = templates_shown(url)
    for template in templates():  # those that others build on first: nobody starts them again
        template.kill()
    successor(again, url)
    started_without = kind_of_parent("worker")
    return {
        "answers": answers,
        "shown": shown,
        "started_by": started_by,
        "adopted_by": adopted_by,
        "again": started_again_by,
        "shown_again": shown_again,
        "without": started_without,
        "shown_without": templates_shown(url),
    }


def observed_without_standby(url: str) -> dict[str, Any]:
    wait_until(lambda: ask(url) == "19.", "an answer", 60)
    (replica,) = replica_processes("worker")
    started_by = [kind_of_parent(name) for name in DEPLOYMENTS]
    successor(replica, url)
    found = {"started_by": started_by, "again": kind_of_parent("worker"), "shown": templates_shown(url)}
    return {"no_standby": found}


def observed_without_templates(url: str) -> dict[str, Any]:
    wait_until(lambda: ask(url) == "19.", "an answer", 60)
    shown = httpx.get(f"{url}/admin/cluster", timeout=60).json().get("templates")
    return {"off": {"started_by": [kind_of_parent(name) for name in DEPLOYMENTS], "shown": shown}}


def templates_shown(url: str) -> dict[str, Any]:
    """Return the templates as /admin/cluster tells them, but for the copies that are Ray's own processes."""
    found = httpx.get(f"{url}/admin/cluster", timeout=60).json()["templates"]
    copies = {one["name"]: one["num_copies"] for one in found["templates"]}
    ready = [one["name"] for one in found["templates"] if one["is_ready"]]
    return {"copies": copies, "ready": ready, "problems": found["problems"]}


@contextmanager
def under_load(url: str) -> Iterator[Counter[str]]:
    """Callers that ask one after the other; who is answered how is counted."""
    answers, enough = Counter[str](), Event()

    def ask_until_enough() -> None:
        while not enough.is_set():
            answers[ask(url)] += 1

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        callers = [pool.submit(ask_until_enough) for _ in range(NUM_CALLERS)]
        try:
            yield answers
        finally:
            enough.set()
        for caller in callers:
            caller.result()


def ask(url: str) -> str:
    message = {"role": "user", "content": "What is 12 + 7?"}
    body = {"model": "adder", "messages": [message], "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    return answer.json()["choices"][0]["message"]["content"] if answer.is_success else str(answer.status_code)


def successor(old: psutil.Process, url: str) -> psutil.Process:
    """Kill a worker, which is nobody's child when its template was killed. Return the next one once it answers."""
    old.kill()
    wait_until(lambda: [one for one in replica_processes("worker") if one.pid != old.pid], "another worker", 60)
    wait_until(lambda: ask(url) == "19.", "its answer", 60)
    (new,) = replica_processes("worker")
    return new


def kind_of_parent(deployment: str) -> str:
    (replica,) = replica_processes(deployment)
    parent = replica.parent()
    return "template" if parent and is_template(parent) else parent.name() if parent else "nobody"


def templates() -> list[psutil.Process]:
    return [process for process in psutil.Process().children(recursive=True) if is_template(process)]


def is_template(process: psutil.Process) -> bool:
    try:
        return "cluster.ray_seam.templates.template" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
