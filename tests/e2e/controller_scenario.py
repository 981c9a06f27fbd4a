"""Two workers that each fit one of four models: a Poisson mix with and without the controller, then faults, and another
config.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the store.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
from integration.harness import ROOT, ray_processes, replica_processes
from kit.waiting import wait_until
from ray import serve

from configs.cluster import ClusterConfig
from configs.http import HttpConfig
from configs.loading import load_cluster_config
from deployments.app import AppArgs, build_app
from deployments.console.running import cluster_up
from infra.ports import free_port

NUM_REQUESTS = 200
RATE = 8.0  # per second
SHARES = {"digits-flux": 0.5, "digits-flux-inverted": 0.25, "digits-sdxl": 0.15, "adder": 0.1}
NUM_CLIENTS = 6
FITS_ONE = "8 MiB"  # of a worker's device: the largest model has 7.6 MiB, two have 9.5 together


def main(folder: Path) -> None:
    observed: dict[str, Any] = {}
    for name, settings in (("off", {"enabled": False}), ("on", {"enabled": True})):
        with cluster_up(config_of(folder / "store", settings), "none") as url:
            wait_until(lambda: len(replica_processes("worker")) == 2, "two workers")
            observed[name] = poisson(url)
            if name == "on":
                observed |= faults(url)
                observed["config changed"] = under_load(url, lambda: change_config(url, folder / "store"))
    print(json.dumps(observed))


def config_of(store: Path, controller: dict[str, Any]) -> ClusterConfig:
    demo = load_cluster_config(ROOT / "configs/clusters/demo.yaml").model_dump(mode="json")
    demo |= {"name": "controlled", "http": {"port": free_port()}, "grpc": None, "store": {"path": str(store)}}
    demo["ray"] = {"num_cpus": 4, "object_store_bytes": "192 MiB"}
    demo["worker"] = {"num_replicas": 2, "num_cpus": 0.2, "device": "cpu-private"}
    demo["worker"] |= {"device_budget_bytes": FITS_ONE, "kv_cache_bytes": "1 MiB"}
    demo["text_encoder"]["num_cpus"] = demo["ingress"]["num_cpus"] = 0.2
    demo["models"] = [model | {"preload": False} for model in demo["models"]]
    return ClusterConfig.model_validate(demo | {"controller": controller})


def ask(http: httpx.Client, model: str, number: int) -> str:
    if model == "adder":
        path, question = "/v1/chat/completions", f"What is {number % 50} + {number % 37}?"
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    else:
        path = "/v1/images/generations"
        body = {"model": model, "prompt": "a handwritten six", "seed": number, "num_inference_steps": 8}
    try:
        answer = http.post(path, json=body)
    except httpx.HTTPError as error:
        return repr(error)
    return str(answer.status_code) if answer.status_code == 200 else f"{answer.status_code}: {answer.text}"


def poisson(url: str) -> dict[str, Any]:
    """Ask with the same arrivals each time. Return the answers, and how often a worker had to load something."""
    chance = random.Random(4)
    at_s, arrivals = 0.0, []
    for number in range(NUM_REQUESTS):
        at_s += chance.expovariate(RATE)
        arrivals.append((at_s, chance.choices(list(SHARES), list(SHARES.values()))[0], number))
    before, began_s, latencies = num_switches(url), time.monotonic(), []

    def one(arrival: tuple[float, str, int]) -> str:
        due_s, model, number = arrival
        threading.Event().wait(max(0.0, began_s + due_s - time.monotonic()))
        asked_s = time.monotonic()
        answer = ask(http, model, number)
        latencies.append(time.monotonic() - asked_s)
        return answer

    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=120, limits=limits) as http, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        answers = Counter(pool.map(one, arrivals))
    mean_s = sum(latencies) / len(latencies)
    return {"answers": answers, "switches": num_switches(url) - before, "mean_s": mean_s, "max_s": max(latencies)}


def num_switches(url: str) -> int:
    return sum(worker.get("num_switches", 0) for worker in workers(url))


def workers(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/admin/cluster", timeout=60).json()["workers"]
    return found


def decisions(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/admin/decisions", params={"max_decisions": 500}, timeout=60)
    found: dict[str, Any] = answer.json() if answer.status_code == 200 else {"workers": [], "decisions": []}
    return found


def faults(url: str) -> dict[str, Any]:
    observed: dict[str, Any] = {"decisions": decisions(url)}
    observed["drain"] = under_load(url, lambda: drained(url))
    observed["controller killed"] = under_load(url, kill_controller)
    wait_until(lambda: len(decisions(url)["workers"]) == 2, "a controller that knows both workers")
    observed["worker killed"] = under_load(url, lambda: kill_while_it_switches(url))
    return observed


def under_load(url: str, disturb: Callable[[], Any]) -> dict[str, Any]:
    answers: Counter[str] = Counter()
    stop = threading.Event()

    def client(first: int) -> None:
        chance, number = random.Random(first), first
        with httpx.Client(base_url=url, timeout=120) as http:
            while not stop.is_set():
                model = chance.choices(list(SHARES), list(SHARES.values()))[0]
                answers[ask(http, model, number)] += 1
                number += NUM_CLIENTS

    def more() -> None:
        goal = answers.total() + 30
        wait_until(lambda: answers.total() >= goal, "answers", 90)

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(client, number) for number in range(NUM_CLIENTS)]
        try:
            more()
            seen = disturb()
            more()
        finally:
            stop.set()
    assert all(one.exception() is None for one in clients)
    return {"answers": answers, "seen": seen}


def drained(url: str) -> None:
    """Drain a worker under load until it runs nothing, and let it have work again.

    The other one cannot have all models ready: what only this one has goes on starting here.
    """
    name = decisions(url)["workers"][0]["name"]
    httpx.post(f"{url}/admin/workers/{name}/drain", timeout=60).raise_for_status()

    wait_until(lambda: not running_on(url, name), "a worker without work")
    httpx.delete(f"{url}/admin/workers/{name}/drain", timeout=60).raise_for_status()
    wait_until(lambda: running_on(url, name), "work for it")


def running_on(url: str, name: str) -> int:
    replicas = httpx.get(f"{url}/admin/admission", timeout=60).json()["replicas"]["worker"]
    return sum(sum(one["running"].values()) for one in replicas if one["name"] == name)


def kill_controller() -> None:
    (victim,) = ray_processes("ray::Controller")
    victim.kill()
    wait_until(
        lambda: victim not in ray_processes("ray::Controller") and ray_processes("ray::Controller"), "another one", 60
    )


def kill_while_it_switches(url: str) -> str:
    """Order a switch by a pin, and kill -9 the worker as soon as it says that it switches."""
    names = [worker["name"] for worker in decisions(url)["workers"]]
    for name, model in itertools.islice(itertools.cycle(itertools.product(names, SHARES)), 200):
        httpx.post(f"{url}/admin/workers/{name}/models/{model}/pin", timeout=60).raise_for_status()
        switching = {one["name"]: one["switching_to"] for one in decisions(url)["workers"] if one["switching_to"]}
        httpx.delete(f"{url}/admin/workers/{name}/models/{model}/pin", timeout=60).raise_for_status()
        if name in switching:
            (pid,) = [one["process"] for one in workers(url) if one.get("name") == name]
            psutil.Process(pid).kill()
            wait_until(partial(is_replaced, url, name), "another worker in its place", 90)
            return switching[name]
    raise AssertionError("no worker was seen while it switched")


def change_config(url: str, store: Path) -> str:
    """Deploy the application with another config: Serve replaces one replica after the other. Return the new policy."""
    before = {process.pid for process in replica_processes("worker")}
    controller = {"enabled": True, "policy": "throughput-first"}
    config = config_of(store, controller).model_copy(update={"http": HttpConfig(port=httpx.URL(url).port)})
    serve.run(build_app(AppArgs(config=config.model_dump(mode="json"))), name=config.name, route_prefix="/")
    wait_until(lambda: before.isdisjoint(process.pid for process in replica_processes("worker")), "other workers", 90)
    wait_until(lambda: len(decisions(url)["workers"]) == 2, "a controller that knows both")
    return str(decisions(url)["policy"])


def is_replaced(url: str, name: str) -> bool:
    names = [worker["name"] for worker in decisions(url)["workers"]]
    return name not in names and len(names) == 2


if __name__ == "__main__":
    main(Path(sys.argv[1]))
