"""Each operation of diffusers' models gives a row what it gives the row alone, bit for bit, on the CPU."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from kit.drawing import seeds
from torch import nn
from torch.nn import functional as F

from deployments.engines.nn.batch_invariant import add_product, conv2d, linear, make_batch_invariant

BATCHES = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 24)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def differing(work: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[int]:
    """Return the batch sizes in which some row is another than alone."""
    alone = [work(*(one[row : row + 1] for one in inputs)) for row in range(max(BATCHES))]
    wrong = []
    for count in BATCHES:
        together = work(*(one[:count] for one in inputs))
        if not all(torch.equal(together[row : row + 1], alone[row]) for row in range(count)):
            wrong.append(count)
    return wrong


@pytest.mark.drawn(14)
@DTYPES
@pytest.mark.parametrize(("width", "out"), [(6, 16), (64, 256), (100, 33), (320, 640)])
@pytest.mark.parametrize("length", [None, 1, 2, 3, 5, 16, 77])
def test_linear(dtype: torch.dtype, width: int, out: int, length: int | None) -> None:
    shape = (max(BATCHES), width) if length is None else (max(BATCHES), length, width)
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    assert differing(lambda x: linear(x, weight, bias), x) == []
    unit = 2**-7 if dtype == torch.bfloat16 else 1e-3  # where the bias is added before the sum is rounded
    assert torch.allclose(linear(x[:1], weight, bias), F.linear(x[:1], weight, bias), rtol=unit, atol=1e-3)


@pytest.mark.parametrize(("width", "out"), [(6, 16), (100, 33), (128, 128), (320, 640), (768, 768), (1024, 24)])
def test_linear_of_sums_that_cancel(width: int, out: int) -> None:
    """Such a sum leaves rounding errors alone, so that any other order of its terms shows in each result."""
    half, weights = torch.randn(max(BATCHES), width // 2), torch.randn(out, width // 2)
    order = torch.randperm(width)
    x = torch.cat([half, half], -1)[:, order]
    weight = torch.cat([weights, -weights], -1)[:, order]
    assert differing(lambda x: linear(x, weight), x) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_half_precision_products_reach_the_size_of_onednn(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test looks at sizes: on a processor without such instructions both ways are one."""
    sizes: list[int] = []
    stock = F.linear

    def watched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        sizes.append(x.numel() * weight.shape[0])
        return stock(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    for width, out in [(6, 16), (16, 16), (100, 33), (64, 64), (320, 640)]:
        for rows in BATCHES:
            result = linear(torch.ones(rows, width, dtype=dtype), torch.ones(out, width, dtype=dtype))
            assert result.shape == (rows, out)
    assert min(sizes) > 16**3


@DTYPES
def test_linear_of_a_part_of_a_sequence(dtype: torch.dtype) -> None:
    """As after SD3's joint attention: in C order for one row, and not for several."""
    joint = torch.randn(max(BATCHES), 48, 64).to(dtype)
    weight, bias = torch.randn(32, 64).to(dtype), torch.randn(32).to(dtype)
    assert differing(lambda x: linear(x[:, 40:], weight, bias), joint) == []


@DTYPES
@seeds(50)
def test_linear_in_any_order_of_memory(dtype: torch.dtype, seed: int) -> None:
    """Few features, in the layouts that views have. The bias is added where the stock layer adds it."""
    draws = random.Random(seed)
    width, out, length = (draws.randint(1, most) for most in (40, 40, 9))
    weight, bias = torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    rows = max(BATCHES)
    inputs = {
        "plain": torch.randn(rows, width),
        "columns": torch.randn(width, rows).T,
        "every other": torch.randn(2 * rows, width)[::2],
        "a part of the features": torch.randn(rows, width + 3)[:, 2 : width + 2],
        "transposed": torch.randn(rows, width, length).transpose(1, 2),
        "of an image": torch.randn(rows, width, 2, length).permute(0, 2, 3, 1),
        "the rows last": torch.randn(length, width, rows).permute(2, 0, 1),
        "one row for all": torch.randn(1, length, width).expand(rows, -1, -1),
    }
    for name, x in inputs.items():
        x = x.to(dtype)
        assert differing(lambda x: linear(x, weight, bias), x) == [], (name, width, out, length)
        expected = F.linear(x.double(), weight.double(), bias.double())
        bound = 0.05 if dtype == torch.bfloat16 else 1e-4
        assert torch.allclose(linear(x, weight, bias).double(), expected, rtol=bound, atol=bound * width), name

        def added(x: torch.Tensor) -> torch.Tensor:
            sums = torch.ones(*x.shape[:-1], out, dtype=dtype)
            add_product(sums, x, weight, 0.5)
            return sums

        assert differing(added, x) == [], (name, width, out, length)
        halves = 1 + F.linear(x.double(), weight.double()) / 2
        assert torch.allclose(added(x).double(), halves, rtol=bound, atol=bound * width), name


@pytest.mark.drawn
@pytest.mark.parametrize("length", [1, 5, 16])
def test_linear_of_two_threads(length: int) -> None:
    torch.set_num_threads(2)
    x, weight = torch.randn(max(BATCHES), length, 320), torch.randn(640, 320)
    assert differing(lambda x: linear(x, weight), x) == []


def test_conv2d_of_two_threads() -> None:
    torch.set_num_threads(2)
    x, weight = torch.randn(max(BATCHES), 16, 12, 12), torch.randn(32, 16, 3, 3)
    assert differing(lambda x: conv2d(x, weight, None, padding=(1, 1)), x) == []


@pytest.mark.drawn(10)
@DTYPES
@pytest.mark.parametrize(("channels", "out", "side"), [(4, 8, 16), (16, 16, 4), (64, 64, 8), (32, 64, 16), (7, 9, 15)])
@pytest.mark.parametrize(("kernel", "padding", "stride"), [(3, 1, 1), (1, 0, 1), (3, 1, 2), (4, 0, 4)])
def test_conv2d(dtype: torch.dtype, channels: int, out: int, side: int, kernel: int, padding: int, stride: int) -> None:
    x = torch.randn(max(BATCHES), channels, side, side).to(dtype)
    layer = nn.Conv2d(channels, out, kernel, stride, padding).to(dtype)
    expected = layer(x)
    make_batch_invariant(layer)
    with torch.no_grad():
        assert differing(layer, x) == []
        assert torch.allclose(layer(x), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)


@pytest.mark.parametrize("groups", [1, 4])
def test_conv2d_has_groups_and_dilation(groups: int) -> None:
    x, weight = torch.randn(2, 8, 9, 9), torch.randn(8, 8 // groups, 3, 3)
    ours = conv2d(x, weight, None, (1, 1), (2, 2), (2, 2), groups)
    assert torch.allclose(ours, F.conv2d(x, weight, None, 1, 2, 2, groups), atol=1e-4)


@DTYPES
@pytest.mark.parametrize("layer", [nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1)], ids=str)
def test_transposed_images(dtype: torch.dtype, layer: nn.Module) -> None:
    """As an attention block gives them: one image is in two orders of memory at once, several are in one."""
    tokens, own = torch.randn(max(BATCHES), 64, 16).to(dtype), copy.deepcopy(layer).to(dtype)
    make_batch_invariant(own)
    with torch.no_grad():
        assert differing(lambda x: own(x.transpose(1, 2).reshape(-1, 16, 8, 8)), tokens) == []


@DTYPES
@pytest.mark.parametrize("shape", [(2, 16, 16, 8), (2, 80, 80, 8), (4, 64, 77, 16), (2, 100, 100, 64)])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention(dtype: torch.dtype, shape: tuple[int, int, int, int], has_mask: bool) -> None:
    heads, queries, keys, width = shape
    q, k, v = (torch.randn(max(BATCHES), heads, count, width).to(dtype) for count in (queries, keys, keys))
    mask = torch.rand(max(BATCHES), 1, 1, keys) > 0.3
    mask[..., 0] = True

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask if has_mask else None)

    assert differing(attend, q, k, v, mask) == []


