"""LoRA files of kohya's trainer equal stock's reading of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deployments.engines.records.protocol import AdapterUse, EngineError
from weights.operations.adapters import load_adapter
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

UNET = (
    "attn2.to_k",
    "attn1.to_out.0",
    "proj_in",
    "ff.net.0.proj",
    "conv1",
    "time_emb_proj",
)
# kohya's names of Flux's modules, the module whose shape they have, and how many of these are fused
FLUX = (
    ("double_blocks_0_img_attn_qkv", "transformer_blocks.0.attn.to_q", 3),
    ("double_blocks_0_txt_attn_proj", "transformer_blocks.0.attn.to_add_out", 1),
    ("double_blocks_0_img_mlp_0", "transformer_blocks.0.ff.net.0.proj", 1),
    ("single_blocks_0_linear2", "single_transformer_blocks.0.proj_out", 1),
)


def kohya_tensors(pair: Any, seed: int = 0, mixed_alphas: bool = False) -> dict[str, torch.Tensor]:
    """Every kind of module. HAZARD: of mixed alphas, stock loses those of a UNet's attention; PEFT warns of it."""
    generator = torch.Generator().manual_seed(seed)
    denoiser, tensors = pair.ours.denoiser, {}
    if pair.ours.family.class_name == "FluxPipeline":
        targets = [(name, denoiser.get_submodule(path).weight, fused) for name, path, fused in FLUX]
    else:
        paths = [path for path, _ in denoiser.named_modules() if path.endswith(UNET)]
        targets = [(path.replace(".", "_"), denoiser.get_submodule(path).weight, 1) for path in paths]
        assert len(targets) >= len(UNET)
    for number, (name, weight, fused) in enumerate(targets):
        kernel_down, kernel_up = ((), ()) if weight.ndim == 2 else (weight.shape[2:], (1, 1))
        down = torch.randn(2, weight.shape[1], *kernel_down, generator=generator)
        up = torch.randn(weight.shape[0] * fused, 2, *kernel_up, generator=generator)
        tensors[f"lora_unet_{name}.lora_down.weight"] = down * 0.5
        tensors[f"lora_unet_{name}.lora_up.weight"] = up * 0.2
        tensors[f"lora_unet_{name}.alpha"] = torch.tensor(1.0 + (number % 3 if mixed_alphas else 0))
    return tensors


@pytest.fixture(params=["flux", "sdxl", "stable_diffusion"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    pair = request.getfixturevalue(request.param)
    path = tmp_path / "style.safetensors"
    save_file(kohya_tensors(pair, mixed_alphas=pair.denoiser_name == "transformer"), path)
    yield path, pair
    pair.stock.unload_lora_weights()


@pytest.mark.drawn(2)
@pytest.mark.parametrize("scale", [1.0, -0.6])
def test_equals_stock(file, make_request, scale):
    path, pair = file
    pair.stock.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="style")
    pair.stock.set_adapters("style", scale)
    request = make_request(guidance_scale=2.0, adapters=(AdapterUse("style", scale),))
    conditioning = pair.conditioning(negative=True)
    adapter = load_adapter(path)
    before = {name: tensor.clone() for name, tensor in adapter.raw.items()}
    ours = pair.assert_equals_stock(request, conditioning, {"style": adapter})
    plain = pair.ours.generate(make_request(guidance_scale=2.0), conditioning)
    assert np.abs(ours.astype(int) - plain.astype(int)).max() > 4
    assert all(torch.equal(adapter.raw[name], tensor) for name, tensor in before.items())


@pytest.mark.drawn
def test_beside_one_of_diffusers_layout(file, make_request, tmp_path):
    _, pair = file
    other = kohya_tensors(pair, seed=1)
    save_file(other, tmp_path / "other.safetensors")
    for name in ("style", "other"):
        pair.stock.load_lora_weights(str(tmp_path), weight_name=f"{name}.safetensors", adapter_name=name)
    pair.stock.set_adapters(["style", "other"], [0.4, 0.7])
    request = make_request(adapters=(AdapterUse("style", 0.4), AdapterUse("other", 0.7)))
    adapters = {name: load_adapter(tmp_path / f"{name}.safetensors") for name in ("style", "other")}
    pair.assert_equals_stock(request, pair.conditioning(), adapters)


def test_each_module_has_its_own_alpha(sdxl, tmp_path):
    tensors = kohya_tensors(sdxl, mixed_alphas=True)
    save_file(tensors, tmp_path / "mixed.safetensors")
    pairs = sdxl.ours._loras.pairs_of(load_adapter(tmp_path / "mixed.safetensors"))
    assert len(pairs) == len(tensors) // 3
    paths = {layer: path for path, layer in sdxl.ours.denoiser.named_modules()}
    for layer, pair in pairs.items():
        assert pair.scale == tensors[f"lora_unet_{paths[layer].replace('.', '_')}.alpha"] / 2


def test_a_file_is_an_adapter_in_the_store(file, tmp_path):
    path, _ = file
    manifest = externalize(WeightStore(tmp_path / "store"), "style", path)
    assert manifest.kind == "adapter"
    assert [component.library for component in manifest.components.values()] == ["peft"]


def test_what_is_refused(flux, sdxl, stable_diffusion_3, make_request, tmp_path):
    save_file(kohya_tensors(sdxl), tmp_path / "sdxl.safetensors")
    save_file(kohya_tensors(flux), tmp_path / "flux.safetensors")
    for pair, name, message in [
        (flux, "sdxl", "sdxl.safetensors: "),
        (sdxl, "flux", "flux.safetensors: "),
        (stable_diffusion_3, "sdxl", "adapter targets .* are not in SD3Transformer2DModel"),
    ]:
        adapters = {"a": load_adapter(tmp_path / f"{name}.safetensors")}
        with pytest.raises(EngineError, match=message):
            pair.ours.start_request(make_request(adapters=(AdapterUse("a"),)), pair.conditioning(), adapters)
