from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.llm.block_manager import BLOCK_SIZE, BlockPool, blocks_for


@given(st.integers(0, 10_000))
def test_blocks_for_is_the_smallest_that_suffices(num_tokens):
    assert (blocks_for(num_tokens) - 1) * BLOCK_SIZE < num_tokens <= blocks_for(num_tokens) * BLOCK_SIZE


@given(
    st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from(["allocate", "release"]), st.integers(0, 6))),
)
def test_blocks_are_neither_lost_nor_given_twice(num_blocks, actions):
    pool = BlockPool(num_blocks)
    held: list[list[int]] = []  # one list per sequence
    for action, number in actions:
        if action == "allocate":
            if number > pool.num_free:
                with pytest.raises(ValueError, match="are free"):
                    pool.allocate(number)
                continue
            blocks = pool.allocate(number)
            assert not {block for group in held for block in group} & set(blocks)
            held.append(blocks)
        elif held:
            pool.release_blocks(held.pop(number % len(held)))
        in_use = {block for group in held for block in group}
        assert pool.num_free == num_blocks - len(in_use)
    for blocks in held:
        pool.release_blocks(blocks)
    assert sorted(pool.allocate(num_blocks)) == list(range(num_blocks))


def test_a_free_block_cannot_be_released():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release_blocks(blocks)
    with pytest.raises(ValueError, match="not in use"):
        pool.release_blocks(blocks)
