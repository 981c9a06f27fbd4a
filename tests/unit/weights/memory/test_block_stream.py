"""Blocks that take turns in two buffers: what is given is what was asked for, whatever the order."""

from __future__ import annotations

import random
import weakref

import pytest
import torch

from weights.memory.block_plan import BlockPlan, plan_blocks
from weights.memory.block_stream import BlockStream
from weights.memory.device_space import DeviceSpace
from weights.memory.transfer import HostCopy, Pair, TransferReport
from weights.records.errors import WeightsError


class CountedCopy(HostCopy):
    """Counts its copies, and fails when told to."""

    def __init__(self) -> None:
        super().__init__(num_threads=1)
        self.num_copies = 0
        self.failure: Exception | None = None

    def copy(self, pairs: list[Pair]) -> TransferReport:  # type: ignore[override]
        self.num_copies += 1
        if self.failure is not None:
            raise self.failure
        return super().copy(pairs)


def open_stream(num_blocks: int) -> tuple[BlockStream, dict[str, torch.Tensor], BlockPlan, CountedCopy]:
    generator = torch.Generator().manual_seed(num_blocks)
    hosts: dict[str, torch.Tensor] = {}
    for number in range(num_blocks):
        hosts[f"blocks.{number}.a.weight"] = torch.randn(7 + number, 11, generator=generator)
        hosts[f"blocks.{number}.a.bias"] = torch.randn(7 + number, generator=generator).to(torch.bfloat16)
    sizes = {name: tensor.nbytes for name, tensor in hosts.items()}
    largest = max(-(-sizes[f"blocks.{n}.a.weight"] // 512) * 512 + 512 for n in range(num_blocks))
    plan = plan_blocks(sizes, 2 * largest)
    assert plan is not None
    assert len(plan.blocks) == num_blocks
    transfer = CountedCopy()
    return BlockStream(plan, hosts, DeviceSpace("cpu-private", transfer)), hosts, plan, transfer


def check(stream: BlockStream, hosts: dict[str, torch.Tensor], plan: BlockPlan, block: int) -> None:
    found = stream.tensors_of(block)
    assert found.keys() == plan.blocks[block].offsets.keys()
    for name, tensor in found.items():
        assert tensor.dtype == hosts[name].dtype
        assert torch.equal(tensor, hosts[name])


def test_any_order_gives_each_block_its_own_tensors() -> None:
    chance = random.Random(1)
    for num_blocks in (1, 2, 3, 7):
        stream, hosts, plan, _ = open_stream(num_blocks)
        for _ in range(60):
            check(stream, hosts, plan, chance.randrange(num_blocks))
        stream.close()


def test_a_pass_uploads_each_block_once_and_two_blocks_stay() -> None:
    num_copies = []
    for num_passes in (2, 6):
        stream, hosts, plan, transfer = open_stream(5)
        for block in [3, 0, 4, 1, 2] * num_passes:  # not in the order of the plan: it is learned
            check(stream, hosts, plan, block)
        stream.close()
        num_copies.append(transfer.num_copies)
    assert num_copies[1] - num_copies[0] == 20
    stream, hosts, plan, transfer = open_stream(2)
    for block in [0, 1] * 5:
        check(stream, hosts, plan, block)
    assert transfer.num_copies == 2
    stream.close()


def test_an_upload_that_fails_is_told_to_who_needs_it_and_tried_again() -> None:
    stream, hosts, plan, transfer = open_stream(4)
    check(stream, hosts, plan, 0)
    stream.tensors_of(1)  # the next ones are under way
    transfer.failure = WeightsError("the link is gone")
    with pytest.raises(WeightsError, match="the link is gone"):
        list(map(stream.tensors_of, (2, 3, 0, 1)))
    transfer.failure = None
    for block in (0, 1, 2, 3, 0, 2, 1):
        try:
            check(stream, hosts, plan, block)
        except WeightsError:  # one that was begun before
            check(stream, hosts, plan, block)
    stream.close()


def test_a_closed_stream_keeps_no_memory() -> None:
    stream, *_ = open_stream(3)
    views = stream.tensors_of(0)
    kept = [weakref.ref(view) for view in views.values()]
    del views
    assert any(ref() is not None for ref in kept)
    stream.close()
    assert all(ref() is None for ref in kept)
