"""The names of a model's layers in the files of LoRAs and their relatives, by trainers and UIs, and the
roles of the tensors in each layer.

A file's layer has diffusers' name, that of the model's own code, or that of older tools; with dots, or with
every dot an underscore; after a prefix for its component. A layer of the model's code may be several
of diffusers' (queries, keys and values in one matrix), whose rows follow one another.

Sources: diffusers 0.42, `loaders/lora_conversion_utils.py`, `single_file_utils.py`; sd-scripts, `networks/`; ComfyUI,
`comfy/lora.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from deployments.engines.records.protocol import EngineError
from weights.formats.lora import without_adapter
from weights.formats.untrusted import shown

DENOISER: Final = "denoiser"


class NamedLayer(NamedTuple):
    """The layers of a module that a name in a file stands for. Their rows follow one another in the file's matrix.

    With `swaps_halves` the file has the second half of the rows first.
    """

    paths: tuple[str, ...]
    swaps_halves: bool = False


# Behind the first prefixes every dot of a path is an underscore.
_FLAT: Final = {
    "lora_unet__": DENOISER,  # VideoX-Fun's
    "lora_unet_": DENOISER,
    "lora_transformer_": DENOISER,
    "lycoris_": DENOISER,
    "oft_unet_": DENOISER,
    "lora_te_": "te",
    "lora_te1_": "te1",
    "lora_te2_": "te2",
    "lora_te3_": "te3",
}
_DOTTED: Final = {
    "diffusion_model.": DENOISER,
    "model.diffusion_model.": DENOISER,
    "lora_unet.": DENOISER,
    "pipe.dit.": DENOISER,
    "transformer.": "transformer",
    "transformer_2.": "transformer_2",
    "unet.": "unet",
    "text_encoder.": "text_encoder",
    "text_encoder_2.": "text_encoder_2",
    "text_encoder_3.": "text_encoder_3",
}
_OF_PEFT: Final = "base_model.model."
_OF_COMFYUI: Final = re.compile(r"text_encoders\.(\w{1,64})\.(?:transformer\.)?")


def component_of(name: str) -> tuple[str, str]:
    """Return the component of a layer's name in a file, and the rest of the name.

    The component is `DENOISER`, one of diffusers' names, or a trainer's or UI's name of a text encoder.
    """
    for prefix, component in _FLAT.items():
        if name.startswith(prefix):
            return component, name.removeprefix(prefix)
    found, rest = DENOISER, name.removeprefix(_OF_PEFT)
    if encoder := _OF_COMFYUI.match(rest):
        return encoder[1], rest[encoder.end() :]
    for prefix, component in _DOTTED.items():
        if rest.startswith(prefix):
            found, rest = component, rest.removeprefix(prefix)
            break
    return found, rest.removeprefix(_OF_PEFT)


# Names in the models' own code, "{}" the number of a block, and their layers in diffusers.
_FLUX_ENDS: Final = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
_IMAGE_QKV: Final = tuple(f"transformer_blocks.{{}}.attn.to_{one}" for one in "qkv")
_TEXT_QKV: Final = tuple(f"transformer_blocks.{{}}.attn.add_{one}_proj" for one in "qkv")
_FLUX_NORMS: Final = {
    **{
        f"double_blocks.{{}}.{stream}_attn.norm.{one}_norm": f"transformer_blocks.{{}}.attn.norm_{added}{one[0]}"
        for stream, added in (("img", ""), ("txt", "added_"))
        for one in ("query", "key")
    },
    **{
        f"single_blocks.{{}}.norm.{one}_norm": f"single_transformer_blocks.{{}}.attn.norm_{one[0]}"
        for one in ("query", "key")
    },
}
_FLUX_SINGLE_QKV: Final = tuple(f"single_transformer_blocks.{{}}.attn.to_{one}" for one in "qkv")
_FLUX: Final[Mapping[str, str | tuple[str, ...]]] = {
    **_FLUX_ENDS,
    **_FLUX_NORMS,
    "double_blocks.{}.img_mod.lin": "transformer_blocks.{}.norm1.linear",
    "double_blocks.{}.txt_mod.lin": "transformer_blocks.{}.norm1_context.linear",
    "double_blocks.{}.img_attn.qkv": _IMAGE_QKV,
    "double_blocks.{}.txt_attn.qkv": _TEXT_QKV,
    "double_blocks.{}.img_attn.proj": "transformer_blocks.{}.attn.to_out.0",
    "double_blocks.{}.txt_attn.proj": "transformer_blocks.{}.attn.to_add_out",
    "double_blocks.{}.img_mlp.0": "transformer_blocks.{}.ff.net.0.proj",
    "double_blocks.{}.img_mlp.2": "transformer_blocks.{}.ff.net.2",
    "double_blocks.{}.txt_mlp.0": "transformer_blocks.{}.ff_context.net.0.proj",
    "double_blocks.{}.txt_mlp.2": "transformer_blocks.{}.ff_context.net.2",
    "single_blocks.{}.linear1": (*_FLUX_SINGLE_QKV, "single_transformer_blocks.{}.proj_mlp"),
    "single_blocks.{}.linear2": "single_transformer_blocks.{}.proj_out",
    "single_blocks.{}.modulation.lin": "single_transformer_blocks.{}.norm.linear",
    # XLabs'
    "double_blocks.{}.processor.qkv_lora1": _IMAGE_QKV,
    "double_blocks.{}.processor.qkv_lora2": _TEXT_QKV,
    "double_blocks.{}.processor.proj_lora1": "transformer_blocks.{}.attn.to_out.0",
    "double_blocks.{}.processor.proj_lora2": "transformer_blocks.{}.attn.to_add_out",
    "single_blocks.{}.processor.qkv_lora": _FLUX_SINGLE_QKV,
    "single_blocks.{}.processor.proj_lora": "single_transformer_blocks.{}.proj_out",
}
_FLUX_2: Final[Mapping[str, str | tuple[str, ...]]] = {
    **_FLUX_NORMS,
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_guidance_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_guidance_embed.timestep_embedder.linear_2",
    "guidance_in.in_layer": "time_guidance_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_guidance_embed.guidance_embedder.linear_2",
    "single_stream_modulation.lin": "single_stream_modulation.linear",
    "double_stream_modulation_img.lin": "double_stream_modulation_img.linear",
    "double_stream_modulation_txt.lin": "double_stream_modulation_txt.linear",
    "final_layer.linear": "proj_out",
    "double_blocks.{}.img_attn.qkv": _IMAGE_QKV,
    "double_blocks.{}.txt_attn.qkv": _TEXT_QKV,
    "double_blocks.{}.img_attn.proj": "transformer_blocks.{}.attn.to_out.0",
    "double_blocks.{}.txt_attn.proj": "transformer_blocks.{}.attn.to_add_out",
    "double_blocks.{}.img_mlp.0": "transformer_blocks.{}.ff.linear_in",
    "double_blocks.{}.img_mlp.2": "transformer_blocks.{}.ff.linear_out",
    "double_blocks.{}.txt_mlp.0": "transformer_blocks.{}.ff_context.linear_in",
    "double_blocks.{}.txt_mlp.2": "transformer_blocks.{}.ff_context.linear_out",
    "single_blocks.{}.linear1": "single_transformer_blocks.{}.attn.to_qkv_mlp_proj",
    "single_blocks.{}.linear2": "single_transformer_blocks.{}.attn.to_out",
}
_SD3: Final[Mapping[str, str | tuple[str, ...]]] = {
    "x_embedder.proj": "pos_embed.proj",
    "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "joint_blocks.{}.x_block.attn.qkv": _IMAGE_QKV,
    "joint_blocks.{}.context_block.attn.qkv": _TEXT_QKV,
    "joint_blocks.{}.x_block.attn2.qkv": tuple(path.replace("attn", "attn2") for path in _IMAGE_QKV),
    **{
        f"joint_blocks.{{}}.{block}.ln_{one}": f"transformer_blocks.{{}}.{norm}{one}"
        for block, norm in (
            ("x_block.attn", "attn.norm_"),
            ("context_block.attn", "attn.norm_added_"),
            ("x_block.attn2", "attn2.norm_"),
        )
        for one in "qk"
    },
    "joint_blocks.{}.x_block.attn.proj": "transformer_blocks.{}.attn.to_out.0",
    "joint_blocks.{}.context_block.attn.proj": "transformer_blocks.{}.attn.to_add_out",
    "joint_blocks.{}.x_block.attn2.proj": "transformer_blocks.{}.attn2.to_out.0",
    "joint_blocks.{}.x_block.adaLN_modulation.1": "transformer_blocks.{}.norm1.linear",
    "joint_blocks.{}.context_block.adaLN_modulation.1": "transformer_blocks.{}.norm1_context.linear",
    "joint_blocks.{}.x_block.mlp.fc1": "transformer_blocks.{}.ff.net.0.proj",
    "joint_blocks.{}.x_block.mlp.fc2": "transformer_blocks.{}.ff.net.2",
    "joint_blocks.{}.context_block.mlp.fc1": "transformer_blocks.{}.ff_context.net.0.proj",
    "joint_blocks.{}.context_block.mlp.fc2": "transformer_blocks.{}.ff_context.net.2",
}
_Z_IMAGE_BLOCKS: Final = ("layers", "noise_refiner", "context_refiner")
_Z_IMAGE: Final[Mapping[str, str | tuple[str, ...]]] = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
    **{
        f"{block}.{{}}.attention.qkv": tuple(f"{block}.{{}}.attention.to_{one}" for one in "qkv")
        for block in _Z_IMAGE_BLOCKS
    },
    **{f"{block}.{{}}.attention.out": f"{block}.{{}}.attention.to_out.0" for block in _Z_IMAGE_BLOCKS},
    **{
        f"{block}.{{}}.attention.{one}_norm": f"{block}.{{}}.attention.norm_{one}"
        for block in _Z_IMAGE_BLOCKS
        for one in "qk"
    },
    **{
        f"{block}.{{}}.attention.to.{one}": f"{block}.{{}}.attention.to_{one}"
        for block in _Z_IMAGE_BLOCKS
        for one in "qkv"
    },
}
_LUMINA_2: Final[Mapping[str, str | tuple[str, ...]]] = {
    f"{block}.{{}}.{name}": f"{block}.{{}}.{path}"
    if isinstance(path, str)
    else tuple(f"{block}.{{}}.{one}" for one in path)
    for block in _Z_IMAGE_BLOCKS
    for name, path in {
        "attention.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
        "attention.out": "attn.to_out.0",
        **{f"attention.{one}_norm": f"attn.norm_{one}" for one in "qk"},
        **{f"feed_forward.w{number}": f"feed_forward.linear_{number}" for number in (1, 2, 3)},
        "adaLN_modulation.1": "norm1.linear",
    }.items()
}
_WAN: Final[Mapping[str, str | tuple[str, ...]]] = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "head.head": "proj_out",
    **{
        f"{blocks}.{{}}.{name}": f"{blocks}.{{}}.{path}"
        for blocks in ("blocks", "vace_blocks")
        for name, path in {
            **{
                f"{attention}.{one}": f"{own}.{layer}"
                for attention, own in (("self_attn", "attn1"), ("cross_attn", "attn2"))
                for one, layer in {
                    **{one: f"to_{one}" for one in "qkv"},
                    "o": "to_out.0",
                    "k_img": "add_k_proj",
                    "v_img": "add_v_proj",
                    "norm_q": "norm_q",
                    "norm_k": "norm_k",
                    "norm_k_img": "norm_added_k",
                }.items()
            },
            "ffn.0": "ffn.net.0.proj",
            "ffn.2": "ffn.net.2",
            "norm3": "norm2",
            "before_proj": "proj_in",
            "after_proj": "proj_out",
        }.items()
    },
}
_REFINER: Final = "context_embedder.token_refiner.refiner_blocks.{}"
_HUNYUAN_VIDEO: Final[Mapping[str, str | tuple[str, ...]]] = {
    **{name: path for name, path in _FLUX_ENDS.items() if name.startswith(("vector_in.", "final_layer."))},
    "img_in.proj": "x_embedder.proj",
    "time_in.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "guidance_in.mlp.0": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.mlp.2": "time_text_embed.guidance_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    "txt_in.t_embedder.mlp.0": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "txt_in.t_embedder.mlp.2": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "txt_in.c_embedder.linear_1": "context_embedder.time_text_embed.text_embedder.linear_1",
    "txt_in.c_embedder.linear_2": "context_embedder.time_text_embed.text_embedder.linear_2",
    "txt_in.individual_token_refiner.blocks.{}.self_attn_qkv": tuple(f"{_REFINER}.attn.to_{one}" for one in "qkv"),
    "txt_in.individual_token_refiner.blocks.{}.self_attn_proj": f"{_REFINER}.attn.to_out.0",
    "txt_in.individual_token_refiner.blocks.{}.mlp.fc1": f"{_REFINER}.ff.net.0.proj",
    "txt_in.individual_token_refiner.blocks.{}.mlp.fc2": f"{_REFINER}.ff.net.2",
    "txt_in.individual_token_refiner.blocks.{}.adaLN_modulation.1": f"{_REFINER}.norm_out.linear",
    "double_blocks.{}.img_mod.linear": "transformer_blocks.{}.norm1.linear",
    "double_blocks.{}.txt_mod.linear": "transformer_blocks.{}.norm1_context.linear",
    **{
        f"double_blocks.{{}}.{stream}_attn_{one}_norm": f"transformer_blocks.{{}}.attn.norm_{added}{one}"
        for stream, added in (("img", ""), ("txt", "added_"))
        for one in "qk"
    },
    **{f"single_blocks.{{}}.{one}_norm": f"single_transformer_blocks.{{}}.attn.norm_{one}" for one in "qk"},
    "double_blocks.{}.img_attn_qkv": _IMAGE_QKV,
    "double_blocks.{}.txt_attn_qkv": _TEXT_QKV,
    "double_blocks.{}.img_attn_proj": "transformer_blocks.{}.attn.to_out.0",
    "double_blocks.{}.txt_attn_proj": "transformer_blocks.{}.attn.to_add_out",
    "double_blocks.{}.img_mlp.fc1": "transformer_blocks.{}.ff.net.0.proj",
    "double_blocks.{}.img_mlp.fc2": "transformer_blocks.{}.ff.net.2",
    "double_blocks.{}.txt_mlp.fc1": "transformer_blocks.{}.ff_context.net.0.proj",
    "double_blocks.{}.txt_mlp.fc2": "transformer_blocks.{}.ff_context.net.2",
    "single_blocks.{}.linear1": (*_FLUX_SINGLE_QKV, "single_transformer_blocks.{}.proj_mlp"),
    "single_blocks.{}.linear2": "single_transformer_blocks.{}.proj_out",
    "single_blocks.{}.modulation.linear": "single_transformer_blocks.{}.norm.linear",
}
_TABLES: Final = {
    "FluxTransformer2DModel": _FLUX,
    "Flux2Transformer2DModel": _FLUX_2,
    "SD3Transformer2DModel": _SD3,
    "ZImageTransformer2DModel": _Z_IMAGE,
    "ChromaTransformer2DModel": _FLUX,
    "Lumina2Transformer2DModel": _LUMINA_2,
    "WanTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": _WAN,
    "WanAnimateTransformer3DModel": _WAN,
    "SkyReelsV2Transformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "HunyuanVideoTransformer3DModel": _HUNYUAN_VIDEO,
    "HunyuanVideoFramepackTransformer3DModel": _HUNYUAN_VIDEO,
}
# Where diffusers has scale before shift, and the model's code shift before scale.
_MODULATED_END: Final = ("final_layer.adaLN_modulation.1", "norm_out.linear")
_SWAPPING: Final = (
    *("FluxTransformer2DModel", "Flux2Transformer2DModel", "SD3Transformer2DModel"),
    *("HunyuanVideoTransformer3DModel", "HunyuanVideoFramepackTransformer3DModel"),
)
# The first part of a path -> the same in the model's own code.
_LTX: Final = {
    "proj_in": "patchify_proj",
    "time_embed": "adaln_single",
    "audio_proj_in": "audio_patchify_proj",
    "audio_time_embed": "audio_adaln_single",
    "prompt_adaln": "prompt_adaln_single",
    "audio_prompt_adaln": "audio_prompt_adaln_single",
    "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
    "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
    "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
    "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
}
_OWN_NORM: Final = re.compile(r"\bnorm_([qk])$")
_FIRST_PARTS: Final = {"LTXVideoTransformer3DModel": _LTX, "LTX2VideoTransformer3DModel": _LTX}
_OF_UNETS: Final = ("UNet2DConditionModel", "UNetMotionModel")


def layer_names(class_name: str, paths: Collection[str]) -> dict[str, NamedLayer]:
    """Return the layers that each name of a file stands for in a module of this class, which has these paths."""
    known = set(paths)
    found = {path: NamedLayer((path,)) for path in paths}
    found |= _of_table(_TABLES.get(class_name, {}), known)
    if class_name in _SWAPPING and _MODULATED_END[1] in known:
        found[_MODULATED_END[0]] = NamedLayer((_MODULATED_END[1],), swaps_halves=True)
    if class_name == "SD3Transformer2DModel":
        found |= _last_of_sd3(known)
    for path in paths if class_name in _FIRST_PARTS else ():
        head, dot, rest = path.partition(".")
        rest = _OWN_NORM.sub(r"\1_norm", rest)
        found[_FIRST_PARTS[class_name].get(head, head) + dot + rest] = NamedLayer((path,))
    if class_name in _OF_UNETS:
        found |= {name: NamedLayer((path,)) for name, path in _of_latent_diffusion(paths)}
    found |= {name: NamedLayer((path,)) for path in paths for name in _older_names(path)}
    flat = {name.replace(".", "_"): layer for name, layer in found.items()}
    return flat | found


def _of_table(table: Mapping[str, str | tuple[str, ...]], known: Collection[str]) -> dict[str, NamedLayer]:
    numbers = sorted({int(part) for path in known for part in path.split(".") if part.isdecimal()})
    found = {}
    for name, wanted in table.items():
        paths = (wanted,) if isinstance(wanted, str) else wanted
        for number in numbers if "{}" in name else [0]:
            numbered = tuple(path.format(number) for path in paths)
            if all(path in known for path in numbered):
                found[name.format(number)] = NamedLayer(numbered)
    return found


def _last_of_sd3(known: Collection[str]) -> dict[str, NamedLayer]:
    """Return the name of the text's modulation in the last block, which has no way back to the text."""
    blocks = {int(path.split(".")[1]) for path in known if path.startswith("transformer_blocks.")}
    last = max(blocks, default=0)
    name = f"joint_blocks.{last}.context_block.adaLN_modulation.1"
    return {name: NamedLayer((f"transformer_blocks.{last}.norm1_context.linear",), swaps_halves=True)}


