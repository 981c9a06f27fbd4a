"""Products of float8 weights on a card that multiplies float8 itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deployments.engines.nn.fp8_linear import take_scales


@pytest.mark.parametrize("per_row", [True, False], ids=["rows", "tensor"])
def test_the_card_multiplies_float8_as_far_as_it_can(device: torch.device, per_row: bool) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip(f"{device} does not multiply float8")
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(256, 512, generator=generator) * 0.05
    scale = torch.full((256, 1) if per_row else (), 2.0**-11)
    values = (wide / scale).to(torch.float8_e4m3fn)
    layer = nn.Sequential(nn.Linear(512, 256)).requires_grad_(False)
    take_scales(layer, {"0.weight": (256, 512), "0.weight_scale": tuple(scale.shape)})
    layer[0].weight = nn.Parameter(values, requires_grad=False)
    layer[0].weight_scale = scale
    layer[0].bias = nn.Parameter(torch.randn(256, generator=generator).to(torch.bfloat16), requires_grad=False)
    layer = layer.to(device)
    x = torch.randn(3, 17, 512, generator=generator).to(device, torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = layer(x)
    assert "aten::_scaled_mm" in {event.name for event in profile.events()}
    exact = x.float() @ (values.to(device).float() * scale.to(device)).T + layer[0].bias.float()
    assert (found.float() - exact).norm() / exact.norm() < 0.05
    uneven, layer[0].bias = x.float(), None  # no such kernel: the weights are made wide
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(uneven)
    assert "aten::_scaled_mm" not in {event.name for event in profile.events()}
