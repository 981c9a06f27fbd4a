"""Adapters of rows: which rows, below what routes them, and what a step does for each layer."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from deployments.engines.nn.lora import AdaptedRows, RowAdapter
from weights.operations.adapters import LoraPair

NUM_LAYERS = 200


class Router(nn.Module):
    """Gives its layer some of the rows, in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.Linear(16, 16)
        self.routed_rows: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.routed_rows = torch.tensor([4, 1, 2])
        result: torch.Tensor = self.expert(x[self.routed_rows])
        return result


@pytest.fixture(autouse=True)
def no_gradients() -> object:
    with torch.no_grad():
        yield


def random_pair() -> LoraPair:
    return LoraPair(torch.randn(2, 16), torch.randn(16, 2), 0.5)


def test_rows_get_their_own_adapters_also_below_what_routes_them() -> None:
    module = nn.ModuleDict({"plain": nn.Linear(16, 16), "router": Router()})
    adapted, x = AdaptedRows(module), torch.randn(5, 16)
    pairs = [{path: random_pair() for path in ("plain", "router.expert")} for _ in range(2)]
    uses = [RowAdapter(pairs[0], 1.0, torch.tensor([0, 1]), 4), RowAdapter(pairs[1], -0.5, torch.tensor([1, 4]), 4)]
    before = {name: module[name](x) for name in module}
    for _ in range(2):  # the second time the layers are known
        with adapted.adding(uses):
            found = {name: module[name](x) for name in module}
        for name, rows in (("plain", torch.arange(5)), ("router", torch.tensor([4, 1, 2]))):
            expected = before[name].clone()
            for use in uses:
                pair = use.pairs["plain" if name == "plain" else "router.expert"]
                delta = use.strength * pair.scale * x[rows] @ pair.down.T @ pair.up.T
                expected += torch.isin(rows, use.rows)[:, None] * delta
            assert torch.allclose(found[name], expected, atol=1e-5)
    assert not any(part._forward_hooks for part in module.modules())


def test_a_step_looks_for_no_layer_again_and_makes_nothing_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.ModuleList(nn.Linear(16, 16) for _ in range(NUM_LAYERS))
    uses = [RowAdapter({str(number): random_pair() for number in range(NUM_LAYERS)}, 1.0, torch.arange(1), 1)]
    adapted = AdaptedRows(module)
    with adapted.adding(uses):
        pass
    monkeypatch.setattr(module, "get_submodule", None)
    gc.collect()
    before = len(gc.get_objects())
    with adapted.adding(uses):
        assert len(gc.get_objects()) - before < NUM_LAYERS // 2
        assert all(len(layer._forward_hooks) == 1 for layer in module)


def test_what_stands_in_for_a_forward_is_not_written_to() -> None:
    module, known = nn.Sequential(nn.Linear(16, 16)), torch.randn(1, 16)
    module[0].forward = lambda x: known.expand(len(x), -1)
    kept, x, pair = known.clone(), torch.randn(3, 16), random_pair()
    with AdaptedRows(module).adding([RowAdapter({"0": pair}, 1.0, torch.tensor([2]), 1)]):
        found = module(x)
    assert torch.equal(known, kept)
    assert torch.equal(found[:2], kept.expand(2, -1))
    assert torch.allclose(found[2], kept[0] + 0.5 * x[2] @ pair.down.T @ pair.up.T, atol=1e-5)
