"""A denoise step that nobody wants any more ends before its next block; one that somebody wants goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from unit.deployments.engines.diffusion.test_denoise_batches import CostsOfMerging

from deployments.engines.diffusion.engine import DiffusionEngine
from deployments.engines.nn.forwards import outer_blocks
from deployments.engines.records.protocol import ConditionedRequest


class Counted:
    """The blocks of a denoiser that ran, in their order; `then` is called after each."""

    def __init__(self, pair: Any, then: Any = lambda count: None) -> None:
        self.ran: list[int] = []
        self.then = then
        self.blocks = outer_blocks(pair.ours.denoiser)
        self._hooks = [block.register_forward_hook(self._note(at)) for at, block in enumerate(self.blocks)]

    def _note(self, at: int) -> Any:
        def note(*_: Any) -> None:
            self.ran.append(at)
            self.then(len(self.ran))

        return note

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def add(engine: DiffusionEngine, pair: Any, make_request: Any, *seeds: int) -> None:
    for seed in seeds:
        request = make_request(seed=seed, request_id=f"r{seed}")
        engine.add_request(ConditionedRequest(request, pair.conditioning(seed, negative=True), {}))


def images(engine: DiffusionEngine) -> dict[str, np.ndarray]:
    found = {}
    while engine.has_work:
        found |= {output.request_id: output.images for output in engine.step() if output.images is not None}
        assert not engine.failures
    return found


def test_a_batch_that_nobody_wants_ends_within_a_block(pair: Any, make_request: Any) -> None:
    engine = DiffusionEngine(pair.ours, CostsOfMerging())
    counted = Counted(pair)
    try:
        num_blocks = len(counted.blocks)
        assert num_blocks > 1
        for stop in range(1, num_blocks):
            add(engine, pair, make_request, 1, 2)
            counted.ran.clear()
            counted.then = lambda count, stop=stop: count == stop and [engine.request_cancel(f"r{n}") for n in (1, 2)]
            assert engine.step() == []
            assert len(counted.ran) == stop
            assert not engine.failures
            assert not engine.has_work
    finally:
        counted.close()
    assert not any(block._forward_pre_hooks for block in counted.blocks)


@pytest.mark.drawn(2)
def test_a_request_that_somebody_wants_goes_on_and_its_image_is_its_own(pair: Any, make_request: Any) -> None:
    engine = DiffusionEngine(pair.ours, CostsOfMerging())
    add(engine, pair, make_request, 3)
    alone = images(engine)["r3"]
    engine = DiffusionEngine(pair.ours, CostsOfMerging())
    add(engine, pair, make_request, 1, 2, 3)
    counted = Counted(pair, lambda count: count == 1 and [engine.request_cancel("r1"), engine.request_cancel("r2")])
    try:
        engine.step()
        assert max(counted.ran) == len(counted.blocks) - 1
    finally:
        counted.close()
    for left in ("r1", "r2"):
        engine.abort(left)
    found = images(engine)
    assert found.keys() == {"r3"}
    assert np.abs(found["r3"].astype(int) - alone).max() <= 1


@pytest.mark.drawn(2)
def test_a_cancelled_request_holds_up_no_other_one_and_comes_again(pair: Any, make_request: Any) -> None:
    engine = DiffusionEngine(pair.ours, CostsOfMerging())
    engine.request_cancel("r1")  # of an earlier request
    engine.abort("r1")
    add(engine, pair, make_request, 1)
    first = images(engine)["r1"]
    add(engine, pair, make_request, 1)
    engine.request_cancel("r1")
    assert engine.step() == []
    assert not engine.has_work
    engine.abort("r1")
    add(engine, pair, make_request, 1)
    assert np.array_equal(images(engine)["r1"], first)


def test_blocks_of_lists_within_lists_are_parts_of_the_outer_ones() -> None:
    inner = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    outer = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(1, 1)), torch.nn.ModuleDict({"inner": inner})])
    module = torch.nn.ModuleDict({"before": torch.nn.Linear(1, 1), "part": torch.nn.ModuleDict({"blocks": outer})})
    assert outer_blocks(module) == list(outer)
