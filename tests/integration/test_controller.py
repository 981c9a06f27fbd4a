"""The controller in the cluster of all tests: its decisions with their reasons, orders by hand, and its death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import ray
from integration.harness import Cluster, ray_processes
from kit.waiting import wait_until

from deployments.cli.orders import _on_node
from deployments.console.client import Client

IMAGE = {"model": "digits-sdxl", "prompt": "a handwritten two", "num_inference_steps": 2, "seed": 5}
SUM = {"model": "adder", "prompt": "What is 4", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def http(cluster: Cluster) -> httpx.Client:
    return httpx.Client(base_url=cluster.url, timeout=60)


def decisions(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/admin/decisions")
    found: dict[str, Any] = answer.json() if answer.status_code == 200 else {"workers": [], "decisions": []}
    return found


def both_workers(http: httpx.Client) -> list[str]:
    wait_until(lambda: len(decisions(http)["workers"]) == 2, "both workers' reports")
    return [worker["name"] for worker in decisions(http)["workers"]]


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
    first, second = both_workers(http)
    assert {one["name"] for one in _on_node(Client(str(http.base_url)), "here")} == {first, second}
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


@pytest.fixture
def break_loading(cluster: Cluster) -> Iterator[Callable[[str, bool], None]]:
    """Let one worker's loads of `adder` fail, or work again, as those of a node without a file would."""
    broken: set[str] = set()

    def change(worker: str, breaks: bool) -> None:
        (name,) = (one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if worker in one["name"])
        actor = ray.get_actor(name, namespace="serve")
        ray.get(actor.__ray_call__.remote(break_adder if breaks else mend_adder), timeout=30)
        (broken.add if breaks else broken.discard)(worker)

    yield change
    for worker in list(broken):
        change(worker, breaks=False)


def break_adder(replica: Any) -> None:
    from deployments.modules.filling import SlotFiller
    from weights.records.errors import FormatError

    fill = SlotFiller._fill_slot

    def failing(self: Any, slot: Any, part: Any, *more: Any, **named: Any) -> Any:
        if part.manifest.model == "adder":
            raise FormatError("config.json: no such file")
        return fill(self, slot, part, *more, **named)

    SlotFiller._whole_fill_slot, SlotFiller._fill_slot = fill, failing


def mend_adder(replica: Any) -> None:
    from deployments.modules.filling import SlotFiller

    SlotFiller._fill_slot = SlotFiller._whole_fill_slot


def test_what_one_worker_cannot_load_another_answers_and_only_none_is_unavailable(
    http: httpx.Client, break_loading: Callable[[str, bool], None]
) -> None:
    first, second = both_workers(http)

    def state() -> tuple[str, str]:
        found = http.get("/v1/models/adder").json()
        return found["state"], found.get("error") or ""

    def forget() -> None:
        http.post("/v2/repository/models/adder/unload").raise_for_status()

    def why_unavailable() -> str:
        """Ask until both have tried: a load that began before may have ended well since."""
        forget()
        answer, (found, error) = http.post("/v1/completions", json=SUM), state()
        told = all(f"worker {name} on node " in error for name in (first, second))
        return error if answer.status_code == 503 and found == "unavailable" and told else ""

    for name in (first, second):
        break_loading(name, True)
    assert "config.json: no such file" in wait_until(why_unavailable, "a state that says so")
    break_loading(second, False)
    wait_until(lambda: http.post("/v1/completions", json=SUM).status_code == 200, "an answer of the other")
    wait_until(lambda: state() == ("ready", ""), "the model, which one worker can serve")
    until_s = time.monotonic() + 4.0  # in which the first one is tried again
    while time.monotonic() < until_s:
        forget()
        answers = [http.post("/v1/completions", json=SUM), http.post("/v1/images/generations", json=IMAGE)]
        assert [answer.status_code for answer in answers] == [200, 200], [answer.text[:300] for answer in answers]


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
            (victim,) = ray_processes("ray::Controller")
            victim.kill()
            wait_until(
                lambda: ray_processes("ray::Controller") and victim not in ray_processes("ray::Controller"),
                "another controller",
            )
            wait_until(lambda: len(decisions(http)["workers"]) == 2, "its first plan")
        finally:
            stop.set()
        for one in asking:
            one.result()
    assert {answer.status_code for answer in answers} == {200}, [a.text for a in answers if a.status_code != 200]
