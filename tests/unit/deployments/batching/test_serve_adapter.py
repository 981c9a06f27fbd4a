"""Requests through `@serve.batch` into a batcher: joined while a batch runs, failed alone, left when cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from kit.waiting import until
from ray import serve

from configs.batching import BatchingConfig
from deployments.batching.batcher import Batcher
from deployments.batching.serve_adapter import ServeAdapter


class Serve:
    """`@serve.batch` without a replica: the calls of one turn of the loop come together. `options` are those given."""

    def __init__(self) -> None:
        self.options: dict[str, float] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.answers = asyncio.Event()  # it gives the handler's futures to those that called
        self.answers.set()

    def batch(self, **options: float) -> Any:
        self.options = options

        def decorate(handler: Any) -> Any:
            waiting: list[tuple[Any, asyncio.Future[Any]]] = []

            async def pass_on() -> None:
                calls, waiting[:] = list(waiting), []
                results = await handler([one for one, _ in calls])
                await self.answers.wait()
                for (_, future), result in zip(calls, results, strict=True):
                    if not future.done():
                        future.set_result(result)

            async def call(one: Any) -> Any:
                loop = asyncio.get_running_loop()
                waiting.append((one, future := loop.create_future()))
                if len(waiting) == 1:
                    loop.call_soon(lambda: self.tasks.append(loop.create_task(pass_on())))
                return await future

            return call

        return decorate


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> Serve:
    found = Serve()
    monkeypatch.setattr(serve, "batch", found.batch)
    return found


class Doubling:
    """A batcher that doubles its items, each batch when `gate` is open."""

    def __init__(self) -> None:
        self.gate, self.begun = asyncio.Event(), asyncio.Event()
        self.batches: list[list[int]] = []
        self.batcher: Batcher[int, int] = Batcher(self.run, BatchingConfig(max_batch_size=8, max_concurrent_batches=1))

    async def run(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        self.begun.set()
        await self.gate.wait()
        return [2 * item for item in items]

    def num_waiting(self) -> int:
        return sum(self.batcher.batching_stats().queued.values())


async def test_requests_that_come_while_a_batch_runs_make_the_next_one(batched: Serve) -> None:
    model = Doubling()
    adapter = ServeAdapter(model.batcher, 1)
    tasks = [asyncio.ensure_future(adapter.submit([0]))]
    await model.begun.wait()
    tasks += [asyncio.ensure_future(adapter.submit([item, item])) for item in (1, 2, 3)]
    await until(lambda: model.num_waiting() == 3)
    model.gate.set()
    assert await asyncio.gather(*tasks) == [[0], [2, 2], [4, 4], [6, 6]]
    assert [sorted(batch) for batch in model.batches] == [[0], [1, 1, 2, 2, 3, 3]]


async def test_a_request_that_cannot_be_grouped_fails_alone(batched: Serve) -> None:
    model = Doubling()
    model.gate.set()
    adapter = ServeAdapter(model.batcher, 8)
    unhashable: Any = []
    found = await asyncio.gather(adapter.submit([1], group=unhashable), adapter.submit([2]), return_exceptions=True)
    assert isinstance(found[0], TypeError)
    assert found[1] == [4]


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_cancelled_caller_leaves_the_queue(is_early: bool, batched: Serve) -> None:
    """Early: before Serve has handed on the future of its results."""
    model = Doubling()
    adapter = ServeAdapter(model.batcher, 8)
    running = asyncio.ensure_future(adapter.submit([1]))
    await model.begun.wait()
    if is_early:
        batched.answers.clear()
    waiting = asyncio.ensure_future(adapter.submit([2]))
    await until(lambda: model.num_waiting() == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert model.num_waiting() == 0
    model.gate.set()
    batched.answers.set()
    assert await running == [2]
    assert model.batches == [[1]]


@pytest.mark.parametrize(("max_ongoing", "at_once"), [(1, 1), (3, 1), (4, 2), (100, 50)])
async def test_half_of_what_a_replica_takes_is_handed_over_while_the_next_is_formed(
    max_ongoing: int, at_once: int, batched: Serve
) -> None:
    ServeAdapter(Doubling().batcher, max_ongoing)
    assert batched.options == {"max_batch_size": at_once, "batch_wait_timeout_s": 0, "max_concurrent_batches": 2}
