"""Files that people report to other projects as "not loaded": their names for layers, and what they change here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from kit.seeding import seeded_rng
from kit.tiny.clips import wan
from kit.tiny.further import FURTHER_CASES
from kit.tiny.pipelines import PIPELINES, make
from safetensors.torch import save_file
from torch import nn

from deployments.engines.diffusion.adapted_parts import StockParts
from deployments.engines.diffusion.families import FAMILIES
from deployments.engines.diffusion.fitted_loras import FittedLoras
from weights.formats.lora import is_lora
from weights.operations.adapters import load_adapter

pytestmark = pytest.mark.slow  # imports diffusers

Write = Callable[[int, int], tuple[dict[str, torch.Tensor], torch.Tensor]]


def random(*shape: int) -> torch.Tensor:
    return torch.from_numpy(seeded_rng().standard_normal(shape)).float()


def low_rank(down_end: str, up_end: str, alpha_end: str = "") -> Write:
    """Return a writer of a LoRA whose tensors end so, and of what it adds."""

    def write(outputs: int, inputs: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        down, up = random(2, inputs), random(outputs, 2)
        scale = 0.5 if alpha_end else 1.0
        alpha = {alpha_end: torch.tensor(1.0)} if alpha_end else {}
        return {down_end: down, up_end: up} | alpha, scale * up @ down

    return write


def kronecker(outputs: int, inputs: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    first, second = random(2, 2), random(outputs // 2, inputs // 2)
    return {".lokr_w1": first, ".lokr_w2": second, ".alpha": torch.tensor(1e9)}, torch.kron(first, second)


def difference(size: int, _: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    added = random(size)
    return {".diff": added}, added[:, None]


KOHYA = low_rank(".lora_down.weight", ".lora_up.weight", ".alpha")
DOWN_UP, OLD = low_rank(".lora_down.weight", ".lora_up.weight"), low_rank(".lora.down.weight", ".lora.up.weight")
PEFT, PROCESSOR = low_rank(".lora_A.weight", ".lora_B.weight"), low_rank(".down.weight", ".up.weight")


def peft_named(name: str) -> Write:
    return low_rank(f".lora_A.{name}.weight", f".lora_B.{name}.weight")


class Reported(NamedTuple):
    """A layer of a file, by its name there, the layer of the model that it is, and how the file has it.

    `absent` is another layer of the file, which the model lacks: the log names it.
    """

    class_name: str
    name: str
    path: str
    write: Write
    absent: str = ""


_UNET, _BLOCK = "mid_block.attentions.0.transformer_blocks.0", "middle_block.1.transformer_blocks.0"
REPORTED: Mapping[str, Reported] = {
    "SimpleTuner 779": Reported(
        "FluxPipeline",
        "transformer.base_model.model.single_transformer_blocks.0.attn.to_k",
        "single_transformer_blocks.0.attn.to_k",
        OLD,
    ),
    "SimpleTuner in ComfyUI 4202": Reported(
        "FluxPipeline", "transformer.transformer_blocks.0.norm1.linear", "transformer_blocks.0.norm1.linear", PEFT
    ),
    "SwarmUI 159": Reported(
        "FluxPipeline",
        "diffusion_model.double_blocks.0.txt_attn.proj",
        "transformer_blocks.0.attn.to_add_out",
        DOWN_UP,
    ),
    "ComfyUI 4476": Reported(
        "FluxPipeline",
        "lycoris_single_transformer_blocks_0_attn_to_k",
        "single_transformer_blocks.0.attn.to_k",
        kronecker,
    ),
    "InvokeAI 6916, FluxGym": Reported(
        "FluxPipeline", "lora_unet_double_blocks_0_img_mlp_2", "transformer_blocks.0.ff.net.2", KOHYA
    ),
    "InvokeAI 8502, fal": Reported(
        "FluxKontextPipeline",
        "base_model.model.double_blocks.0.img_mod.lin",
        "transformer_blocks.0.norm1.linear",
        PEFT,
    ),
    "norms of Flux, ComfyUI": Reported(
        "FluxPipeline",
        "diffusion_model.double_blocks.0.txt_attn.norm.key_norm",
        "transformer_blocks.0.attn.norm_added_k",
        difference,
    ),
    "norms of single blocks of Flux": Reported(
        "FluxPipeline",
        "lora_unet_single_blocks_0_norm_query_norm",
        "single_transformer_blocks.0.attn.norm_q",
        difference,
    ),
    "diffusers 11675": Reported(
        "FluxPipeline",
        "base_model.model.transformer_blocks.0.attn.to_q",
        "transformer_blocks.0.attn.to_q",
        peft_named("default_0"),
    ),
    "an adapter of PEFT by name": Reported(
        "StableDiffusionXLPipeline", f"unet.{_UNET}.attn1.to_v", f"{_UNET}.attn1.to_v", peft_named("my_style")
    ),
    "OneTrainer 885": Reported("StableDiffusionXLPipeline", f"unet.{_BLOCK}.ff.net.2", f"{_UNET}.ff.net.2", KOHYA),
    "ComfyUI 1144, without a component": Reported(
        "StableDiffusionXLPipeline", f"{_UNET}.attn2.processor.to_q_lora", f"{_UNET}.attn2.to_q", PROCESSOR
    ),
    "diffusers 10860": Reported(
        "StableDiffusionXLPipeline", f"unet.{_UNET}.attn1.to_out.0", f"{_UNET}.attn1.to_out.0", OLD
    ),
    "InvokeAI 7624, sliders": Reported(
        "StableDiffusionXLPipeline",
        f"lora_unet_{_UNET.replace('.', '_')}_attn1_to_q",
        f"{_UNET}.attn1.to_q",
        KOHYA,
    ),
    "WanVideoWrapper 1862, of another Wan": Reported(
        "WanPipeline",
        "diffusion_model.blocks.0.cross_attn.k",
        "blocks.0.attn2.to_k",
        DOWN_UP,
        "diffusion_model.blocks.0.cross_attn.k_img",
    ),
    "diffusion-pipe 114": Reported("WanPipeline", "diffusion_model.blocks.0.ffn.2", "blocks.0.ffn.net.2", PEFT),
    "ComfyUI 10973, ai-toolkit": Reported(
        "ZImagePipeline",
        "diffusion_model.layers.0.attention.to_k",
        "layers.0.attention.to_k",
        kronecker,
    ),
    "InvokeAI 9264, norms": Reported(
        "ZImagePipeline", "diffusion_model.layers.0.attention.q_norm", "layers.0.attention.norm_q", difference
    ),
    "diffusers 13107, a klein of some layers": Reported(
        "Flux2KleinPipeline",
        "diffusion_model.single_blocks.0.linear2",
        "single_transformer_blocks.0.attn.to_out",
        PEFT,
    ),
    "forgeChroma 4, of Flux": Reported(
        "ChromaPipeline",
        "lora_unet_double_blocks_0_img_attn_proj",
        "transformer_blocks.0.attn.to_out.0",
        KOHYA,
        "lora_unet_double_blocks_0_img_mod_lin",
    ),
    "diffusers 9914, single blocks of XLabs": Reported(
        "FluxPipeline", "single_blocks.0.processor.proj_lora", "single_transformer_blocks.0.proj_out", PROCESSOR
    ),
    "diffusers 12053, converted by sd-scripts": Reported(
        "FluxPipeline",
        "transformer.single_transformer_blocks.0.proj_mlp",
        "single_transformer_blocks.0.proj_mlp",
        PEFT,
    ),
    "sd-scripts, Stable Diffusion 3": Reported(
        "StableDiffusion3Pipeline",
        "lora_unet_joint_blocks_0_x_block_mlp_fc1",
        "transformer_blocks.0.ff.net.0.proj",
        KOHYA,
    ),
    "diffusers, Stable Diffusion 3": Reported(
        "StableDiffusion3Pipeline",
        "transformer.transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.attn.to_out.0",
        PEFT,
    ),
    "diffusers 13137, LoKr of klein": Reported(
        "Flux2KleinPipeline",
        "diffusion_model.double_blocks.0.img_mlp.2",
        "transformer_blocks.0.ff.linear_out",
        kronecker,
    ),
    "ComfyUI 11487, musubi-tuner": Reported(
        "ZImagePipeline", "lora_unet_layers_0_attention_to_out_0", "layers.0.attention.to_out.0", KOHYA
    ),
    "ComfyUI 9213, SimpleTuner": Reported(
        "QwenImagePipeline",
        "transformer.transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.0.attn.add_k_proj",
        PEFT,
    ),
    "ai-toolkit 372": Reported(
        "QwenImagePipeline",
        "diffusion_model.transformer_blocks.0.img_mlp.net.2",
        "transformer_blocks.0.img_mlp.net.2",
        PEFT,
    ),
    "ComfyUI 9203, ModelScope": Reported(
        "QwenImagePipeline",
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.attn.to_out.0",
        peft_named("default"),
    ),
    "musubi-tuner, Wan": Reported("WanPipeline", "lora_unet_blocks_0_cross_attn_o", "blocks.0.attn2.to_out.0", KOHYA),
    "VideoX-Fun, Wan": Reported("WanPipeline", "lora_unet__blocks_0_self_attn_q", "blocks.0.attn1.to_q", KOHYA),
    "Wan, modulation": Reported(
        "WanPipeline", "diffusion_model.time_projection.1", "condition_embedder.time_proj", DOWN_UP
    ),
    "OneTrainer, Chroma": Reported(
        "ChromaPipeline",
        "lora_transformer_single_transformer_blocks_0_attn_to_k",
        "single_transformer_blocks.0.attn.to_k",
        KOHYA,
    ),
    "ComfyUI 7792, HiDream": Reported(
        "HiDreamImagePipeline",
        "lycoris_double_stream_blocks_0_block_attn1_to_k",
        "double_stream_blocks.0.block.attn1.to_k",
        kronecker,
    ),
}


@pytest.fixture(scope="module")
def denoisers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], nn.Module]:
    made: dict[str, nn.Module] = {}

    def build(class_name: str) -> Any:
        if class_name in ("FluxPipeline", "FluxKontextPipeline"):
            return request.getfixturevalue("flux").ours.denoiser
        if class_name in ("StableDiffusionXLPipeline", "StableDiffusion3Pipeline"):
            fixture = "sdxl" if "XL" in class_name else "stable_diffusion_3"
            return request.getfixturevalue(fixture).ours.denoiser
        if class_name == "WanPipeline":
            return wan().transformer
        if class_name == "HiDreamImagePipeline":
            return FURTHER_CASES[class_name].parts()["transformer"]
        if class_name in FAMILIES:
            return make(class_name, tmp_path_factory.mktemp("model")).transformer
        return PIPELINES[class_name][0]().transformer

    def denoiser_of(class_name: str) -> nn.Module:
        if class_name not in made:
            made[class_name] = build(class_name)
        return made[class_name]

    return denoiser_of


@pytest.mark.parametrize("report", list(REPORTED))
def test_a_reported_file_changes_the_layer_that_it_names(
    report: str, denoisers: Callable[[str], nn.Module], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = REPORTED[report]
    module = denoisers(case.class_name)
    layer: Any = module.get_submodule(case.path)
    shape = (layer.weight.shape[0], layer.weight.shape[-1])
    tensors, expected = case.write(*shape)
    file = {case.name + end: one for end, one in tensors.items()}
    if case.absent:
        file |= {case.absent + end: one.clone() for end, one in tensors.items()}
    assert is_lora(file)
    save_file(file, tmp_path / "a.safetensors")
    name = "unet" if "XL" in case.class_name else "transformer"
    parts = FAMILIES.get(case.class_name) or StockParts(case.class_name, name, {})
    ((found, pair),) = FittedLoras(parts, name, module).pairs_of(load_adapter(tmp_path / "a.safetensors")).items()
    assert found is layer
    added = pair.up if not pair.down.numel() else pair.up @ pair.down
    torch.testing.assert_close(pair.scale * added, expected, rtol=1e-5, atol=1e-5)
    assert ("have no effect" in caplog.text) == bool(case.absent)
