"""VAEs that a pipeline gets: in the place of its own, a folder of diffusers or a `.safetensors` file as UIs have it;
beside it, a small one that makes partial images.

Imported by `weights.formats.checkpoint` alone, where a model names a VAE.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weights.formats.checkpoint import read_component
from weights.formats.folder import read_json
from weights.formats.low_precision import read_as_plain
from weights.formats.safetensors import read_header
from weights.formats.source import Checkpoint, SourceComponent
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

_NAME: Final = "vae"
_SMALL: Final = "AutoencoderTiny"  # of diffusers; its latents are those of the class below
_LARGE: Final = "AutoencoderKL"
_INDEX: Final = "model_index.json"


def with_vaes(checkpoint: Checkpoint, paths: Mapping[str, Path]) -> Checkpoint:
    """Return the pipeline with the VAEs of `paths`, by component: "vae" in the place of its own, and "preview_vae".

    Each is a folder, that of a pipeline that has it, or (in the place of the own) a single file. Raises FormatError for
    what is no VAE of the class of the model's own, or an AutoencoderTiny, or one whose latents have another shape.
    """
    own = next((part for part in checkpoint.components if part.name == _NAME), None)
    if checkpoint.kind != "diffusion" or own is None:
        raise FormatError(f"{'/'.join(paths)}: {checkpoint.path} has no VAE to replace")
    components, headers = {part.name: part for part in checkpoint.components}, dict(checkpoint.headers)
    for name, path in paths.items():
        folder = path / _NAME if (path / _INDEX).is_file() else path
        if folder.is_dir() or name != _NAME:
            components[name] = _read_folder(name, folder, own, checkpoint.root / _NAME)
            headers[f"{name}/config.json"] = (folder / "config.json").read_bytes()
        else:
            components[name] = _read_file(path, own, checkpoint)
    if components[_NAME].class_name != own.class_name:
        index = read_json(checkpoint.root / _INDEX)
        headers[_INDEX] = json.dumps(index | {_NAME: [own.library, _SMALL]}).encode()
    return replace(checkpoint, components=tuple(components.values()), headers=headers)


def _read_folder(name: str, folder: Path, own: SourceComponent, own_folder: Path) -> SourceComponent:
    if not folder.is_dir():
        raise FormatError(f"{name}: {folder}: expected a folder of diffusers with an {_SMALL}")
    config, expected = read_json(folder / "config.json"), read_json(own_folder / "config.json")
    class_name = config.get("_class_name")
    known = {_SMALL} if name != _NAME else {own.class_name} | ({_SMALL} if own.class_name == _LARGE else set())
    if class_name not in known or own.class_name not in (_LARGE, class_name):
        wanted = f", expected an {_SMALL}" if name != _NAME else ""
        raise FormatError(f"{name}: {folder}: of class {shown(class_name)}, the model's is {own.class_name}{wanted}")
    (channels, depth), (own_channels, own_depth) = (
        (one.get("latent_channels", 4), _num_sizes(one)) for one in (config, expected)
    )
    if (channels, depth) != (own_channels, own_depth):
        raise FormatError(
            f"{name}: {folder}: latents of {channels} channels and {depth} sizes, the model's have {own_channels} and "
            f"{own_depth}"
        )
    vae = read_component(folder, name, own.library, str(class_name), name, allow_torch=False)
    if vae is None:
        raise FormatError(f"{name}: {folder}: no safetensors weights beside config.json")
    return replace(vae, tensors=read_as_plain(folder, vae.tensors, vae.metadata))


def _num_sizes(config: Mapping[str, Any]) -> int:
    """Return how many sizes the images of a VAE have within it, each half of that before."""
    blocks = config.get("block_out_channels") or config.get("decoder_block_out_channels")
    return len(blocks) if isinstance(blocks, list) else 0


def _read_file(path: Path, own: SourceComponent, checkpoint: Checkpoint) -> SourceComponent:
    """Return the VAE of a file, which the config of the model's own describes."""
    if path.suffix != ".safetensors" or not path.is_file():
        raise FormatError(f"vae: {path}: expected a folder of diffusers or a .safetensors file")
    header = read_header(path)
    if header.tensors.keys() >= own.tensors.keys():  # diffusers' own names
        tensors = read_as_plain(path, header.tensors, header.metadata)
        return replace(own, tensors=tensors, metadata=dict(header.metadata), files=(path.name,))
    # By name: it takes torch and diffusers, which the control plane does without.
    vae: SourceComponent = importlib.import_module("weights.conversion.single_file").read_vae_file(path, checkpoint)
    return vae
