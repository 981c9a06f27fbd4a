"""The batcher behind `@serve.batch`, in a replica of real Serve."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from integration.harness import Cluster
from kit.waiting import until
from ray import serve

from configs.batching import BatchingConfig
from deployments.batching.batcher import Batcher
from deployments.batching.serve_adapter import ServeAdapter

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import tests

MAX_ONGOING = 64


class Doubling:
    """Holds its batches until it is let go, and tells what came together."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it
        self._batches: list[list[int]] = []
        self._gate = asyncio.Event()
        self._batcher: Batcher[int, int] = Batcher(self._run_batch, BatchingConfig(max_batch_size=16))
        self._serve_adapter = ServeAdapter(self._batcher, MAX_ONGOING)

    async def ask(self, items: list[int], group: Any = None) -> list[int]:
        return await self._serve_adapter.submit(items, group=group)

    async def num_queued(self) -> int:
        return sum(self._batcher.batching_stats().queued.values())

    async def num_running(self) -> int:
        return sum(self._batcher.batching_stats().running.values())

    async def let_go(self) -> list[list[int]]:
        self._gate.set()
        return [list(batch) for batch in self._batches]  # as it is now: the answer is written down later

    async def _run_batch(self, items: Sequence[int]) -> list[int | Exception]:
        self._batches.append(list(items))
        await self._gate.wait()
        return [item * 2 if item >= 0 else ValueError(f"{item} is below 0") for item in items]


@pytest.fixture
def handle(cluster: Cluster) -> Iterator[Any]:
    deployment = serve.deployment(Doubling).options(
        max_ongoing_requests=MAX_ONGOING, ray_actor_options={"num_cpus": 0}, graceful_shutdown_wait_loop_s=0.1
    )
    yield serve.run(deployment.bind(), name="serve-adapter", route_prefix=None)
    serve.delete("serve-adapter")


async def until_running(handle: Any) -> None:
    await until(handle.num_running.remote)


async def until_queued(handle: Any, number: int) -> None:
    async def are_queued() -> bool:
        return bool(await handle.num_queued.remote() == number)

    await until(are_queued)


async def test_late_requests_join_and_errors_and_cancels_are_for_one(handle: Any) -> None:
    first = handle.ask.remote([0])
    await until_running(handle)
    responses = []
    for number, items in enumerate([[1, 2], [-3], [4], [5]], start=1):  # one after the other: none comes with another
        responses.append(handle.ask.remote(items))
        await until_queued(handle, number)
    responses[2].cancel()
    await until_queued(handle, 3)
    with pytest.raises(TypeError, match="unhashable"):
        await handle.ask.remote([6], group=[])
    assert await handle.let_go.remote() == [[0]]
    assert await first == [0]
    assert await responses[0] == [2, 4]
    with pytest.raises(ValueError, match="-3 is below 0"):
        await responses[1]
    assert await responses[3] == [10]
    assert await handle.let_go.remote() == [[0], [1, 2, -3, 5]]
