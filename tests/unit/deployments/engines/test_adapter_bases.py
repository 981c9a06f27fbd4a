"""Adapters are compared with their bases by headers and configs, at the sizes that published models have."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import ControlNetModel, FluxControlNetModel, FluxTransformer2DModel, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPVisionConfig
from transformers import CLIPVisionModelWithProjection as VisionModel

from deployments.engines.servable import why_unservable
from weights.formats.checkpoint import read_checkpoint
from weights.formats.source import AdapterBase

pytestmark = pytest.mark.slow  # imports diffusers
UNETS: Mapping[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768, "attention_head_dim": 8},
    "sd21": {"cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20), "use_linear_projection": True},
    "sdxl": {
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "block_out_channels": (320, 640, 1280),
        "transformer_layers_per_block": (1, 2, 10),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "use_linear_projection": True,
    },
}
UP: Mapping[str, Any] = {"sdxl": {"up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D")}}
CLASSES = {"sd15": "StableDiffusionPipeline", "sd21": "StableDiffusionPipeline", "sdxl": "StableDiffusionXLPipeline"}
WIDTHS = {"sd15": (768,), "sd21": (1024,), "sdxl": (768, 1280), "flux": (768,)}  # of text encoders
Sides = tuple[int, ...]
Base = Callable[[str], AdapterBase]


@functools.cache
def unet_of(name: str) -> Any:
    with torch.device("meta"):
        return UNet2DConditionModel(**UNETS[name], **UP.get(name, {}))


def clip(cls: Any, width: int) -> Any:
    config = CLIPTextConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=1, num_attention_heads=width // 64
    )
    with torch.device("meta"):
        return cls(config)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """Makes models of published sizes, of which there are configs and headers, and no weights."""
    made: dict[str, AdapterBase] = {}

    def make(name: str) -> AdapterBase:
        folder = tmp_path_factory.mktemp(name)
        encoders = {
            "text_encoder" + "_2" * place: clip(CLIPTextModelWithProjection if place else CLIPTextModel, width)
            for place, width in enumerate(WIDTHS[name])
        }
        with torch.device("meta"):
            denoiser = unet_of(name) if name in UNETS else FluxTransformer2DModel(num_layers=1, num_single_layers=1)
        parts = encoders | {"unet" if name in UNETS else "transformer": denoiser}
        for key, part in parts.items():
            (part.config.save_pretrained if key in encoders else part.save_config)(folder / key)
        (folder / "vae").mkdir()
        (folder / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [128, 256, 512, 512]}))
        components = {
            key: SimpleNamespace(
                name=key,
                library="transformers" if key in encoders else "diffusers",
                class_name=type(part).__name__,
                format="safetensors",
                tensors=part.state_dict(),
            )
            for key, part in parts.items()
        }
        return AdapterBase(name, "diffusion", CLASSES.get(name, "FluxPipeline"), folder, components)

    def find(name: str) -> AdapterBase:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return find


def refusal(path: Path, base: AdapterBase) -> str | None:
    said = why_unservable(read_checkpoint(path), (base,))
    assert said is None or "\n" not in said
    return said


# LoRAs: (out, in) sizes of layers as each trainer names them.
SD15 = {
    "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn2_to_k": (640, 768),
    "lora_unet_mid_block_attentions_0_proj_in": (1280, 1280, 1, 1),
    "lora_unet_up_blocks_3_attentions_2_transformer_blocks_0_ff_net_0_proj": (2560, 320),
    "lora_te_text_model_encoder_layers_0_self_attn_q_proj": (768, 768),
}
SDXL = {
    "lora_unet_input_blocks_4_1_transformer_blocks_1_attn2_to_k": (640, 2048),
    "lora_unet_middle_block_1_transformer_blocks_9_attn1_to_q": (1280, 1280),
    "lora_unet_output_blocks_5_1_proj_out": (640, 640),
    "lora_te1_text_model_encoder_layers_0_mlp_fc1": (3072, 768),
    "lora_te2_text_model_encoder_layers_0_self_attn_out_proj": (1280, 1280),
}
FLUX = {
    "lora_unet_double_blocks_0_img_attn_qkv": (9216, 3072),
    "lora_unet_double_blocks_0_txt_mlp_2": (3072, 12288),
    "lora_unet_single_blocks_0_linear1": (21504, 3072),
    "lora_te1_text_model_encoder_layers_0_mlp_fc2": (768, 3072),
}
KOHYA = {"sd15": SD15, "sdxl": SDXL, "flux": FLUX}


def write_lora(
    file: Path,
    layers: Mapping[str, Sides],
    down: str = ".lora_down.weight",
    up: str = ".lora_up.weight",
    *,
    rank: int = 4,
) -> Path:
    tensors = {}
    for name, (rows, columns, *kernel) in layers.items():
        tensors[name + down] = torch.zeros(rank, columns, *kernel, dtype=torch.float16)
        tensors[name + up] = torch.zeros(rows, rank, *(1 for _ in kernel), dtype=torch.float16)
        if down == ".lora_down.weight":
            tensors[f"{name}.alpha"] = torch.tensor(2.0)
    save_file(tensors, file)
    return file


@pytest.mark.drawn(2)
@pytest.mark.parametrize("of", KOHYA)
@pytest.mark.parametrize("trained", KOHYA)
def test_a_lora_of_kohyas_layout_fits_its_own_base_alone(base: Base, tmp_path: Path, trained: str, of: str) -> None:
    file = write_lora(tmp_path / "style.safetensors", KOHYA[trained])
    said = refusal(file, base(of))
    if trained == of:
        assert said is None
        return
    assert said is not None
    assert said.startswith(f"{file}: ")
    assert said.endswith(f"expected a LoRA for {of!r}, a {base(of).class_name}")
    assert len(said) < 1000


@pytest.mark.drawn(4)
@pytest.mark.parametrize("layer", [*SD15, *SDXL, *FLUX])
def test_each_layer_of_other_sizes_is_found(base: Base, tmp_path: Path, layer: str) -> None:
    of = next(name for name, layers in KOHYA.items() if layer in layers)
    rows, columns, *kernel = KOHYA[of][layer]
    wrong = write_lora(tmp_path / "style.safetensors", KOHYA[of] | {layer: (rows, columns // 2, *kernel)})
    said = refusal(wrong, base(of)) or ""
    # Of layers that stock cuts from a fused one, each is told by its own size.
    assert f"({columns // 2}, " in said, said
    assert f"({columns}, " in said, said


def test_a_sentence_names_the_layer_and_both_sizes(base: Base, tmp_path: Path) -> None:
    file = write_lora(tmp_path / "style.safetensors", SD15)
    assert refusal(file, base("sdxl")) == (
        f"{file}: adapter target 'down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k': matrices of (in, out) "
        "sizes (768, 640) do not fit a Linear of (2048, 640); expected a LoRA for 'sdxl', a StableDiffusionXLPipeline"
    )
    assert "(768, 640) do not fit a Linear of (1024, 640)" in (refusal(file, base("sd21")) or "")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("of", "layers", "matrices"),
    [
        ("flux", {"diffusion_model.double_blocks.0.img_attn.qkv": (9216, 3072)}, ("lora_down", "lora_up")),
        ("flux", {"double_blocks.0.processor.qkv_lora1": (9216, 3072)}, ("down", "up")),
        (
            "sdxl",
            {"unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.processor.to_k_lora": (640, 2048)},
            ("down", "up"),
        ),
        ("sdxl", {"text_encoder_2.text_model.encoder.layers.0.self_attn.q_proj": (1280, 1280)}, ("lora_A", "lora_B")),
    ],
)
def test_other_layouts_that_name_modules_beside_the_model_are_compared(
    base: Base, tmp_path: Path, of: str, layers: Mapping[str, Sides], matrices: tuple[str, str]
) -> None:
    down, up = (f".{half}.weight" for half in matrices)
    assert refusal(write_lora(tmp_path / "a.safetensors", layers, down, up), base(of)) is None
    wrong = {name: (rows, columns + 64) for name, (rows, columns) in layers.items()}
    assert "do not fit a Linear" in (refusal(write_lora(tmp_path / "b.safetensors", wrong, down, up), base(of)) or "")


KINDS: Mapping[str, Mapping[str, Sides]] = {
    "LoKr": {"lokr_w1": (16, 16), "lokr_w2": (80, 80)},
    "LoKr of products": {"lokr_w1": (16, 16), "lokr_w2_a": (80, 4), "lokr_w2_b": (4, 80), "alpha": ()},
    "LoHa": {f"hada_w{one}_{half}": (1280, 4) if half == "a" else (4, 1280) for one in "12" for half in "ab"},
    "difference": {"diff": (1280, 1280), "diff_b": (1280,)},
    "OFT": {"oft_blocks": (16, 80, 80), "alpha": ()},
    "OFT of PEFT": {"oft_R.weight": (16, 3160)},
    "BOFT": {"oft_blocks": (3, 16, 80, 80), "rescale": (1280, 1), "alpha": ()},
    "IA3": {"weight": (1280,), "on_input": ()},
    "GLoRA": {"a1.weight": (1280, 4), "a2.weight": (4, 1280), "b1.weight": (1280, 4), "b2.weight": (4, 1280)},
}


@pytest.mark.drawn
@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_are_compared_without_their_values(base: Base, tmp_path: Path, kind: str) -> None:
    layer = "lora_unet_middle_block_1_proj_in"
    for name, rows in (("right", 1), ("wrong", 2)):
        tensors = {f"{layer}.{end}": torch.ones(sides) for end, sides in KINDS[kind].items()}
        first = next(iter(tensors))
        sides = tensors[first].shape
        if len(sides) == 4:  # the stages of a BOFT
            tensors[first] = torch.ones(sides[0], sides[1] * rows, *sides[2:])
        else:
            tensors[first] = torch.ones(sides[0] * rows, *sides[1:])
        save_file(tensors, tmp_path / f"{name}.safetensors")
    assert refusal(tmp_path / "right.safetensors", base("sdxl")) is None
    said = refusal(tmp_path / "wrong.safetensors", base("sdxl")) or ""
    assert "expected a LoRA for 'sdxl'" in said
    reasons = ("do not fit a Linear of (1280, 1280)", "do not go together", "diff_b has shape", "is for 2560 features")
    assert any(reason in said for reason in reasons), said


def test_a_part_for_an_encoder_that_the_pipeline_lacks_is_told(base: Base, tmp_path: Path) -> None:
    file = write_lora(
        tmp_path / "style.safetensors", FLUX | {"lora_te3_encoder_block_0_layer_0_SelfAttention_q": (8, 8)}
    )
    said = "changes text_encoder_2.encoder_block_0_layer_0_SelfAttention_q, and 'flux' has no text_encoder_2"
    assert said in (refusal(file, base("flux")) or "")


def test_halves_of_unlike_ranks_are_told(base: Base, tmp_path: Path) -> None:
    name = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    halves = {"down": torch.zeros(4, 1280), "up": torch.zeros(1280, 8)}
    save_file({f"{name}.lora_{half}.weight": one for half, one in halves.items()}, tmp_path / "a.safetensors")
    said = refusal(tmp_path / "a.safetensors", base("sd15")) or ""
    assert f"{name}.lora_down.weight has shape [4, 1280], and {name}.lora_up.weight [1280, 8]" in said


def test_no_lora_is_for_what_diffusers_own_code_runs(base: Base, tmp_path: Path) -> None:
    other = AdapterBase("kandinsky", "diffusion", "KandinskyPipeline", tmp_path, {})
    said = refusal(write_lora(tmp_path / "a.safetensors", SD15), other)
    assert said == f"{tmp_path / 'a.safetensors'}: a LoRA, and none are served with 'kandinsky', a KandinskyPipeline"


def test_words_of_another_text_encoder_are_told(base: Base, tmp_path: Path) -> None:
    file = tmp_path / "bad-hands.safetensors"
    save_file({"emb_params": torch.zeros(4, 1024)}, file)
    assert refusal(file, base("sd21")) is None
    assert refusal(file, base("sd15")) == (
        f"{file}: tensor 'emb_params' has vectors of 1024 numbers, and the text_encoder of 'sd15' reads 768"
    )
    save_file({"clip_l": torch.zeros(4, 768), "clip_g": torch.zeros(4, 768)}, file)
    assert "'clip_g' has vectors of 768 numbers, and the text_encoder_2 of 'sdxl' reads 1280" in str(
        refusal(file, base("sdxl"))
    )


def controlnet(folder: Path, net: Any, **changed: Any) -> Path:
    """Write a ControlNet's config and a file of its tensors' names and shapes, without their bytes being needed."""
    net.save_config(folder)
    config = json.loads((folder / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, one in net.state_dict().items():
        header[name] = {"dtype": "F8_E4M3", "shape": list(one.shape), "data_offsets": [offset, offset + one.numel()]}
        offset += one.numel()
    raw = json.dumps(header).encode()
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)  # a hole
    return folder


def net_of(name: str, **options: Any) -> Any:
    with torch.device("meta"):
        return ControlNetModel(**UNETS[name], **options)


def flux_net(**options: Any) -> Any:
    with torch.device("meta"):
        return FluxControlNetModel(num_layers=1, num_single_layers=0, **options)


def test_what_a_base_tells_of_a_controlnet_is_not_asked_of_diffusers(
    base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its import takes seconds."""

    def ask(*_: Any) -> None:
        raise AssertionError("diffusers was asked")

    monkeypatch.setattr("deployments.engines.building.build.check_module", ask)
    for name, net in {"sd15": net_of("sd15"), "sdxl": net_of("sdxl"), "flux": flux_net()}.items():
        assert refusal(controlnet(tmp_path / name, net), base(name)) is None
    odd = net_of("sdxl", encoder_hid_dim=8, encoder_hid_dim_type="text_proj")
    with pytest.raises(AssertionError, match="diffusers was asked"):
        refusal(controlnet(tmp_path / "odd", odd), base("sdxl"))


