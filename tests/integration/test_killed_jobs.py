"""kill -9 of registry, ingress and workers, at random moments, while jobs and batches run: each has its result, once.

`make faults` runs it: a hundred kills. Each kind of process is killed by a thread of its own, as soon as it is up again
and a drawn pause is over: one after the other, the kills would wait for the slowest to come back.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
from integration.harness import Cluster, pixels, replica_processes
from kit.seeding import seeded_random
from kit.waiting import wait_until

from cluster.records.actor_names import NAMESPACE, registry_name

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.timeout(900)]
NUM_KILLS, MOST_S = 100, 480.0
NUM_LINES, NUM_JOBS = 200, 12  # a batch and a job begin whenever a twelfth of the kills is done
CHATS, IMAGES, EMBEDDINGS = "/v1/chat/completions", "/v1/images/generations", "/v1/embeddings"
# The longest drawn pause before each kind dies again: the registry is back at once, and would have all the kills.
PAUSES_S = {"registry": 3.0, "ingress": 0.5, "worker": 0.5}
ENDED_S = 240.0  # from the last kill until everything is done


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=30) as client:
        yield client


def answered(http: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    """Return the answer of a cluster whose processes die, asking until there is one."""

    def ask() -> httpx.Response | None:
        try:
            answer = http.request(method, path, **options)
        except httpx.TransportError:
            return None
        return answer if answer.status_code < 500 and answer.status_code != 429 else None

    found: httpx.Response = wait_until(ask, f"an answer of {path}", timeout_s=120)
    return found


def image_of(seed: int) -> dict[str, Any]:
    return {"model": "digits-flux", "prompt": f"a handwritten {seed % 10}", "seed": seed, "num_inference_steps": 30}


def sum_of(number: int) -> dict[str, Any]:
    question = f"What is {number // 20} + {number % 20}?"
    return {"model": "adder", "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 8}


def text_of(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


class Killer:
    """It kills processes of a cluster, whichever are up, at moments that it draws, in a thread for each kind."""

    def __init__(self, cluster: Cluster, draws: random.Random) -> None:
        self._cluster = cluster
        self._draws = draws
        self._is_over = threading.Event()
        self.kills: list[str] = []

    @contextmanager
    def killing(self) -> Iterator[None]:
        """Kill until the block ends, or there were enough."""
        victims = {"registry": self._registry, "ingress": self._ingress, "worker": self._workers}
        threads = [
            threading.Thread(target=self._kill_on, args=(name, find, random.Random(self._draws.random())))
            for name, find in victims.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _kill_on(self, name: str, find: Callable[[], list[int]], draws: random.Random) -> None:
        while not self._is_over.wait(draws.uniform(0, PAUSES_S[name])):
            for id_ in find():
                if len(self.kills) == NUM_KILLS:
                    return
                with contextlib.suppress(ProcessLookupError):
                    os.kill(id_, signal.SIGKILL)
                    self.kills.append(name)

    def _registry(self) -> list[int]:
        try:
            registry = ray.get_actor(registry_name(self._cluster.config), namespace=NAMESPACE)
            return [ray.get(registry.__ray_call__.remote(lambda _: os.getpid()), timeout=5)]
        except (ray.exceptions.RayError, ValueError):
            return []

    def _ingress(self) -> list[int]:
        """Return the ingress if it answers: one that only begins would be a failed start for Serve."""
        try:
            if httpx.get(f"{self._cluster.url}/v1/jobs", timeout=5).status_code >= 500:
                return []
        except httpx.TransportError:
            return []
        return [process.pid for process in replica_processes("ingress")]

    def _workers(self) -> list[int]:
        """Return one of the workers that answer, if there are two."""
        try:
            shown = httpx.get(f"{self._cluster.url}/admin/cluster", timeout=5).json()
        except (httpx.TransportError, ValueError):
            return []
        are_up = [worker for worker in shown.get("workers", ()) if "modules" in worker]
        processes = replica_processes("worker")
        return [self._draws.choice(processes).pid] if len(are_up) == len(processes) == 2 else []


def test_nothing_is_lost_and_nothing_is_given_twice(cluster: Cluster, http: httpx.Client, record_property: Any) -> None:
    sums = [text_of(http.post(CHATS, json=sum_of(number)).json()) for number in range(NUM_LINES)]
    images = [pixels(http.post(IMAGES, json=image_of(seed))) for seed in range(NUM_JOBS)]
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    lines = [
        json.dumps({"custom_id": f"{number}", "method": "POST", "url": CHATS, "body": sum_of(number)})
        for number in range(NUM_LINES)
    ]
    file = client.files.create(file=("sums.jsonl", "\n".join(lines).encode()), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": CHATS}
    killer, jobs, batches, start_s = Killer(cluster, seeded_random()), list[str](), list[str](), time.monotonic()

    def begun_batch(number: int) -> dict[str, Any]:
        """Return a batch; the same number is the same one."""
        headers = {"Idempotency-Key": f"sums-{number}"}
        found: dict[str, Any] = answered(http, "POST", "/v1/batches", json=asked, headers=headers).json()
        return found

    with killer.killing():
        while (len(killer.kills) < NUM_KILLS or len(jobs) < NUM_JOBS) and time.monotonic() - start_s < MOST_S:
            number = len(jobs)
            if number == NUM_JOBS or len(killer.kills) * NUM_JOBS < number * NUM_KILLS:
                time.sleep(0.05)
                continue
            batches.append(begun_batch(number)["id"])
            job = {"endpoint": IMAGES, "body": image_of(number), "idempotency_key": f"killed-{number}"}
            jobs.append(answered(http, "POST", "/v1/jobs", json=job).json()["id"])
    record_property("kills", {name: killer.kills.count(name) for name in sorted(set(killer.kills))})
    record_property("killing_s", round(time.monotonic() - start_s))
    assert (len(killer.kills), len(jobs)) == (NUM_KILLS, NUM_JOBS), "as many kills as the time is for"

    def are_done() -> bool:
        states = [answered(http, "GET", f"/v1/jobs/{id_}").json()["status"] for id_ in (*batches, *jobs)]
        return set(states) == {"done"}

    wait_until(are_done, "the end of all jobs", timeout_s=ENDED_S)
    for id_, right in zip(jobs, images, strict=False):
        np.testing.assert_array_equal(pixels(answered(http, "GET", f"/v1/jobs/{id_}/result")), right)
    for number, id_ in enumerate(batches):
        batch = begun_batch(number)
        assert batch["id"] == id_
        assert batch["request_counts"] == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
        assert batch["error_file_id"] is None
        output = answered(http, "GET", f"/v1/files/{batch['output_file_id']}/content").text
        results = [json.loads(line) for line in output.splitlines()]
        assert sorted(int(one["custom_id"]) for one in results) == list(range(NUM_LINES))
        for one in results:
            assert text_of(one["response"]["body"]) == sums[int(one["custom_id"])]
    listed = answered(http, "GET", "/v1/jobs", params={"limit": 100}).json()["data"]
    assert len([job for job in listed if job["id"] in {*batches, *jobs}]) == len(batches) + len(jobs)