_LDM_ENDS: Final = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_out": "out.2",
}
_LDM_RESNET: Final = {
    "conv1": "in_layers.2",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


def _of_latent_diffusion(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of a UNet's layers in the code of latent diffusion, which numbers its blocks through."""
    paths = list(paths)
    resnets = {path.split(".")[3] for path in paths if path.startswith("down_blocks.0.resnets.")}
    attentive = {path.split(".")[1] for path in paths if path.startswith("up_blocks.") and ".attentions." in path}
    per_block = len(resnets) + 1
    found = [(new, path) for path, new in _LDM_ENDS.items() if path in paths]
    for path in paths:
        side, *rest = path.split(".")
        match side, rest:
            case "mid_block", [kind, layer, *inner]:
                place = f"middle_block.{1 if kind == 'attentions' else 2 * int(layer)}"
            case "down_blocks", [block, "downsamplers", _, "conv"]:
                found.append((f"input_blocks.{(int(block) + 1) * per_block}.0.op", path))
                continue
            case "up_blocks", [block, "upsamplers", _, "conv"]:
                after = 1 + (block in attentive)
                found.append((f"output_blocks.{(int(block) + 1) * per_block - 1}.{after}.conv", path))
                continue
            case (("down_blocks" | "up_blocks"), [block, ("resnets" | "attentions") as kind, layer, *inner]):
                number = int(block) * per_block + int(layer) + (side == "down_blocks")
                place = f"{'input' if side == 'down_blocks' else 'output'}_blocks.{number}.{int(kind == 'attentions')}"
            case _:
                continue
        if inner:
            is_resnet = kind == "resnets"
            found.append((f"{place}.{_LDM_RESNET.get(inner[0], inner[0]) if is_resnet else '.'.join(inner)}", path))
    return found


_OLD_ATTENTION: Final = {"to_q": "to_q", "to_k": "to_k", "to_v": "to_v", "to_out.0": "to_out"} | {
    "q_proj": "to_q",
    "k_proj": "to_k",
    "v_proj": "to_v",
    "out_proj": "to_out",
}


def _older_names(path: str) -> list[str]:
    """Return names of a layer in older files: of attention processors, and of CLIPs within the whole of a model."""
    found = []
    if path.startswith(("transformer_blocks.", "double_blocks.")):
        found.append("sformer_blocks." + path.partition(".")[2])
    for end, old in _OLD_ATTENTION.items():
        if path.endswith(f".{end}"):
            above = path.removesuffix(f".{end}")
            found += [f"{above}.processor.{old}_lora", f"{above}.{old}_lora"]
    if path.startswith("text_model."):
        found.append(path.removeprefix("text_model."))
    elif path.startswith(("encoder.layers.", "text_projection")):
        found.append(f"text_model.{path}")
    return found + [f"text_model.{name}" for name in found if path.startswith("encoder.layers.") and "_lora" in name]


# The roles of a layer's tensors.

UP, DOWN, ALPHA, LENGTHS = "up", "down", "alpha", "magnitude"
OF_LYCORIS: Final = ".dora_scale"
ON_INPUT: Final = ".on_input"
_IA3: Final = ".weight"  # beside one of `ON_INPUT`
# The end of a tensor's name -> its role. A longer end goes before a shorter one.
_ENDS: Final = {
    **{
        f".lora_{half}{end}": what
        for half, what in (("A", DOWN), ("B", UP))
        for end in ("", ".weight")
    },
    **{
        f".{name}{what}.weight": what
        for name in ("lora_", "lora.", "lora_linear_layer.", "")
        for what in (DOWN, UP)
    },
    ".lora_mid.weight": "mid",
    ".alpha": ALPHA,
    ".lora.alpha": ALPHA,
    ".lora_linear_layer.alpha": ALPHA,
    OF_LYCORIS: LENGTHS,
    ".lora_magnitude_vector": LENGTHS,
    ".lora_magnitude_vector.weight": LENGTHS,
    ".magnitude": LENGTHS,
    **{
        f".lora_{half}{end}": f"{what} bias"
        for half, what in (("A", DOWN), ("B", UP))
        for end in (".bias",)
    },
    ".diff_b": "up bias",
    ".diff": "difference",
    ".w_norm": "difference",
    ".b_norm": "up bias",
    **{f".hada_{name}": f"hada_{name}" for name in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
    **{f".lokr_{name}": f"lokr_{name}" for name in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
    **{f".{name}.weight": f"glora_{name}" for name in ("a1", "a2", "b1", "b2", "bm")},
    ".oft_blocks": "oft_blocks",
    ".rescale": "rescale",
    ".oft_R.weight": "oft_R",
    ON_INPUT: "on_input",
}  # fmt: skip
_LONGEST_FIRST: Final = sorted(_ENDS, key=len, reverse=True)
# Kinds known by name, and not supported.
_FOREIGN: Final = {
    ".oft_R": "an OFT",
    ".oft_diag": "an OFT",
    ".boft_R": "a BOFT of PEFT",
    ".boft_s": "a BOFT of PEFT",
    ".ia3_l": "an IA3 of PEFT",
    ".glora_": "a GLoRA of PEFT",
    ".set_weight": "a replaced weight",
    ".reshape_weight": "a reshaped weight",
    ".lora_embedding_": "a LoRA of token vectors",
}
READ: Final = (
    "LoRA, DoRA, LoCon, LoHa, LoKr, GLoRA, OFT, BOFT and IA3 of LyCORIS, OFT of PEFT, and full differences of layers, "
    "norms and their biases"
)
_MAX_NAME_CHARS: Final = 1024


def part_of(name: str, beside: Container[str] = ()) -> tuple[str, str]:
    """Return the layer's name in a tensor's name, and the tensor's role.

    `beside` are the names of the file: an IA3's tensor for a layer has the name of a layer's own weight. Raises
    EngineError for an unsupported tensor, naming its kind if it is known.
    """
    if len(name) > _MAX_NAME_CHARS:
        raise EngineError(f"tensor {shown(name)} has a name of {len(name)} characters")
    plain = without_adapter(name)
    for end in _LONGEST_FIRST:
        if plain.endswith(end) and len(plain) > len(end):
            return plain.removesuffix(end).removesuffix("_"), _ENDS[end]  # some trainers end flat names so
    if name.endswith(_IA3) and name.removesuffix(_IA3) + ON_INPUT in beside:
        return name.removesuffix(_IA3), "ia3"
    kind = next((kind for part, kind in _FOREIGN.items() if part in name), None)
    if name.startswith("bundle_emb."):
        kind = "an embedding of new words beside a LoRA"
    what = f"is {kind}, which is not read" if kind else "has a name that no kind of adapter has"
    raise EngineError(f"tensor {shown(name)} {what}; read are {READ}")


def num_changed(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of elements of the weight that tensors of these shapes change, by their roles in a layer.

    0 if they do not match.
    """
    try:
        if UP in shapes:
            return shapes[UP][0] * math.prod(shapes[DOWN][1:]) * math.prod(shapes.get("mid", ())[2:])
        if "difference" in shapes:
            return math.prod(shapes["difference"])
        if "hada_w1_a" in shapes:
            return _num_of_product(shapes, "hada_w1", "hada_t1")
        if "lokr_w1" in shapes or "lokr_w1_a" in shapes:
            return _num_of_product(shapes, "lokr_w1", "") * _num_of_product(shapes, "lokr_w2", "lokr_t2")
    except (KeyError, IndexError):
        pass
    return 0


def _num_of_product(shapes: Mapping[str, Sequence[int]], name: str, core: str) -> int:
    if name in shapes:
        return math.prod(shapes[name])
    first, second = shapes[f"{name}_a"], shapes[f"{name}_b"]
    if core in shapes:
        return first[1] * second[1] * math.prod(shapes[core][2:])
    return first[0] * math.prod(second[1:])
