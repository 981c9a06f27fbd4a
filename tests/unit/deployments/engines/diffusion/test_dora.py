"""DoRA, on the side path and merged, is what PEFT computes; kohya's and LyCORIS' are what their formula says."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from deployments.engines.nn import fp8_linear
from deployments.engines.nn.batch_invariant import make_batch_invariant
from deployments.engines.nn.lora import AdaptedSpan, applied_adapters, fit_pairs, merge_pairs
from deployments.engines.records.protocol import AdapterUse, EngineError
from infra.offline.fp8_pipeline import _quantize_rows
from weights.operations.adapters import LoraPair, load_adapter

TARGETS = {
    "StableDiffusion3Pipeline": ["attn.to_q", "attn.add_k_proj", "ff.net.0.proj"],
    "FluxPipeline": ["attn.to_q", "attn.to_out.0", "ff.net.0.proj", "proj_mlp"],
    "StableDiffusionXLPipeline": ["attn2.to_k", "attn1.to_out.0", "proj_in", "conv1", "time_emb_proj"],
    "StableDiffusionPipeline": ["attn2.to_k", "proj_in", "conv1"],
}


def randomize(adapted: nn.Module, adapter: str, seed: int) -> None:
    """Give a PEFT adapter random matrices, and magnitudes around those of the base."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if f"lora_magnitude_vector.{adapter}" in name:
                parameter.mul_(1 + torch.randn_like(parameter) * 0.2)
            elif f".{adapter}." in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)


@pytest.fixture
def dora(pair, tmp_path) -> Any:
    """Two DoRAs in the stock pipeline, of one of which a plain LoRA is a mate, and the folders that it saved."""
    denoiser = getattr(pair.stock, pair.denoiser_name)
    for seed, name in enumerate(("thick", "wide")):
        config = peft.LoraConfig(
            r=2 + seed, lora_alpha=3, target_modules=TARGETS[pair.ours.family.class_name], use_dora=True
        )
        denoiser.add_adapter(config, name)
        randomize(denoiser, name, seed)
        layers = peft.get_peft_model_state_dict(denoiser, adapter_name=name)
        metadata = {f"{pair.denoiser_name}_lora_adapter_metadata": config.to_dict()}
        pair.stock.save_lora_weights(tmp_path / name, **{f"{pair.denoiser_name}_lora_layers": layers}, **metadata)
    yield tmp_path, pair
    pair.stock.unload_lora_weights()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("scale", [1.0, 0.6, -0.5])
def test_equals_stock(dora, make_request, scale):
    folder, pair = dora
    pair.stock.set_adapters("thick", scale)
    request = make_request(num_images=2, guidance_scale=2.0, adapters=(AdapterUse("thick", scale),))
    conditioning = pair.conditioning(negative=True)
    ours = pair.assert_equals_stock(request, conditioning, {"thick": load_adapter(folder / "thick")})
    plain = pair.ours.generate(make_request(num_images=2, guidance_scale=2.0), conditioning)
    assert np.abs(ours.astype(int) - plain.astype(int)).max() > 4


@pytest.mark.drawn(2)
def test_two_of_them_equal_stock(dora, make_request):
    folder, pair = dora
    pair.stock.set_adapters(["thick", "wide"], [0.5, 0.8])
    request = make_request(adapters=(AdapterUse("wide", 0.8), AdapterUse("thick", 0.5)))
    adapters = {name: load_adapter(folder / name) for name in ("thick", "wide")}
    pair.assert_equals_stock(request, pair.conditioning(), adapters)


@pytest.mark.drawn(2)
def test_merged_it_is_the_same(dora, make_request):
    folder, pair = dora
    adapters, uses = {"thick": load_adapter(folder / "thick")}, (AdapterUse("thick", 0.7),)
    merged = pair.ours.generate(
        make_request(adapters=uses, merges_adapter=True), pair.conditioning(), adapters=adapters
    )
    beside = pair.ours.generate(make_request(adapters=uses), pair.conditioning(), adapters=adapters)
    assert np.abs(merged.astype(int) - beside.astype(int)).max() <= 1


