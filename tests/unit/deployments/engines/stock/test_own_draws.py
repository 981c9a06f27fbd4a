"""A call's default random streams go on where its last turn ended, and others' go on as if it had drawn nothing."""

from __future__ import annotations

import torch

from deployments.engines.stock.own_draws import OwnDraws


def test_each_call_draws_its_own_numbers_whatever_others_draw() -> None:
    first, second = OwnDraws(3, None), OwnDraws(4, torch.device("cpu"))
    torch.manual_seed(5)
    others = torch.randn(4)
    torch.manual_seed(5)
    found: dict[int, list[torch.Tensor]] = {3: [], 4: []}
    own = [torch.randn(1)]
    for turn in range(3):
        for seed, draws in ((3, first), (4, second)):
            draws.take()
            found[seed] += [torch.randn(1), torch.randn(1)]
            draws.give_back()
            draws.give_back()  # which has nothing to give back
        own.append(torch.randn(1))
        assert torch.equal(torch.cat(own), others[: turn + 2])
    for seed, numbers in found.items():
        torch.manual_seed(seed)
        assert torch.equal(torch.cat(numbers), torch.cat([torch.randn(1) for _ in range(6)]))
