"""Images go on elsewhere, to the same images: after kill -9 of their worker, and when workers are restarted in turn."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import signal
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from integration.harness import Cluster
from kit.streams import stream_pieces
from kit.waiting import until, wait_until
from PIL import Image
from ray import serve

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import Demand
from configs.admission import AdmissionConfig
from deployments.ingress.messages.terms import WORKER
from deployments.ingress.service.retries import ResumedImages, RetriedCalls
from deployments.records import ImageProgress, ImageRequest, ImageResult
from deployments.replicas.replica_calls import OnPiece, ReplicaCalls

NUM_REQUESTS = 16
NUM_STEPS = 30
EVERY_STEPS = 4
TIMEOUT_S = 300.0  # of a busy machine


class RecordedCalls(ReplicaCalls):
    """Calls of the workers; `steps` has what each try of a request told, steps that were done again as well."""

    def __init__(self, handle: Any) -> None:
        super().__init__(handle)
        self.steps: dict[int, list[list[int]]] = defaultdict(list)

    async def receive_stream(self, method: str, *arguments: Any, on_piece: OnPiece, **options: Any) -> None:
        told: list[int] = []
        self.steps[arguments[0].seed].append(told)

        async def tell(piece: Any) -> None:
            if isinstance(piece, ImageProgress):
                told.append(piece.step)
            await on_piece(piece)

        await super().receive_stream(method, *arguments, on_piece=tell, **options)


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
    ask = Demand(WORKER, "digits-flux", 1.0, 1 / NUM_REQUESTS, 1, "default", TIMEOUT_S)
    async with stream_pieces(
        calls, "stream_images", request_of(seed), demand=ask, resumption=ResumedImages()
    ) as stream:
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
    await asyncio.to_thread(wait_until, lambda: len(workers(cluster)) == 2, "two workers")
    processes = workers(cluster)
    victim, other = processes
    handle = serve.get_deployment_handle("worker", cluster.config.name)
    queue = Dispatcher(AdmissionConfig())
    recorded = RecordedCalls(handle)
    calls = RetriedCalls(recorded, queue, TIMEOUT_S)
    queue.set_replicas(WORKER, [other])
    undisturbed = await asyncio.gather(*(images_of(calls, seed) for seed in range(NUM_REQUESTS)))
    recorded.steps.clear()

    queue.set_replicas(WORKER, [victim])
    running = [asyncio.create_task(images_of(calls, seed)) for seed in range(NUM_REQUESTS)]
    await until(lambda: any(tries[0][-1:] > [5] for tries in recorded.steps.values()))
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
    await asyncio.to_thread(wait_until, lambda: len(workers(cluster)) == 2, "a worker in its place")


@pytest.mark.faults
def test_images_do_not_notice_that_all_workers_are_restarted_one_after_the_other(cluster: Cluster) -> None:
    wait_until(lambda: len(workers(cluster)) == 2, "two workers")
    body = {"model": "digits-flux", "prompt": "a handwritten two", "num_inference_steps": 60, "size": "32x32"}
    with httpx.Client(base_url=cluster.url, timeout=TIMEOUT_S) as http, ThreadPoolExecutor(8) as pool:

        def draw(seed: int) -> np.ndarray:
            answer = http.post("/v1/images/generations", json=body | {"seed": seed})
            assert answer.status_code == 200, answer.text
            with Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"]))) as image:
                return np.asarray(image)

        def denoising(name: str) -> int:
            shown = http.get("/admin/cluster").json()["workers"]
            return sum(worker["denoising"] for worker in shown if worker["name"] == name)

        expected = [draw(seed) for seed in range(8)]
        stop, found = threading.Event(), [list[np.ndarray]() for _ in expected]

        def ask_on(seed: int) -> None:
            while not stop.is_set():
                found[seed].append(draw(seed))

        asking = [pool.submit(ask_on, seed) for seed in range(8)]
        try:
            for name, process in workers(cluster).items():
                wait_until(lambda name=name: denoising(name) > 0, "its work", TIMEOUT_S)
                http.post(f"/admin/workers/{name}/drain").raise_for_status()
                wait_until(lambda name=name: denoising(name) == 0, "the end of its work", TIMEOUT_S)
                os.kill(process, signal.SIGKILL)
                wait_until(lambda name=name: name not in workers(cluster), "its end")
                wait_until(lambda: len(workers(cluster)) == 2, "a worker in its place", TIMEOUT_S)
                http.delete(f"/admin/workers/{name}/drain").raise_for_status()
        finally:
            stop.set()
            for one in asking:
                one.result()
    for image, drawn in zip(expected, found, strict=True):
        assert drawn
        assert all(itertools.starmap(np.array_equal, ((image, one) for one in drawn)))