@pytest.mark.drawn
def test_company_changes_nothing(dora, make_request):
    folder, pair = dora
    adapters = {name: load_adapter(folder / name) for name in ("thick", "wide")}
    uses = [(), (AdapterUse("thick"),), (AdapterUse("wide", 0.4),), (AdapterUse("thick", 0.0),)]
    jobs = [make_request(adapters=use) for use in uses]
    states = [pair.ours.start_request(job, pair.conditioning(), adapters) for job in jobs]
    while not states[0].done:
        pair.ours.step(states)
    together = pair.ours.decode(states)
    for job, image in zip(jobs, together, strict=True):
        assert np.array_equal(image, pair.ours.generate(job, pair.conditioning(), adapters=adapters))
    assert np.array_equal(together[0], together[3])  # of strength 0 it is off


def layer_of(kind: str) -> tuple[Any, torch.Tensor, LoraPair]:
    """A layer, an input, and a pair for it."""
    torch.manual_seed(5)
    if kind == "conv":
        layer: Any = nn.Conv2d(6, 8, 3, padding=1)
        return layer, torch.randn(2, 6, 5, 5), LoraPair(torch.randn(2, 6, 3, 3), torch.randn(8, 2, 1, 1), 0.7)
    layer, pair = nn.Linear(32, 16), LoraPair(torch.randn(2, 32), torch.randn(16, 2), 0.7)
    if kind == "float8":
        values, scale, _ = _quantize_rows("w", layer.weight.detach().numpy(), "row")
        layer.__class__ = fp8_linear._Fp8Linear
        weight = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = torch.from_numpy(scale)
    return layer, torch.randn(2, 7, 32), pair


@pytest.mark.parametrize("kind", ["linear", "conv", "float8"])
@pytest.mark.parametrize("by_input", [False, True])
@pytest.mark.parametrize("is_merged", [False, True])
def test_a_layer_has_the_lengths_that_its_magnitudes_say(kind, by_input, is_merged):
    layer, x, pair = layer_of(kind)
    with torch.no_grad():
        wide = copy.deepcopy(layer)
        if kind == "float8":
            wide.__class__ = nn.Linear
            wide.weight = nn.Parameter(layer.weight.float() * layer.weight_scale)
        weight = wide.weight
        delta = (pair.up.flatten(1) @ pair.down.flatten(1)).view(weight.shape)
        changed = weight + 0.9 * pair.scale * delta
        axes = tuple(axis for axis in range(weight.ndim) if axis != int(by_input))
        magnitude = torch.rand(weight.shape[int(by_input)]) + 0.5
        shape = [-1 if axis not in axes else 1 for axis in range(weight.ndim)]
        wide.weight = nn.Parameter(
            changed * magnitude.view(shape) / torch.linalg.vector_norm(changed, dim=axes, keepdim=True)
        )
        pair = LoraPair(pair.down, pair.up, pair.scale, magnitude, by_input)
        make_batch_invariant(nn.Sequential(layer))
        merged = merge_pairs({layer: pair}, 0.9)
        if is_merged and kind != "float8":
            found = merged.forwards[layer](x)
        else:
            assert bool(merged.beside) is (kind == "float8")
            with applied_adapters([AdaptedSpan([({layer: pair}, 0.9)])]):
                found = layer(x)
        assert torch.allclose(found, wide(x), atol=1e-4)


def test_a_row_of_zeros_stays_one():
    module = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        module[0].weight[1] = 0
    up = torch.randn(3, 2)
    up[1] = 0
    pairs = fit_pairs(module, {"0": LoraPair(torch.randn(2, 4), up, 1.0, torch.ones(3))})
    with torch.no_grad(), applied_adapters([AdaptedSpan([(pairs, 1.0)])]):
        found = module(torch.randn(5, 4))
    assert torch.allclose(found[:, 1], module[0].bias[1].expand(5))


# kohya's: their names are translated, and the fused layers of Flux are divided.


