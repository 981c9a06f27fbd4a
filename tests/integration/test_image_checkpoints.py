"""kill -9 of a worker under running images: they go on elsewhere after their last checkpoint, to the same images."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx
import numpy as np
import pytest
from integration.harness import Cluster, wait_for
from ray import serve

from cluster.control.dispatcher import Dispatcher
from cluster.control.lanes import Ask
from configs.admission import AdmissionConfig
from deployments.ingress.asking import WORKER
from deployments.ingress.retries import RetriedCalls
from deployments.records import ImageProgress, ImageRequest, ImageResult
from deployments.services.replica_calls import ReplicaCalls

NUM_REQUESTS = 16
NUM_STEPS = 30
EVERY_STEPS = 4
TIMEOUT_S = 300.0  # of a busy machine


class RecordedCalls(ReplicaCalls):
    """Calls of the workers; `steps` has what each try of a request told, steps that were done again as well."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.steps: dict[int, list[list[int]]] = defaultdict(list)

    async def stream(self, method: str, *arguments: Any, **options: Any) -> AsyncGenerator[Any]:
        told: list[int] = []
        self.steps[arguments[0].seed].append(told)
        async with aclosing(super().stream(method, *arguments, **options)) as pieces:
            async for piece in pieces:
                if isinstance(piece, ImageProgress):
                    told.append(piece.step)
                yield piece


def request_of(seed: int) -> ImageRequest:
    return ImageRequest(
        model="digits-flux",
        prompt=f"a handwritten {seed % 10}",
        seed=seed,
        width=32,
        height=32,
        guidance_scale=3.0,
        num_inference_steps=NUM_STEPS,
        reports_steps=True,
        checkpoint_steps=EVERY_STEPS,
    )


async def images_of(calls: RetriedCalls, seed: int) -> np.ndarray:
    ask = Ask(WORKER, "digits-flux", 1.0, 1 / NUM_REQUESTS, 1, "default", TIMEOUT_S)
    async with aclosing(calls.stream("stream_images", request_of(seed), ask=ask)) as stream:
        pieces = [piece async for piece in stream]
    assert [piece.step for piece in pieces[:-1]] == list(range(1, NUM_STEPS + 1)), "each step is told once"
    assert isinstance(pieces[-1], ImageResult)
    return np.stack(pieces[-1].images)


def workers(cluster: Cluster) -> dict[str, int]:
    """Return the workers' processes by name."""
    shown = httpx.get(f"{cluster.url}/admin/cluster", timeout=60).json()["workers"]
    return {worker["name"]: worker["process"] for worker in shown if "process" in worker}


@pytest.mark.faults
async def test_sixteen_images_outlive_their_worker(cluster: Cluster) -> None:
    await asyncio.to_thread(wait_for, lambda: len(workers(cluster)) == 2, "two workers")
    processes = workers(cluster)
    victim, other = processes
    handle = serve.get_deployment_handle("worker", "atelier")
    queue = Dispatcher(AdmissionConfig())
    recorded = RecordedCalls(handle)
    calls = RetriedCalls(recorded, queue, TIMEOUT_S)
    queue.set_replicas(WORKER, [other])
    undisturbed = await asyncio.gather(*(images_of(calls, seed) for seed in range(NUM_REQUESTS)))
    recorded.steps.clear()

    queue.set_replicas(WORKER, [victim])
    running = [asyncio.create_task(images_of(calls, seed)) for seed in range(NUM_REQUESTS)]
    async with asyncio.timeout(TIMEOUT_S):
        while not any(tries[0][-1:] > [5] for tries in recorded.steps.values()):
            await asyncio.sleep(0)
    queue.set_replicas(WORKER, [other])  # as when the ingress hears of the death
    os.kill(processes[victim], signal.SIGKILL)
    found = await asyncio.gather(*running)
    for seed in range(NUM_REQUESTS):
        assert np.array_equal(found[seed], undisturbed[seed]), seed
    interrupted = [tries for tries in recorded.steps.values() if len(tries) > 1]
    assert len(recorded.steps) == NUM_REQUESTS
    assert any(second[0] > 1 for _, second in interrupted), "none went on"
    for first, second in interrupted:
        num_again = first[-1] - second[0] + 1 if first else 0
        assert num_again < EVERY_STEPS, "more was done again than what came after the checkpoint"
    await asyncio.to_thread(wait_for, lambda: len(workers(cluster)) == 2, "a worker in its place")