def test_a_controlnet_fits_its_own_base_alone(base: Base, tmp_path: Path) -> None:
    nets = {
        "sd15": net_of("sd15", down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)),
        "sdxl": net_of("sdxl"),
        "flux": flux_net(),
    }
    folders = {name: controlnet(tmp_path / name, net) for name, net in nets.items()}
    for name, folder in folders.items():
        assert refusal(folder, base(name)) is None
    assert refusal(folders["sd15"], base("sdxl")) == (
        f"{folders['sd15']}: a ControlNet that has block_out_channels [320, 640, 1280, 1280], and 'sdxl' "
        "[320, 640, 1280]: it is of another family"
    )
    assert "has cross_attention_dim 768, and 'sd21' 1024" in str(refusal(folders["sd15"], base("sd21")))
    assert refusal(folders["flux"], base("sdxl")) == (
        f"{folders['flux']}: a ControlNet that is a FluxControlNetModel, and 'sdxl' (StableDiffusionXLPipeline) takes "
        "a ControlNetModel or ControlNetUnionModel or ControlNetXSAdapter or T2IAdapter"
    )
    assert "is a ControlNetModel, and 'flux' (FluxPipeline) takes a FluxControlNetModel" in str(
        refusal(folders["sdxl"], base("flux"))
    )