def kohya(pair, by_input: bool, number: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of a file, and the weights that the changed modules have with it by LyCORIS' formula."""
    generator = torch.Generator().manual_seed(number)
    denoiser, tensors, changed = pair.ours.denoiser, {}, {}
    if pair.ours.family.class_name == "FluxPipeline":
        block = "transformer_blocks.0.attn."
        targets = {
            "double_blocks_0_img_attn_qkv": [block + name for name in ("to_q", "to_k", "to_v")],
            "double_blocks_0_txt_attn_proj": [block + "to_add_out"],
            "double_blocks_0_img_mlp_0": ["transformer_blocks.0.ff.net.0.proj"],
        }
    else:
        endings = ("attn2.to_k", "attn1.to_out.0", "conv1", "proj_in")
        paths = [path for path, _ in denoiser.named_modules() if path.endswith(endings)]
        targets = {path.replace(".", "_"): [path] for path in paths}
    for name, paths in targets.items():
        weights = [denoiser.get_submodule(path).weight for path in paths]
        weight = torch.cat(weights)
        kernels = ((), ()) if weight.ndim == 2 else (weight.shape[2:], (1, 1))
        down = torch.randn(2, weight.shape[1], *kernels[0], generator=generator) * 0.5
        up = torch.randn(len(weight), 2, *kernels[1], generator=generator) * 0.2
        alpha = 1.0
        whole = weight + alpha / 2 * (up.flatten(1) @ down.flatten(1)).view(weight.shape)
        axes = tuple(axis for axis in range(weight.ndim) if axis != int(by_input))
        norm = torch.linalg.vector_norm(whole, dim=axes, keepdim=True)
        scale = norm * (1 + 0.3 * torch.rand(norm.shape, generator=generator))
        parts = (whole * scale / norm).split([len(own) for own in weights])
        changed |= dict(zip(paths, parts, strict=True))
        tensors |= {f"lora_unet_{name}.lora_down.weight": down, f"lora_unet_{name}.lora_up.weight": up}
        tensors |= {f"lora_unet_{name}.alpha": torch.tensor(alpha), f"lora_unet_{name}.dora_scale": scale}
    return tensors, changed


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("name", "by_input"),
    [("sdxl", False), ("sdxl", True), ("stable_diffusion", False), ("stable_diffusion", True), ("flux", False)],
)
def test_a_kohya_dora_is_its_formula(request, make_request, tmp_path, name, by_input):
    pair = request.getfixturevalue(name)
    tensors, changed = kohya(pair, by_input, 1)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "style.safetensors")
    denoiser = getattr(pair.stock, pair.denoiser_name)
    before = {path: denoiser.get_submodule(path).weight.data for path in changed}
    for path, weight in changed.items():
        denoiser.get_submodule(path).weight.data = weight.data
    try:
        request = make_request(guidance_scale=2.0, adapters=(AdapterUse("style"),))
        adapters = {"style": load_adapter(tmp_path / "style.safetensors")}
        ours = pair.assert_equals_stock(request, pair.conditioning(negative=True), adapters)
    finally:
        for path, weight in before.items():
            denoiser.get_submodule(path).weight.data = weight
    scaled = {name: tensor for name, tensor in tensors.items() if not name.endswith("dora_scale")}
    save_file({name: tensor.contiguous() for name, tensor in scaled.items()}, tmp_path / "plain.safetensors")
    plain = {"style": load_adapter(tmp_path / "plain.safetensors")}
    assert (
        np.abs(ours.astype(int) - pair.ours.generate(request, pair.conditioning(negative=True), None, plain)).max() > 2
    )


def test_magnitudes_that_fit_no_layer_are_refused(flux, sdxl, make_request, tmp_path):
    for pair, by_input, change, message in [
        (flux, True, None, "dora_scale is by input, which is not supported for a FluxPipeline"),
        (sdxl, False, torch.ones(3, 1), r"dora_scale has the shape \(3, 1\), which no layer"),
    ]:
        tensors, _ = kohya(pair, by_input, 2)
        if change is not None:
            tensors[next(name for name in tensors if name.endswith("dora_scale"))] = change
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
        adapters = {"a": load_adapter(tmp_path / "a.safetensors")}
        with pytest.raises(EngineError, match=message):
            pair.ours.start_request(make_request(adapters=(AdapterUse("a"),)), pair.conditioning(), adapters)
