"""The cache of text encodings: exact, bounded, computed once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from kit.clock import Clock
from unit.deployments.text.batches import Batches

from deployments.text.cache import ENTRY_BYTES, TENSOR_BYTES, EncodingCache, EncodingKey, Found
from deployments.text.requests import pack

COST_BYTES = ENTRY_BYTES + TENSOR_BYTES + 400  # of an encoding of 100 float32


def key(number: int, module: str = "m") -> EncodingKey:
    return EncodingKey(module, "float32", "max_length", (number, 0))


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


async def get(cache: EncodingCache, key: EncodingKey, compute: Any, *, keep: bool = False) -> Found:
    """Look one key up; `compute` makes one encoding."""

    async def compute_many(keys: Sequence[EncodingKey]) -> list[Any]:
        return [await compute() for _ in keys]

    return (await cache.get_all([key], compute_many, keep={key} if keep else ()))[key]


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def source(cache: EncodingCache, number: int, encoder: Any, **options: Any) -> str:
    return (await get(cache, key(number), encoder, **options)).source


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
    cache, encoder = EncodingCache(10**6), Encoder()
    first = await get(cache, key(1), encoder)
    assert first.source == "computed"
    second = await get(cache, key(1), encoder)
    assert second.source == "local"
    assert second.encoding is first.encoding
    for other in (key(2), key(1, "other")):
        assert (await get(cache, other, encoder)).source == "computed"
    assert encoder.count == 3
    stats = cache.cache_stats()
    assert (stats.local, stats.computed, stats.joined, stats.entries) == (1, 3, 0, 3)
    assert stats.nbytes == 3 * COST_BYTES


async def test_who_asks_meanwhile_waits_for_the_same_computation() -> None:
    cache, encoder = EncodingCache(10**6), Encoder()
    encoder.open.clear()
    waiting = [asyncio.ensure_future(get(cache, key(1), encoder)) for _ in range(1000)]
    await settle()
    encoder.open.set()
    found = await asyncio.gather(*waiting)
    assert [one.source for one in found] == ["computed"] + ["joined"] * 999
    assert len({id(one.encoding) for one in found}) == 1
    assert (encoder.count, cache.cache_stats().joined) == (1, 999)


async def test_a_failure_is_not_remembered_and_those_who_waited_try_themselves() -> None:
    cache, encoder = EncodingCache(10**6), Encoder()
    encoder.error = ValueError("bad tokens")
    encoder.open.clear()
    waiting = [asyncio.ensure_future(get(cache, key(1), encoder)) for _ in range(3)]
    await settle()
    encoder.open.set()
    assert {str(error) for error in await asyncio.gather(*waiting, return_exceptions=True)} == {"bad tokens"}
    encoder.error = None
    assert (await get(cache, key(1), encoder)).encoding["pooled"][0] == encoder.count == 4
    assert (cache.cache_stats().entries, cache.cache_stats().failed) == (1, 3)


@pytest.mark.parametrize("cancelled", [{0}, {1}, {0, 1}])
async def test_cancelling_callers_does_not_cancel_the_computation(cancelled: set[int]) -> None:
    cache, encoder = EncodingCache(10**6), Encoder()
    encoder.open.clear()
    waiting = [asyncio.ensure_future(get(cache, key(1), encoder)) for _ in range(2)]
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
    cache = EncodingCache(3 * COST_BYTES, clock=clock)
    for number, encoder.cost_s in ((1, 5.0), (2, 0.1), (3, 3.0), (4, 1.0)):
        await get(cache, key(number), encoder)
    stats = cache.cache_stats()
    assert (stats.entries, stats.evicted, stats.nbytes) == (3, 1, 3 * COST_BYTES)
    assert [await source(cache, number, encoder) for number in (1, 3, 4)] == ["local"] * 3
    encoder.cost_s = 0.01
    assert await source(cache, 2, encoder) == "computed"
    assert cache.cache_stats().refused == 1
    assert await source(cache, 4, encoder) == "local"


async def test_negative_and_empty_prompts_stay_however_cheap() -> None:
    clock = Clock()
    encoder = Encoder(clock)
    cache = EncodingCache(8 * COST_BYTES, clock=clock)
    encoder.cost_s = 0.001
    await get(cache, key(0), encoder, keep=True)
    await get(cache, key(1), encoder)
    assert await source(cache, 1, encoder, keep=True) == "local"  # wanted as a negative prompt later
    encoder.cost_s = 10.0
    for number in range(2, 40):
        await get(cache, key(number), encoder)
    assert [await source(cache, number, encoder) for number in (0, 1)] == ["local"] * 2
    stats = cache.cache_stats()
    assert (stats.entries, stats.kept, stats.kept_bytes) == (8, 2, 2 * COST_BYTES)
    for number in range(100, 120):
        await get(cache, key(number), encoder, keep=True)
    assert cache.cache_stats().kept == 2  # a quarter of eight, whatever is asked for


async def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache, encoder = EncodingCache(COST_BYTES), Encoder()
    await get(cache, key(1), encoder)
    encoder.size = 101
    found = await get(cache, key(2), encoder)
    assert found.encoding["pooled"].shape == (101,)
    assert await source(cache, 1, encoder) == "local"
    assert await source(cache, 2, encoder) == "computed"


async def test_a_row_of_a_batch_does_not_keep_the_batch() -> None:
    cache = EncodingCache(10**6)
    batch = torch.rand(50, 100)

    async def compute() -> dict[str, torch.Tensor]:
        return {"hidden": batch[3], "half": batch[4, :50], "none": torch.empty(0)}

    encoding = (await get(cache, key(1), compute)).encoding
    held = sum(tensor.untyped_storage().nbytes() for tensor in encoding.values())
    assert cache.cache_stats().nbytes == ENTRY_BYTES + 3 * TENSOR_BYTES + held == ENTRY_BYTES + 3 * TENSOR_BYTES + 600
    batch.zero_()
    assert (await get(cache, key(1), compute)).encoding["hidden"].any()


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
    cache = EncodingCache(10**6)

    async def compute() -> dict[str, torch.Tensor]:
        with torch.inference_mode(inference):
            return {"pooled": torch.ones(100)}

    write((await get(cache, key(1), compute)).encoding)
    again = await get(cache, key(1), compute)
    assert again.source == "computed"
    assert torch.equal(again.encoding["pooled"], torch.ones(100))
    stats = cache.cache_stats()
    assert (stats.mutated, stats.entries, stats.nbytes) == (1, 1, COST_BYTES)


async def test_a_found_encoding_is_no_dict_to_put_things_into_and_packs_read_only() -> None:
    found = await get(EncodingCache(10**6), key(1), Encoder())
    with pytest.raises(TypeError):
        found.encoding["more"] = torch.ones(1)  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        pack(found.encoding)["pooled"].data[0] = 1


async def test_what_damaged_weights_may_have_made_is_forgotten() -> None:
    cache, encoder = EncodingCache(10**6), Encoder()
    assert await source(cache, 1, encoder) == "computed"
    encoder.open.clear()
    computing = asyncio.ensure_future(get(cache, key(2), encoder))
    await settle()
    cache.forget_all()
    encoder.open.set()
    assert (await computing).source == "computed"
    assert (cache.cache_stats().entries, cache.cache_stats().nbytes) == (0, 0)
    assert [await source(cache, number, encoder) for number in (1, 2, 2)] == ["computed", "computed", "local"]


async def test_stats_are_plain_values() -> None:
    cache = EncodingCache(10**6)
    assert cache.cache_stats().entries_per_gib == 0
    await get(cache, key(1), Encoder())
    stats = json.loads(json.dumps(asdict(cache.cache_stats())))
    assert stats["entries_per_gib"] == pytest.approx(2**30 / COST_BYTES)


# Several keys in one call


async def test_a_failure_of_one_module_releases_its_claims_and_no_others() -> None:
    cache, batches = EncodingCache(10**6), Batches()

    async def compute_many(keys: Sequence[EncodingKey]) -> list[dict[str, torch.Tensor]]:
        if keys[0].module_key == "n":
            raise ValueError("bad")
        return await batches(keys)

    with pytest.raises(ValueError, match="bad"):
        await cache.get_all([key(1), key(2, "n"), key(3, "n")], compute_many)
    found = await cache.get_all([key(1), key(2, "n")], batches)
    assert [one.source for one in found.values()] == ["local", "computed"]


async def test_a_batch_with_too_few_results_fails_and_leaves_nobody_waiting() -> None:
    cache = EncodingCache(10**6)

    async def compute_many(keys: Sequence[EncodingKey]) -> list[dict[str, torch.Tensor]]:
        return [{"pooled": torch.ones(1)}]

    with pytest.raises(ValueError, match="shorter"):
        await asyncio.wait_for(cache.get_all([key(1), key(2)], compute_many), 5)
    assert await source(cache, 2, Encoder()) == "computed"


async def test_who_joined_failing_computations_goes_alone_in_the_end() -> None:
    """However often others fail by their own terms, a request is not refused for that."""
    cache, hasty = EncodingCache(10**6), Encoder()
    hasty.error = TimeoutError("its time was over")
    hasty.open.clear()
    first = asyncio.ensure_future(get(cache, key(1), hasty))
    await settle()
    patient = Encoder()
    others = [asyncio.ensure_future(get(cache, key(1), hasty)) for _ in range(6)]
    last = asyncio.ensure_future(get(cache, key(1), patient))
    await settle()
    hasty.open.set()
    async with asyncio.timeout(5):
        assert (await last).source == "computed"
        failed = await asyncio.gather(first, *others, return_exceptions=True)
    assert sum(isinstance(error, TimeoutError) for error in failed) >= 3


async def test_nobody_joins_what_was_begun_before_everything_was_forgotten() -> None:
    cache, damaged, sound = EncodingCache(10**6), Encoder(), Encoder()
    damaged.open.clear()
    before = asyncio.ensure_future(get(cache, key(1), damaged))
    await settle()
    cache.forget_all()
    assert await source(cache, 1, sound) == "computed"
    damaged.open.set()
    assert (await before).source == "computed"
    assert (damaged.count, sound.count) == (1, 1)
    assert await source(cache, 1, sound) == "local"
