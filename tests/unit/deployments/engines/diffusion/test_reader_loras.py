"""LoRAs of models whose prompts a language model reads have the effect that they have in stock, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.classes import assembled
from kit.tiny.pipelines import make, saved
from kit.tiny.seeing import edit_small_areas, qwen_edit
from safetensors.torch import save_file
from unit.deployments.engines.diffusion.reader_pairs import ReaderPair

from deployments.engines.records.protocol import AdapterUse, DiffusionRequest
from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase
from weights.operations.adapters import load_adapter

RANK, ALPHA = 2, 3.0
Tensors = dict[str, torch.Tensor]
QWEN = (
    "transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.add_k_proj", "transformer_blocks.0.attn.to_out.0",
    "transformer_blocks.0.txt_mlp.net.2", "transformer_blocks.1.img_mod.1", "proj_out",
)  # fmt: skip
Z_IMAGE = ("layers.0.attention.to_q", "noise_refiner.0.feed_forward.w1", "layers.1.adaLN_modulation.0")
FLUX_2 = (
    "transformer_blocks.0.attn.to_q", "transformer_blocks.0.ff_context.linear_out",
    "double_stream_modulation_img.linear", "single_transformer_blocks.0.attn.to_qkv_mlp_proj",
)  # fmt: skip
MODULES = {
    "QwenImageEditPipeline": QWEN,
    "QwenImageEditPlusPipeline": QWEN,
    "QwenImagePipeline": QWEN,
    "ZImagePipeline": Z_IMAGE,
    "Flux2Pipeline": FLUX_2,
    "Flux2KleinPipeline": FLUX_2,
}
# Names of Black Forest Labs, and the modules of diffusers that they mean.
BLACK_FOREST = {
    "double_blocks.0.img_attn.qkv": [f"transformer_blocks.0.attn.to_{one}" for one in "qkv"],
    "double_blocks.0.txt_mlp.2": ["transformer_blocks.0.ff_context.linear_out"],
    "single_blocks.0.linear1": ["single_transformer_blocks.0.attn.to_qkv_mlp_proj"],
}


def written(pair: ReaderPair, name: Callable[[str], str], down: str, up: str, *, has_alpha: bool) -> Tensors:
    """Matrices of the modules of a class, by the names that `name` gives them."""
    is_flux = pair.class_name.startswith("Flux2") and not name("x").startswith("transformer.")
    modules = BLACK_FOREST if is_flux else {path: [path] for path in MODULES[pair.class_name]}
    found = {}
    for path, parts in modules.items():
        weights = [pair.ours.denoiser.get_submodule(part).weight for part in parts]
        found[name(path) + down] = torch.randn(RANK, weights[0].shape[1]) * 0.5
        found[name(path) + up] = torch.randn(sum(map(len, weights)), RANK) * 0.3
        if has_alpha:
            found[f"{name(path)}.alpha"] = torch.tensor(ALPHA)
    return found


def of_diffusers(pair: ReaderPair) -> Tensors:
    return written(pair, "transformer.{}".format, ".lora_A.weight", ".lora_B.weight", has_alpha=False)


def of_comfyui(pair: ReaderPair) -> Tensors:
    return written(pair, "diffusion_model.{}".format, ".lora_A.weight", ".lora_B.weight", has_alpha=False)


def of_kohya(pair: ReaderPair) -> Tensors:
    def name(path: str) -> str:
        return f"lora_unet_{path.replace('.', '_')}"

    return written(pair, name, ".lora_down.weight", ".lora_up.weight", has_alpha=True)


def of_lightning(pair: ReaderPair) -> Tensors:
    return written(pair, str, ".lora_down.weight", ".lora_up.weight", has_alpha=True)


def of_diffsynth(pair: ReaderPair) -> Tensors:
    return written(pair, str, ".lora_A.default.weight", ".lora_B.default.weight", has_alpha=False)


ALL: Sequence[Callable[[ReaderPair], Tensors]] = (of_diffusers, of_comfyui, of_kohya, of_lightning, of_diffsynth)
CASES = [
    (class_name, layout)
    for class_name in MODULES
    for layout in (ALL[:3] if class_name.startswith("Flux2") else ALL)
    if "Plus" not in class_name or layout is of_diffusers  # else as the other one that edits
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ReaderPair]:
    made: dict[str, ReaderPair] = {}

    def find(class_name: str) -> ReaderPair:
        if class_name not in made:
            folder = tmp_path_factory.mktemp("pair")
            if "Edit" in class_name:
                stock = saved(lambda: assembled(class_name, **qwen_edit()), folder)
            else:
                stock = make(class_name, folder)
            made[class_name] = ReaderPair(stock, folder)
        return made[class_name]

    return find


@pytest.mark.drawn
@pytest.mark.parametrize(("class_name", "layout"), CASES)
def test_images_are_those_of_stock(
    pairs: Callable[[str], ReaderPair],
    class_name: str,
    layout: Callable[[ReaderPair], Tensors],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edit_small_areas(monkeypatch)
    pair, file = pairs(class_name), tmp_path / "style.safetensors"
    tensors = layout(pair)
    save_file(tensors, file)
    image = seeded_rng().integers(0, 256, (64, 64, 3), dtype=np.uint8)
    request = DiffusionRequest(
        "r", height=64, width=64, num_inference_steps=2, seed=7, guidance_scale=2.0, true_cfg_scale=2.0,
        references=(image,) if pair.family.references.most else (), adapters=(AdapterUse("style", 0.8),),
    )  # fmt: skip
    negative = None if class_name.startswith("Flux2") else "dull"  # of stock it is always empty, or none
    conditioning = pair.conditioning(request, "make it blue", negative)
    pair.stock.load_lora_weights(str(tmp_path), weight_name=file.name, adapter_name="style")
    try:
        pair.stock.set_adapters("style", 0.8)
        stock = pair.stock_run(request, "make it blue", negative)
        pair.stock.set_adapters("style", 0.0)
        plain, _ = pair.stock_run(request, "make it blue", negative)
    finally:
        pair.stock.unload_lora_weights()
    state = pair.ours.start_request(request, conditioning, {"style": load_adapter(file)})
    pair.assert_equal_to_stock(state, stock)
    assert (state.latents - plain).abs().max() > 0.01
    parts = {part.name: part for part in read_checkpoint(pair.folder).components}
    base = AdapterBase("base", "diffusion", class_name, pair.folder, parts)
    assert why_unservable(read_checkpoint(file), (base,)) is None
    narrow = {name: one[:, 1:] if ".lora_down" in name or ".lora_A" in name else one for name, one in tensors.items()}
    save_file({name: one.contiguous() for name, one in narrow.items()}, file)
    assert "base" in (why_unservable(read_checkpoint(file), (base,)) or "")
