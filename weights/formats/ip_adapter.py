"""IP-Adapters: an image as a prompt, as tencent-ailab's code and diffusers' `load_ip_adapter` have them in files.

A folder with the adapter's safetensors file (`image_proj.*`, `ip_adapter.1.to_k_ip.weight`, ...) and `image_encoder/`,
the CLIP that it reads images with: the layout of h94/IP-Adapter, of which a folder holds one adapter here. Plain ones
project the image's vector to a few tokens; "plus" ones resample the tokens of its last layer but one, and "full" ones
project each of those. Those of Flux, which XLabs names otherwise, are plain with biases. Those of Stable Diffusion 3
resample the tokens of a SigLIP anew at each time, and have norms for each attention.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from weights.formats.source import AdapterBase
from weights.formats.untrusted import shown
from weights.records.errors import AdapterError

IP_CLASS: Final = "IPAdapter"
LIBRARY: Final = "ip_adapter"
ENCODER: Final = "image_encoder"  # its folder, and the prefix of its tensors in the component
ENCODER_CLASS: Final = "CLIPVisionModelWithProjection"
TIMED_ENCODER_CLASS: Final = "SiglipVisionModel"  # of adapters of Stable Diffusion 3
_PLAIN_TOKENS: Final = 4
HEAD_WIDTH: Final = 64  # of the attention of a resampler
_FLUX_TOKENS: Final = (4, 16)
_KEYS: Final = re.compile(r"^ip_adapter\.(\d{1,4})\.to_(k|v)_ip\.weight$")
_PLAIN: Final = ("proj.weight", "proj.bias", "norm.weight", "norm.bias")
_FULL: Final = tuple(f"proj.{number}.{half}" for number in (0, 2, 3) for half in ("weight", "bias"))
_RESAMPLER: Final = ("latents", "proj_in.weight", "proj_in.bias", "proj_out.weight", "proj_out.bias")
_RESAMPLER_END: Final = ("norm_out.weight", "norm_out.bias")
_RESAMPLER_LAYER: Final = (
    *("0.norm1.weight", "0.norm1.bias", "0.norm2.weight", "0.norm2.bias", "0.to_q.weight", "0.to_kv.weight"),
    *("0.to_out.weight", "1.0.weight", "1.0.bias", "1.1.weight", "1.3.weight"),
)

_TIMED_LAYER: Final = (*_RESAMPLER_LAYER, "2.1.weight", "2.1.bias")
_TIMES: Final = tuple(f"time_embedding.linear_{number}.{leaf}" for number in (1, 2) for leaf in ("weight", "bias"))
_NORMS_OF_TIMED: Final = ("norm_q.weight", "norm_k.weight", "norm_ip_k.weight")
_LEAVES: Final = {
    "flux": ("to_k_ip.weight", "to_k_ip.bias", "to_v_ip.weight", "to_v_ip.bias"),
    "sd3": ("to_k_ip.weight", "to_v_ip.weight", "norm_ip.linear.weight", "norm_ip.linear.bias", *_NORMS_OF_TIMED),
}
_PLAIN_LEAVES: Final = ("to_k_ip.weight", "to_v_ip.weight")

_SERVED: Final = (
    "of Stable Diffusion 1 and 2 and SDXL the plain, plus, plus-face and full-face ones are served, and those of "
    "Stable Diffusion 3 and XLabs' of Flux"
)
# The names of those for Flux in XLabs' files.
_XLABS: Final = "ip_adapter_proj_model."
_XLABS_KEYS: Final = re.compile(
    r"^double_blocks\.(\d{1,4})\.processor\.ip_adapter_double_stream_([kv])_proj\.(weight|bias)$"
)
# What reads the encoder's numbers, and what the finished tokens leave last.
_READERS: Final = {
    "plain": "proj.weight",
    "flux": "proj.weight",
    "full": "proj.0.weight",
    "plus": "proj_in.weight",
    "sd3": "proj_in.weight",
}
_NORMS: Final = {
    "plain": "norm.weight",
    "flux": "norm.weight",
    "full": "proj.3.weight",
    "plus": "norm_out.weight",
    "sd3": "norm_out.weight",
}
_BLOCKS: Final = ("down_blocks", "up_blocks", "mid_block")  # as diffusers goes through a UNet
_PATCHES: Final = "embeddings.patch_embedding.weight"  # of an encoder: as wide as its tokens
_FLUX_TEXT: Final = "context_embedder.weight"  # of a transformer: as wide as its text

_SD3_PATCHES: Final = "pos_embed.proj.weight"
Kind = Literal["plain", "plus", "full", "flux", "sd3"]
Denoiser = Literal["a UNet", "one of Flux", "one of Stable Diffusion 3"]
_FOR: Final[Mapping[Kind, Denoiser]] = {"flux": "one of Flux", "sd3": "one of Stable Diffusion 3"}
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IpAdapterForm:
    """The structure of an adapter: `layers` number its pairs of matrices, in the order of the denoiser's layers.

    `num_resampled` is the number of layers of a plus one's resampler. A full one has a token for each of its encoder's.
    """

    kind: Kind
    layers: tuple[int, ...]
    text_width: int
    num_resampled: int = 0


def is_ip_adapter_folder(path: Path) -> bool:
    """Return whether a folder looks like an IP-Adapter's, by the names of its files."""
    is_named = any(path.glob("ip[-_]adapter*.safetensors"))
    return is_named or ((path / ENCODER / "config.json").is_file() and any(path.glob("*.safetensors")))


