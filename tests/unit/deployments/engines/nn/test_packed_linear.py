"""Packed products against gguf-py's dequantize and a float32 product, by every path that this machine has."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng

from deployments.engines.native import building, library
from deployments.engines.native.library import PackedMatrix, load_kernels
from deployments.engines.nn import packed_linear
from deployments.engines.nn.packed_linear import PackedEmbedding, PackedLinear, product_path
from deployments.engines.nn.packed_weights import (
    UNPACKED_KINDS,
    Arithmetic,
    PackedWeight,
    group_int8_weight,
    packed_weight,
    unpack_rows,
)
from deployments.engines.records.protocol import EngineError
from weights.formats.ggml_values import unpack_blocks
from weights.loading.stage_transforms import dequantize_int8, quantize_int8
from weights.platform.private_folder import cache_folder
from weights.records.dtypes import BLOCK_SIZES

K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")  # of 256 elements
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,)}
LARGEST_ERROR = 0.012


def random_weight(kind: str, rows: int, columns: int) -> tuple[PackedWeight, torch.Tensor]:
    """A weight and what gguf-py makes of it. gguf-py cannot write K types, so their bytes are drawn."""
    type_ = gguf.GGMLQuantizationType[kind]
    if kind not in (*K_TYPES, "IQ4_NL"):
        packed = gguf.quants.quantize(seeded_rng().standard_normal((rows, columns), dtype=np.float32), type_)
    else:
        elements, block_bytes = BLOCK_SIZES[kind]
        blocks = seeded_rng().integers(0, 256, (rows, columns // elements, block_bytes), dtype=np.uint8)
        for at in HALVES.get(kind, (0, 2)):
            halves = seeded_rng().uniform(-0.01, 0.01, (*blocks.shape[:2], 1)).astype(np.float16)
            blocks[..., at : at + 2] = halves.view(np.uint8)
        packed = blocks.reshape(rows, -1)
    reference = torch.from_numpy(gguf.quants.dequantize(packed, type_))
    return packed_weight("w", kind, torch.from_numpy(packed)), reference


def product(x: torch.Tensor, weight: PackedWeight, arithmetic: Arithmetic) -> torch.Tensor:
    return PackedLinear(weight, None, arithmetic)(x)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("kind", UNPACKED_KINDS)
def test_both_ways_to_unpack_give_gguf_pys_numbers(kind: str) -> None:
    weight, reference = random_weight(kind, 37, 768)
    torch.testing.assert_close(unpack_blocks(kind, weight.data), reference, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(unpack_rows(weight, 5, 31), reference[5:31], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 41])
@pytest.mark.parametrize("kind", UNPACKED_KINDS)
def test_exact_products(kind: str, num_rows: int) -> None:
    weight, reference = random_weight(kind, 70, 512)
    x = torch.randn(num_rows, 512)
    got = product(x, weight, "exact")
    assert relative(got, x.double() @ reference.double().T) < 1e-5


@pytest.mark.drawn(26)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 5, 16, 23])
@pytest.mark.parametrize("kind", UNPACKED_KINDS)
def test_fast_products_are_as_near_as_their_path_promises(kind: str, num_rows: int, dtype: torch.dtype) -> None:
    if load_kernels() is None:
        pytest.skip("no compiled kernels here")
    columns = 512 if kind in K_TYPES else 544  # half a step of padding
    weight, reference = random_weight(kind, 70, columns)
    x = torch.randn(num_rows, columns).to(dtype)
    for arithmetic in ("fast", "deterministic"):
        got = product(x, weight, arithmetic)
        assert got.dtype == dtype
        # One row scatters: of 3,900 draws the largest error was 0.018, of five rows 0.009. Bfloat16 rounds once more.
        bound = LARGEST_ERROR * (2.0 if num_rows == 1 else 1.0) + (0.0005 if dtype == torch.bfloat16 else 0.0)
        assert relative(got, x.double() @ reference.double().T) < bound


@pytest.mark.parametrize("num_rows", [1, 7, 33])
@pytest.mark.parametrize("kind", [*UNPACKED_KINDS, "GROUP_INT8"])
def test_int8_products_are_those_of_their_formula(kind: str, num_rows: int) -> None:
    """Nothing but the rounding of x to int8 by 32 elements is lost, whatever the numbers of rows and columns."""
    if load_kernels() is None:
        pytest.skip("no compiled kernels here")
    columns = 768 if kind in K_TYPES else 544
    if kind == "GROUP_INT8":
        values, scales = quantize_int8(seeded_rng().standard_normal((35, 768), dtype=np.float32), 64)
        weight = group_int8_weight("w", torch.from_numpy(values), torch.from_numpy(scales), 64)
        reference, columns = torch.from_numpy(dequantize_int8(values, scales, 64)), 768
    else:
        weight, reference = random_weight(kind, 35, columns)
    groups = (torch.randn(num_rows, columns) * torch.logspace(-3, 3, columns)).view(num_rows, -1, 32)
    steps = groups.abs().amax(-1, keepdim=True) / 127
    whole = (groups / steps).round()
    # Nothing lies half way between two whole numbers, where the last bit of a division decides.
    x = (whole + 0.9 * (groups / steps - whole)).mul(steps).view(num_rows, columns)
    rounded = (whole * steps).view(num_rows, columns)
    assert relative(product(x, weight, "fast"), rounded.double() @ reference.double().T) < 1e-5


@pytest.mark.parametrize("kind", UNPACKED_KINDS)
def test_the_greatest_bytes_do_not_overflow(kind: str) -> None:
    """Sums of products of bytes are kept in 16 bits where they fit: all bits of the weights set, and the least int8."""
    if load_kernels() is None:
        pytest.skip("no compiled kernels here")
    weight, _ = random_weight(kind, 16, 512)
    firsts = (0,) if kind in ("Q8_0", "Q4_0", "Q5_0", "MXFP4") else HALVES.get(kind, (0, 2))
    scales = [at + byte for at in firsts for byte in (0, 1) if kind != "MXFP4" or not byte]
    blocks = weight.data.view(16, -1, BLOCK_SIZES[kind][1])
    for fill in (0xFF, 0x80, 0x00):
        for at in set(range(blocks.shape[-1])) - set(scales):
            blocks[..., at] = fill
        reference = torch.from_numpy(gguf.quants.dequantize(weight.data.numpy(), gguf.GGMLQuantizationType[kind]))
        x = torch.full((9, 512), 1.0)
        x[1::2] = -1
        expected = x.double() @ reference.double().T
        assert (product(x, weight, "fast") - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", UNPACKED_KINDS)
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels here")
    columns = 512 if kind in K_TYPES else 544
    weight, _ = random_weight(kind, 67, columns)
    x = torch.randn(75, columns)
    together = kernels.matmul(PackedMatrix(*weight), x)
    for size in (1, 4, 6, 17, 40):
        parts = [kernels.matmul(PackedMatrix(*weight), part) for part in x.split(size)]
        assert torch.equal(torch.cat(parts), together)


@pytest.mark.parametrize(
    ("columns", "group"), [(128, 64), (192, 128), (192, 192), (96, 64), (80, 32), (72, 8), (50, 10)]
)
def test_flat_int8_groups_may_cross_rows(columns: int, group: int) -> None:
    values, scales = quantize_int8(seeded_rng().standard_normal((64, columns), dtype=np.float32), group)
    weight = group_int8_weight("w", torch.from_numpy(values), torch.from_numpy(scales), group)
    reference = torch.from_numpy(dequantize_int8(values, scales, group))
    torch.testing.assert_close(unpack_rows(weight, 3, 60), reference[3:60], rtol=1e-6, atol=1e-8)
    x = torch.randn(7, columns)
    assert relative(product(x, weight, "exact"), x @ reference.T) < 1e-5
    assert relative(product(x, weight, "fast"), x @ reference.T) < 0.012
    if product_path(weight, "fast") != "unpack":
        alone = torch.cat([product(x[i : i + 1], weight, "fast") for i in range(7)])
        assert torch.equal(alone, product(x, weight, "fast"))
    assert torch.equal(PackedEmbedding(weight, torch.float32)(torch.tensor([9, 2])), unpack_rows(weight, 0, 64)[[9, 2]])


def test_other_variants_of_the_kernels_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The AVX2 code runs on this machine, too, and gives the same bits: it adds in the same order."""
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels here")
    older = library.Kernels(building.built_library(cache_folder() / "native"), frozenset({"avx2", "fma", "f16c"}))
    assert older.variant == "avx2"
    for kind in UNPACKED_KINDS:
        weight, reference = random_weight(kind, 35, 512)
        x = torch.randn(6, 512)
        got = older.matmul(PackedMatrix(*weight), x)
        assert relative(got, x @ reference.T) < LARGEST_ERROR
        assert torch.equal(got, kernels.matmul(PackedMatrix(*weight), x))
        torch.testing.assert_close(older.unpack_rows(PackedMatrix(*weight), 0, 35), reference, rtol=1e-6, atol=1e-8)


