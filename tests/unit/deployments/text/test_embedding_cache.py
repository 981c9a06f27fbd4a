"""The cache of text encodings: exact, bounded, computed once, with and without the cluster's tier."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from cluster.encodings.packed import ByteArray, Layout, join_tensors
from cluster.encodings.records import SharedEncoding
from deployments.text.cache import ENTRY_BYTES, TENSOR_BYTES, EmbeddingCache, EncodingKey
from deployments.text.tensor_records import pack

COST_BYTES = ENTRY_BYTES + TENSOR_BYTES + 400  # of an encoding of 100 float32


def key(number: int, module: str = "m") -> EncodingKey:
    return EncodingKey(module, "float32", "max_length", (number, 0))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Encoder:
    """Counts computations, which take `cost_s`; while it is shut they do not end."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.count = 0
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None
        self.clock, self.cost_s, self.size = clock or Clock(), 1.0, 100

    async def __call__(self) -> dict[str, torch.Tensor]:
        self.count += 1
        count = self.count
        await self.open.wait()
        self.clock.now_s += self.cost_s
        if self.error:
            raise self.error
        return {"pooled": torch.full((self.size,), float(count))}


class Shared:
    """The cluster's tier in memory: one that has, gives claims, or fails."""

    def __init__(self) -> None:
        self.entries: dict[str, SharedEncoding] = {}
        self.claims: set[str] = set()
        self.kept: set[str] = set()
        self.used: list[str] = []
        self.error: Exception | None = None

    async def find_or_claim(self, digest: str) -> SharedEncoding | None:
        await self._answer()
        if digest not in self.entries:
            self.claims.add(digest)
        return self.entries.get(digest)

    async def publish(self, digest: str, layout: Layout, data: ByteArray, cost_s: float, keep: bool) -> None:
        await self._answer()
        self.claims.discard(digest)
        self.entries[digest] = SharedEncoding(layout, data, cost_s)
        self.kept |= {digest} if keep else set()

    async def abandon(self, digest: str) -> None:
        await self._answer()
        self.claims.discard(digest)

    async def forget_all(self) -> None:
        await self._answer()
        self.entries.clear()

    def note_use(self, digest: str) -> None:
        self.used.append(digest)

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.error:
            raise self.error


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def source(cache: EmbeddingCache, number: int, encoder: Any, **options: Any) -> str:
    return (await cache.get(key(number), encoder, **options)).source


def test_every_part_of_a_key_counts() -> None:
    base = EncodingKey("m", "float32", "max_length", (1, 23))
    others = [
        replace(base, module_key="n"),
        replace(base, dtype="bfloat16"),
        replace(base, padding="longest"),
        replace(base, token_ids=(12, 3)),
        replace(base, token_ids=(1, 23, 0)),
        replace(base, token_ids=(-1, 10**40)),
        replace(base, token_ids=()),
    ]
    digests = {one.digest() for one in [base, *others]}
    assert len(digests) == 8
    assert {len(digest) for digest in digests} == {64}
    assert replace(base).digest() == base.digest()


async def test_the_same_tokens_are_encoded_once() -> None:
    cache, encoder = EmbeddingCache(10**6), Encoder()
    first = await cache.get(key(1), encoder)
    assert (first.source, first.hit) == ("computed", False)
    second = await cache.get(key(1), encoder)
    assert (second.source, second.hit) == ("local", True)
    assert second.encoding is first.encoding
    for other in (key(2), key(1, "other")):
        assert not (await cache.get(other, encoder)).hit
    assert encoder.count == 3
    stats = cache.stats()
    assert (stats.local, stats.computed, stats.joined, stats.shared, stats.entries) == (1, 3, 0, 0, 3)
    assert stats.nbytes == 3 * COST_BYTES


async def test_who_asks_meanwhile_waits_for_the_same_computation() -> None:
    cache, encoder = EmbeddingCache(10**6), Encoder()
    encoder.open.clear()
    waiting = [asyncio.ensure_future(cache.get(key(1), encoder)) for _ in range(1000)]
    await settle()
    encoder.open.set()
    found = await asyncio.gather(*waiting)
    assert [one.source for one in found] == ["computed"] + ["joined"] * 999
    assert len({id(one.encoding) for one in found}) == 1
    assert (encoder.count, cache.stats().joined) == (1, 999)


