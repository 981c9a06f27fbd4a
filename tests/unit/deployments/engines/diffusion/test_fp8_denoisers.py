"""Denoisers with float8 weights compute what stock computes with the same weights made wide, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from safetensors.torch import load_file
from torch import nn

from deployments.engines.building.build import build_module
from deployments.engines.diffusion.pipeline import DenoisePipeline
from deployments.engines.nn import fp8_linear
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.nn.fp8_linear import _Fp8Linear, _scaled_product
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters
from infra.offline.fp8_pipeline import _quantize_rows, export_fp8
from weights.loading.loader import load_model
from weights.loading.provider import LocalExtents
from weights.operations.adapters import LoraPair
from weights.operations.externalize import externalize
from weights.records.errors import FormatError, WeightsError
from weights.storage.store import WeightStore


def quantized(pair: Any, folder: Path, scales: Any) -> Any:
    family = pair.ours.family
    return export_fp8(pair.folder, folder, family.denoiser_name, family.network.keeps_precision, scales)


def widened(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By torch's own cast."""
    return {
        name: tensor.float() * tensors[f"{name}_scale"] if tensor.dtype == torch.float8_e4m3fn else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }


@pytest.mark.drawn(2)
@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_images_equal_stock_with_the_same_weights(pair, make_request, tmp_path, scales):
    report = quantized(pair, tmp_path / "fp8", scales)
    store = WeightStore(tmp_path / "store")
    manifest = externalize(store, "small", tmp_path / "fp8", dtype="float32")  # which leaves float8 as it is
    loaded = load_model(manifest, LocalExtents(store.packs))
    name = pair.denoiser_name
    modules = {part: build_module("diffusers", None, pair.folder / part, loaded[part]) for part in (name, "vae")}
    ours = DenoisePipeline(pair.ours.family, pair.folder, modules)
    small = [module for module in ours.denoiser.modules() if isinstance(module, _Fp8Linear)]
    assert len(small) == sum(row.kind == "F8_E4M3" for row in report.tensors) > 3
    assert ours.denoiser.dtype == torch.float32
    before = getattr(pair.stock, name)
    wide = copy.deepcopy(before)
    wide.load_state_dict(widened(dict(loaded[name])))
    request, conditioning = make_request(guidance_scale=2.0), pair.conditioning(negative=True)
    setattr(pair.stock, name, wide)
    try:
        stock = pair.stock_images(request, conditioning)
    finally:
        setattr(pair.stock, name, before)
    images = ours.generate(request, conditioning)
    assert np.abs(images.astype(int) - stock.astype(int)).max() <= 1
    exact = pair.ours.generate(request, conditioning)
    assert 0 < np.abs(images.astype(int) - exact.astype(int)).mean() < 16  # random weights; float8 is not for nothing


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_a_product_of_float8_is_that_of_what_its_factors_stand_for(scales, monkeypatch):
    """Torch multiplies float8 on the CPU as well, slowly; nothing chooses it there."""
    generator = torch.Generator().manual_seed(4)
    matrix = torch.randn(48, 64, generator=generator).numpy() * 0.1
    values, scale, _ = _quantize_rows("w", matrix, scales)
    weight, scale = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn), torch.from_numpy(scale)
    bias = torch.randn(48, generator=generator).to(torch.bfloat16)
    x = torch.randn(3, 5, 64, generator=generator).to(torch.bfloat16) * torch.logspace(-3, 3, 5)[:, None].bfloat16()
    x[1, 2] = 0
    found = _scaled_product(x, weight, scale, bias)
    assert (found.shape, found.dtype) == ((3, 5, 48), torch.bfloat16)
    steps = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    rounded = (x.float() / steps).to(torch.float8_e4m3fn).float() * steps
    expected = rounded @ (weight.float() * scale).T + bias.float()
    assert torch.allclose(found.float(), expected, rtol=2**-7, atol=1e-3)
    assert torch.equal(_scaled_product(x[:1, 3:4], weight, scale, bias), found[:1, 3:4])  # its rows are its own
    exact = x.float() @ (weight.float() * scale).T + bias.float()
    assert (found.float() - exact).norm() / exact.norm() < 0.05

    layer = nn.Linear(64, 48).to(torch.bfloat16).requires_grad_(False)
    layer.__class__, layer.weight = _Fp8Linear, nn.Parameter(weight, requires_grad=False)
    layer.bias = nn.Parameter(bias, requires_grad=False)
    layer.register_buffer("weight_scale", scale)
    assert not torch.equal(layer(x), found)
    monkeypatch.setattr(fp8_linear, "_multiplies_float8", lambda x, weight: True)
    assert torch.equal(layer(x), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_a_layer_is_that_of_its_wide_weights_bit_for_bit(dtype, scales):
    """All values that there are, as torch's cast makes them, in more parts than one."""
    rows, columns = 2100, 512
    matrix = torch.randn(rows, columns).numpy() * 0.1
    values, scale, _ = _quantize_rows("w", matrix, scales)
    weight = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
    layer = nn.Linear(columns, rows).to(dtype).requires_grad_(False)
    x, expected = torch.randn(16, columns).to(dtype), copy.deepcopy(layer)
    expected.weight = nn.Parameter((weight.float() * torch.from_numpy(scale)).to(dtype), requires_grad=False)
    make_batch_invariant(nn.Sequential(expected))
    layer.__class__, layer.weight = _Fp8Linear, nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.from_numpy(scale).to(dtype)  # a power of two: no cast changes it
    assert torch.equal(layer(x), expected(x))
    pair = LoraPair(torch.randn(2, columns), torch.randn(rows, 2), 0.5)
    with applied_adapters([AdaptedSpan([({layer: pair}, 1.0)])]):
        assert not torch.equal(layer(x), expected(x))


@pytest.mark.parametrize("scales", ["row", "tensor"])
def test_errors_are_those_of_float8(scales):
    matrix = seeded_rng().normal(size=(64, 96)).astype(np.float32)
    matrix[5] = 0
    values, scale, row = _quantize_rows("w", matrix, scales)
    assert scale.shape == ((64, 1) if scales == "row" else ())
    assert np.array_equal(np.exp2(np.round(np.log2(scale))), scale)
    restored = values.astype(np.float32) * scale
    large = np.abs(matrix) > scale * 2**-6  # three bits of mantissa, rounded to nearest
    assert (np.abs(restored - matrix)[large] <= np.abs(matrix)[large] / 16).all()
    assert 0.01 < row.rms_error < 0.04
    assert 8 <= row.bits_per_weight < 8.5


def test_what_is_kept_and_what_is_refused(flux, sdxl, tmp_path):
    report = quantized(flux, tmp_path / "fp8", "row")
    kinds = {row.name: (row.kind, row.note) for row in report.tensors}
    assert kinds["transformer_blocks.0.attn.to_q.weight"] == ("F8_E4M3", "")
    assert kinds["single_transformer_blocks.0.proj_out.weight"] == ("F8_E4M3", "")
    for name in ("x_embedder.weight", "proj_out.weight", "norm_out.linear.weight"):
        assert kinds[name] == ("F32", "keeps its precision")
    stored = load_file(tmp_path / "fp8" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert set(stored) == set(kinds) | {f"{name}_scale" for name, (kind, _) in kinds.items() if kind == "F8_E4M3"}
    assert (tmp_path / "fp8" / "vae" / "diffusion_pytorch_model.safetensors").is_file()
    with pytest.raises(FormatError, match="exists already"):
        quantized(flux, tmp_path / "fp8", "row")
    with pytest.raises(FormatError, match="no diffusers pipeline with a 'transformer'"):
        export_fp8(sdxl.folder, tmp_path / "other", "transformer", ())
    for bad in (float("nan"), float("inf")):
        with pytest.raises(WeightsError, match="tensor w: float8 cannot express"):
            _quantize_rows("w", np.array([[1.0, bad]], np.float32), "row")
    assert not (tmp_path / "other").exists()