def test_dispatch_says_its_path() -> None:
    weight, reference = random_weight("Q8_0", 32, 64)
    assert product_path(weight, "exact") == "unpack"
    assert product_path(packed_weight("w", "F32", reference), "fast") == "torch"
    if kernels := load_kernels():
        assert product_path(weight, "fast") == f"int8-{kernels.variant}"
        assert "int8" in repr(PackedLinear(weight, None, "fast"))


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32)])
def test_floats_stay_as_they_are(kind: str, dtype: torch.dtype) -> None:
    matrix = torch.randn(33, 48).to(dtype)
    weight = packed_weight("w", kind, matrix)
    x = torch.randn(5, 48)
    assert weight.data.data_ptr() == matrix.data_ptr()
    assert relative(PackedLinear(weight, torch.ones(33), "exact")(x), x @ matrix.float().T + 1) < 1e-5
    assert torch.equal(PackedEmbedding(weight, torch.float32)(torch.tensor([4, 0])), matrix[[4, 0]].float())


def test_infinities_are_not_hidden() -> None:
    weight, _ = random_weight("Q8_0", 32, 64)
    for bad in (float("inf"), float("nan")):
        x = torch.randn(2, 64)
        x[1, 7] = bad
        for arithmetic in ("fast", "deterministic", "exact"):
            y = product(x, weight, arithmetic)
            assert y[0].isfinite().all()
            assert not y[1].isfinite().any()


