"""Gated features in the compiled kernels, against the same in float64 and beside torch's own error."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from diffusers.models.activations import GEGLU
from kit.drawing import seeds
from kit.kernels import needs_half_products
from torch import nn
from torch.nn import functional as F

from deployments.engines.native.operations import load_operations
from deployments.engines.nn.batch_invariant import linear
from deployments.engines.nn.few_rows import gate_any, has_half_products, multiply_any
from deployments.engines.nn.forwards import make_quick
from weights.platform.torch_seam import fake_mode

pytestmark = pytest.mark.usefixtures("faster_kernels")


def gated(x: torch.Tensor) -> torch.Tensor:
    kept, gate = x.chunk(2, dim=-1)
    return kept * F.gelu(gate)


@needs_half_products
@seeds(20)
def test_features_of_any_size(seed: int) -> None:
    """Rounded once; the same bits in any batch, order of memory and number of threads."""
    draws = random.Random(seed)
    rows, size, spread = draws.randint(2, 9), draws.randint(1, 90), draws.choice([0.1, 1.0, 4.0])
    x = (torch.randn(2, rows, 2 * size) * spread).bfloat16()
    torch.set_num_threads(1)
    found = gate_any(x)
    expected = gated(x.double())
    assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + 4e-7 * spread).all(), (rows, size, spread)
    assert torch.equal(gate_any(x[1:, -1:]), found[1:, -1:])
    torch.set_num_threads(2)
    assert torch.equal(gate_any(x.transpose(0, 1).contiguous().transpose(0, 1)), found)


@needs_half_products
def test_what_is_infinite_or_no_number_stays_so_where_it_is() -> None:
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, -300.0, 300.0, 0.0]).bfloat16()
    found = gate_any(torch.cat([torch.ones(6).bfloat16(), ends])[None])[0]
    assert found[0] == torch.inf
    assert found[2].isnan()
    assert found[3:].tolist() == pytest.approx([0.0, 300.0, 0.0], abs=1e-30)


@needs_half_products
def test_layers_are_quick_and_a_hook_of_their_product_counts() -> None:
    stock = GEGLU(64, 96).bfloat16().requires_grad_(False)
    ours, x = copy.deepcopy(stock), torch.randn(2, 5, 64).bfloat16()
    make_quick(ours)
    assert torch.equal(ours(x), load_operations().gate(stock.proj(x)))
    torch.testing.assert_close(ours(x), stock(x), atol=0.02, rtol=0.02)
    ours.proj.register_forward_hook(lambda layer, given, found: found * 2)
    assert torch.equal(ours(x), load_operations().gate(stock.proj(x) * 2))
    plain = copy.deepcopy(ours).float()
    assert torch.equal(plain(x.float()), gated(plain.proj(x.float())))
    with pytest.warns(FutureWarning, match="scale"):
        ours(x, scale=1.0)


@needs_half_products
def test_products_with_more_outputs_than_inputs_are_the_kernels() -> None:
    with torch.no_grad():
        for rows in (1, 7, 100):
            wide, x = nn.Linear(64, 512).bfloat16(), torch.randn(rows, 64).bfloat16()
            found = linear(x, wide.weight, wide.bias)
            assert torch.equal(found, load_operations().linear(x, wide.weight, wide.bias))
            expected = F.linear(x.double(), wide.weight.double(), wide.bias.double())
            assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + 1e-5).all()
            assert torch.equal(linear(x[-1:], wide.weight, wide.bias), found[-1:])
        narrow = torch.randn(64, 512).bfloat16()
        for weight, bias in [
            (wide.weight, None),
            (narrow, narrow[:, 0].contiguous()),
            (wide.weight.float(), wide.bias),
        ]:
            assert multiply_any(torch.randn(7, weight.shape[1]).bfloat16(), weight, bias) is None


@needs_half_products
def test_an_operation_of_torch_has_its_shape_without_memory() -> None:
    operation, x = load_operations().gate, torch.randn(2, 3, 10).bfloat16()
    assert operation(x.to("meta")).shape == operation(x).shape == (2, 3, 5)
    with fake_mode() as mode:
        assert operation(mode.from_tensor(x)).shape == (2, 3, 5)


def test_other_features_are_torchs() -> None:
    x = torch.randn(2, 10).bfloat16()
    assert (gate_any(x) is not None) == has_half_products()
    for other in (x.float(), x[:, :9], x[:0], x.clone().requires_grad_()):
        assert gate_any(other) is None
