"""The controller in the cluster of all tests: its decisions with their reasons, orders by hand, and its death."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from integration.harness import Cluster
from kit.waiting import wait_until

IMAGE = {"model": "digits-sdxl", "prompt": "a handwritten two", "num_inference_steps": 2, "seed": 5}
SUM = {"model": "adder", "prompt": "What is 4", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def http(cluster: Cluster) -> httpx.Client:
    return httpx.Client(base_url=cluster.url, timeout=60)


def decisions(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/admin/decisions")
    found: dict[str, Any] = answer.json() if answer.status_code == 200 else {"workers": [], "decisions": []}
    return found


def test_a_model_that_is_nowhere_is_ordered_with_a_reason_or_switched_to_at_once(http: httpx.Client) -> None:
    """A request pays a switch that takes less than itself: an order would take longer."""
    http.post("/v2/repository/models/digits-sdxl/unload").raise_for_status()
    before_s = time.time()
    answer = http.post("/v1/images/generations", json=IMAGE)
    assert answer.status_code == 200, answer.text
    made = [one for one in decisions(http)["decisions"] if one["at_s"] >= before_s and one["model"] == "digits-sdxl"]
    assert answer.json()["switch"]["attached_bytes"] > 0 or made
    assert all(one["evict"] == [] and "without a worker" in one["reason"] for one in made)


def test_a_drained_worker_hands_over_and_no_request_fails(http: httpx.Client) -> None:
    first, second = (worker["name"] for worker in decisions(http)["workers"])
    refused = http.post("/admin/workers/nobody/drain")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "worker")
    assert first in refused.json()["error"]["message"]
    ordered = http.post(f"/admin/workers/{first[:6]}/drain").json()
    try:
        assert ordered["draining"] == [first]
        wait_until(lambda: decisions(http)["planned"].get("adder") == [second], "a plan without it")
        assert {http.post("/v1/completions", json=SUM).status_code for _ in range(20)} == {200}
    finally:
        assert http.delete(f"/admin/workers/{first}/drain").json()["draining"] == []


def test_a_controller_that_is_killed_loses_nothing(cluster: Cluster, http: httpx.Client) -> None:
    stop = threading.Event()
    answers: list[httpx.Response] = []

    def ask_on() -> None:
        with httpx.Client(base_url=cluster.url, timeout=60) as own:
            while not stop.is_set():
                answers.append(own.post("/v1/completions", json=SUM))

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask_on) for _ in range(2)]
        try:
            (victim,) = controllers()
            victim.kill()
            wait_until(lambda: controllers() and victim not in controllers(), "another controller")
            wait_until(lambda: len(decisions(http)["workers"]) == 2, "its first plan")
        finally:
            stop.set()
        for one in asking:
            one.result()
    assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers if a.status_code != 200]


def controllers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if next(iter(process.cmdline()), "").startswith("ray::Controller"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found