def test_a_controlnets_tensors_are_compared_where_its_config_says_less_or_another(base: Base, tmp_path: Path) -> None:
    folder = controlnet(tmp_path / "old", net_of("sd15"))
    config = json.loads((folder / "config.json").read_text())
    for key in ("addition_embed_type", "conditioning_embedding_out_channels"):
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    assert refusal(folder, base("sd15")) is None
    del config["cross_attention_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "attn2.to_k.weight' has shape (320, 768), the config asks for (320, 1280)" in str(
        refusal(folder, base("sd15"))
    )
    assert refusal(folder, base("sd21")) == (
        f"{folder}: tensor down_blocks.0.attentions.0.proj_in.weight has shape [320, 320, 1, 1], which in 'sd21' is "
        "[320, 320]"
    )


def test_controlnets_that_no_family_can_call_are_told(base: Base, tmp_path: Path) -> None:
    pools = controlnet(tmp_path / "pools", net_of("sd15"), global_pool_conditions=True)
    assert "pools its image (global_pool_conditions)" in str(refusal(pools, base("sd15")))
    coarse = controlnet(tmp_path / "coarse", net_of("sd15", conditioning_embedding_out_channels=(4, 8)))
    assert "reduces its image by 2, and the model's latents have a side of 1/8" in str(refusal(coarse, base("sd15")))
    wide = controlnet(tmp_path / "inpainting", net_of("sd15", in_channels=9))
    assert refusal(wide, base("sd15")) is None
    for other in (
        AdapterBase("wan", "diffusion", "WanPipeline", tmp_path, {}),
        AdapterBase("x", "llm", None, tmp_path, {}),
    ):
        assert "cannot follow" in str(refusal(wide, other))


