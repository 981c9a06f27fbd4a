"""Jobs of a running cluster: each has the right result, once, also when their owner and their ingress are killed."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from integration.harness import Cluster, pixels, replica_processes
from kit.waiting import wait_until

from cluster.records.actor_names import NAMESPACE, registry_name

pytestmark = pytest.mark.ray
NUM_JOBS = 4
ENDPOINT = "/v1/images/generations"


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        yield client


def body_of(seed: int) -> dict[str, Any]:
    return {"model": "digits-flux", "prompt": f"a handwritten {seed}", "seed": seed, "num_inference_steps": 150}


def answered(http: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    """Return the answer of a cluster of which a process may just be gone."""

    def ask() -> httpx.Response | None:
        try:
            answer = http.request(method, path, **options)
        except httpx.TransportError:
            return None
        return answer if answer.status_code < 500 else None

    found: httpx.Response = wait_until(ask, f"an answer of {path}")
    return found


def registry_process(cluster: Cluster) -> int:
    registry = ray.get_actor(registry_name(cluster.config), namespace=NAMESPACE)
    process_id: int = ray.get(registry.__ray_call__.remote(lambda _: os.getpid()))
    return process_id


def test_jobs_survive_kill_9_of_their_owner_and_of_their_ingress(cluster: Cluster, http: httpx.Client) -> None:
    expected = [pixels(http.post(ENDPOINT, json=body_of(seed))) for seed in range(NUM_JOBS)]
    jobs = [{"endpoint": ENDPOINT, "body": body_of(seed), "idempotency_key": f"k{seed}"} for seed in range(NUM_JOBS)]
    ids = [answered(http, "POST", "/v1/jobs", json=job).json()["id"] for job in jobs[:2]]
    os.kill(registry_process(cluster), signal.SIGKILL)
    ids += [answered(http, "POST", "/v1/jobs", json=job).json()["id"] for job in jobs[2:]]
    again = [answered(http, "POST", "/v1/jobs", json=job).json()["id"] for job in jobs]
    assert again == ids

    def looks() -> list[dict[str, Any]]:
        return [answered(http, "GET", f"/v1/jobs/{id_}").json() for id_ in ids]

    wait_until(lambda: any(job["status"] == "running" for job in looks()), "a job that runs")
    ingress = replica_processes("ingress")[0]
    os.kill(ingress.pid, signal.SIGKILL)
    wait_until(lambda: all(job["status"] == "done" for job in looks()), "the end of all jobs", timeout_s=120)
    assert max(job["num_starts"] for job in looks()) > 1, "a job began again"
    for id_, right in zip(ids, expected, strict=True):
        result = answered(http, "GET", f"/v1/jobs/{id_}/result")
        assert result.status_code == 200
        np.testing.assert_array_equal(pixels(result), right)
        assert answered(http, "GET", f"/v1/jobs/{id_}/result").content == result.content
    listed = answered(http, "GET", "/v1/jobs", params={"endpoint": ENDPOINT, "limit": 100}).json()["data"]
    assert sorted(job["id"] for job in listed) == sorted(ids)


def test_a_batch_runs_by_openais_client(cluster: Cluster) -> None:
    client, path = cluster.openai, "/v1/chat/completions"
    bodies = {
        f"{first} + 7": {"model": "adder", "messages": [{"role": "user", "content": f"What is {first} + 7?"}]}
        for first in range(10, 15)
    }
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": path, "body": body}) for name, body in bodies.items()
    ]
    file = client.files.create(file=("sums.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    done = wait_until(lambda: _ended(client.batches.retrieve(batch.id)), "the end of the batch")
    assert (done.status, done.request_counts.completed, done.error_file_id) == ("completed", len(bodies), None)
    output = client.files.content(done.output_file_id).text.splitlines()
    said = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, output)
    }
    assert said == {f"{first} + 7": f"{first + 7}." for first in range(10, 15)}


def _ended(batch: Any) -> Any:
    return batch if batch.status not in ("validating", "in_progress", "finalizing") else None


def test_a_large_file_goes_through_the_door_and_back(cluster: Cluster) -> None:
    content = random.randbytes(3 * cluster.config.ingress.limits.max_upload_bytes // 2)
    file = cluster.openai.files.create(file=("large.jsonl", content), purpose="batch")
    assert file.bytes == len(content)
    assert cluster.openai.files.content(file.id).content == content
    assert cluster.openai.files.delete(file.id).deleted
