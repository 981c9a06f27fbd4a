"""LoRAs in the layouts that the stock loaders convert have the effect that they have there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

RANK = 2
FLUX, UNET = "transformer_blocks.0.attn.", "down_blocks.{block}.attentions.0.transformer_blocks.0."


def matrices(
    denoiser: Any, name: str, paths: Sequence[str], suffixes: tuple[str, str], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return a module's two matrices; over several modules of one input they are fused."""
    weights = [denoiser.get_submodule(path).weight for path in paths]
    down = torch.randn(RANK, weights[0].shape[1], generator=generator) * 0.5
    up = torch.randn(sum(map(len, weights)), RANK, generator=generator) * 0.2
    return {name + suffixes[0]: down, name + suffixes[1]: up}


def named(denoiser: Any, modules: Mapping[str, Sequence[str]], down: str, up: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, paths in modules.items():
        tensors |= matrices(denoiser, name, paths, (down, up), generator)
    return tensors


def comfyui_flux(pair: Any) -> dict[str, torch.Tensor]:
    """`diffusion_model.` and the names of Black Forest Labs, with alphas."""
    modules = {
        "diffusion_model.double_blocks.0.img_attn.qkv": [FLUX + name for name in ("to_q", "to_k", "to_v")],
        "diffusion_model.double_blocks.0.txt_attn.proj": [FLUX + "to_add_out"],
        "diffusion_model.double_blocks.0.img_mlp.0": ["transformer_blocks.0.ff.net.0.proj"],
    }
    tensors = named(pair.ours.denoiser, modules, ".lora_down.weight", ".lora_up.weight")
    return tensors | {f"{name}.alpha": torch.tensor(1.0) for name in modules}


def xlabs_flux(pair: Any) -> dict[str, torch.Tensor]:
    modules = {
        "double_blocks.0.processor.qkv_lora1": [FLUX + name for name in ("to_q", "to_k", "to_v")],
        "double_blocks.0.processor.qkv_lora2": [FLUX + f"add_{name}_proj" for name in "qkv"],
        "double_blocks.0.processor.proj_lora1": [FLUX + "to_out.0"],
        "double_blocks.0.processor.proj_lora2": [FLUX + "to_add_out"],
        "single_blocks.0.processor.proj_lora": ["single_transformer_blocks.0.proj_out"],
    }
    return named(pair.ours.denoiser, modules, ".down.weight", ".up.weight")


def transformer_flux(pair: Any) -> dict[str, torch.Tensor]:
    """`transformer.` and the names of diffusers, but kohya's matrices."""
    paths = (FLUX + "to_q", "single_transformer_blocks.0.proj_mlp")
    modules = {f"transformer.{path}": [path] for path in paths}
    return named(pair.ours.denoiser, modules, ".lora_down.weight", ".lora_up.weight")


def kohya_flux_and_more(pair: Any) -> dict[str, torch.Tensor]:
    """kohya's, with a text encoder that stock does not know, and leaves out."""
    modules = {
        "lora_unet_double_blocks_0_img_mlp_0": ["transformer_blocks.0.ff.net.0.proj"],
        "lora_unet_single_blocks_0_linear2": ["single_transformer_blocks.0.proj_out"],
    }
    tensors = named(pair.ours.denoiser, modules, ".lora_down.weight", ".lora_up.weight")
    other = "lora_te3_encoder_block_0_layer_0_SelfAttention_q"
    return tensors | {f"{other}.lora_down.weight": torch.ones(2, 4), f"{other}.lora_up.weight": torch.ones(4, 2)}


def unet_paths(pair: Any, *endings: str) -> list[str]:
    paths = [path for path, layer in pair.ours.denoiser.named_modules() if path.endswith(endings)]
    assert len(paths) >= len(endings)
    return paths


def old_processors(pair: Any) -> dict[str, torch.Tensor]:
    """The attention processors of diffusers before PEFT: `to_q_lora.down.weight`."""
    modules = {
        f"unet.{path.replace('attn2.', 'attn2.processor.').removesuffix('.0')}_lora": [path]
        for path in unet_paths(pair, "attn2.to_q", "attn2.to_k", "attn2.to_out.0")
    }
    return named(pair.ours.denoiser, modules, ".down.weight", ".up.weight")


def old_layers(pair: Any) -> dict[str, torch.Tensor]:
    """The layers of diffusers before PEFT: `to_q.lora.down.weight`."""
    modules = {f"unet.{path}.lora": [path] for path in unet_paths(pair, "attn1.to_v", "ff.net.0.proj")}
    return named(pair.ours.denoiser, modules, ".down.weight", ".up.weight")


def kohya_with_a_module_more(pair: Any) -> dict[str, torch.Tensor]:
    """kohya's, with a block that this UNet does not have: stock warns, and leaves it out."""
    paths = unet_paths(pair, "attn2.to_k", "attn1.to_v")
    modules = {f"lora_unet_{path.replace('.', '_')}": [path] for path in paths}
    more = paths[0].replace("attentions.0", "attentions.7").replace(".", "_")
    assert more not in modules
    tensors = named(pair.ours.denoiser, modules, ".lora_down.weight", ".lora_up.weight")
    halves = {".lora_down.weight": torch.ones(2, 12), ".lora_up.weight": torch.ones(8, 2)}
    tensors |= {f"lora_unet_{more}{half}": tensor for half, tensor in halves.items()}
    return tensors | {f"{name}.alpha": torch.tensor(1.0) for name in (*modules, f"lora_unet_{more}")}


LAYOUTS = [
    ("flux", comfyui_flux),
    ("flux", xlabs_flux),
    ("flux", transformer_flux),
    ("flux", kohya_flux_and_more),
    ("sdxl", old_processors),
    ("stable_diffusion", old_processors),
    ("sdxl", old_layers),
    ("stable_diffusion", old_layers),
    ("sdxl", kohya_with_a_module_more),
    ("stable_diffusion", kohya_with_a_module_more),
]


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout[0]}-{layout[1].__name__}")
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    name, make = request.param
    pair, path = request.getfixturevalue(name), tmp_path / "style.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in make(pair).items()}, path)
    yield path, pair
    pair.stock.unload_lora_weights()