def is_ip_adapter(names: Collection[str]) -> bool:
    """Return whether the tensors of a file are an IP-Adapter's, by their names."""
    is_known = any(name.startswith("image_proj.") for name in names) and any(_KEYS.match(name) for name in names)
    return is_known or any(name.startswith(_XLABS) for name in names)


def canonical_name(name: str) -> str:
    """Return the name that a tensor of XLabs' adapters has in others; any other stays."""
    if name.startswith(_XLABS):
        return f"image_proj.{name.removeprefix(_XLABS)}"
    match = _XLABS_KEYS.match(name)
    return f"ip_adapter.{match[1]}.to_{match[2]}_ip.{match[3]}" if match else name


def read_ip_adapter(file: Path, shapes: Mapping[str, Shape]) -> IpAdapterForm:
    """Return the structure of the adapter that these tensors are (those of its encoder may be among them).

    Raises AdapterError for what is none, naming the form of one that is not served, or the tensor that is missing.
    """
    own = {canonical_name(name): one for name, one in shapes.items() if not name.startswith(f"{ENCODER}.")}
    pairs = {int(match[1]) for name in own if (match := _KEYS.match(name))}
    projection = {name.removeprefix("image_proj."): own[name] for name in own if name.startswith("image_proj.")}
    if form := _form_not_served(own, projection):
        raise AdapterError(f"{file}: {form}; {_SERVED}")
    if not pairs or not projection:
        raise AdapterError(f"{file}: no IP-Adapter: expected tensors image_proj.* and ip_adapter.N.to_k_ip.weight")
    kind = _kind_of(own, projection)
    if kind is None:
        raise AdapterError(f"{file}: an IP-Adapter of a form that is not known; {_SERVED}")
    num_resampled = _count_layers(projection)
    names = {
        "plain": _PLAIN,
        "flux": _PLAIN,
        "full": _FULL,
        "plus": _resampler_names(num_resampled, _RESAMPLER_LAYER),
        "sd3": (*_TIMES, *_resampler_names(num_resampled, _TIMED_LAYER)),
    }[kind]
    wanted = {f"image_proj.{name}" for name in names}
    wanted |= {f"ip_adapter.{number}.{leaf}" for number in pairs for leaf in _LEAVES.get(kind, _PLAIN_LEAVES)}
    for name in sorted(wanted ^ own.keys()):
        what = "is missing" if name in wanted else f"is not of a {kind} IP-Adapter"
        raise AdapterError(f"{file}: tensor {shown(name)} {what}")
    _check_shapes(file, own, projection, kind, pairs)
    return IpAdapterForm(kind, tuple(sorted(pairs)), projection[_NORMS[kind]][0], num_resampled)


