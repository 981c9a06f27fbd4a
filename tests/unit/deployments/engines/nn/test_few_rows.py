"""Products of few rows in the compiled kernels, against the same product in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.llm.models.step_rows import STEP_INPUTS, StepInputs, StepLinear, StepRows
from deployments.engines.native.building import built_library
from deployments.engines.native.library import Kernels, load_kernels
from deployments.engines.native.operations import joined, load_operations
from deployments.engines.nn import few_rows
from deployments.engines.nn.batch_invariant import linear
from deployments.engines.nn.few_rows import (
    MOST_ROWS,
    add_pair,
    are_kernels_faster,
    multiply_any,
    multiply_few,
    multiply_rows,
)
from deployments.engines.nn.packed_linear import PackedLinear
from deployments.engines.nn.packed_weights import packed_weight
from weights.platform.private_folder import cache_folder
from weights.platform.torch_seam import fake_mode

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels for this processor")


def _exact(linear, x):
    bias = 0 if linear.bias is None else linear.bias.double()
    return (x.double() @ linear.weight.double().T + bias).float()


@pytest.mark.drawn(15)
@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (1, MOST_ROWS), (2, MOST_ROWS)])
@pytest.mark.parametrize(("columns", "outputs"), [(16, 3), (48, 33), (384, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_exact_product(shape, columns, outputs, bias, threads):
    linear, x = nn.Linear(columns, outputs, bias=bias), torch.randn(*shape, columns)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            found = multiply_few(linear, x)
    finally:
        torch.set_num_threads(before)
    assert found.shape == (*shape, outputs)
    assert torch.allclose(found, _exact(linear, x), rtol=1e-5, atol=1e-5)


@needs_kernels
def test_company_does_not_matter_in_a_single_bit():
    linear, x = nn.Linear(384, 100), torch.randn(1, 31, 384)
    with torch.no_grad():
        together = multiply_few(linear, x)
        assert all(torch.equal(multiply_few(linear, x[:, i : i + 1]), together[:, i : i + 1]) for i in range(31))


@needs_kernels
@pytest.mark.parametrize("name", ["AMD EPYC 9R14", "Intel(R) Xeon(R) Platinum 8488C"])
def test_many_rows_are_theirs_where_mkl_takes_code_for_other_processors(name, monkeypatch):
    is_slow = name.startswith("AMD") and load_kernels().variant == "avx512"
    monkeypatch.setattr(few_rows, "processor_name", lambda: name)
    are_kernels_faster.cache_clear()
    try:
        assert are_kernels_faster() == is_slow
        with torch.no_grad():
            layer, x = nn.Linear(48, 32), torch.randn(20 * MOST_ROWS, 48)
            assert torch.equal(multiply_few(layer, x), multiply_rows(layer, x) if is_slow else layer(x))
            wide = nn.Linear(256, 160)
            found = linear(x := torch.randn(2, 300, 256), wide.weight, wide.bias)
            assert torch.equal(found, multiply_rows(wide, x) if is_slow else wide(x))
    finally:
        are_kernels_faster.cache_clear()


@pytest.fixture
def slow_mkl(monkeypatch):
    """A processor for which MKL takes code for others."""
    if load_kernels() is None or load_kernels().variant != "avx512":
        pytest.skip("no kernels that are the faster ones for any number of rows")
    monkeypatch.setattr(few_rows, "processor_name", lambda: "AMD EPYC 9R14")
    are_kernels_faster.cache_clear()
    yield
    are_kernels_faster.cache_clear()


@pytest.mark.parametrize("by_kernels", [None, 3, torch.tensor([1, 5])])
def test_prompts_of_stock_language_models_are_theirs_there(by_kernels, slow_mkl):
    layer, x = StepLinear(256, 160), torch.randn(1, 40, 256)
    inputs = StepInputs(rows=StepRows((1, 40), by_kernels, 16))
    setattr(layer, STEP_INPUTS, inputs)
    count = by_kernels if isinstance(by_kernels, int) else 40
    with torch.no_grad():
        assert torch.equal(layer(x)[0, :count], multiply_rows(layer, x[0, :count]))
        inputs.rows = None  # of experts, which have rows of their own
        assert torch.equal(layer(x[0, :7]), multiply_rows(layer, x[0, :7]))


def test_weights_of_files_in_float32_are_theirs_there(slow_mkl):
    layer, x = nn.Linear(256, 160), torch.randn(33, 256)
    packed = PackedLinear(packed_weight("w", "F32", layer.weight.detach()), None, "fast")
    with torch.no_grad():
        assert torch.equal(packed(x), load_kernels().linear(x, layer.weight, None))
        assert torch.equal(packed(x[:3]), packed(x)[:3])


@needs_kernels
@pytest.mark.parametrize(("columns", "outputs"), [(2064, 48), (3072, 17), (1024, 64)])
def test_a_row_of_many_columns_has_the_same_bits_among_any_number_of_rows(columns, outputs):
    """Sums of more columns are folded where a stretch ends, and rows are multiplied in blocks."""
    layer, x = nn.Linear(columns, outputs), torch.randn(801, columns)
    with torch.no_grad():
        together = multiply_rows(layer, x)
        assert torch.allclose(together, _exact(layer, x), rtol=1e-5, atol=1e-5)
        for count in (1, 2, 6, 7, 12, 385, 391):
            assert torch.equal(multiply_rows(layer, x[-count:]), together[-count:])


@pytest.mark.skipif(not getattr(load_kernels(), "has_half_products", False), reason="no products of bfloat16")
@pytest.mark.parametrize(("columns", "outputs"), [(16, 3), (16, 32), (48, 33), (1536, 80), (2064, 48), (4112, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_bfloat16_is_rounded_once_and_alike_in_any_company(columns, outputs, bias):
    layer, x = nn.Linear(columns, outputs, bias=bias).bfloat16(), torch.randn(400, columns).bfloat16()
    with torch.no_grad():
        found = load_kernels().linear(x, layer.weight, layer.bias)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        assert found.dtype == torch.bfloat16
        assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-4)
        for count in (1, 5, 13, 31, 32, 37, 64, 75):  # of some, rows of W are turned into lanes
            assert torch.equal(load_kernels().linear(x[-count:], layer.weight, layer.bias), found[-count:])


@pytest.mark.skipif(not getattr(load_kernels(), "has_half_products", False), reason="no products of bfloat16")
@pytest.mark.parametrize(("rows", "columns", "outputs"), [(801, 2064, 145), (64 * 384, 16, 32)])
def test_blocks_of_bfloat16_rows_are_alike_with_any_number_of_threads(rows, columns, outputs):
    """The second case ends with a block of six rows."""
    layer, x = nn.Linear(columns, outputs).bfloat16(), torch.randn(rows, columns).bfloat16()
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(load_kernels().linear(x, layer.weight.detach(), layer.bias.detach()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    assert torch.allclose(found[0].double(), exact, rtol=2**-8, atol=1e-4)


@needs_kernels
def test_the_avx2_variant_computes_the_same():
    older = Kernels(built_library(cache_folder() / "native"), frozenset({"avx2", "fma", "f16c"}))
    assert older.variant == "avx2"
    layer, x = nn.Linear(2064, 145), torch.randn(200, 2064)
    down, up = torch.randn(12, 2064), torch.randn(145, 12)
    with torch.no_grad():
        found = older.linear(x, layer.weight, layer.bias)
        assert torch.allclose(found, _exact(layer, x), rtol=1e-5, atol=1e-5)
        assert torch.equal(older.linear(x[-5:], layer.weight, layer.bias), found[-5:])
        ours, result = load_kernels(), torch.zeros(200, 145)
        older.add_pair(result, x, down, up, 0.5)
        ours.add_pair(expected := torch.zeros(200, 145), x, down, up, 0.5)
    assert torch.allclose(result, expected, rtol=1e-4, atol=1e-2)


@needs_kernels
def test_an_operation_of_torch_is_the_kernels_product():
    operation, layer = load_operations().linear, nn.Linear(64, 48)
    x = torch.randn(3, 7, 128)[..., ::2]
    out = torch.empty(3, 7, 48)
    with torch.no_grad():
        expected = multiply_rows(layer, x)
        assert torch.equal(operation(x, layer.weight, layer.bias), expected)
        assert torch.ops.atelier.linear.out(x, layer.weight, layer.bias, out=out).data_ptr() == out.data_ptr()
        assert torch.equal(out, expected)
        sized = operation(x.to("meta"), layer.weight.to("meta"))
        assert (sized.shape, sized.dtype) == (expected.shape, expected.dtype)
        with fake_mode() as mode:
            fake = operation(mode.from_tensor(x), mode.from_tensor(layer.weight.detach()))
        assert fake.shape == expected.shape


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("columns", "outputs", "rank"), [(48, 33, 4), (96, 384, 16), (1040, 80, 20), (68, 130, 40), (64, 97, 72)]
)
def test_a_pair_of_low_rank_is_added_alike_in_any_company(columns, outputs, rank, threads):
    x, result = torch.randn(3, 67, columns), torch.randn(3, 67, outputs)
    down, up = torch.randn(rank, columns), torch.randn(outputs, rank)
    exact = result.double() + 0.3 * (x.double() @ down.double().T @ up.double().T)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together, alone = result.clone(), result.clone()
        assert add_pair(together, x, down, up, 0.3)
        for row in alone.view(-1, outputs).split((1, 2, 3, 5, 7, 96, 87)):
            at = (row.data_ptr() - alone.data_ptr()) // 4 // outputs
            assert add_pair(row, x.view(-1, columns)[at : at + len(row)], down, up, 0.3)
        turned = result.transpose(0, 1).clone().transpose(0, 1)  # in another order of memory
        assert add_pair(turned, x, down, up, 0.3)
    finally:
        torch.set_num_threads(before)
    assert torch.allclose(together.double(), exact, rtol=1e-5, atol=1e-3)
    assert torch.equal(alone, together)
    assert torch.equal(turned, together)


@needs_kernels
def test_products_that_follow_each_other_are_one_call_which_follows_its_memory():
    operations, aten = load_operations(), torch.ops.aten
    x, weight, bias, down, up = (torch.randn(*shape) for shape in [(7, 48), (33, 48), (33,), (4, 48), (33, 4)])
    workspace = torch.empty(4 * 7 * 33, dtype=torch.uint8).untyped_storage()
    y = torch.empty(0).set_(workspace, 0, (7, 33), (33, 1))
    product = torch.ops.atelier.linear.out
    calls = [
        (product, (x, weight, bias), {"out": y}),
        (operations.add_pair, (y, x, down, up, 0.5), {}),
        (aten.mul.out, (y, y), {"out": y}),
        (product, (torch.randn(48, 7).T, weight), {"out": torch.empty(7, 33)}),  # in another order of memory
    ]
    bound = joined(calls, workspace)
    assert len(bound) == 3
    found = []
    for nbytes in (workspace.nbytes(), 2**24):  # which moves it
        workspace.resize_(nbytes)
        y.fill_(torch.nan)
        for call, args, kwargs in bound:
            call(*args, **kwargs)
        found.append(y.clone())
    expected = F.linear(x, weight, bias) + 0.5 * x @ down.T @ up.T
    assert torch.allclose(found[0], expected**2, rtol=1e-4, atol=1e-4)
    assert torch.equal(*found)


def test_pairs_of_other_types_and_sizes_are_not_added():
    x, down, up, result = torch.randn(5, 48), torch.randn(4, 48), torch.randn(32, 4), torch.zeros(5, 32)
    odd_rank, odd_width = (x, down[:3], up[:, :3].contiguous()), (x[:, :42], down[:, :42].contiguous(), up)
    for given in (odd_rank, odd_width, (x.double(), down.double(), up.double()), (x[:0], down, up)):
        assert not add_pair(result[: len(given[0])], *given, 1.0)
    assert not result.any()


@needs_kernels
def test_a_gradient_and_other_tensors_are_torchs():
    layer = nn.Linear(256, 160)
    x = torch.randn(5, 256, requires_grad=True)
    linear(x, layer.weight, layer.bias).sum().backward()
    assert torch.allclose(x.grad[0], layer.weight.sum(0), atol=1e-4)
    with torch.no_grad():
        assert multiply_any(x.double(), layer.weight.double(), None) is None
        assert multiply_any(x, layer.weight.T.contiguous().T, None) is None
        assert multiply_any(x[:, :240], layer.weight, None) is None
        assert multiply_any(x[:0], layer.weight, None) is None


def test_what_the_kernels_do_not_know_is_the_layer_s_own():
    x = torch.randn(2, 5, 40)
    odd, half, hooked = nn.Linear(40, 8), nn.Linear(48, 8).half(), nn.Linear(48, 8)
    hooked.register_forward_hook(lambda layer, inputs, output: -output)
    transposed = nn.Linear(48, 48)
    transposed.weight.data = torch.randn(48, 48).T
    wide = torch.randn(2, 5, 96)[..., ::2]  # not contiguous
    with torch.no_grad():
        assert torch.equal(multiply_few(odd, x), odd(x))
        assert torch.equal(multiply_few(half, wide.half()), half(wide.half()))
        assert torch.equal(multiply_few(hooked, wide), hooked(wide))
        assert torch.equal(multiply_few(transposed, wide), transposed(wide))
        plain = nn.Linear(48, 8)
        assert torch.allclose(multiply_few(plain, wide), _exact(plain, wide), atol=1e-5)


@needs_kernels
def test_any_number_of_rows_with_zeros_behind_them_and_no_other_width():
    linear, x = nn.Linear(64, 48), torch.randn(3 * MOST_ROWS, 64)
    with torch.no_grad():
        found = multiply_rows(linear, torch.cat([x, torch.randn(5, 64)]), len(x))
        assert torch.allclose(found[:-5], _exact(linear, x), rtol=1e-5, atol=1e-5)
        assert found.shape == (3 * MOST_ROWS + 5, 48)
        assert not found[-5:].any()
        assert all(torch.equal(multiply_rows(linear, x[i : i + 1])[0], found[i]) for i in range(0, 3 * MOST_ROWS, 7))
        assert multiply_rows(linear, x.view(-1, 32)) is None
