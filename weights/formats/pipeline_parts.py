"""The configs of a pipeline: the parts that it must have to be served, the first of them that a checkpoint lacks,
and what tells pipelines of one class apart: FLUX.1-schnell is a FluxPipeline as FLUX.1-dev.

Adapters are compared with these, by headers and configs, when they are registered.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from weights.formats.encoder_files import tokenizer_folder
from weights.formats.folder import read_json
from weights.records.dtypes import cast_target, config_name
from weights.records.errors import FormatError

if TYPE_CHECKING:
    from weights.formats.source import Checkpoint


SOLVER_CONFIG: Final = "scheduler/scheduler_config.json"
_SWITCHES: Final = (  # file of the pipeline's folder, key
    ("transformer/config.json", "guidance_embeds"),
    ("transformer/config.json", "zero_cond_t"),
    (SOLVER_CONFIG, "use_dynamic_shifting"),
    ("model_index.json", "is_distilled"),
)
_MAX_BLOCKS: Final = 16
_LEAST_SAMPLE_SIZE: Final = 64  # of a UNet whose config is so old that a smaller one is a mistake


@dataclass(frozen=True, slots=True)
class PipelineParts:
    """The components of a pipeline class beside its VAE and solver. Of `encoders`, stock does without `optional`."""

    denoiser: str
    encoders: tuple[str, ...]
    optional: frozenset[str] = frozenset()


_STABLE_DIFFUSION: Final = PipelineParts("unet", ("text_encoder",))
_XL: Final = PipelineParts("unet", ("text_encoder", "text_encoder_2"), frozenset({"text_encoder"}))
_THREE: Final = PipelineParts(
    "transformer", ("text_encoder", "text_encoder_2", "text_encoder_3"), frozenset({"text_encoder_3"})
)
_FLUX: Final = PipelineParts("transformer", ("text_encoder", "text_encoder_2"))
_ONE_ENCODER: Final = PipelineParts("transformer", ("text_encoder",))
PIPELINES: Final[Mapping[str, PipelineParts]] = {
    f"{name}{task}Pipeline": parts
    for name, parts in {
        "StableDiffusion": _STABLE_DIFFUSION,
        "StableDiffusionXL": _XL,
        "StableDiffusion3": _THREE,
        "Flux": _FLUX,
        "QwenImage": _ONE_ENCODER,
        "ZImage": _ONE_ENCODER,
    }.items()
    for task in ("", "Img2Img", "Inpaint")
} | dict.fromkeys(
    ("Flux2Pipeline", "Flux2KleinPipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline"), _ONE_ENCODER
)


def why_incomplete(checkpoint: Checkpoint) -> str | None:
    """Return why a pipeline of a known class cannot be served, naming the component, or None.

    None for whatever else it is: other classes and kinds are not looked at. Raises FormatError.
    """
    parts = PIPELINES.get(checkpoint.class_name or "")
    if checkpoint.kind != "diffusion" or parts is None:
        return None
    index = read_json(checkpoint.root / "model_index.json")
    weights = {component.name for component in checkpoint.components}
    lack = _lacking_part(parts, index, weights, {file.as_posix() for file in checkpoint.skeleton_files()})
    return None if lack is None else f"{checkpoint.path}: this {checkpoint.class_name} cannot be served: {lack}"


def _lacking_part(
    parts: PipelineParts, index: Mapping[str, Any], weights: Collection[str], files: Collection[str]
) -> str | None:
    """Name the part that a pipeline lacks; None for a whole one.

    `index` is its model_index.json, `weights` are the components that have any, `files` the names of its other files.
    """
    for name in (parts.denoiser, "vae", *parts.encoders):
        entry = index.get(name)
        if name in parts.optional and isinstance(entry, list) and not any(entry):
            continue
        if not isinstance(entry, list) or not any(entry):
            return f"model_index.json names no {name}"
        if name not in weights:
            return f"its {name} has no weights (no safetensors file in the folder {name})"
        if f"{name}/config.json" not in files:
            return f"its {name} has no config ({name}/config.json is not there)"
        folder = tokenizer_folder(name)
        if folder != name and not any(file.startswith(f"{folder}/") for file in files):
            return f"its {name} has no tokenizer (no file in the folder {folder})"
    if SOLVER_CONFIG not in files:
        return f"it has no solver ({SOLVER_CONFIG} is not there)"
    return None


def pipeline_variant(skeleton: Path) -> Mapping[str, bool | int]:
    """Return the switches of a pipeline's configs that choose its defaults, `pixels_per_latent` of its VAE, and the
    latents of an image of the size that its denoiser is made for, `sample_width` and `sample_height`.

    What its configs do not have is left out.
    """
    found: dict[str, bool | int] = {}
    for file, key in _SWITCHES:
        try:
            value = read_json(skeleton / file).get(key)
        except FormatError:  # not there, or not sound: the pipeline itself will say what is wrong with it
            continue
        if isinstance(value, bool):
            found[key] = value
    with contextlib.suppress(FormatError):
        config = read_json(skeleton / "vae/config.json")
        blocks, halvings = config.get("block_out_channels"), config.get("temperal_downsample")
        if isinstance(blocks, list) and 0 < len(blocks) <= _MAX_BLOCKS:
            found["pixels_per_latent"] = 2 ** (len(blocks) - 1)
        elif isinstance(halvings, list) and len(halvings) < _MAX_BLOCKS:  # of a VAE of videos
            found["pixels_per_latent"] = 2 ** len(halvings)
    return found | _sample_sides(skeleton)


def _sample_sides(skeleton: Path) -> dict[str, int]:
    for part in ("unet", "transformer"):
        with contextlib.suppress(FormatError):
            config = read_json(skeleton / part / "config.json")
            size = config.get("sample_size")
            if _is_side(size) and size < _LEAST_SAMPLE_SIZE and part == "unet" and _is_before_0_9(config):
                size = _LEAST_SAMPLE_SIZE  # as stock's constructors correct it
            sides = size if isinstance(size, list) else [size, size]
            if len(sides) == 2 and all(map(_is_side, sides)):
                return dict(zip(("sample_height", "sample_width"), map(int, sides), strict=True))
    return {}


def _is_side(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _is_before_0_9(config: Mapping[str, Any]) -> bool:
    """Return whether a version of diffusers before 0.9 wrote a config."""
    version = re.match(r"(\d{1,9})\.(\d{1,9})\.", str(config.get("_diffusers_version")))
    return version is not None and (int(version[1]), int(version[2])) < (0, 9)


def denoiser_dtype(class_name: str | None, components: Mapping[str, Any], dtypes: Mapping[str, str]) -> str:
    """Return `float_dtype` of a pipeline's denoiser, "" for what has none. `dtypes` are those wanted, by component."""
    parts = PIPELINES.get(class_name or "")
    if parts is None or parts.denoiser not in components:
        return ""
    return float_dtype(components[parts.denoiser], dtypes.get(parts.denoiser, "auto"))


def float_dtype(part: Any, wanted: str = "auto") -> str:
    """Return the config's name of the one floating type that a component's plain tensors have in the store.

    "" where they have several or none. `wanted` is a dtype as `weights.records.dtypes.cast_target` takes it.
    """
    types = {cast_target(tensor.dtype, wanted) for tensor in part.tensors.values()}
    names = {config_name(one) for one in types} - {""}
    return names.pop() if len(names) == 1 else ""