def count_tokens(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of tokens that an adapter makes of an image, by the shapes of all its tensors."""
    if latents := shapes.get("image_proj.latents"):
        return latents[1]
    if plain := shapes.get("image_proj.proj.weight"):
        return plain[0] // shapes["image_proj.norm.weight"][0]
    return next(shape[0] for name, shape in shapes.items() if name.endswith("embeddings.position_embedding.weight"))


def check_encoder(file: Path, shapes: Mapping[str, Shape]) -> None:
    """Check that an adapter reads what the encoder among its tensors says of an image. Raises AdapterError."""
    form, name = read_ip_adapter(file, shapes), f"{ENCODER}.visual_projection.weight"
    if form.kind == "sd3":
        name = next((one for one in shapes if one.startswith(f"{ENCODER}.") and one.endswith(_PATCHES)), _PATCHES)
    head = shapes.get(name, ())
    if len(head) != (4 if form.kind == "sd3" else 2):
        raise AdapterError(f"{file}: tensor {name} of a {image_encoder_class(form.kind)} is missing")
    reader = f"image_proj.{_READERS[form.kind]}"
    given, read = head[0] if form.kind in ("plain", "flux", "sd3") else head[1], shapes[reader][1]
    if given != read:
        raise AdapterError(
            f"{file}: tensor {reader} reads vectors of {read} numbers, and the {ENCODER} beside it gives {given}: the "
            "adapter was trained with another one"
        )


def check_ip_base(file: Path, shapes: Mapping[str, Shape], denoiser: Any, base: AdapterBase) -> None:
    """Check that an adapter has a layer for each attention to text of a denoiser, of its size. Raises AdapterError."""
    if denoiser.format != "safetensors":
        return
    form, tensors = read_ip_adapter(file, shapes), denoiser.tensors
    kind: Denoiser = "a UNet"
    sizes = _cross_attentions(tensors)
    if _SD3_PATCHES in tensors:
        kind, sizes = "one of Stable Diffusion 3", [(inner, form.text_width) for inner in _joint_attentions(tensors)]
    elif _FLUX_TEXT in tensors:
        kind, sizes = "one of Flux", _double_blocks(tensors)
    reason = why_unlike(form, shapes, sizes, repr(base.model), kind)
    if reason:
        raise AdapterError(f"{file}: an IP-Adapter that {reason}")


def why_unlike(
    form: IpAdapterForm,
    shapes: Mapping[str, Sequence[int]],
    attentions: Sequence[Sequence[int]],
    model: str,
    denoiser: Denoiser,
) -> str | None:
    """Return why an adapter is none for a denoiser with attentions to text of these (inner, text) sizes, or None."""
    if (wanted := _FOR.get(form.kind, "a UNet")) != denoiser:
        what = "is for a UNet" if wanted == "a UNet" else f"is {wanted.removeprefix('one ')}"
        return f"{what}, and {model} {'has' if denoiser == 'a UNet' else 'is'} {denoiser}"
    if len(form.layers) != len(attentions):
        return f"has {len(form.layers)} layers, and {model} {len(attentions)}: it is for another one"
    for number, attention in zip(form.layers, attentions, strict=True):
        name = f"ip_adapter.{number}.to_k_ip.weight"
        if list(shapes[name]) != list(attention):
            return f"has {name} of shape {list(shapes[name])}, and {model} {list(attention)}: it is for another one"
    return None


def _cross_attentions(tensors: Mapping[str, Any]) -> list[Shape]:
    """Return the (inner, text) sizes of a UNet's attentions to text, in the order in which adapters number them."""
    end = ".to_k.weight"
    names = [name for name in tensors if name.endswith(end) and not name.endswith(f"attn1{end}")]
    return [tuple(tensors[name].shape) for name in sorted(names, key=_place)]


def _double_blocks(tensors: Mapping[str, Any]) -> list[Shape]:
    """Return the (inner, text) sizes of the blocks of a Flux in which text and image attend to each other."""
    names = [name for name in tensors if re.match(r"transformer_blocks\.\d{1,4}\.attn\.to_q\.weight$", name)]
    return [(tensors[name].shape[0], tensors[_FLUX_TEXT].shape[1]) for name in sorted(names, key=_place)]


def _joint_attentions(tensors: Mapping[str, Any]) -> list[int]:
    """Return the widths of the attentions of a Stable Diffusion 3, in the order in which adapters number them."""
    names = [name for name in tensors if re.match(r"transformer_blocks\.\d{1,4}\.attn2?\.to_q\.weight$", name)]
    return [tensors[name].shape[0] for name in sorted(names, key=lambda name: (_place(name), name))]


def _place(name: str) -> tuple[int, list[int]]:
    block = name.partition(".")[0]
    return (*_BLOCKS, block).index(block), [int(number) for number in re.findall(r"\.(\d{1,9})(?=\.)", name)]


def _kind_of(names: Collection[str], projection: Collection[str]) -> Kind | None:
    if any(".norm_ip." in name for name in names) or any(name.startswith("time_embedding.") for name in projection):
        return "sd3"
    if "proj.weight" in projection:
        return "flux" if any(name.endswith("_ip.bias") for name in names) else "plain"
    if "proj.3.weight" in projection:
        return "full"
    return "plus" if "latents" in projection else None


def _form_not_served(names: Collection[str], projection: Collection[str]) -> str | None:
    """Name the form of an adapter that is not served, by the names of its tensors, as diffusers does; else None."""
    is_plus = any(name.startswith("perceiver_resampler.") for name in projection)
    if is_plus or {"proj.0.weight", "norm.weight"} <= set(projection):
        return (
            "a FaceID adapter, which reads a face as insightface's recognition models (buffalo_l, antelopev2) describe "
            "it, and none of them is served"
        )
    return None


def _fits_of_timed(
    own: Mapping[str, Shape], projection: Mapping[str, Shape], pairs: Collection[int], width: int, inner: int
) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes of what an adapter of Stable Diffusion 3 has beside others; norms have the width of a head."""
    fits: dict[str, tuple[int | None, ...]] = {f"image_proj.{_TIMES[0]}": (inner, None)}
    fits |= {f"image_proj.{name}": (inner,) for name in _TIMES if name.endswith("bias")}
    fits[f"image_proj.{_TIMES[2]}"] = (inner, inner)
    for name in projection:
        if name.endswith(".2.1.weight"):
            fits |= {f"image_proj.{name}": (4 * inner, inner)}
            fits |= {f"image_proj.{name.removesuffix('weight')}bias": (4 * inner,)}
    for number in pairs:
        prefix = f"ip_adapter.{number}."
        head = (own[f"{prefix}norm_q.weight"] or (0,))[0]
        fits |= {f"{prefix}norm_ip.linear.weight": (2 * width, inner), f"{prefix}norm_ip.linear.bias": (2 * width,)}
        fits |= {prefix + name: (head,) for name in _NORMS_OF_TIMED}
    return fits


def image_encoder_class(kind: Kind) -> str:
    """Return the class of transformers that reads the images of an adapter."""
    return TIMED_ENCODER_CLASS if kind == "sd3" else ENCODER_CLASS


def _count_layers(names: Collection[str]) -> int:
    numbers = {int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,3})\.", name))}
    return 1 + max(numbers, default=-1)


def _resampler_names(num_layers: int, each: Sequence[str]) -> list[str]:
    layers = [f"layers.{number}.{name}" for number in range(num_layers) for name in each]
    return [*_RESAMPLER, *_RESAMPLER_END, *layers]


def _check_shapes(
    file: Path,
    own: Mapping[str, Shape],
    projection: Mapping[str, Shape],
    kind: Kind,
    pairs: Collection[int],
) -> None:
    """Raise AdapterError for tensors that do not go together."""
    for name in (_NORMS[kind], _READERS[kind]):
        if not projection[name]:
            raise AdapterError(f"{file}: tensor {shown(f'image_proj.{name}')} has no axes")
    width, inner = projection[_NORMS[kind]][0], projection[_READERS[kind]][0]
    fits: dict[str, tuple[int | None, ...]] = {
        f"ip_adapter.{number}.to_{half}_ip.weight": (None, width) for number in pairs for half in "kv"
    }
    if kind in ("plain", "flux"):
        tokens = _PLAIN_TOKENS
        if kind == "flux":
            tokens = next((one for one in _FLUX_TOKENS if inner == one * width), _PLAIN_TOKENS)
            keys = [name for name in fits if own[name]]
            fits |= {f"{name.removesuffix('weight')}bias": (own[name][0],) for name in keys}
        fits |= {"image_proj.proj.weight": (tokens * width, None), "image_proj.proj.bias": (tokens * width,)}
    elif kind == "full":
        fits |= {"image_proj.proj.0.weight": (inner, None), "image_proj.proj.0.bias": (inner,)}
        fits |= {"image_proj.proj.2.weight": (width, inner), "image_proj.proj.2.bias": (width,)}
    else:
        fits |= {"image_proj.latents": (1, None, inner), "image_proj.proj_in.weight": (inner, None)}
        fits["image_proj.proj_out.weight"] = (width, inner)
        if kind == "sd3":
            fits |= _fits_of_timed(own, projection, pairs, width, inner)
        for name, shape in projection.items():
            if not name.endswith(("0.to_q.weight", "0.to_kv.weight")):
                continue
            rows = (shape or (0,))[0] // (2 if name.endswith("0.to_kv.weight") else 1)
            if rows % HEAD_WIDTH or shape[1:] != (inner,):
                raise AdapterError(f"{file}: tensor {shown(name)} has shape {list(shape)}: no heads of {HEAD_WIDTH}")
    for name, sides in fits.items():
        given = own[name]
        if len(given) != len(sides) or any(a not in (b, None) for a, b in zip(sides, given, strict=True)):
            wanted = ", ".join("any" if side is None else str(side) for side in sides)
            raise AdapterError(f"{file}: tensor {shown(name)} has shape {list(given)}, expected [{wanted}]")
