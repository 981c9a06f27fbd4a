"""One request's computations as one call per encoder, through the real cache, with no request waiting for ever."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from deployments.engines.text.tokens import TokenizedText
from deployments.text.cache import EmbeddingCache, EncodingKey
from deployments.text.encode_jobs import EncodeJob
from deployments.text.merged_misses import MergedMisses


class Calls:
    """Stands for the merged calls: remembers them, and ends them when it is open."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, list[int]]] = []
        self.terms: list[tuple[int, float | None]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None

    async def __call__(self, jobs: Any, priority: int, timeout_s: float | None) -> list[dict[str, torch.Tensor]]:
        assert len({id(job.encoder) for job in jobs}) == 1
        self.made.append((jobs[0].encoder, [job.text.token_ids[0] for job in jobs]))
        self.terms.append((priority, timeout_s))
        await self.open.wait()
        if self.error:
            raise self.error
        return [{"pooled": torch.tensor([float(job.text.token_ids[0])])} for job in jobs]

    @property
    def numbers(self) -> list[list[int]]:
        return [numbers for _, numbers in self.made]


async def request(
    cache: EmbeddingCache,
    calls: Calls,
    numbers: list[int],
    encoder_of: Callable[[int], Any] = lambda _: "one",
    **terms: Any,
) -> list[float]:
    """A request for texts that are one number each."""
    misses = MergedMisses(calls, len(numbers), **terms)

    async def look_up(number: int) -> float:
        job = EncodeJob(encoder_of(number), TokenizedText((number,)))
        key = EncodingKey("m", "float32", "trimmed", (number,))
        found = await misses.find(job, lambda compute: cache.get(key, compute))
        return float(found.encoding["pooled"])

    return await asyncio.gather(*(look_up(number) for number in numbers))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_one_call_per_encoder() -> None:
    cache, calls = EmbeddingCache(10**6), Calls()
    found = await request(
        cache, calls, [1, 2, 3, 4, 5], ("even", "odd", "even", "odd", "even", "odd").__getitem__, priority=3
    )
    assert found == [1, 2, 3, 4, 5]
    assert calls.made == [("odd", [1, 3, 5]), ("even", [2, 4])]
    assert calls.terms == [(3, None)] * 2
    assert await request(cache, calls, [6, 2, 7, 1], timeout_s=1.5) == [6, 2, 7, 1]
    assert calls.numbers[2:] == [[6, 7]]  # what was there holds nothing back
    assert calls.terms[2] == (0, 1.5)
    assert await request(cache, calls, [1, 7]) == [1, 7]
    assert len(calls.made) == 3


async def test_requests_that_overlap_compute_each_text_once() -> None:
    cache, calls = EmbeddingCache(10**6), Calls()
    calls.open.clear()
    first = asyncio.ensure_future(request(cache, calls, [1, 2]))
    second = asyncio.ensure_future(request(cache, calls, [2, 3, 1]))
    await until(lambda: len(calls.made) == 2)
    assert calls.numbers == [[1, 2], [3]]  # the second does not wait for the first before its own goes
    assert not first.done()
    calls.open.set()
    assert await asyncio.gather(first, second) == [[1, 2], [2, 3, 1]]


async def test_what_a_slow_lookup_asks_for_goes_when_it_asks() -> None:
    """A tier of the cluster may say no late; the others' texts are not held for it longer than the bound."""
    calls, answer = Calls(), asyncio.Event()
    misses = MergedMisses(calls, 3, max_hold_s=0.001)

    async def get(number: int) -> Any:
        async def slow(compute: Any) -> Any:
            if number:
                await answer.wait()
            return await compute()

        return await misses.find(EncodeJob("one", TokenizedText((number,))), slow)  # type: ignore[arg-type]

    lookups = [asyncio.ensure_future(get(number)) for number in range(3)]
    await until(lambda: calls.numbers == [[0]])
    answer.set()
    await asyncio.gather(*lookups)
    assert calls.numbers == [[0], [1, 2]]


async def test_a_request_that_is_cancelled_leaves_its_computations_to_others() -> None:
    cache, calls = EmbeddingCache(10**6), Calls()
    calls.open.clear()
    first = asyncio.ensure_future(request(cache, calls, [1, 2]))
    await until(lambda: bool(calls.made))
    second = asyncio.ensure_future(request(cache, calls, [2]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    calls.open.set()
    assert await second == [2]
    assert calls.numbers == [[1, 2]]


async def test_a_request_that_is_cancelled_before_its_call() -> None:
    """Its lookups are under way already, and others may have joined them."""
    cache, calls = EmbeddingCache(10**6), Calls()
    first = asyncio.ensure_future(request(cache, calls, [1, 2]))
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.wait_for(request(cache, calls, [2, 1]), 5) == [2, 1]
    assert sorted(number for numbers in calls.numbers for number in numbers) == [1, 2]


async def test_an_error_reaches_all_who_wait_and_nothing_hangs() -> None:
    cache, calls = EmbeddingCache(10**6), Calls()
    calls.error = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        await request(cache, calls, [1, 2, 3])
    calls.error = None
    assert await request(cache, calls, [1, 2, 3]) == [1, 2, 3]


async def test_many_requests_at_random_all_end() -> None:
    """Overlapping sets in any order, some of them cancelled: no text is computed twice, nobody waits for ever."""
    draw = random.Random()
    cache, calls = EmbeddingCache(10**7), Calls()
    running = []
    for _ in range(150):
        numbers = draw.sample(range(60), draw.randint(1, 8))
        running.append((numbers, asyncio.ensure_future(request(cache, calls, numbers))))
        if draw.random() < 0.3:
            await asyncio.sleep(0)
        if draw.random() < 0.2:
            draw.choice(running)[1].cancel()
    async with asyncio.timeout(5):
        found = await asyncio.gather(*(task for _, task in running), return_exceptions=True)
    for (numbers, _), result in zip(running, found, strict=True):
        assert isinstance(result, asyncio.CancelledError) or result == numbers
    computed = [number for numbers in calls.numbers for number in numbers]
    assert len(computed) == len(set(computed))
