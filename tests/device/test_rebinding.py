"""Rebinding on a device: parameters stay the same objects while their data comes and goes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weights.loading.modules import assign


def test_a_module_is_cleared_and_bound_again(device: torch.device, module: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    first, second = ({name: torch.randn_like(t).to(device) for name, t in net.state_dict().items()} for _ in range(2))
    binding = assign(net, first)
    binding.clear()
    before = module.memory_allocated(device)
    first.clear()
    assert module.memory_allocated(device) < before
    binding.put_tensors(second)
    x = torch.randn(2, 8, device=device)
    with torch.no_grad():
        expected = nn.functional.layer_norm(
            x @ second["0.weight"].T + second["0.bias"], [8], second["1.weight"], second["1.bias"]
        )
        torch.testing.assert_close(net(x), expected)


def test_parameters_keep_their_identity_when_a_module_moves(device: torch.device, module: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[1].weight = net[0].weight  # tied
    parameters = list(net.parameters())
    net.to(device)
    assert [id(one) for one in net.parameters()] == [id(one) for one in parameters]
    assert net[0].weight is net[1].weight
    assert {one.device for one in net.parameters()} == {device}
    net.to("cpu")
    assert {one.device.type for one in parameters} == {"cpu"}
