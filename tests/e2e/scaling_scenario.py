"""One worker that becomes two under a burst, none in silence, and one again with the next request.

Runs in a process of its own, and prints what it saw as one line of JSON. Argument: a folder for the store.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
from e2e.controller_scenario import ask, config_of, decisions
from e2e.templates_scenario import is_template
from integration.harness import replica_processes
from kit.waiting import wait_until

from deployments.console.running import cluster_up

NUM_CALLERS = 60
SCALING = {"min_workers": 0, "max_workers": 2, "drain_s": 1.0, "downscale_delay_s": 1.0, "to_zero_delay_s": 2.0}


def main(folder: Path) -> None:
    config = config_of(folder / "store", {"scaling": SCALING})
    config = config.model_copy(update={"worker": config.worker.model_copy(update={"num_replicas": 1})})
    with cluster_up(config, "none") as url:
        print(json.dumps(observed(url)))


def observed(url: str) -> dict[str, Any]:
    began_s, enough = time.monotonic(), Event()
    with httpx.Client(base_url=url, timeout=120) as http, ThreadPoolExecutor(NUM_CALLERS) as pool:
        callers = [pool.submit(ask_until, enough, http, number) for number in range(NUM_CALLERS)]
        try:
            wait_until(lambda: decisions(url)["scaling"]["target"] == 2, "two workers to be wanted")
            wanted_s = time.monotonic() - began_s
            wait_until(lambda: len(replica_processes("worker")) == 2, "two workers")
            copies = sum(is_template(parent) for one in replica_processes("worker") if (parent := one.parent()))
            wait_until(lambda: num_running(url) == 2, "work on both")
        finally:
            enough.set()
        answers = sum((caller.result() for caller in callers), Counter[str]())
        wait_until(lambda: not replica_processes("worker"), "no worker", 90)
        asked_s = time.monotonic()
        answers[ask(http, "digits-flux", 1)] += 1
        back_s = time.monotonic() - asked_s
        (worker,) = replica_processes("worker")
        orders = [one["reason"] for one in decisions(url)["decisions"] if one["action"] == "switch"]
    found = {"answers": answers, "wanted_s": wanted_s, "back_s": back_s, "process": worker.pid, "orders": orders}
    return found | {"copies": copies}


def num_running(url: str) -> int:
    """Workers on which requests run."""
    queue = httpx.get(f"{url}/admin/admission", timeout=60).json()
    return sum(bool(replica["running"]) for replica in queue["replicas"]["worker"])


def ask_until(enough: Event, http: httpx.Client, number: int) -> Counter[str]:
    """Answers to one caller's requests, one after the other: a burst that ends before a slow machine has started
    a second process would leave nobody who wants it."""
    answers = Counter({ask(http, "digits-flux", number): 1})
    while not enough.is_set():
        answers[ask(http, "digits-flux", number)] += 1
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]))
