"""Slots of sequences are those of their blocks whatever becomes of these, and a step looks at the new ones alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kit.seeding import seeded_random

from deployments.engines.llm.sequences import paged_attention
from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, blocks_for
from deployments.engines.llm.sequences.kv_cache import KVCache, KvHeads
from deployments.engines.llm.sequences.paged_attention import MAX_PADDED, plan_attention
from deployments.engines.llm.sequences.sequence import Chunk, Sequence
from deployments.engines.llm.sequences.slot_table import SlotTable


class Cache:
    null_slot = 10**6


def test_slots_are_those_of_the_blocks() -> None:
    chance = seeded_random()
    for _ in range(40):
        table, blocks = SlotTable(), [chance.randrange(100)]
        for _ in range(30):
            turn = chance.random()
            if turn < 0.6:  # grows, mostly in a run
                blocks.append(blocks[-1] + 1 if chance.random() < 0.8 else chance.randrange(100))
            elif turn < 0.75:  # writes into a block of its own
                blocks[-1] = chance.randrange(100)
            elif turn < 0.8:  # was preempted
                blocks[:] = [chance.randrange(100) for _ in range(chance.randrange(1, 9))]
            table.follow(blocks)
            slots = [block * BLOCK_SIZE + place for block in blocks for place in range(BLOCK_SIZE)]
            start, stop = sorted(chance.choices(range(len(slots) + 1), k=2))
            assert table.part(start, stop).tolist() == slots[start:stop]
            stop = max(1, stop)
            own = blocks[: blocks_for(stop)]
            is_run = own == list(range(own[0], own[0] + len(own)))
            assert table.run(stop) == (own[0] * BLOCK_SIZE if is_run else None)


@pytest.mark.parametrize("in_a_run", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_a_step_makes_tensors_of_new_blocks_alone(
    monkeypatch: pytest.MonkeyPatch, in_a_run: bool, on_host: bool
) -> None:
    made, tensor = [], torch.tensor
    monkeypatch.setattr(
        torch, "tensor", lambda values, **options: made.append(len(values)) or tensor(values, **options)
    )
    monkeypatch.setattr(paged_attention, "computes_on_host", lambda device: on_host)
    blocks = list(range(200)) if in_a_run else list(range(0, 400, 2))
    sequence = Sequence("a", [5] * (200 * BLOCK_SIZE), 10, block_table=blocks)
    for length in range(190 * BLOCK_SIZE, 190 * BLOCK_SIZE + 40):
        made.clear()
        plan = plan_attention([Chunk(sequence, length - 1, length, True)], Cache(), torch.device("cpu"), 0)  # type: ignore[arg-type]
        slot = blocks[(length - 1) // BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
        assert plan.slots.tolist() == [slot]
        if length > 190 * BLOCK_SIZE:
            assert sum(made) <= 2
    assert len(plan.long) == on_host
    if on_host:
        assert (plan.long[0].run == 0) is in_a_run
        assert len(plan.long[0].slots) == (0 if in_a_run else length)


def test_long_completions_of_one_step_attend_each_to_its_own_keys() -> None:
    chance, num_blocks = seeded_random(), 2 * blocks_for(2 * MAX_PADDED)
    spec = SimpleNamespace(kv_layers=[KvHeads(2, 8, 8)])
    cache = KVCache(spec, num_blocks, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    keys, values = torch.randn(2, num_blocks * BLOCK_SIZE, 2, 8)
    cache.write_slots(0, torch.arange(len(keys)), keys, values)
    blocks = chance.sample(range(num_blocks), num_blocks)
    lengths = [chance.randrange(MAX_PADDED + 1, 2 * MAX_PADDED) for _ in range(2)]
    chunks, expected = [], []
    q_THD = torch.randn(2, 4, 8)
    for row, length in enumerate(lengths):
        own = blocks[row::2][: blocks_for(length)]
        chunks.append(Chunk(Sequence(str(row), [5] * length, 10, block_table=own), length - 1, length, True))
        slots = [block * BLOCK_SIZE + place for block in own for place in range(BLOCK_SIZE)][:length]
        k_LHD, v_LHD = (one[slots].repeat_interleave(2, 1) for one in (keys, values))
        weights = torch.einsum("hd,lhd->hl", q_THD[row], k_LHD).div(8**0.5).softmax(-1)
        expected.append(torch.einsum("hl,lhd->hd", weights, v_LHD))
    plan = plan_attention(chunks, cache, torch.device("cpu"), 0)
    assert len(plan.long) == 2
    torch.testing.assert_close(plan.read(0, q_THD), torch.stack(expected))
