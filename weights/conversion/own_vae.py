"""A VAE in the place of a pipeline's own: a folder of diffusers, or a `.safetensors` file as UIs have it.

Imported by `weights.formats.checkpoint` alone, where a model names a VAE.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Final

from weights.formats.checkpoint import read_component
from weights.formats.folder import read_json
from weights.formats.low_precision import read_as_plain
from weights.formats.safetensors import read_header
from weights.formats.source import Checkpoint, SourceComponent
from weights.formats.untrusted import shown
from weights.records.errors import FormatError

_NAME: Final = "vae"
_CONFIG: Final = f"{_NAME}/config.json"


def with_vae(checkpoint: Checkpoint, path: Path) -> Checkpoint:
    """Return the pipeline with the VAE of `path`: its folder, that of a pipeline that has it, or a single file.

    Raises FormatError for what is no VAE of the class of the model's own, or one whose latents have another shape.
    """
    own = next((part for part in checkpoint.components if part.name == _NAME), None)
    if checkpoint.kind != "diffusion" or own is None:
        raise FormatError(f"vae: {checkpoint.path} has no VAE to replace")
    folder = path / _NAME if (path / "model_index.json").is_file() else path
    headers = dict(checkpoint.headers)
    if folder.is_dir():
        vae = _read_folder(folder, own, checkpoint.root / _CONFIG)
        headers[_CONFIG] = (folder / "config.json").read_bytes()
    else:
        vae = _read_file(path, own, checkpoint)
    others = tuple(vae if part.name == _NAME else part for part in checkpoint.components)
    return replace(checkpoint, components=others, headers=headers)


def _read_folder(folder: Path, own: SourceComponent, own_config: Path) -> SourceComponent:
    config, expected = read_json(folder / "config.json"), read_json(own_config)
    class_name = config.get("_class_name")
    if class_name != own.class_name:
        raise FormatError(f"vae: {folder}: of class {shown(class_name)}, the model's is {own.class_name}")
    (channels, depth), (own_channels, own_depth) = (
        (one.get("latent_channels"), len(one.get("block_out_channels") or ())) for one in (config, expected)
    )
    if (channels, depth) != (own_channels, own_depth):
        raise FormatError(
            f"vae: {folder}: latents of {channels} channels and {depth} sizes, the model's have {own_channels} and "
            f"{own_depth}"
        )
    vae = read_component(folder, _NAME, own.library, own.class_name, _NAME, allow_torch=False)
    if vae is None:
        raise FormatError(f"vae: {folder}: no safetensors weights beside config.json")
    return replace(vae, tensors=read_as_plain(folder, vae.tensors, vae.metadata))


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
