"""Convolutions in the compiled kernels, against the same convolution in float64."""

from __future__ import annotations

import random

import pytest
import torch
from kit.drawing import seeds
from kit.kernels import needs_half_products
from torch import nn
from torch.nn import functional as F

from deployments.engines.native.library import load_kernels
from deployments.engines.native.operations import load_operations
from deployments.engines.nn.batch_invariant import conv2d, make_batch_invariant
from deployments.engines.nn.few_rows import convolve_any, has_half_products
from weights.platform.torch_seam import fake_mode

pytestmark = pytest.mark.usefixtures("faster_kernels")


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: int) -> torch.Tensor:
    return F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), stride, padding)


def drawn_case(draws: random.Random, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Return the shapes of images and weights, a stride and a padding, that the kernels take."""
    kernel = draws.choice([1, 3])
    images, inputs, outputs = draws.randint(1, 4), draws.randint(70, 150), draws.randint(60, 220)
    height, width = draws.randint(3, 30), draws.randint(3, 30)
    if draws.random() < 0.4:  # few pixels, whose weights are read where they lie
        images, inputs, height, width = (
            draws.randint(1, 6),
            32 * draws.randint(2, 4),
            draws.randint(3, 9),
            draws.randint(3, 8),
        )
    elif dtype == torch.float32:
        width = draws.randint(3, 256 // height)
    elif draws.random() < 0.15:  # a row of pixels that is a block, and more
        height, width = draws.randint(3, 5), draws.randint(500, 600)
    shapes = (images, inputs, height, width), (outputs, inputs, kernel, kernel)
    return *shapes, draws.choice([1, 1, 2]), draws.randint(0, kernel // 2 + 1)


@needs_half_products
@seeds(50)
def test_convolutions_of_any_shape(seed: int) -> None:
    """Rounded once; the same bits in any batch, order of memory and number of threads."""
    draws = random.Random(seed)
    dtype, unit = draws.choice([(torch.float32, 2**-24), (torch.bfloat16, 2**-8)])
    shape, sides, stride, padding = drawn_case(draws, dtype)
    x, bias = torch.randn(shape).to(dtype), torch.randn(sides[0]).to(dtype) if draws.random() < 0.7 else None
    weight = (torch.randn(sides) / (sides[1] * sides[2] ** 2) ** 0.5).to(dtype)
    given = weight, bias, (stride, stride), (padding, padding), (1, 1)
    torch.set_num_threads(1)
    together = convolve_any(x, *given)
    assert together is not None, (shape, sides, stride, padding)
    expected = exact(x, weight, bias, stride, padding)
    assert together.shape == expected.shape
    # Half a unit in the last place, and where terms cancel the errors of float32.
    assert ((together.double() - expected).abs() <= expected.abs() * unit + 1e-5).all(), (dtype, shape, sides, stride)
    for row in range(len(x)):
        assert torch.equal(convolve_any(x[row : row + 1], *given), together[row : row + 1])
    torch.set_num_threads(2)
    assert torch.equal(convolve_any(x, *given), together)
    turned = x.to(memory_format=torch.channels_last)
    assert torch.equal(conv2d(turned, weight.to(memory_format=torch.channels_last), *given[1:]), together)


@needs_half_products
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_families_are_theirs_and_a_broken_pixel_stays_where_it_is(dtype: torch.dtype) -> None:
    layer, x = nn.Conv2d(33, 64, 3, padding=1).to(dtype), torch.randn(2, 33, 16, 16).to(dtype)
    make_batch_invariant(layer)
    with torch.no_grad():
        whole = layer(x)
        assert torch.equal(whole, load_kernels().conv2d(x, layer.weight, layer.bias, 1, 1))
        x[1, 32, 0, 0] = torch.nan
        broken = layer(x)
    assert broken[1, :, :2, :2].isnan().all()
    broken[1, :, :2, :2] = whole[1, :, :2, :2]
    assert torch.equal(broken, whole)


@needs_half_products
def test_an_operation_of_torch_has_its_shape_without_memory() -> None:
    operation = load_operations().conv2d
    x, weight = torch.randn(2, 33, 9, 12).bfloat16(), torch.randn(64, 33, 3, 3).bfloat16()
    expected = operation(x, weight, None, 2, 1)
    sized = operation(x.to("meta"), weight.to("meta"), None, 2, 1)
    assert (sized.shape, sized.dtype) == (expected.shape, expected.dtype)
    with fake_mode() as mode:
        assert operation(mode.from_tensor(x), mode.from_tensor(weight), None, 2, 1).shape == expected.shape


def test_other_convolutions_are_torchs() -> None:
    x, weight = torch.randn(2, 32, 9, 9).bfloat16(), torch.randn(64, 32, 3, 3).bfloat16()
    plain = (None, (1, 1), (1, 1), (1, 1))
    most, more = torch.randn(2, 32, 16, 16), torch.randn(2, 32, 16, 17)
    with torch.no_grad():
        for images, weights in [(x, weight), (more.bfloat16(), weight), (most, weight.float())]:
            assert (convolve_any(images, weights, *plain) is not None) == has_half_products()
        for images, weights, rest in [
            (more, weight.float(), plain),
            (x.float(), weight, plain),
            (x.half(), weight.half(), plain),
            (x, weight.float(), plain),
            (x[0], weight, plain),
            (x[:0], weight, plain),
            (x[:, :16], weight, plain),
            (x[..., :2, :2], weight, (None, (1, 1), (0, 0), (1, 1))),
            (x, weight, (torch.randn(64), *plain[1:])),
            (x, weight, (torch.randn(3).bfloat16(), *plain[1:])),
            (x, weight, (None, (3, 3), (1, 1), (1, 1))),
            (x, weight, (None, (1, 2), (1, 1), (1, 1))),
            (x, weight, (None, (1, 1), (1, 0), (1, 1))),
            (x, weight, (None, (1, 1), (1, 1), (2, 2))),
            (x, weight[..., :1], plain),
            (x, torch.randn(64, 32, 5, 5).bfloat16(), plain),
            (x, weight[:3], plain),
        ]:
            assert convolve_any(images, weights, *rest) is None, (images.shape, weights.shape, rest)
        grouped = conv2d(x, weight[:, :8], None, (1, 1), (1, 1), (1, 1), 4)
        assert torch.equal(grouped, F.conv2d(x, weight[:, :8], None, 1, 1, 1, 4))
    learnt = x.clone().requires_grad_()
    conv2d(learnt, weight, *plain).sum().backward()
    assert learnt.grad is not None
