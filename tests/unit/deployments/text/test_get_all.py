"""Requests that overlap, fail and are cancelled: one batch per encoder, each text once, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from kit.seeding import seeded_random
from kit.waiting import until
from unit.deployments.text.batches import Batches

from deployments.text.cache import EncodingCache, EncodingKey


async def request(
    cache: EncodingCache, batches: Batches, numbers: list[int], encoder_of: Callable[[int], str] = lambda _: "one"
) -> list[float]:
    """A request for texts that are one number each."""
    keys = [EncodingKey(encoder_of(number), "float32", "trimmed", (number,)) for number in numbers]
    found = await cache.get_all(keys, batches)
    return [float(found[key].encoding["pooled"]) for key in keys]


async def test_one_batch_per_encoder() -> None:
    cache, batches = EncodingCache(10**6), Batches()
    parity = ("even", "odd").__getitem__
    found = await request(cache, batches, [1, 2, 3, 4, 5], lambda number: parity(number % 2))
    assert found == [1, 2, 3, 4, 5]
    assert batches.made == [("odd", [1, 3, 5]), ("even", [2, 4])]
    assert await request(cache, batches, [6, 2, 8, 4], lambda _: "even") == [6, 2, 8, 4]
    assert batches.numbers[2:] == [[6, 8]]  # what was there holds nothing back
    assert await request(cache, batches, [2, 8], lambda _: "even") == [2, 8]
    assert len(batches.made) == 3


async def test_requests_that_overlap_compute_each_text_once() -> None:
    cache, batches = EncodingCache(10**6), Batches()
    batches.open.clear()
    first = asyncio.ensure_future(request(cache, batches, [1, 2]))
    second = asyncio.ensure_future(request(cache, batches, [2, 3, 1]))
    await until(lambda: len(batches.made) == 2)
    assert batches.numbers == [[1, 2], [3]]  # the second does not wait for the first before its own goes
    assert not first.done()
    batches.open.set()
    assert await asyncio.gather(first, second) == [[1, 2], [2, 3, 1]]


async def test_a_request_that_is_cancelled_leaves_its_computations_to_others() -> None:
    cache, batches = EncodingCache(10**6), Batches()
    batches.open.clear()
    first = asyncio.ensure_future(request(cache, batches, [1, 2]))
    await until(lambda: bool(batches.made))
    second = asyncio.ensure_future(request(cache, batches, [2]))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    batches.open.set()
    assert await second == [2]
    assert batches.numbers == [[1, 2]]


async def test_a_request_that_is_cancelled_before_its_batch() -> None:
    """Its claims are made already, and others may have joined them."""
    cache, batches = EncodingCache(10**6), Batches()
    first = asyncio.ensure_future(request(cache, batches, [1, 2]))
    await asyncio.sleep(0)
    first.cancel()
    assert await asyncio.wait_for(request(cache, batches, [2, 1]), 5) == [2, 1]
    assert sorted(number for numbers in batches.numbers for number in numbers) == [1, 2]


async def test_an_error_reaches_all_who_wait_and_nothing_hangs() -> None:
    cache, batches = EncodingCache(10**6), Batches()
    batches.error = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        await request(cache, batches, [1, 2, 3])
    batches.error = None
    assert await request(cache, batches, [1, 2, 3]) == [1, 2, 3]


async def test_many_requests_at_random_all_end() -> None:
    """Overlapping sets in any order, some of them cancelled: no text is computed twice, nobody waits for ever."""
    draw = seeded_random()
    cache, batches = EncodingCache(10**7), Batches()
    running = []
    for _ in range(150):
        numbers = draw.sample(range(60), draw.randint(1, 8))
        running.append((numbers, asyncio.ensure_future(request(cache, batches, numbers))))
        if draw.random() < 0.3:
            await asyncio.sleep(0)
        if draw.random() < 0.2:
            draw.choice(running)[1].cancel()
    async with asyncio.timeout(5):
        found = await asyncio.gather(*(task for _, task in running), return_exceptions=True)
    for (numbers, _), result in zip(running, found, strict=True):
        assert isinstance(result, asyncio.CancelledError) or result == numbers
    computed = [number for numbers in batches.numbers for number in numbers]
    assert len(computed) == len(set(computed))
