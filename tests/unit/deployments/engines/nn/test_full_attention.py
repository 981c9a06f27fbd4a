"""Attention in the compiled kernels, against the same attention in float64 and beside torch's own error."""

from __future__ import annotations

import random
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import Attention
from kit.drawing import seeds
from kit.kernels import needs_half_products
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from deployments.engines.graph.replay import Replays
from deployments.engines.native.operations import load_operations
from deployments.engines.nn.batch_invariant import attention, make_batch_invariant
from deployments.engines.nn.few_rows import attend_any, has_half_products
from deployments.engines.nn.forwards import make_quick
from weights.platform.torch_seam import fake_mode

pytestmark = pytest.mark.usefixtures("faster_kernels")


def heads(images: int, count: int, tokens: int, size: int) -> torch.Tensor:
    """Return heads as diffusers has them: a view of the tokens' features."""
    return torch.randn(images, tokens, count, size).bfloat16().transpose(1, 2)


@needs_half_products
@seeds(50)
def test_attention_of_any_shape(seed: int) -> None:
    """As exact as torch's; the same bits in any batch, order of memory and number of threads."""
    draws = random.Random(seed)
    images, count, size = (
        draws.randint(2, 3),
        draws.randint(1, 3),
        2 * draws.choice([draws.randint(4, 80), draws.randint(81, 256)]),
    )
    queries, keys = draws.randint(1, 600), draws.randint(1, 600)
    query, key, value = (heads(images, count, tokens, size) for tokens in (queries, keys, keys))
    query, scale = query * draws.choice([0.1, 1.0, 5.0]), draws.choice([size**-0.5, 0.3, 2.0])
    shape = images, count, queries, keys, size, scale
    torch.set_num_threads(1)
    attend = load_operations().attend
    together = attend(query, key, value, scale)
    expected = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), scale=scale)

    def error(found: torch.Tensor) -> float:
        return float((found.double() - expected).abs().max())

    assert error(together) <= 1.5 * error(F.scaled_dot_product_attention(query, key, value, scale=scale)) + 2**-9, shape
    assert together.transpose(1, 2).is_contiguous()
    for row in range(images):
        own = slice(row, row + 1)
        assert torch.equal(attend(query[own], key[own], value[own], scale), together[own]), shape
    assert torch.equal(attend(query[:, -1:, -70:], key[:, -1:], value[:, -1:], scale), together[:, -1:, -70:]), shape
    torch.set_num_threads(2)
    turned = (one.transpose(2, 3).contiguous().transpose(2, 3) for one in (query, key, value))
    assert torch.equal(attend(*turned, scale), together), shape


@needs_half_products
def test_scores_of_any_size_and_a_broken_token() -> None:
    """A share is 0 of what is far below the greatest; NaN stays with its query and its head."""
    query, key, value = heads(1, 2, 70, 16), heads(1, 2, 130, 16), heads(1, 2, 130, 16)
    whole = attention(query, key, value)
    query[0, 0, 3, 5] = torch.nan
    broken = attention(query, key, value)
    assert broken[0, 0, 3].isnan().all()
    broken[0, 0, 3] = whole[0, 0, 3]
    assert torch.equal(broken, whole)
    far = attention(heads(1, 2, 70, 16) * 1e15, key * 1e15, value)
    assert far.isfinite().all()
    key[0, 1, 129, 0] = torch.inf
    assert attention(heads(1, 2, 70, 16), key, value)[0, 0].isfinite().all()


@needs_half_products
def test_more_keys_take_no_more_memory() -> None:
    """No plan of memory counts that of the threads."""
    attend, page = load_operations().attend, resource.getpagesize()
    query, key = heads(1, 1, 64, 8), heads(1, 1, 2**20, 8)  # keys of 16 MiB
    attend(query, key[:, :, :64], key[:, :, :64], 0.5)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * page

    before = resident()
    attend(query, key, key, 0.5)
    assert resident() - before < 2**22


@needs_half_products
def test_layers_of_families_attend_by_it_and_recordings_keep_it() -> None:
    layer, x, text = Attention(80, heads=2, dim_head=40).bfloat16(), torch.randn(2, 64, 80).bfloat16(), None
    stock = layer(x)
    make_batch_invariant(layer)
    make_quick(layer)
    seen: list[Any] = []

    class Listener(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        own = layer(x)
        with Listener():
            assert torch.equal(layer(hidden_states=x), own)
        q, k, v = (product(x).unflatten(2, (2, 40)).transpose(1, 2) for product in (layer.to_q, layer.to_k, layer.to_v))
        mixed = load_operations().attend(q, k, v, 40**-0.5).transpose(1, 2).flatten(2)
        assert torch.equal(layer.to_out[0](mixed), own)
        replays = Replays(min_forwards=1)
        for _ in range(3):
            assert torch.equal(replays.run("key", [x], lambda inputs: layer(inputs[0], text)), own)
    assert attention in seen
    assert F.scaled_dot_product_attention not in seen
    assert torch.allclose(own, stock, atol=2e-2)


@needs_half_products
def test_an_operation_of_torch_has_its_shape_without_memory() -> None:
    operation = load_operations().attend
    given = heads(2, 3, 65, 8), heads(2, 3, 7, 8), heads(2, 3, 7, 8)
    expected = operation(*given, 0.5)
    sized = operation(*(one.to("meta") for one in given), 0.5)
    assert (sized.shape, sized.stride(), sized.dtype) == (expected.shape, expected.stride(), expected.dtype)
    with fake_mode() as mode:
        assert operation(*map(mode.from_tensor, given), 0.5).stride() == expected.stride()


def test_other_attention_is_torchs() -> None:
    q, k = heads(2, 2, 64, 8), heads(2, 2, 70, 8)
    with torch.no_grad():
        assert (attend_any(q, k, k, None) is not None) == has_half_products()
        for query, key, value, scale in [
            (q.float(), k.float(), k.float(), None),
            (q.half(), k.half(), k.half(), None),
            (q, k.float(), k, None),
            (q[:, :, :63], k, k, None),
            (q[:0], k[:0], k[:0], None),
            (q, k[:, :, :0], k[:, :, :0], None),
            (q[0], k[0], k[0], None),
            (q, k[:, :1], k[:, :1], None),
            (q, k[:1], k[:1], None),
            (q, k, k[:, :, :9], None),
            (q, k, k[..., :6], None),
            (q[..., :7], k[..., :7], k[..., :7], None),
            (heads(1, 1, 64, 514), heads(1, 1, 9, 514), heads(1, 1, 9, 514), None),
            (q, k, k, -0.5),
            (q, k, k, 0.0),
        ]:
            assert attend_any(query, key, value, scale) is None, (query.shape, key.shape, value.shape, scale)
        mask = torch.rand(64, 70) > 0.3
        for options in ({"attn_mask": mask}, {"is_causal": True}, {"scale": -0.5}):
            assert torch.equal(attention(q, k, k, **options), F.scaled_dot_product_attention(q, k, k, **options))
        few = {"enable_gqa": True}
        assert torch.equal(
            attention(q, k[:, :1], k[:, :1], **few), F.scaled_dot_product_attention(q, k[:, :1], k[:, :1], **few)
        )
        torch.manual_seed(1)
        dropped = attention(q, k, k, dropout_p=0.5)
        torch.manual_seed(1)
        assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, k, dropout_p=0.5))
    learnt = q.clone().requires_grad_()
    attention(learnt, k, k).sum().backward()
    assert learnt.grad is not None
