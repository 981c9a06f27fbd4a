"""A plan of the tensors of a module that stay on a device too small for it, and of those that come block by block."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from weights.memory.block_plan import ALIGNMENT, Rates, choose_way, plan_blocks


def random_sizes(chance: random.Random) -> dict[str, int]:
    """Return the tensors of a transformer: two lists of blocks with lists of their own, and some beside them."""
    sizes = {"x_embedder.weight": chance.randint(1, 9999), "norm_out.linear.weight": chance.randint(1, 9999)}
    for name in ("transformer_blocks", "single_transformer_blocks"):
        for number in range(chance.randint(1, 15)):
            block = f"{name}.{number}"
            for leaf in ("attn.to_q", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"):
                sizes |= {f"{block}.{leaf}.weight": chance.randint(1, 99_999), f"{block}.{leaf}.bias": 64}
    return sizes


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def test_every_plan_keeps_to_its_budget_and_has_each_tensor_once() -> None:
    chance = random.Random(3)
    num_planned = 0
    for _ in range(200):
        sizes = random_sizes(chance)
        total = sum(map(aligned, sizes.values()))
        budget = chance.randint(total // 50, total - 1)
        plan = plan_blocks(sizes, budget)
        if plan is None:
            rest = sum(aligned(nbytes) for name, nbytes in sizes.items() if "blocks" not in name)
            leaves = Counter[str]()
            for name, nbytes in sizes.items():
                leaves[name.rpartition(".")[0] if "blocks" in name else ""] += aligned(nbytes)
            del leaves[""]
            assert rest + 2 * max(leaves.values()) > budget, "single layers would have fitted"
            continue
        num_planned += 1
        names = [name for block in plan.blocks for name in block.offsets]
        assert len(names) == len(set(names))
        assert plan.streamed == set(names) <= {name for name in sizes if "blocks" in name}
        staying = sum(aligned(nbytes) for name, nbytes in sizes.items() if name not in plan.streamed)
        assert staying + 2 * plan.buffer_bytes <= budget
        for block in plan.blocks:
            spans = sorted((offset, offset + sizes[name]) for name, offset in block.offsets.items())
            assert all(start % ALIGNMENT == 0 for start, _ in spans)
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
            assert spans[-1][1] <= block.nbytes <= plan.buffer_bytes
            assert all(name.startswith(f"{block.path}.") for name in block.offsets)
    assert num_planned > 100


def test_more_room_keeps_more_and_blocks_that_come_lie_between_those_that_stay() -> None:
    sizes = {f"blocks.{number}.linear.weight": 5120 for number in range(100)}
    plan = plan_blocks(sizes, 5120 * 52)
    assert plan is not None
    assert [block.path for block in plan.blocks] == [f"blocks.{number}" for number in range(0, 100, 2)]
    tight = plan_blocks(sizes, 5120 * 2)
    assert tight is not None
    assert len(tight.blocks) == 100
    assert plan_blocks(sizes, 5120 * 2 - 1) is None


def test_a_block_that_is_too_large_comes_in_parts() -> None:
    sizes = {f"blocks.{number}.{part}.weight": 51_200 for number in range(3) for part in ("a", "b.0", "b.1")}
    plan = plan_blocks(sizes, 102_400)
    assert plan is not None
    assert [block.path for block in plan.blocks] == [
        f"blocks.{n}.{part}" for n in range(3) for part in ("a", "b.0", "b.1")
    ]


def test_a_module_without_lists_of_blocks_has_no_plan() -> None:
    assert plan_blocks({"model.weight": 10_000, "head.weight": 10_000}, 15_000) is None


@pytest.mark.parametrize(
    ("rows", "rates", "way"),
    [
        (1, Rates(25e9, 35e9, 434e9), "host"),
        (17, Rates(25e9, 35e9, 434e9), "host"),
        (18, Rates(25e9, 35e9, 434e9), "stream"),
        (4096, Rates(25e9, 35e9, 434e9), "stream"),
        (199, Rates(25e9, 35e9, 5e12), "host"),
        (201, Rates(25e9, 35e9, 5e12), "stream"),
        (1, Rates(50e9, 35e9, 5e12), "stream"),
    ],
)
def test_few_rows_are_the_hosts_and_for_many_the_weights_come(rows: int, rates: Rates, way: str) -> None:
    """The turning point of bfloat16 on a real machine: 2 x weights x rows / flops takes as long as the link."""
    assert choose_way(2 * 10**8, 10**8, rows, rates) == way
    assert choose_way(2 * 10**8, 10**8, rows, rates, is_resident=True) == "stay"