@pytest.mark.drawn(2)
def test_equals_stock(file, make_request, tmp_path):
    path, pair = file
    pair.stock.load_lora_weights(str(path.parent), weight_name=path.name, adapter_name="style")
    pair.stock.set_adapters("style", 0.8)
    request = make_request(guidance_scale=2.0, adapters=(AdapterUse("style", 0.8),))
    conditioning = pair.conditioning(negative=True)
    ours = pair.assert_equals_stock(request, conditioning, {"style": load_adapter(path)})
    plain = pair.ours.generate(make_request(guidance_scale=2.0), conditioning)
    assert np.abs(ours.astype(int) - plain.astype(int)).max() > 2
    assert externalize(WeightStore(tmp_path / "store"), "style", path).kind == "adapter"


def test_what_has_no_effect_is_said(sdxl, tmp_path, caplog):
    save_file(kohya_with_a_module_more(sdxl), tmp_path / "style.safetensors")
    pairs = sdxl.ours._loras.pairs_of(load_adapter(tmp_path / "style.safetensors"))
    assert len(pairs) == len(kohya_with_a_module_more(sdxl)) // 3 - 1
    assert f"1 of {len(pairs) + 1} modules are not in a UNet2DConditionModel and have no effect" in caplog.text


def test_of_another_model_nothing_is_left_out(sdxl, make_request, tmp_path):
    name = "lora_unet_down_blocks_3_attentions_7_transformer_blocks_0_attn2_to_k"
    tensors = {f"{name}.lora_down.weight": torch.ones(2, 12), f"{name}.lora_up.weight": torch.ones(8, 2)}
    save_file(tensors, tmp_path / "other.safetensors")
    adapters = {"other": load_adapter(tmp_path / "other.safetensors")}
    with pytest.raises(EngineError, match=r"adapter targets .* \(1 of 1\) are not in UNet2DConditionModel"):
        sdxl.ours.start_request(make_request(adapters=(AdapterUse("other"),)), sdxl.conditioning(), adapters)


def test_one_file_as_diffusers_saves_it_is_an_adapter(flux, tmp_path):
    tensors = named(
        flux.ours.denoiser, {f"transformer.{FLUX}to_q": [FLUX + "to_q"]}, ".lora_A.weight", ".lora_B.weight"
    )
    save_file(tensors, tmp_path / "mine.safetensors")
    assert externalize(WeightStore(tmp_path / "store"), "mine", tmp_path / "mine.safetensors").kind == "adapter"
