from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.engines.llm.sequences.block_manager import BLOCK_SIZE, BlockPool, block_key, blocks_for


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


@given(
    st.integers(1, 10),
    st.lists(st.tuples(st.sampled_from(["allocate", "release", "publish", "find"]), st.integers(0, 9))),
)
def test_published_blocks_are_found_until_their_room_is_needed(num_blocks, actions):
    """Against a naive model: use counts, and what each block is known to hold."""
    pool = BlockPool(num_blocks)
    uses: dict[int, int] = {}
    keys: dict[bytes, int] = {}
    unused: list[int] = []  # published, the oldest first
    for action, number in actions:
        held = sorted(block for block, count in uses.items() if count)
        if action == "allocate" and number <= num_blocks - len(held):
            before = dict(keys)
            blocks = pool.allocate(number)
            assert not set(blocks) & set(held)
            evicted = [block for block in unused if block in blocks]
            assert evicted == unused[: len(evicted)]  # the oldest went
            unused = unused[len(evicted) :]
            keys = {key: block for key, block in before.items() if block not in evicted}
            uses |= dict.fromkeys(blocks, 1)
        elif action == "release" and held:
            block = held[number % len(held)]
            pool.release_blocks([block])
            uses[block] -= 1
            if not uses[block] and block in keys.values():
                unused.append(block)
        elif action == "publish" and held:
            block, key = held[number % len(held)], b"%d" % number
            pool.publish(block, key)
            if key not in keys and block not in keys.values():
                keys[key] = block
        elif action == "find":
            key = b"%d" % number
            found = pool.find_prefix([key])
            assert found == ([keys[key]] if key in keys else [])
            pool.share_blocks(found)
            for block in found:
                uses[block] = uses.get(block, 0) + 1
                unused = [other for other in unused if other != block]
        assert pool.num_free == num_blocks - sum(count > 0 for count in uses.values())
        assert all(pool.is_shared(block) == (count > 1) for block, count in uses.items() if count)


def test_blocks_follow_each_other_where_they_can():
    pool = BlockPool(20)
    first = pool.allocate(3)
    second = pool.allocate(3)
    assert (first, second) == ([0, 1, 2], [3, 4, 5])
    assert pool.allocate(1, after=2) == [6]  # taken
    pool.release_blocks(second)
    assert pool.allocate(2, after=2) == [3, 4]


def next_of(free: list[bool], last: int | None) -> int:
    """Return the block that is taken next: the one behind the last, or the first of the longest run."""
    if last is not None and last + 1 < len(free) and free[last + 1]:
        return last + 1
    runs, first = [], None
    for place, is_free in enumerate([*free, False]):
        if is_free and first is None:
            first = place
        elif not is_free and first is not None:
            runs.append((first - place, first))
            first = None
    return min(runs)[1]


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 40), st.data())
def test_blocks_are_those_that_are_found_one_by_one(free, count, data):
    pool = BlockPool(len(free))
    pool.allocate(len(free))
    pool.release_blocks([place for place, is_free in enumerate(free) if is_free])
    used = [place for place, is_free in enumerate(free) if not is_free]
    last = after = data.draw(st.sampled_from([None, *used]))
    expected = []
    for _ in range(count := min(count, sum(free))):
        last = next_of(free, last)
        free[last] = False
        expected.append(last)
    assert pool.allocate(count, after) == expected


def test_the_pool_is_looked_through_once_however_many_blocks_are_wanted(monkeypatch):
    pool = BlockPool(1000)
    pool.release_blocks(pool.allocate(1000)[::2])
    seen, flatnonzero = [], np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", lambda values: seen.append(1) or flatnonzero(values))
    assert pool.allocate(400) == list(range(0, 800, 2))
    assert len(seen) == 1


def test_keys_depend_on_all_that_came_before():
    first = block_key(b"", range(16))
    assert block_key(first, range(16)) != first
    assert block_key(b"adapter", range(16)) != first
    assert block_key(b"", range(1, 17)) != first
    assert block_key(b"", list(range(16))) == first
