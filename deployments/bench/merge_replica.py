"""Replicas of `atelier bench merge`: arrivals are generated inside a replica, so that only batching counts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve

from configs.batching import BatchingConfig
from deployments.batching.batcher import Batcher
from deployments.batching.serve_adapter import ServeAdapter
from deployments.bench.merge_traffic import Pattern, Service

MAX_ONGOING = 256
_Submit = Callable[[int], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of the requests that were measured. `sizes` counts batches by their items."""

    makespan_s: float
    mean_latency_s: float
    sizes: dict[int, int]


class MergeReplica:
    """A replica that serves patterns of traffic, through `@serve.batch` or through the batcher."""

    async def outcomes(self, pattern: Pattern, waits_s: Sequence[float]) -> list[Outcome]:
        """Serve the pattern side by side: by the batcher with default settings, then by `@serve.batch` with each wait.

        What else the machine does meets all of them.
        """
        ways = [self._at_dispatch(pattern), *(self._at_arrival(pattern, wait_s) for wait_s in waits_s)]
        return list(await asyncio.gather(*ways))

    async def own_cost_us(self, num_requests: int, num_callers: int) -> dict[str, float]:
        """Return microseconds per request of batching alone: callers in a row each, a handler that does nothing."""
        sizes: Counter[int] = Counter()
        idle = Pattern("idle", Service("nothing", 0.0, 0.0), 32, ())
        batcher: Batcher[int, int] = Batcher(_handler(idle, sizes), BatchingConfig(max_batch_size=32))
        serve_adapter = ServeAdapter(batcher, MAX_ONGOING)
        batched = serve.batch(max_batch_size=32, batch_wait_timeout_s=0)(_handler(idle, sizes))
        ways: dict[str, _Submit] = {
            "nothing": _nothing,
            "batcher": lambda item: batcher.submit([item]),
            "batcher behind serve.batch": lambda item: serve_adapter.submit([item]),
            "serve.batch": batched,
        }
        return {name: await _cost_us(submit, num_requests, num_callers) for name, submit in ways.items()}

    async def _at_dispatch(self, pattern: Pattern) -> Outcome:
        sizes: Counter[int] = Counter()
        batcher: Batcher[int, int] = Batcher(
            _handler(pattern, sizes), BatchingConfig(max_batch_size=pattern.max_batch_size)
        )
        return await _serve(pattern, lambda item: batcher.submit([item]), sizes)

    async def _at_arrival(self, pattern: Pattern, wait_s: float) -> Outcome:
        sizes: Counter[int] = Counter()
        decorate = serve.batch(max_batch_size=pattern.max_batch_size, batch_wait_timeout_s=wait_s)
        return await _serve(pattern, decorate(_handler(pattern, sizes)), sizes)


class Empty:
    """An empty deployment: Serve's own cost."""

    async def ask(self, item: int) -> int:
        return item


class AtArrival:
    """Serve's own batching, which does not wait."""

    async def ask(self, item: int) -> int:
        return await self._run_batch(item)

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0)
    async def _run_batch(self, items: list[int]) -> list[int]:
        return items


class AtDispatch:
    """The batcher behind Serve's decorator, as services use it."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Serve awaits it: the batcher needs the event loop
        async def run_batch(items: Sequence[int]) -> Sequence[int]:
            return items

        self._serve_adapter = ServeAdapter(Batcher(run_batch, BatchingConfig(max_batch_size=32)), MAX_ONGOING)

    async def ask(self, item: int) -> int:
        return (await self._serve_adapter.submit([item]))[0]


def _handler(pattern: Pattern, sizes: Counter[int]) -> Callable[[Sequence[int]], Awaitable[Sequence[int]]]:
    async def handle(items: Sequence[int]) -> Sequence[int]:
        sizes[len(items)] += 1
        await asyncio.sleep(pattern.service.duration_s(len(items)))
        return items

    return handle


async def _serve(pattern: Pattern, submit: _Submit, sizes: Counter[int]) -> Outcome:
    num_warm = pattern.num_warm
    if num_warm:
        await _answers(pattern.arrivals_s[:num_warm], submit)
        sizes.clear()
    first_s = pattern.arrivals_s[num_warm]
    done = await _answers([at_s - first_s for at_s in pattern.arrivals_s[num_warm:]], submit)
    return Outcome(
        makespan_s=max(end_s for _, end_s in done),
        mean_latency_s=sum(end_s - start_s for start_s, end_s in done) / len(done),
        sizes=dict(sorted(sizes.items())),
    )


async def _answers(arrivals_s: Sequence[float], submit: _Submit) -> list[tuple[float, float]]:
    """Return when each was due and answered, from the start. Requests do not wait for each other."""
    start = time.perf_counter()

    async def one(index: int, at_s: float) -> tuple[float, float]:
        await asyncio.sleep(max(0.0, start + at_s - time.perf_counter()))
        await submit(index)
        return at_s, time.perf_counter() - start

    return list(await asyncio.gather(*(one(index, at_s) for index, at_s in enumerate(arrivals_s))))


async def _nothing(_: int) -> None:
    await asyncio.sleep(0)


async def _cost_us(submit: _Submit, num_requests: int, num_callers: int) -> float:
    async def caller() -> None:
        for item in range(num_requests // num_callers):
            await submit(item)

    await asyncio.gather(*(caller() for _ in range(num_callers)))  # the first round makes queues and metrics
    start = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(num_callers)))
    return (time.perf_counter() - start) / (num_requests // num_callers * num_callers) * 1e6
