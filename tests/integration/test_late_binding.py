"""Requests wait in the ingress until a worker can start them: cancels, pipelines, and models that change meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.harness import Cluster, replica_processes, shifted_adder
from kit.waiting import until

# Half a worker each: two workers start four of them.
LONG = {"model": "digits-flux", "prompt": "a handwritten two", "num_inference_steps": 200, "n": 8}
SHORT = {"model": "digits-flux", "prompt": "a handwritten six", "num_inference_steps": 4}
BOUND_S = 40.0
GONE_S = 3.0  # for what was cancelled: it was at the end of a step


class Queue:
    """The cluster over one client, and its admission queue as an operator sees it."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    def ask(self, path: str, body: dict[str, Any], **headers: str) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.http.post(path, json=body, headers=headers))

    def image(self, body: dict[str, Any]) -> asyncio.Task[httpx.Response]:
        return self.ask("/v1/images/generations", body)

    def complete(self, model: str) -> asyncio.Task[httpx.Response]:
        return self.ask("/v1/completions", {"model": model, "prompt": "What is 4", "max_tokens": 8, "temperature": 0})

    async def text(self, model: str) -> str:
        answer = await self.complete(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    async def shown(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get("/admin/admission")).json()
        return answer

    async def waiting(self) -> int:
        return sum(model["waiting"] for model in (await self.shown())["models"])

    async def workers(self) -> dict[str, int]:
        """The requests that each worker runs, of those that are given work."""
        found = (await self.shown())["replicas"]["worker"]
        return {worker["name"]: sum(worker["running"].values()) for worker in found if not worker["is_gone"]}

    async def is_idle(self) -> bool:
        return not await self.waiting() and not any((await self.workers()).values())

    @asynccontextmanager
    async def filled(self, num_waiting: int = 4) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
        """Keep both workers full with long images for the length of the block. At its end they are cancelled."""
        long = [self.image(LONG) for _ in range(12 + num_waiting)]  # some may be done before all are here
        try:
            await until(self._is_full, "full workers")
            yield long
        finally:
            for task in long:
                task.cancel()
            await asyncio.gather(*long, return_exceptions=True)

    async def _is_full(self) -> bool:
        """A slow machine refuses the last ones, which could not be done in time."""
        return [*(await self.workers()).values()] == [2, 2] and await self.waiting() >= 4


@pytest.fixture
async def queue(cluster: Cluster) -> AsyncIterator[Queue]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as http:
        made = Queue(http)

        async def is_whole() -> bool:
            return len(await made.workers()) == 2 and await made.is_idle()

        await until(is_whole, "two idle workers")
        yield made
        await until(made.is_idle, "an empty queue")


async def test_what_is_cancelled_is_gone_at_once_wherever_it_is(queue: Queue) -> None:
    async with queue.filled(20):
        pass
    await until(queue.is_idle, "an end of what was cancelled", GONE_S)


@pytest.mark.long
async def test_a_worker_that_comes_gets_work_at_once_while_others_wait(queue: Queue) -> None:
    """Serve's own routing would leave what was asked before a replica came to those that were there."""
    before = await queue.workers()
    async with queue.filled() as long:
        replica_processes("worker")[0].kill()

        async def is_at_work() -> bool:
            workers = await queue.workers()
            new = workers.keys() - before.keys()
            if not new:  # a quick machine draws many before it comes, and what is asked after that may go anywhere
                long.extend(queue.image(LONG) for _ in range(8 - await queue.waiting()))
            return any(workers[name] == 2 for name in new)

        await until(is_at_work, "work for the worker in its place", 150.0)  # which imports torch first
        assert await queue.waiting()
        answers = [task.result() for task in long if task.done()]
        assert {answer.status_code for answer in answers} <= {200, 429}, [a.text for a in answers]  # 429: a slow one


async def test_pipelines_and_texts_pass_full_workers_and_nothing_waits_for_ever(queue: Queue) -> None:
    """Stages are never refused and do not block each other, with few places for pipelines and for waiting."""
    before = (await queue.http.get("/admin/admission")).json()["admission"]
    tight = {"max_running_pipelines": 2, "max_waiting_per_model": 40}
    (await queue.http.put("/admin/admission", json=tight)).raise_for_status()
    try:
        images = [queue.image(SHORT | {"prompt": f"a handwritten {n}", "num_inference_steps": 20}) for n in range(60)]
        sums = [
            queue.ask(
                "/v1/images/generations", {"model": "sum-to-digit", "prompt": f"{2 + n % 4} + {1 + n % 3}", "seed": n}
            )
            for n in range(12)
        ]
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["what a film!"]}
        kinds = [queue.ask("/v2/models/text-classifier/infer", {"inputs": [tensor]}) for _ in range(12)]
        async with asyncio.timeout(BOUND_S):
            answers = await asyncio.gather(*images, *sums, *kinds)
    finally:
        (await queue.http.put("/admin/admission", json=before)).raise_for_status()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} <= {200, 429}, [a.text for a in answers if a.status_code != 200]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert [task.result().status_code for task in sums + kinds] == [200] * 24


async def test_who_waits_keeps_the_version_of_a_model_that_changes_or_goes(queue: Queue, tmp_path: Path) -> None:
    folder = shifted_adder(tmp_path / "swap", 1)
    register = {"id": "swap", "path": str(folder), "dtype": "float32"}
    (await queue.http.post("/admin/models", json=register)).raise_for_status()
    try:
        first = await queue.text("swap")
        async with queue.filled():
            old = [queue.complete("swap") for _ in range(6)]
            await until(lambda: waits_for(queue, "swap", 4), "requests that wait")
            shifted_adder(folder, 2)
            (await queue.http.post("/admin/models", json=register)).raise_for_status()
            new = [queue.complete("swap") for _ in range(6)]
            await until(lambda: waits_for(queue, "swap", 8), "requests for the new version")
        second = await queue.text("swap")
        assert first != second
        found = [answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*old, *new)]
        assert found == [first] * 6 + [second] * 6

        async with queue.filled():
            last = [queue.complete("swap") for _ in range(6)]
            await until(lambda: waits_for(queue, "swap", 4), "requests that wait")
            (await queue.http.delete("/admin/models/swap")).raise_for_status()
            assert (await queue.complete("swap")).status_code == 404
        answers = await asyncio.gather(*last)
        assert {answer.status_code for answer in answers} <= {200, 404}, [answer.text for answer in answers]
    finally:
        await queue.http.delete("/admin/models/swap", params={"purge": "true"})


async def waits_for(queue: Queue, model: str, least: int) -> bool:
    """Return whether so many requests of a model wait: an image that ends lets one or two of them start."""
    return any(one["model"] == model and one["waiting"] >= least for one in (await queue.shown())["models"])