async def test_a_failure_reaches_all_and_is_not_remembered() -> None:
    shared = Shared()
    cache, encoder = EmbeddingCache(10**6, shared), Encoder()
    encoder.error = ValueError("bad tokens")
    encoder.open.clear()
    waiting = [asyncio.ensure_future(cache.get(key(1), encoder)) for _ in range(3)]
    await settle()
    assert shared.claims
    encoder.open.set()
    assert {str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {"bad tokens"}
    await settle()
    assert not shared.claims  # another replica may try
    encoder.error = None
    assert (await cache.get(key(1), encoder)).encoding["pooled"][0] == 2
    assert (cache.stats().entries, cache.stats().failed) == (1, 3)


@pytest.mark.parametrize("cancelled", [{0}, {1}, {0, 1}])
async def test_cancelling_callers_does_not_cancel_the_computation(cancelled: set[int]) -> None:
    cache, encoder = EmbeddingCache(10**6, Shared()), Encoder()
    encoder.open.clear()
    waiting = [asyncio.ensure_future(cache.get(key(1), encoder)) for _ in range(2)]
    await settle()
    for index in cancelled:
        waiting[index].cancel()
    await settle()
    encoder.open.set()
    for index, task in enumerate(waiting):
        if index in cancelled:
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert (await task).encoding["pooled"][0] == 1
    await settle()
    assert await source(cache, 1, encoder) == "local"


async def test_what_took_longest_to_compute_stays() -> None:
    clock = Clock()
    encoder = Encoder(clock)
    cache = EmbeddingCache(3 * COST_BYTES, clock=clock)
    for number, encoder.cost_s in ((1, 5.0), (2, 0.1), (3, 3.0), (4, 1.0)):
        await cache.get(key(number), encoder)
    stats = cache.stats()
    assert (stats.entries, stats.evicted, stats.nbytes) == (3, 1, 3 * COST_BYTES)
    assert [await source(cache, number, encoder) for number in (1, 3, 4)] == ["local"] * 3
    encoder.cost_s = 0.01
    assert await source(cache, 2, encoder) == "computed"
    assert cache.stats().refused == 1
    assert await source(cache, 4, encoder) == "local"


async def test_negative_and_empty_prompts_stay_however_cheap() -> None:
    clock = Clock()
    encoder = Encoder(clock)
    cache = EmbeddingCache(8 * COST_BYTES, clock=clock)
    encoder.cost_s = 0.001
    await cache.get(key(0), encoder, keep=True)
    await cache.get(key(1), encoder)
    assert await source(cache, 1, encoder, keep=True) == "local"  # wanted as a negative prompt later
    encoder.cost_s = 10.0
    for number in range(2, 40):
        await cache.get(key(number), encoder)
    assert [await source(cache, number, encoder) for number in (0, 1)] == ["local"] * 2
    stats = cache.stats()
    assert (stats.entries, stats.kept, stats.kept_bytes) == (8, 2, 2 * COST_BYTES)
    for number in range(100, 120):
        await cache.get(key(number), encoder, keep=True)
    assert cache.stats().kept == 2  # a quarter of eight, whatever is asked for


async def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache, encoder = EmbeddingCache(COST_BYTES), Encoder()
    await cache.get(key(1), encoder)
    encoder.size = 101
    found = await cache.get(key(2), encoder)
    assert found.encoding["pooled"].shape == (101,)
    assert await source(cache, 1, encoder) == "local"
    assert await source(cache, 2, encoder) == "computed"


async def test_a_row_of_a_batch_does_not_keep_the_batch() -> None:
    cache = EmbeddingCache(10**6)
    batch = torch.rand(50, 100)

    async def compute() -> dict[str, torch.Tensor]:
        return {"hidden": batch[3], "half": batch[4, :50], "none": torch.empty(0)}

    encoding = (await cache.get(key(1), compute)).encoding
    held = sum(tensor.untyped_storage().nbytes() for tensor in encoding.values())
    assert cache.stats().nbytes == ENTRY_BYTES + 3 * TENSOR_BYTES + held == ENTRY_BYTES + 3 * TENSOR_BYTES + 600
    batch.zero_()
    assert (await cache.get(key(1), compute)).encoding["hidden"].any()


def add_in_place(encoding: Mapping[str, torch.Tensor]) -> None:
    encoding["pooled"].add_(1)


def write_through_a_view(encoding: Mapping[str, torch.Tensor]) -> None:
    encoding["pooled"].detach().view(10, 10)[2:, 0] = 7


def write_without_autograd(encoding: Mapping[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        torch.neg(encoding["pooled"], out=encoding["pooled"])


@pytest.mark.parametrize("write", [add_in_place, write_through_a_view, write_without_autograd])
@pytest.mark.parametrize("inference", [False, True])
async def test_a_write_into_a_cached_encoding_is_found_and_harms_nobody_later(write: Any, inference: bool) -> None:
    shared = Shared()
    cache = EmbeddingCache(10**6, shared)

    async def compute() -> dict[str, torch.Tensor]:
        with torch.inference_mode(inference):
            return {"pooled": torch.ones(100)}

    write((await cache.get(key(1), compute)).encoding)
    again = await cache.get(key(1), compute)
    assert again.source == "shared"
    assert torch.equal(again.encoding["pooled"], torch.ones(100))
    write(again.encoding)
    shared.entries.clear()
    again = await cache.get(key(1), compute)
    assert again.source == "computed"
    assert torch.equal(again.encoding["pooled"], torch.ones(100))
    stats = cache.stats()
    assert (stats.mutated, stats.entries, stats.nbytes) == (2, 1, COST_BYTES)


async def test_a_found_encoding_is_no_dict_to_put_things_into_and_packs_read_only() -> None:
    found = await EmbeddingCache(10**6).get(key(1), Encoder())
    with pytest.raises(TypeError):
        found.encoding["more"] = torch.ones(1)  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        pack(found.encoding)["pooled"].data[0] = 1


async def test_what_another_replica_has_computed_is_not_computed_again() -> None:
    shared = Shared()
    encoder = Encoder(clock := Clock())
    first, second = (EmbeddingCache(10**6, shared, clock) for _ in range(2))
    await first.get(key(1), encoder, keep=True)
    await settle()
    assert shared.kept == set(shared.entries) == {key(1).digest()}
    assert shared.entries[key(1).digest()].cost_s == encoder.cost_s
    found = await second.get(key(1), encoder)
    assert (found.source, encoder.count) == ("shared", 1)
    assert torch.equal(found.encoding["pooled"], torch.ones(100))
    assert await source(second, 1, encoder) == "local"
    assert shared.used == [key(1).digest()]
    assert (second.stats().shared, second.stats().local, second.stats().computed) == (1, 1, 0)


async def test_what_damaged_weights_may_have_made_is_in_no_tier_afterwards() -> None:
    shared = Shared()
    cache, encoder = EmbeddingCache(10**6, shared), Encoder()
    assert await source(cache, 1, encoder) == "computed"
    await settle()
    encoder.open.clear()
    computing = asyncio.ensure_future(cache.get(key(2), encoder))
    await settle()
    cache.forget_all()
    encoder.open.set()
    assert (await computing).source == "computed"
    await settle()
    assert (shared.entries, shared.claims, cache.stats().entries, cache.stats().nbytes) == ({}, set(), 0, 0)
    assert [await source(cache, number, encoder) for number in (1, 2, 2)] == ["computed", "computed", "local"]
    await settle()
    assert len(shared.entries) == 2


async def test_with_the_other_tier_gone_everything_is_computed_and_nothing_fails() -> None:
    shared = Shared()
    cache, encoder = EmbeddingCache(10**6, shared), Encoder()
    shared.error = RuntimeError("the actor died")
    assert [await source(cache, number, encoder) for number in (1, 2, 1)] == ["computed", "computed", "local"]
    assert cache.stats().shared_errors == 2
    shared.error = None
    encoder.open.clear()
    getting = asyncio.ensure_future(cache.get(key(3), encoder))
    await settle()
    shared.error = RuntimeError("the actor died before it heard of it")
    encoder.open.set()
    assert (await getting).source == "computed"
    await settle()
    assert (cache.stats().shared_errors, cache.stats().failed) == (3, 0)
    assert await source(cache, 3, encoder) == "local"


async def test_what_the_other_tier_gives_is_checked_by_using_it() -> None:
    shared = Shared()
    layout, data = join_tensors(pack({"pooled": torch.ones(3)}))
    shared.entries[key(1).digest()] = SharedEncoding((replace(layout[0], dtype="float33"),), data, 1.0)
    cache, encoder = EmbeddingCache(10**6, shared), Encoder()
    assert await source(cache, 1, encoder) == "computed"
    assert cache.stats().shared_errors == 1


async def test_stats_are_plain_values() -> None:
    cache = EmbeddingCache(10**6)
    assert cache.stats().entries_per_gib == 0
    await cache.get(key(1), Encoder())
    stats = json.loads(json.dumps(asdict(cache.stats())))
    assert stats["entries_per_gib"] == pytest.approx(2**30 / COST_BYTES)