@DTYPES
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 7), (16, 16), (5, 77)])
def test_attention_of_views(dtype: torch.dtype, heads: int, queries: int, keys: int) -> None:
    """As layers have it: the heads are a view of the features, which for one head or one row is in C order, too."""
    width = 8
    q, k, v = (torch.randn(max(BATCHES), count, heads * width).to(dtype) for count in (queries, keys, keys))

    def attend(*features: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(*(one.unflatten(2, (heads, width)).transpose(1, 2) for one in features))

    assert differing(attend, q, k, v) == []


@DTYPES
@pytest.mark.parametrize(
    "work",
    [
        lambda x: F.group_norm(x, 4),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.rms_norm(x, x.shape[-1:]),
        F.silu,
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        torch.sin,
        torch.exp,
        lambda x: torch.softmax(x, -1),
        lambda x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
        lambda x: x.mean(-1),
    ],
)
def test_what_is_left_to_torch(dtype: torch.dtype, work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert differing(work, torch.randn(max(BATCHES), 8, 12, 16).to(dtype)) == []


def test_weights_hooks_and_subclasses_stay() -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4), nn.Conv2d(4, 4, 3, padding="same"))
    seen: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(output))
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    make_batch_invariant(model)
    make_batch_invariant(model)
    model[0](torch.randn(1, 4))
    assert len(seen) == 1
    assert type(model[1]) is Own
    assert model[2](torch.randn(1, 4, 5, 5)).shape == (1, 4, 5, 5)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