def ip_adapter(
    folder: Path, unet: Any, *, read: int = 1024, gives: int = 1024, config_gives: int | None = None
) -> Path:
    """Write a plain adapter for a UNet, and the config and one tensor of the CLIP that reads its images."""
    (folder / "image_encoder").mkdir(parents=True)
    vision = CLIPVisionConfig(hidden_size=1280, num_attention_heads=16, projection_dim=config_gives or gives)
    config = vision.to_dict() | {"architectures": [VisionModel.__name__]}
    (folder / "image_encoder" / "config.json").write_text(json.dumps(config))
    save_file({"visual_projection.weight": torch.zeros(gives, 1280)}, folder / "image_encoder" / "model.safetensors")
    width = unet.config.cross_attention_dim
    tensors = {
        "image_proj.proj.weight": torch.zeros(4 * width, read),
        "image_proj.proj.bias": torch.zeros(4 * width),
        "image_proj.norm.weight": torch.zeros(width),
        "image_proj.norm.bias": torch.zeros(width),
    }
    names = [name.removesuffix(".processor") for name in unet.attn_processors if not name.endswith("attn1.processor")]
    for place, name in enumerate(names):
        for half in "kv":
            weight = torch.zeros(unet.get_submodule(name).inner_dim, width, dtype=torch.float16)
            tensors[f"ip_adapter.{2 * place + 1}.to_{half}_ip.weight"] = weight
    save_file(tensors, folder / "ip-adapter.safetensors")
    return folder


