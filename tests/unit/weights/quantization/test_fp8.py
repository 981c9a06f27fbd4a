"""F8_E4M3 with one scale, against torch on fresh random tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from weights.loading.stage_transforms import quantize_fp8
from weights.records.errors import WeightsError


def as_float8(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e30])
def test_bytes_and_scale_are_those_of_torch(spread: float) -> None:
    weight = torch.randn(64, 33) * spread
    data, scale = quantize_fp8(weight.numpy())
    assert scale == (weight.abs().max() / 448.0).item()
    expected = (weight / scale).to(torch.float8_e4m3fn)
    assert data == expected.view(torch.uint8).numpy().tobytes()
    restored = as_float8(data).float().reshape(weight.shape) * scale
    # 3 bits of mantissa: half a step is 1/16 of the value, or of the smallest normal number.
    assert torch.all((restored - weight).abs() <= weight.abs() / 16 + 2**-10 * scale)


def test_the_largest_value_stays_finite() -> None:
    for _ in range(200):
        weight = torch.randn(8).numpy() * np.float32(seeded_rng().uniform(1e-3, 1e3))
        values = as_float8(quantize_fp8(weight)[0]).float()
        assert values.abs().max() == 448


def test_zeros_and_nothing() -> None:
    assert quantize_fp8(np.zeros((2, 2), np.float32)) == (bytes(4), 1.0)
    assert quantize_fp8(np.zeros((0, 2), np.float32)) == (b"", 1.0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(WeightsError, match="infinities or NaNs"):
        quantize_fp8(np.array([1, bad], np.float32))
