"""Group-wise int8, against torch on fresh random tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from weights.loading.stage_transforms import dequantize_int8, quantize_int8
from weights.records.errors import WeightsError


def as_torch_does(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = weight.reshape(-1, group_size)
    scales = groups.abs().amax(1) / 127.0
    return torch.round(groups / scales[:, None]).to(torch.int8).reshape(weight.shape), scales


@pytest.mark.parametrize("group_size", [1, 32, 64, 96])
@pytest.mark.parametrize("shape", [(96, 64), (8, 48, 4), (192,)])
def test_values_and_scales_are_those_of_torch(shape: tuple[int, ...], group_size: int) -> None:
    weight = torch.randn(shape)
    values, scales = quantize_int8(weight.numpy(), group_size)
    expected_values, expected_scales = as_torch_does(weight, group_size)
    assert (values.dtype, values.shape, scales.dtype) == (np.int8, shape, np.float32)
    assert torch.equal(torch.from_numpy(scales), expected_scales)
    assert torch.equal(torch.from_numpy(values), expected_values)
    restored = torch.from_numpy(dequantize_int8(values, scales, group_size))
    error = (restored - weight).abs().reshape(-1, group_size)
    assert torch.all(error <= expected_scales[:, None] * 0.5001)


def test_halves_are_rounded_to_even() -> None:
    group = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5], np.float32)
    values, scales = quantize_int8(group, 8)
    assert (values.tolist(), scales.tolist()) == ([127, 0, 2, 2, 0, -2, -2, 4], [1.0])


def test_a_group_of_zeros_has_scale_0_and_is_not_nan() -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[1] = 1
    values, scales = quantize_int8(weight)
    assert scales[0] == 0
    assert np.array_equal(dequantize_int8(values, scales), weight)


def test_denormals_stay_in_range() -> None:
    tiny = np.float32(1e-45) * np.arange(1, 129, dtype=np.float32)
    values, scales = quantize_int8(tiny, 4)
    assert np.abs(values.astype(int)).max() <= 127
    assert np.abs(dequantize_int8(values, scales, 4) - tiny).max() <= tiny.max()


def test_the_order_in_memory_does_not_matter() -> None:
    weight = seeded_rng().standard_normal((64, 32)).astype(np.float32)
    assert np.array_equal(quantize_int8(np.asfortranarray(weight))[0], quantize_int8(weight)[0])


def test_nothing_at_all() -> None:
    values, scales = quantize_int8(np.zeros((0, 64), np.float32))
    assert (values.shape, scales.shape, dequantize_int8(values, scales).shape) == ((0, 64), (0,), (0, 64))


@pytest.mark.parametrize(("size", "group_size"), [(65, 64), (10, 3), (64, 0), (64, -64)])
def test_only_whole_groups(size: int, group_size: int) -> None:
    with pytest.raises(WeightsError, match=f"{size} elements are no whole number of groups of {group_size}"):
        quantize_int8(np.zeros(size, np.float32), group_size)
    with pytest.raises(WeightsError, match="no whole number"):
        dequantize_int8(np.zeros(size, np.int8), np.zeros(1, np.float32), group_size)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(WeightsError, match="infinities or NaNs"):
        quantize_int8(np.array([1, bad] * 32, np.float32))


def test_scales_are_one_per_group() -> None:
    with pytest.raises(WeightsError, match="2 groups of 64 elements take as many scales, 3 came"):
        dequantize_int8(np.zeros(128, np.int8), np.zeros(3, np.float32))
