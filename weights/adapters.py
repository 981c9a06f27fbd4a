"""LoRA files -> pairs of low-rank matrices per module path.

Reads the layout that diffusers and PEFT save: `<component>.<module path>.lora_A.weight` (rank, in) and
`.lora_B.weight` (out, rank), optionally `.alpha` scalars, optionally the training config as JSON in the
safetensors metadata. Source: diffusers 0.42, `loaders/peft.py` and `utils/peft_utils.py:get_peft_kwargs`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from weights.errors import AdapterError, FormatError
from weights.formats.safetensors import read_header

FILE_NAME = "pytorch_lora_weights.safetensors"
METADATA_KEY = "lora_adapter_metadata"
COMPONENTS = ("transformer", "unet", "text_encoder", "text_encoder_2")
_SUFFIXES = {"lora_A.weight": "down", "lora_B.weight": "up", "alpha": "alpha"}
_UNSUPPORTED = {"use_dora": "DoRA", "lora_bias": "a LoRA bias"}


@dataclass(frozen=True, slots=True)
class LoraPair:
    """y += scale * up(down(x)): `down` (rank, in, ...) and `up` (out, rank, ...); `scale` is alpha / rank."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One file: pairs by component ("transformer", "unet", …) and module path."""

    path: Path
    components: Mapping[str, Mapping[str, LoraPair]]

    @property
    def num_bytes(self) -> int:
        pairs = [pair for component in self.components.values() for pair in component.values()]
        return sum(pair.down.nbytes + pair.up.nbytes for pair in pairs)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LoraAdapter:
        """The same adapter with its tensors elsewhere; tensors that are there already are not copied."""
        moved = {
            component: {
                path: replace(pair, down=pair.down.to(device, dtype), up=pair.up.to(device, dtype))
                for path, pair in pairs.items()
            }
            for component, pairs in self.components.items()
        }
        return LoraAdapter(self.path, moved)


def load_adapter(path: Path) -> LoraAdapter:
    """The LoRA in `path`, a safetensors file or a folder with pytorch_lora_weights.safetensors.

    Raises AdapterError naming the file and the tensor: not a safetensors file, keys of another layout
    (kohya, DoRA), halves without their other half, or shapes that do not fit together.
    """
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise AdapterError(f"{file}: no such file (expected a .safetensors file, or a folder with {FILE_NAME})")
    try:
        metadata = read_header(file).metadata
    except FormatError as error:
        raise AdapterError(str(error)) from None
    return parse_adapter(file, load_file(file), metadata)


def parse_adapter(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> LoraAdapter:
    """The LoRA that these tensors and this safetensors metadata make up; they came from `file`.

    Nothing is copied. Raises AdapterError as `load_adapter` does.
    """
    halves: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        component, module_path, kind = _split(file, name)
        halves.setdefault(component, {}).setdefault(module_path, {})[kind] = tensor
    if not halves:
        raise AdapterError(f"{file}: holds no tensors")
    config = _config(file, metadata)
    return LoraAdapter(
        file,
        {
            component: {
                module_path: _pair(file, f"{component}.{module_path}", parts, _scoped(config, component))
                for module_path, parts in modules.items()
            }
            for component, modules in halves.items()
        },
    )


def _split(file: Path, name: str) -> tuple[str, str, str]:
    component, _, rest = name.partition(".")
    for suffix, kind in _SUFFIXES.items():
        module_path = rest.removesuffix(f".{suffix}")
        if component in COMPONENTS and module_path != rest:
            return component, module_path, kind
    raise AdapterError(
        f"{file}: tensor {name!r} is not of the diffusers/PEFT layout, expected "
        f"'<component>.<module>.<suffix>' with a component of {', '.join(COMPONENTS)} "
        f"and a suffix of {', '.join(_SUFFIXES)}"
    )


def _pair(file: Path, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> LoraPair:
    for kind, suffix in (("down", "lora_A.weight"), ("up", "lora_B.weight")):
        if kind not in tensors:
            raise AdapterError(f"{file}: tensor '{name}.{suffix}' is missing")
    down, up = tensors["down"], tensors["up"]
    if down.ndim not in (2, 4) or up.ndim != down.ndim or up.shape[1] != down.shape[0] or down.shape[0] == 0:
        raise AdapterError(
            f"{file}: tensors of {name!r} do not fit: lora_A {tuple(down.shape)}, lora_B {tuple(up.shape)}, "
            "expected (rank, in) and (out, rank), or the same with two kernel axes"
        )
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"{file}: tensors of {name!r} are {down.dtype} and {up.dtype}, expected floating point")
    rank = down.shape[0]
    alpha = _alpha(file, name, tensors, config, rank)
    return LoraPair(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _alpha(file: Path, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], rank: int) -> float:
    """The tensor's word, then the training config's, else the rank (so that the scale is 1, as in stock)."""
    if "alpha" in tensors:
        if tensors["alpha"].numel() != 1:
            raise AdapterError(f"{file}: tensor '{name}.alpha' has shape {tuple(tensors['alpha'].shape)}, expected one")
        alpha = tensors["alpha"].item()
    else:
        alpha = _configured_alpha(file, name.partition(".")[2], config, rank)
    if not (isinstance(alpha, int | float) and math.isfinite(alpha)):
        raise AdapterError(f"{file}: alpha of {name!r} is {alpha!r}, expected a finite number")
    return float(alpha)


def _configured_alpha(file: Path, module_path: str, config: Mapping[str, Any], rank: int) -> Any:
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module_path):  # PEFT's get_pattern_key
                return value
        except re.error as error:
            raise AdapterError(f"{file}: alpha_pattern {pattern!r} is not a regular expression: {error}") from None
    return config.get("lora_alpha", rank)


def _config(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The PEFT config that diffusers stores flat, as '<component>.<option>'."""
    raw = metadata.get(METADATA_KEY)
    if raw is None:
        return {}
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise AdapterError(f"{file}: metadata {METADATA_KEY!r} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{file}: metadata {METADATA_KEY!r} is a JSON {type(config).__name__}, expected an object")
    for key, value in config.items():
        if value and (what := _UNSUPPORTED.get(key.rpartition(".")[2])):
            raise AdapterError(f"{file}: metadata says {key}={value!r}: {what} is not supported")
        if key.rpartition(".")[2] == "alpha_pattern" and not isinstance(value, dict | None):
            raise AdapterError(f"{file}: metadata says {key}={value!r}, expected an object")
    return config


def _scoped(config: Mapping[str, Any], component: str) -> dict[str, Any]:
    prefix = f"{component}."
    return {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
