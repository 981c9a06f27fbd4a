"""A cluster whose config changes while somebody asks it all the time: `atelier apply`, as people run it.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the store.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from integration.harness import DEMO_MODELS, ROOT, replica_processes
from kit.waiting import wait_until

from cluster.process.ray_calls import named_actors
from cluster.ray_seam.serve_control import deployed_app
from cluster.records.actor_names import NAMESPACE, controller_name, keeper_nodes, registry_name
from configs.cluster import ClusterConfig
from configs.loading import load_cluster_config
from deployments.console.running import cluster_up
from infra.ports import free_port

ADDER = str(DEMO_MODELS / "adder")
QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "temperature": 0}
DEPLOYMENTS = ("ingress", "text_encoder", "worker")


def main(folder: Path) -> None:
    file, fields = folder / "one.yaml", first_fields(folder)
    config = write(file, fields)
    observed: dict[str, Any] = {}
    with cluster_up(config, str(file)) as url, Client(url) as client:
        wait_until(lambda: client.num_right, "the first answers")
        observed["at first"] = processes(config)
        observed |= change_models(file, fields, config, client)
        observed |= change_controller(file, fields, config, client)
        observed |= change_replicas(file, fields, config)
        observed["not taken"] = apply(file, fields | {"store": fields["store"] | {"verify": False}})
        observed["elsewhere"] = apply(file, fields | {"store": fields["store"] | {"path": str(folder / "else")}})
        observed["another name"] = apply(file, fields | {"name": "two"})
        before = client.num_right
        wait_until(lambda: client.num_right >= before + 3, "answers at the end")
    observed["wrong"] = client.wrong
    print(json.dumps(observed))


def change_models(file: Path, fields: dict[str, Any], config: ClusterConfig, client: Client) -> dict[str, Any]:
    """A model comes, the registry dies and comes back, and the model goes. The fields keep another description."""
    fields["models"][0]["description"] = "adds"
    more = fields | {"models": [*fields["models"], {"id": "second", "path": ADDER}], "admission": {"max_waiting": 77}}
    observed: dict[str, Any] = {"plan": apply(file, more, "--plan"), "models before": client.models()}
    observed["with a second"] = apply(file, more)
    observed["models"], observed["answer"] = client.models(), client.ask("second")
    observed["max_waiting"] = client.max_waiting()
    observed["again"] = apply(file, more)
    observed["after models"] = processes(config)
    registry = ray.get_actor(registry_name(config), namespace=NAMESPACE)
    ray.kill(registry, no_restart=False)
    kept = wait_until(lambda: config_of(registry), "the registry's return")
    observed["after a restart"] = [[model.id for model in kept.models], kept.admission.max_waiting]
    observed["without it"] = apply(file, fields)
    observed["models after"] = wait_until(lambda: (found := client.models()) and "second" not in found and found)
    return observed


def change_controller(file: Path, fields: dict[str, Any], config: ClusterConfig, client: Client) -> dict[str, Any]:
    """The controller places models otherwise and begins to scale, scales by another number, and stops."""
    observed: dict[str, Any] = {"before the controller": processes(config), "controller": []}
    for number in (1, 2):
        controller = {"policy": "throughput-first", "scaling": {"min_workers": number, "max_workers": number}}
        observed["controller"].append(apply(file, fields | {"controller": controller}))
        wait_until(lambda number=number: (client.decisions()["scaling"] or {}).get("target") == number, "the number")
        wait_until(lambda number=number: len(replica_processes("worker")) == number, f"{number} workers")
    observed["policy"] = client.decisions()["policy"]
    observed["after the controller"] = processes(config)
    observed["controller"].append(apply(file, fields))
    wait_until(lambda: client.decisions()["scaling"] is None, "the controller to scale no more")
    wait_until(lambda: len(replica_processes("worker")) == 1, "one worker")
    return observed


def change_replicas(file: Path, fields: dict[str, Any], config: ClusterConfig) -> dict[str, Any]:
    before = processes(config)
    fields["worker"] |= {"kv_cache_bytes": "65 MiB"}
    observed: dict[str, Any] = {"before replicas": before}
    with Workers(config.name) as workers:
        observed["another worker"] = apply(file, fields)
    observed["workers meanwhile"] = sorted(workers.seen)
    observed["after a worker"] = processes(config)
    fields["worker"] |= {"num_replicas": 2}
    fields["http"] |= {"web": False}
    observed["another ingress"] = apply(file, fields)
    observed["after an ingress"] = processes(config)
    return observed


class Client:
    """Somebody who asks one question after the other, for the length of the block."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on)
        self.num_right = 0
        self.wrong: list[str] = []

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            try:
                answer = self.ask("adder")
            except (httpx.HTTPError, KeyError) as error:
                answer = repr(error)
            if answer == "19.":
                self.num_right += 1
            else:
                self.wrong.append(answer)

    def ask(self, model: str) -> str:
        answer = self._http.post("/v1/chat/completions", json={"model": model, **QUESTION})
        return str(answer.json()["choices"][0]["message"]["content"]) if answer.is_success else answer.text

    def models(self) -> dict[str, str]:
        listed = self._http.get("/v1/models?all=true").json()["data"]
        return {model["id"]: model["description"] for model in listed}

    def decisions(self) -> dict[str, Any]:
        """Return the controller's account of itself."""
        found: dict[str, Any] = self._http.get("/admin/decisions").json()
        return found

    def max_waiting(self) -> int:
        return int(self._http.get("/admin/admission").json()["admission"]["max_waiting"])


