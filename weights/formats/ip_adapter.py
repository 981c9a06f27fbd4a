"""IP-Adapters: an image as a prompt, as tencent-ailab's code and diffusers' `load_ip_adapter` have them in files.

A folder with the adapter's safetensors file (`image_proj.*`, `ip_adapter.1.to_k_ip.weight`, ...) and `image_encoder/`,
the CLIP that it reads images with: the layout of h94/IP-Adapter, of which a folder holds one adapter here. Plain ones
project the image's vector to a few tokens; "plus" ones resample the tokens of its last layer but one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weights.errors import AdapterError
from weights.formats.untrusted import shown

IP_CLASS: Final = "IPAdapter"
LIBRARY: Final = "ip_adapter"
ENCODER: Final = "image_encoder"  # its folder, and the prefix of its tensors in the component
ENCODER_CLASS: Final = "CLIPVisionModelWithProjection"
_PLAIN_TOKENS: Final = 4
HEAD_WIDTH: Final = 64  # of the attention of a resampler
_KEYS: Final = re.compile(r"^ip_adapter\.(\d{1,4})\.to_(k|v)_ip\.weight$")
_PLAIN: Final = ("proj.weight", "proj.bias", "norm.weight", "norm.bias")
_RESAMPLER: Final = ("latents", "proj_in.weight", "proj_in.bias", "proj_out.weight", "proj_out.bias")
_RESAMPLER_END: Final = ("norm_out.weight", "norm_out.bias")
_RESAMPLER_LAYER: Final = (
    *("0.norm1.weight", "0.norm1.bias", "0.norm2.weight", "0.norm2.bias", "0.to_q.weight", "0.to_kv.weight"),
    *("0.to_out.weight", "1.0.weight", "1.0.bias", "1.1.weight", "1.3.weight"),
)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IpAdapterForm:
    """The structure of an adapter: `layers` number its pairs of matrices, in the order of the denoiser's layers.

    `num_resampled` is the number of layers of its resampler, 0 for a plain one.
    """

    layers: tuple[int, ...]
    num_tokens: int
    text_width: int
    num_resampled: int


def is_ip_adapter_folder(path: Path) -> bool:
    """Return whether a folder looks like an IP-Adapter's, by the names of its files."""
    return (path / ENCODER / "config.json").is_file() and any(path.glob("*.safetensors"))


def is_ip_adapter(names: Collection[str]) -> bool:
    """Return whether the tensors of a file are an IP-Adapter's, by their names."""
    return any(name.startswith("image_proj.") for name in names) and any(_KEYS.match(name) for name in names)


def read_ip_adapter(file: Path, shapes: Mapping[str, Shape]) -> IpAdapterForm:
    """Return the structure of the adapter that these tensors are (those of its encoder may be among them).

    Raises AdapterError for what is none, for FaceID and full ones, and naming the tensor that is missing.
    """
    own = {name: shape for name, shape in shapes.items() if not name.startswith(f"{ENCODER}.")}
    pairs = {int(match[1]) for name in own if (match := _KEYS.match(name))}
    projection = {name.removeprefix("image_proj."): own[name] for name in own if name.startswith("image_proj.")}
    if not pairs or not projection:
        raise AdapterError(f"{file}: no IP-Adapter: expected tensors image_proj.* and ip_adapter.N.to_k_ip.weight")
    is_plain = "proj.weight" in projection
    if not is_plain and "latents" not in projection:
        raise AdapterError(f"{file}: {_why_unknown(projection)}; plain and plus ones are served, plus-face among them")
    num_resampled = 0 if is_plain else _count_layers(projection)
    wanted = {f"image_proj.{name}" for name in (_PLAIN if is_plain else _resampler_names(num_resampled))}
    wanted |= {f"ip_adapter.{number}.to_{half}_ip.weight" for number in pairs for half in "kv"}
    for name in sorted(wanted ^ own.keys()):
        what = "is missing" if name in wanted else "is not of a plain or plus IP-Adapter"
        raise AdapterError(f"{file}: tensor {shown(name)} {what}")
    _check_shapes(file, own, projection, pairs)
    width = projection["norm.weight" if is_plain else "norm_out.weight"][0]
    num_tokens = _PLAIN_TOKENS if is_plain else projection["latents"][1]
    return IpAdapterForm(tuple(sorted(pairs)), num_tokens, width, num_resampled)


def _why_unknown(projection: Collection[str]) -> str:
    """Return what an adapter of another kind is, by the names of its projection's tensors, as diffusers tells them."""
    is_plus = any(name.startswith("perceiver_resampler.") for name in projection)
    if is_plus or {"proj.0.weight", "norm.weight"} <= set(projection):
        return (
            "a FaceID adapter, which reads a face as insightface's recognition models (buffalo_l, antelopev2) describe "
            "it, and none of them is served"
        )
    return "a full IP-Adapter" if "proj.3.weight" in projection else "an IP-Adapter of a kind that is not known"


def _count_layers(names: Collection[str]) -> int:
    numbers = {int(match[1]) for name in names if (match := re.match(r"layers\.(\d{1,3})\.", name))}
    return 1 + max(numbers, default=-1)


def _resampler_names(num_layers: int) -> list[str]:
    layers = [f"layers.{number}.{name}" for number in range(num_layers) for name in _RESAMPLER_LAYER]
    return [*_RESAMPLER, *_RESAMPLER_END, *layers]


def _check_shapes(
    file: Path, own: Mapping[str, Shape], projection: Mapping[str, Shape], pairs: Collection[int]
) -> None:
    """Raise AdapterError for tensors that do not go together."""
    is_plain = "proj.weight" in projection
    width = projection["norm.weight" if is_plain else "norm_out.weight"][0]
    fits: dict[str, tuple[int | None, ...]] = {
        f"ip_adapter.{number}.to_{half}_ip.weight": (None, width) for number in pairs for half in "kv"
    }
    if is_plain:
        fits["image_proj.proj.weight"] = (_PLAIN_TOKENS * width, None)
        fits["image_proj.proj.bias"] = (_PLAIN_TOKENS * width,)
    else:
        inner = projection["proj_in.weight"][0]
        fits |= {"image_proj.latents": (1, None, inner), "image_proj.proj_in.weight": (inner, None)}
        fits["image_proj.proj_out.weight"] = (width, inner)
        for name, shape in projection.items():
            heads = shape[0] // 2 if name.endswith("0.to_kv.weight") else shape[0]
            if name.endswith(("0.to_q.weight", "0.to_kv.weight")) and (heads % HEAD_WIDTH or shape[1:] != (inner,)):
                raise AdapterError(f"{file}: tensor {shown(name)} has shape {list(shape)}: no heads of {HEAD_WIDTH}")
    for name, sides in fits.items():
        given = own[name]
        if len(given) != len(sides) or any(a not in (b, None) for a, b in zip(sides, given, strict=True)):
            wanted = ", ".join("any" if side is None else str(side) for side in sides)
            raise AdapterError(f"{file}: tensor {shown(name)} has shape {list(given)}, expected [{wanted}]")
