"""Patterns of arrivals and batch times for `infra.bench merge`, and the replicas that serve them.

Arrivals are generated inside a replica, so that only batching counts. Times are in seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from ray import serve

from configs.batching import BatchingConfig
from deployments.batching.batcher import Batcher
from deployments.batching.serve_adapter import ServeAdapter

MAX_ONGOING = 256
BURST_GAP: Final = 0.03  # between requests of one burst, of a batch's time
ARRIVALS: Final = ("even", "poisson", "bursts of 3", "bursts of 8", "on and off")
LOADS: Final = (0.3, 0.9, 1.67, 3.0)  # requests per time of a batch of one
LINEAR_LOADS: Final = (0.3, 0.7)  # where batching gains next to nothing, more would be overload
_Submit = Callable[[int], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Service:
    """A model whose batch of n items takes first_s + further_s * (n - 1)."""

    name: str
    first_s: float
    further_s: float

    def duration_s(self, num_items: int) -> float:
        return self.first_s + self.further_s * (num_items - 1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Requests by their arrivals in seconds from the start; the first `num_warm` are served and not measured."""

    name: str
    service: Service
    max_batch_size: int
    arrivals_s: tuple[float, ...]
    num_warm: int = 0


def scenario() -> Pattern:
    """Return 24 requests at 10 per second, 0.5 s for one and 0.01 s for each further item, at most 8 together."""
    return Pattern("scenario", Service("scenario", 0.5, 0.01), 8, tuple(0.1 * index for index in range(24)))


def grid(unit_s: float, num_requests: int, num_warm: int, seed: int) -> list[Pattern]:
    """Return 50 patterns; a batch of one takes `unit_s`."""
    services = {
        Service("flat", unit_s, 0.02 * unit_s): LOADS,
        Service("steep", unit_s, 0.2 * unit_s): LOADS,
        Service("linear", unit_s, 0.95 * unit_s): LINEAR_LOADS,
    }
    rng = random.Random(seed)
    return [
        Pattern(
            f"{arrivals}, load {load}, {service.name}",
            service,
            8,
            tuple(accumulate(_gaps_s(arrivals, unit_s / load, unit_s, num_warm + num_requests, rng))),
            num_warm,
        )
        for service, loads in services.items()
        for load in loads
        for arrivals in ARRIVALS
    ]


def _gaps_s(arrivals: str, mean_s: float, unit_s: float, number: int, rng: random.Random) -> Sequence[float]:
    if arrivals == "even":
        return [mean_s] * number
    if arrivals == "poisson":
        return [rng.expovariate(1 / mean_s) for _ in range(number)]
    if arrivals == "on and off":
        return [mean_s * (0.25 if index // 20 % 2 else 1.75) for index in range(number)]
    size, within_s = int(arrivals.split()[-1]), BURST_GAP * unit_s
    between_s = max(mean_s * size - within_s * (size - 1), within_s)
    return [within_s if index % size else between_s for index in range(number)]


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

    async def answer_item(self, item: int) -> int:
        return item


class AtArrival:
    """Serve's own batching, which does not wait."""

    async def answer_item(self, item: int) -> int:
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

    async def answer_item(self, item: int) -> int:
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
