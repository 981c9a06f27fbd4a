"""Rebinding on a real card: parameters stay the same objects while their data comes and goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weights.loading.modules import assign

pytestmark = pytest.mark.gpu


def test_a_module_is_cleared_and_bound_again_on_the_card() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    first, second = ({name: torch.randn_like(t).cuda() for name, t in net.state_dict().items()} for _ in range(2))
    binding = assign(net, first)
    binding.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    first.clear()
    assert torch.cuda.memory_allocated() < before
    binding.put_tensors(second)
    x = torch.randn(2, 8, device="cuda")
    with torch.no_grad():
        expected = nn.functional.layer_norm(
            x @ second["0.weight"].T + second["0.bias"], [8], second["1.weight"], second["1.bias"]
        )
        torch.testing.assert_close(net(x), expected)
