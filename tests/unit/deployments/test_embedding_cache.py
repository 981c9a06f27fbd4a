"""The cache of text encodings: exact, bounded, computed once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from deployments.embedding_cache import EmbeddingCache

ENTRY_BYTES = 512 + 8 * 2 + 400  # overhead, two token ids, 100 float32


def key(number: int, module: str = "m") -> tuple[str, tuple[int, ...]]:
    return module, (number, 0)


class Encoder:
    """Counts computations; while it is shut they do not end."""

    def __init__(self) -> None:
        self.count = 0
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None

    async def __call__(self) -> dict[str, torch.Tensor]:
        self.count += 1
        await self.open.wait()
        if self.error:
            raise self.error
        return {"pooled": torch.full((100,), float(self.count))}


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_same_tokens_are_encoded_once() -> None:
    cache, encoder = EmbeddingCache(10**6), Encoder()
    first, spared = await cache.get(key(1), encoder)
    assert not spared
    second, spared = await cache.get(key(1), encoder)
    assert spared
    assert second is first
    for other in (key(2), key(1, "other"), ("m", (1,))):
        assert not (await cache.get(other, encoder))[1]
    assert encoder.count == 4
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.joined, stats.entries) == (1, 4, 0, 4)


async def test_who_asks_meanwhile_waits_for_the_same_computation() -> None:
    cache, encoder = EmbeddingCache(10**6), Encoder()
    encoder.open.clear()
    waiting = [asyncio.ensure_future(cache.get(key(1), encoder)) for _ in range(10)]
    await settle()
    encoder.open.set()
    found = await asyncio.gather(*waiting)
    assert [spared for _, spared in found] == [False] + [True] * 9
    assert len({id(encoding) for encoding, _ in found}) == 1
    assert (encoder.count, cache.stats().joined) == (1, 9)


async def test_a_failure_reaches_all_and_is_not_remembered() -> None:
    cache, encoder = EmbeddingCache(10**6), Encoder()
    encoder.error = ValueError("bad tokens")
    encoder.open.clear()
    waiting = [asyncio.ensure_future(cache.get(key(1), encoder)) for _ in range(3)]
    await settle()
    encoder.open.set()
    assert {str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {"bad tokens"}
    encoder.error = None
    assert (await cache.get(key(1), encoder))[0]["pooled"][0] == 2
    assert cache.stats().entries == 1


@pytest.mark.parametrize("cancelled", [0, 1])
async def test_cancelling_one_caller_does_not_cancel_the_others(cancelled: int) -> None:
    cache, encoder = EmbeddingCache(10**6), Encoder()
    encoder.open.clear()
    waiting = [asyncio.ensure_future(cache.get(key(1), encoder)) for _ in range(2)]
    await settle()
    waiting[cancelled].cancel()
    await settle()
    encoder.open.set()
    encoding, _ = await waiting[1 - cancelled]
    assert encoding["pooled"][0] == 1
    assert waiting[cancelled].cancelled()
    assert (await cache.get(key(1), encoder))[1]


async def test_the_least_recently_used_goes_first() -> None:
    cache, encoder = EmbeddingCache(3 * ENTRY_BYTES), Encoder()
    for number in (1, 2, 3, 1, 4):
        await cache.get(key(number), encoder)
    stats = cache.stats()
    assert (stats.entries, stats.evicted, stats.nbytes) == (3, 1, 3 * ENTRY_BYTES)
    assert stats.nbytes <= stats.max_bytes
    spared = {number: (await cache.get(key(number), encoder))[1] for number in (1, 3, 4)}
    assert spared == {1: True, 3: True, 4: True}
    assert not (await cache.get(key(2), encoder))[1]


async def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache, encoder = EmbeddingCache(ENTRY_BYTES), Encoder()
    await cache.get(key(1), encoder)

    async def large() -> dict[str, Any]:
        return {"pooled": torch.zeros(101)}

    await cache.get(key(2), large)
    assert (await cache.get(key(1), encoder))[1]
    assert not (await cache.get(key(2), large))[1]