def test_wrong_tensors_are_refused_with_what_is_supported() -> None:
    with pytest.raises(EngineError, match=r"'w' is IQ2_S; supported are .*Q8_0"):
        packed_weight("w", "IQ2_S", torch.zeros(2, 82, dtype=torch.uint8))
    with pytest.raises(EngineError, match="rows of Q8_0 blocks"):
        packed_weight("w", "Q8_0", torch.zeros(2, 35, dtype=torch.uint8))
    with pytest.raises(EngineError, match="3 scales for groups of 64"):
        group_int8_weight("w", torch.zeros(2, 64, dtype=torch.int8), torch.zeros(3), 64)


def test_without_a_compiler_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(building.BuildFailed, match="/bin/false failed"):
        building.build_library(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("ATELIER_NATIVE", "0")
    monkeypatch.setattr(packed_linear, "load_kernels", load_kernels.__wrapped__)  # asked anew
    weight = packed_weight("w", "Q8_0", torch.zeros(4, 34, dtype=torch.uint8))
    assert product_path(weight, "fast") == "unpack"
    assert PackedLinear(weight, None, "fast")(torch.ones(2, 32)).shape == (2, 4)


def test_sums_of_exponentials_by_blocks() -> None:
    kernels = load_kernels()
    if kernels is None:
        pytest.skip("no compiled kernels here")
    x = torch.randn(5, 300) * 8
    x[1, 128:256] = float("-inf")
    rows, factors = [4, 1, 2], [1.0, 0.3, 50.0]
    best = x[rows].amax(-1)
    got = kernels.exponential_sums(x, rows, best, factors, 128)
    exact = ((x[rows].double() - best[:, None]) * torch.tensor(factors)[:, None]).exp()
    expected = torch.stack([part.sum(-1) for part in exact.split(128, dim=-1)], dim=-1)
    # An exponent of 80 is rounded by 5e-6, and so is its exponential.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-37)
    assert got[1, 1] == 0