def test_an_ip_adapter_fits_its_own_base_alone(base: Base, tmp_path: Path) -> None:
    folders = {name: ip_adapter(tmp_path / name, unet_of(name)) for name in UNETS}
    for name, folder in folders.items():
        assert refusal(folder, base(name)) is None
    file = folders["sd15"] / "ip-adapter.safetensors"
    assert refusal(folders["sd15"], base("sdxl")) == (
        f"{file}: an IP-Adapter that has 16 layers, and 'sdxl' 70: it is for another one"
    )
    assert refusal(folders["sd15"], base("sd21")) == (
        f"{file}: an IP-Adapter that has ip_adapter.1.to_k_ip.weight of shape [320, 768], and 'sd21' [320, 1024]: it "
        "is for another one"
    )
    assert "an IP-Adapter that is for a UNet, and 'flux' is one of Flux" in str(refusal(folders["sd15"], base("flux")))


def test_an_ip_adapter_of_another_image_encoder_is_told(base: Base, tmp_path: Path) -> None:
    folder = ip_adapter(tmp_path / "a", unet_of("sd15"), read=1024, gives=1280)
    with pytest.raises(Exception, match=r"reads vectors of 1024 numbers, and the image_encoder beside it gives 1280"):
        read_checkpoint(folder)
    folder = ip_adapter(tmp_path / "b", unet_of("sd15"), config_gives=768)
    assert "config.json has projection_dim 768, and its weights have 1024" in str(refusal(folder, base("sd15")))