class Workers:
    """Counts the workers that run, as often as Serve's controller changes them, for the length of the block."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._count)
        self.seen: set[int] = set()

    def __enter__(self) -> Workers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _count(self) -> None:
        while not self._stop.wait(0.1):
            self.seen.add(deployed_app(self._name).replicas["worker"].num_running)


def first_fields(folder: Path) -> dict[str, Any]:
    return {
        "name": "applied",
        "http": {"port": free_port()},
        "ray": {"num_cpus": 4, "object_store_bytes": "256 MiB"},
        "store": {"path": str(folder / "store"), "node_budget_bytes": "64 MiB"},
        "models": [{"id": "adder", "path": ADDER}],
        "ingress": {"num_cpus": 0.1},
        "text_encoder": {"num_cpus": 0.1},
        "worker": {"num_cpus": 0.1, "kv_cache_bytes": "64 MiB"},
    }


def write(file: Path, fields: dict[str, Any]) -> ClusterConfig:
    file.write_text(yaml.safe_dump(fields))
    return load_cluster_config(file)


def apply(file: Path, fields: dict[str, Any], *options: str) -> list[Any]:
    """Return the exit code of `atelier apply`, and all that it says."""
    write(file, fields)
    command = [sys.executable, "-m", "deployments.cli.main", "apply", str(file), *options]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200, env=os.environ | {"COLUMNS": "200"}
    )
    return [done.returncode, done.stdout + done.stderr]


def config_of(registry: Any) -> ClusterConfig | None:
    try:
        found: ClusterConfig = ray.get(registry.config.remote(), timeout=5)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
        return None
    return found


def processes(config: ClusterConfig) -> dict[str, list[int]]:
    """Return the processes of the control plane and of each deployment, once those that drain have ended."""
    names = [*named_actors()]
    found = {"registry": [name for name in names if name == registry_name(config)]}
    key = registry_name(config).removeprefix("registry:")
    found["controller"] = [name for name in names if name == controller_name(config)]
    found["keeper"] = [f"keeper:{key}:{node}" for node in keeper_nodes(key, names)]
    pids = {role: sorted(pid_of(name) for name in those) for role, those in found.items()}
    return pids | {name: sorted(process.pid for process in replica_processes(name)) for name in DEPLOYMENTS}


def pid_of(name: str) -> int:
    actor = ray.get_actor(name, namespace=NAMESPACE)
    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
