"""Products of few rows in the compiled kernels, against the same product in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deployments.engines.native.library import load_kernels
from deployments.engines.nn import few_rows
from deployments.engines.nn.few_rows import MOST_BESIDE_SLOW_MKL, MOST_ROWS, most_rows, multiply_few, multiply_rows

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
    most_rows.cache_clear()
    try:
        assert most_rows() == (MOST_BESIDE_SLOW_MKL if is_slow else MOST_ROWS)
        linear, x = nn.Linear(48, 32), torch.randn(2 * MOST_ROWS, 48)
        with torch.no_grad():
            expected = multiply_rows(linear, x) if is_slow else linear(x)
            assert torch.equal(multiply_few(linear, x), expected)
            beyond = torch.randn(MOST_BESIDE_SLOW_MKL + 1, 48)
            assert torch.equal(multiply_few(linear, beyond), linear(beyond))
    finally:
        most_rows.cache_clear()


def test_what_the_kernels_do_not_know_is_the_layer_s_own():
    x = torch.randn(2, 5, 40)
    odd, half, hooked = nn.Linear(40, 8), nn.Linear(48, 8).bfloat16(), nn.Linear(48, 8)
    hooked.register_forward_hook(lambda layer, inputs, output: -output)
    transposed = nn.Linear(48, 48)
    transposed.weight.data = torch.randn(48, 48).T
    wide = torch.randn(2, 5, 96)[..., ::2]  # not contiguous
    with torch.no_grad():
        assert torch.equal(multiply_few(odd, x), odd(x))
        assert torch.equal(multiply_few(half, wide.bfloat16()), half(wide.bfloat16()))
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
