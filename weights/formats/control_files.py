"""ControlNets and T2I-Adapters in one file, as their trainers publish them: read as diffusers' folders of the same.

A file has no config. What a ControlNet has in common with its base stands in that one's config, the rest is in the
names and shapes of the tensors. Three layouts are read: diffusers' names without their config.json; those of the
original code (`input_blocks.1.0...`, `zero_convs.0.0`), also behind `control_model.`; and files that change their base,
whose weights they need: `difference` (what is added to it), and Control-LoRAs (`lora_controlnet`; base + up @ down).
Sources: lllyasviel/ControlNet `cldm/cldm.py`, TencentARC/T2I-Adapter `ldm/modules/encoders/adapter.py`; diffusers
0.42, `scripts/convert_original_t2i_adapter.py`; ComfyUI `comfy/controlnet.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from weights.formats.folder import read_json
from weights.formats.low_precision import read_as_plain
from weights.formats.pipeline_parts import pipeline_variant
from weights.formats.published_quantization import ComputedTensor
from weights.formats.safetensors import read_header
from weights.formats.source import CONFIG_FILE, BasePipeline, Checkpoint, SourceComponent
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

ControlKind = Literal["unet", "union", "t2i", "flux"]
CONTROL_CLASSES: Final = (  # of diffusers' folders, whether they are served or refused by name
    *("ControlNetModel", "ControlNetUnionModel", "ControlNetXSAdapter", "UNetControlNetXSModel", "T2IAdapter"),
    *("MultiAdapter", "SparseControlNetModel", "QwenImageControlNetModel", "SanaControlNetModel"),
)
SERVED: Final = (
    "in one file are read: ControlNets of Stable Diffusion and SDXL (in diffusers' names and the original ones), their "
    "Control-LoRAs, unions (ControlNet++), T2I-Adapters, and ControlNets of Flux in diffusers' names"
)
_Shapes = Mapping[str, Sequence[int]]
_Array = npt.NDArray[Any]
_PREFIXES: Final = ("control_model.", "adapter.")
_LORA_MARK, _DIFFERENCE_MARK = "lora_controlnet", "difference"
_FLOATS: Final[Mapping[str, Any]] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_MAX_BLOCKS: Final = 64
_XS: Final = r"(^|\.)(control_to_base_for_conv_in|base_to_ctrl|ctrl_to_base)\."
# What tells a file that is refused, by a pattern of one of its names, the first that matches.
_REFUSED: Final = (
    (r"^lllite_", "a ControlNet-LLLite"),
    (r"^mid_convs\.[01]\.", "a ControlNeXt"),
    (r"^control_all_x_embedder\.|^control_layers\.", "a ControlNet of Z-Image in one file"),
    (r"^control_img_in\.|^control_blocks\.0\.after_proj\.", "a ControlNet of Qwen-Image (Fun)"),
    (r"^controlnet_blocks\.0\.linear\.", "a ControlNet of Flux in MistoLine's layout"),
    (r"^control_type$|^pos_embed_input\.proj\.", "a ControlNet of Stable Diffusion 3 in one file"),
)
_OF_UNETS: Final = (  # what diffusers' `ControlNetModel.from_unet` takes of a UNet's config
    *("encoder_hid_dim", "encoder_hid_dim_type", "addition_embed_type", "addition_time_embed_dim"),
    *("transformer_layers_per_block", "flip_sin_to_cos", "freq_shift", "down_block_types", "only_cross_attention"),
    *("block_out_channels", "layers_per_block", "downsample_padding", "mid_block_scale_factor", "act_fn"),
    *("norm_num_groups", "norm_eps", "cross_attention_dim", "attention_head_dim", "num_attention_heads"),
    *("use_linear_projection", "class_embed_type", "num_class_embeds", "upcast_attention", "mid_block_type"),
    *("resnet_time_scale_shift", "projection_class_embeddings_input_dim"),
)
_OF_FLUX: Final = (
    *("in_channels", "attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim"),
    "axes_dims_rope",
)
_IN_RESNETS: Final = {
    "in_layers.0": "norm1",
    "in_layers.2": "conv1",
    "emb_layers.1": "time_emb_proj",
    "out_layers.0": "norm2",
    "out_layers.3": "conv2",
    "skip_connection": "conv_shortcut",
}
_EMBEDDINGS: Final = {
    "time_embed.0": "time_embedding.linear_1",
    "time_embed.2": "time_embedding.linear_2",
    "label_emb.0.0": "add_embedding.linear_1",
    "label_emb.0.2": "add_embedding.linear_2",
    "input_blocks.0.0": "conv_in",
    "middle_block_out.0": "controlnet_mid_block",
}


def control_kind(path: Path, shapes: _Shapes) -> ControlKind | None:
    """Return the kind of control that a file's tensors are; None for a file of something else.

    Raises FormatError for a kind that is not read, naming it.
    """
    names = {_bare(name) for name in shapes}
    if any(n.startswith("double_blocks.") for n in names) and any(n.startswith("controlnet_blocks.") for n in names):
        raise FormatError(f"{path}: a ControlNet of Flux in XLabs' own names, which are not read; {SERVED}")
    if "task_embedding" in names and any(name.startswith("spatial_ch_projs.") for name in names):
        return "union"
    if {_LORA_MARK, "controlnet_cond_embedding.conv_in.weight"} & names:
        return "unet"
    if any(name.startswith("zero_convs.0.0.") for name in names):
        return "unet"
    if any(re.match(r"body\.\d+\.(resnets\.0\.|body\.0\.)?block1\.weight$", name) for name in names):
        return "t2i"
    if any(re.search(_XS, name) for name in names):
        raise FormatError(
            f"{path}: a ControlNet-XS without its config.json, which alone says how many heads it has: put it into a "
            f"folder beside that; {SERVED}"
        )
    for pattern, what in _REFUSED:
        if any(re.search(pattern, name) for name in names):
            raise FormatError(f"{path}: {what}, which is not served; {SERVED}")
    if "controlnet_x_embedder.weight" not in names:
        return None
    if any(".img_mlp.net.0.proj." in name for name in names):
        raise FormatError(f"{path}: a ControlNet of Qwen-Image, which is not served; {SERVED}")
    return "flux"


def is_control_file(path: Path) -> bool:
    """Return whether it is a single file of a control, which is read by the configs of its base.

    Raises FormatError for one that is damaged, or of a kind that is not read.
    """
    if path.suffix != ".safetensors" or not path.is_file():
        return False
    return control_kind(path, {name: tensor.shape for name, tensor in read_header(path).tensors.items()}) is not None


def read_control_file(path: Path, base: BasePipeline) -> Checkpoint:
    """Return a single file as the folder that diffusers has of the same. Raises FormatError."""
    header = read_header(path)
    tensors = read_as_plain(path, header.tensors, header.metadata)
    kind = control_kind(path, {name: tensor.shape for name, tensor in tensors.items()})
    if kind is None:
        raise FormatError(f"{path}: neither a ControlNet nor a T2I-Adapter; {SERVED}")
    denoiser = "transformer" if kind == "flux" else "unet"
    file = base.folder / denoiser / CONFIG_FILE
    if not file.is_file():
        what = _WORDS[kind]
        raise FormatError(f"{path}: {what}, and {base.name!r}, which it is for, has no {denoiser}")
    given = read_json(file)
    bare = {_bare(name): tensor for name, tensor in tensors.items()}
    if len(bare) != len(tensors):
        raise FormatError(f"{path}: has tensors of one name with and without {' or '.join(_PREFIXES)}")
    class_name, config, found = _READERS[kind](path, given, bare, base)
    config = {"_class_name": class_name, **config}
    part = SourceComponent("controlnet", "diffusers", class_name, ".", found, dict(header.metadata), (_FILE,))
    return Checkpoint(path, "controlnet", class_name, (part,), {CONFIG_FILE: json.dumps(config, indent=2).encode()})


_FILE: Final = "diffusion_pytorch_model.safetensors"
_WORDS: Final[Mapping[ControlKind, str]] = {
    "unet": "a ControlNet of Stable Diffusion or SDXL",
    "union": "a union of ControlNets for Stable Diffusion or SDXL",
    "t2i": "a T2I-Adapter",
    "flux": "a ControlNet of Flux",
}
_Read = tuple[str, dict[str, Any], dict[str, SourceTensor]]


def why_alone(path: Path, kind: ControlKind) -> str:
    """Return why a file cannot be read without a base."""
    return (
        f"{path}: {_WORDS[kind]} in one file, without a config: it is read by that of the model that it is for; "
        "register it as an adapter, with its `base`"
    )


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _read_unet_control(
    path: Path, unet: Mapping[str, Any], given: Mapping[str, SourceTensor], base: BasePipeline
) -> _Read:
    """Return a ControlNet, or a union of them, of a UNet of that config."""
    per_block = int(unet.get("layers_per_block", 2)) + 1
    is_lora, adds = _LORA_MARK in given, _DIFFERENCE_MARK in given
    named: dict[str, SourceTensor] = {}
    hints = _hint_places(given)
    for name, tensor in given.items():
        if name in (_LORA_MARK, _DIFFERENCE_MARK):
            continue
        new = name if _is_of_diffusers(given) else _renamed(name, per_block, hints)
        if new is None or new in named:
            raise FormatError(f"{path}: tensor {shown(name)} is none of a ControlNet's")
        named[new] = tensor
    if is_lora or adds:
        named = _on_base(path, named, base, adds=adds)
    config = {key: unet[key] for key in _OF_UNETS if unet.get(key) is not None}
    config |= _structure(path, named, config)
    if "task_embedding" not in named:
        return "ControlNetModel", config, named
    config.pop("mid_block_type", None)
    return "ControlNetUnionModel", config | _union_of(path, named), named


def _is_of_diffusers(names: Collection[str]) -> bool:
    return "controlnet_cond_embedding.conv_in.weight" in names


def _hint_places(names: Collection[str]) -> dict[int, str]:
    """Return the layers of the original code's reader of images, by their numbers, under diffusers' names."""
    numbers = sorted({int(match[1]) for name in names if (match := re.match(r"input_hint_block\.(\d{1,3})\.", name))})
    inner = {number: f"blocks.{place}" for place, number in enumerate(numbers[1:-1])}
    return dict.fromkeys(numbers[:1], "conv_in") | inner | dict.fromkeys(numbers[-1:], "conv_out")


def _renamed(name: str, per_block: int, hints: Mapping[int, str]) -> str | None:
    """Return a tensor of the original code under diffusers' name, None for one that it does not have."""
    module, _, leaf = name.rpartition(".")
    if module in _EMBEDDINGS:
        return f"{_EMBEDDINGS[module]}.{leaf}"
    if match := re.fullmatch(r"input_hint_block\.(\d{1,3})", module):
        return f"controlnet_cond_embedding.{hints[int(match[1])]}.{leaf}"
    if match := re.fullmatch(r"zero_convs\.(\d{1,3})\.0", module):
        return f"controlnet_down_blocks.{match[1]}.{leaf}"
    if match := re.fullmatch(r"middle_block\.([012])\.(.+)", module):
        return _layer("mid_block", int(match[1]) // 2, match[2], leaf, is_attention=match[1] == "1")
    if match := re.fullmatch(r"input_blocks\.(\d{1,3})\.([01])\.(.+)", module):
        block, layer = divmod(int(match[1]) - 1, per_block)
        if match[3] == "op":
            return f"down_blocks.{block}.downsamplers.0.conv.{leaf}"
        return _layer(f"down_blocks.{block}", layer, match[3], leaf, is_attention=match[2] == "1")
    return None


def _layer(block: str, number: int, inner: str, leaf: str, *, is_attention: bool) -> str | None:
    if is_attention:
        return f"{block}.attentions.{0 if block == 'mid_block' else number}.{inner}.{leaf}"
    return f"{block}.resnets.{number}.{_IN_RESNETS[inner]}.{leaf}" if inner in _IN_RESNETS else None


def _on_base(
    path: Path, named: Mapping[str, SourceTensor], base: BasePipeline, *, adds: bool
) -> dict[str, SourceTensor]:
    """Return the tensors of a file that changes its base: those of its own, those that it changes, and the base's."""
    unet = base.components.get("unet")
    if unet is None or unet.format != "safetensors":
        raise FormatError(
            f"{path}: changes the weights of its base, and {base.name!r} has none that are no blocks of packed numbers"
        )
    of_base = {
        name: tensor
        for name, tensor in unet.tensors.items()
        if name.startswith(("down_blocks.", "mid_block.", "conv_in.", "time_embedding.", "add_embedding."))
    }
    found = dict(of_base)
    for name, tensor in named.items():
        module, _, leaf = name.rpartition(".")
        weight = f"{module}.weight"
        if leaf in ("up", "down"):
            found[weight] = _low_rank(path, weight, named, of_base)
        elif adds and name in of_base:
            found[name] = _sum(path, name, of_base[name], tensor)
        else:
            found[name] = tensor
    return found


def _low_rank(
    path: Path, weight: str, named: Mapping[str, SourceTensor], of_base: Mapping[str, SourceTensor]
) -> ComputedTensor:
    """Return a layer of the base plus the product of two small matrices; of a convolution, of flattened ones."""
    module = weight.removesuffix(".weight")
    up, down, own = named.get(f"{module}.up"), named.get(f"{module}.down"), of_base.get(weight)
    if up is None or down is None or own is None:
        lack = "its base lacks" if own is None else "lacks a half of"
        raise FormatError(f"{path}: {lack} the layer {shown(module)}")
    rank = up.shape[1] if len(up.shape) > 1 else 0
    sides = math.prod(own.shape[1:])
    if not rank or math.prod(up.shape) != own.shape[0] * rank or math.prod(down.shape) != rank * sides:
        raise FormatError(
            f"{path}: {shown(module)}: up {list(up.shape)} and down {list(down.shape)} give no weight of its base, "
            f"{list(own.shape)}"
        )

    def compute() -> _Array:
        product = _wide(path, up).reshape(-1, rank) @ _wide(path, down).reshape(rank, -1)
        return (_wide(path, own) + product.reshape(own.shape)).astype(_FLOATS[own.dtype])

    return ComputedTensor(path, _float_of(path, own), own.shape, compute)


def _sum(path: Path, name: str, own: SourceTensor, added: SourceTensor) -> ComputedTensor:
    if tuple(own.shape) != tuple(added.shape):
        raise FormatError(
            f"{path}: tensor {shown(name)} has shape {list(added.shape)}, and is added to one of {list(own.shape)}"
        )

    def compute() -> _Array:
        return (_wide(path, own) + _wide(path, added)).astype(_FLOATS[own.dtype])

    return ComputedTensor(path, _float_of(path, own), own.shape, compute)


def _float_of(path: Path, tensor: SourceTensor) -> str:
    if tensor.dtype not in _FLOATS:
        raise FormatError(f"{path}: changes a tensor in {tensor.dtype}; expected one of {', '.join(_FLOATS)}")
    return tensor.dtype


def _wide(path: Path, tensor: SourceTensor) -> _Array:
    return np.frombuffer(tensor.read(), _FLOATS[_float_of(path, tensor)]).astype(np.float32).reshape(tensor.shape)


def _structure(path: Path, named: Mapping[str, SourceTensor], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the structure of a ControlNet by its tensors: small ones have fewer attentions than their base."""
    widths = config.get("block_out_channels", ())
    kinds, depths = list[str](), list[int]()
    for block in range(len(widths)):
        depth = _count(path, named, rf"down_blocks\.{block}\.attentions\.0\.transformer_blocks\.(\d+)\.")
        kinds.append("CrossAttnDownBlock2D" if depth else "DownBlock2D")
        depths.append(max(1, depth))
    depth = _count(path, named, r"mid_block\.attentions\.0\.transformer_blocks\.(\d+)\.")
    hints = _count(path, named, r"controlnet_cond_embedding\.blocks\.(\d+)\.")
    reader = [f"controlnet_cond_embedding.blocks.{place}.weight" for place in range(1, hints, 2)]
    first, image = (
        _shape(path, named, name, 4) for name in ("conv_in.weight", "controlnet_cond_embedding.conv_in.weight")
    )
    return {
        "down_block_types": kinds,
        "transformer_layers_per_block": [*depths[:-1], depth or depths[-1]],
        "in_channels": first[1],
        "conditioning_channels": image[1],
        "conditioning_embedding_out_channels": [image[0], *(_shape(path, named, name, 4)[0] for name in reader)],
        **({} if depth else {"mid_block_type": "UNetMidBlock2D"}),
    }


def _union_of(path: Path, named: Mapping[str, SourceTensor]) -> dict[str, Any]:
    modes, width = _shape(path, named, "task_embedding", 2)
    return {
        "num_control_type": modes,
        "num_trans_channel": width,
        "num_trans_layer": _count(path, named, r"transformer_layes\.(\d+)\."),
        "num_proj_channel": _shape(path, named, "spatial_ch_projs.weight", 2)[0],
    }


def _read_adapter(path: Path, unet: Mapping[str, Any], given: Mapping[str, SourceTensor], base: BasePipeline) -> _Read:
    """Return a T2I-Adapter, whose blocks the original code has in one row (but for those of a light one)."""
    is_light = not any(name.startswith("conv_in.") for name in given)
    first = _shape(path, given, "body.0.in_conv.weight" if is_light else "conv_in.weight", 4)
    pixels = int(pipeline_variant(base.folder).get("pixels_per_latent", 8))
    found = next(
        ((gray, factor) for gray in (1, 3) for factor in (pixels, 2 * pixels) if gray * factor**2 == first[1]), None
    )
    if found is None:
        raise FormatError(
            f"{path}: a T2I-Adapter that reads {first[1]} numbers of a patch, and {base.name!r} has latents of "
            f"{pixels} pixels a side"
        )
    channels, factor = found
    is_xl = factor != pixels
    is_original = not any(".resnets." in name for name in given)
    count, num_blocks = _count(path, given, r"body\.(\d+)\."), len(unet.get("block_out_channels", ()))
    # Those of SDXL have one for the middle, too.
    num_groups = num_blocks + 1 if is_xl and not count % (num_blocks + 1) else num_blocks
    each = count // num_groups if is_original and not is_light and num_groups else 1
    if is_original and not is_light and (not each or count % num_groups):
        raise FormatError(f"{path}: a T2I-Adapter of {count} blocks, and {base.name!r} has {num_groups} to add to")
    named = {f"adapter.{_regrouped(name, each) if is_original else name}": one for name, one in given.items()}
    end = "out_conv" if is_light else "resnets.0.block1"
    groups = _count(path, named, r"adapter\.body\.(\d+)\.")
    widths = [_shape(path, named, f"adapter.body.{place}.{end}.weight", 4)[0] for place in range(groups)]
    config = {
        "in_channels": channels,
        "channels": widths[:-1] if is_light else widths,
        "num_res_blocks": _count(path, named, r"adapter\.body\.0\.resnets\.(\d+)\."),
        "downscale_factor": factor,
        "adapter_type": "light_adapter" if is_light else "full_adapter_xl" if is_xl else "full_adapter",
    }
    return "T2IAdapter", config, named


def _regrouped(name: str, each: int) -> str:
    """Return a tensor of the original code's T2I-Adapter under diffusers' name, of `each` blocks to a group."""
    match = re.match(r"body\.(\d{1,3})\.(body\.(\d{1,3})\.)?(.+)$", name)
    if match is None:
        return name
    number, inner, rest = int(match[1]), match[3], match[4]
    if inner is not None:
        return f"body.{number}.resnets.{inner}.{rest}"
    group, place = divmod(number, each)
    return (
        f"body.{group}.{rest}"
        if rest.startswith(("in_conv.", "out_conv."))
        else (f"body.{group}.resnets.{place}.{rest}")
    )


def _read_flux(
    path: Path, transformer: Mapping[str, Any], given: Mapping[str, SourceTensor], base: BasePipeline
) -> _Read:
    """Return a ControlNet of Flux, which has a transformer's first blocks."""
    config = {key: transformer[key] for key in _OF_FLUX if transformer.get(key) is not None}
    if any(name.startswith("input_hint_block.") for name in given):
        raise FormatError(
            f"{path}: a ControlNet of Flux that reads pixels; put it into a folder beside its config.json"
        )
    config |= {
        "num_layers": _count(path, given, r"transformer_blocks\.(\d+)\."),
        "num_single_layers": _count(path, given, r"single_transformer_blocks\.(\d+)\."),
        "guidance_embeds": any(name.startswith("time_text_embed.guidance_embedder.") for name in given),
    }
    if "controlnet_mode_embedder.weight" in given:
        config["num_mode"] = _shape(path, given, "controlnet_mode_embedder.weight", 2)[0]
    return "FluxControlNetModel", config, dict(given)


_Reader = Callable[[Path, Mapping[str, Any], Mapping[str, SourceTensor], BasePipeline], _Read]
_READERS: Final[Mapping[ControlKind, _Reader]] = {
    "unet": _read_unet_control,
    "union": _read_unet_control,
    "t2i": _read_adapter,
    "flux": _read_flux,
}


def _count(path: Path, names: Collection[str], pattern: str) -> int:
    """Count the different numbers that the names have in a pattern's group. Raises FormatError for too many."""
    numbers = {int(match[1]) for name in names if (match := re.match(pattern, name)) and len(match[1]) < 5}
    if len(numbers) > _MAX_BLOCKS:
        raise FormatError(f"{path}: {len(numbers)} blocks, expected at most {_MAX_BLOCKS}")
    return len(numbers)


def _shape(path: Path, named: Mapping[str, SourceTensor], name: str, num_axes: int) -> Sequence[int]:
    tensor = named.get(name)
    if tensor is None or len(tensor.shape) != num_axes:
        what = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
        raise FormatError(f"{path}: tensor {shown(name)} {what}; expected one of {num_axes} axes")
    return tensor.shape
