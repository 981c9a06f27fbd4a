"""LoRA files -> pairs of low-rank matrices per module path.

Reads the layout that diffusers and PEFT save: `<component>.<module path>.lora_A.weight` (rank, in) and
`.lora_B.weight` (out, rank), optionally `.alpha` scalars and `.lora_magnitude_vector` (out,), optionally the training
config as JSON in the safetensors metadata. All other layouts, kohya's say, are taken as they are;
what PEFT saves of a language model is in `weights/formats/lora.py`. Source: diffusers 0.42, `loaders/peft.py` and
`utils/peft_utils.py:get_peft_kwargs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from weights.formats.folder import LORA_FILE
from weights.formats.learned_words import check_words, is_words
from weights.formats.lora import (
    COMPONENTS,
    MAX_NAME_CHARS,
    NAMED_SUFFIXES,
    PEFT_CONFIG,
    PEFT_FILE,
    LoraConfig,
    is_convertible,
    is_finite,
    is_lora,
    is_peft,
    peft_config_of,
    peft_targets,
    read_lora_configs,
    read_peft_config,
)
from weights.formats.safetensors import read_header
from weights.formats.untrusted import shown
from weights.records.errors import AdapterError, FormatError

__all__ = ["LoraAdapter", "LoraPair", "load_adapter", "parse_adapter", "parse_named"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraPair:
    """y += scale * up(down(x)): `down` (rank, in, ...) and `up` (out, rank, ...); `scale` is alpha / rank.

    With a `magnitude` it is a DoRA: the weights of each output of the layer, together with the pair's, have that
    length (out,); `by_input`, those of each input (in,). `bias` (out,), times the scale, is added as well.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    magnitude: torch.Tensor | None = None
    by_input: bool = False
    bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Rank of the two matrices."""
        return self.down.shape[0]

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> LoraPair:
        """Return the pair with its tensors elsewhere; tensors that are there already are not copied."""
        magnitude = None if self.magnitude is None else self.magnitude.to(device, torch.float32)
        bias = None if self.bias is None else self.bias.to(device, dtype)
        up, down = self.up.to(device, dtype), self.down.to(device, dtype)
        return replace(self, down=down, up=up, magnitude=magnitude, bias=bias)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoraAdapter:
    """One version of one adapter: pairs by component ("transformer", a language model's "model", …) and module path.

    The object is the version: two are the same only if they are one object. One of another layout than diffusers' has
    no components, but `raw`, its tensors by name: which modules they mean is known beside the model. `configs` are
    those of its metadata by component. A textual inversion has `words` alone: by text encoder, the vectors (N, D) that
    it reads in the place of the adapter's name.
    """

    path: Path
    components: Mapping[str, Mapping[str, LoraPair]]
    raw: Mapping[str, torch.Tensor] = field(default_factory=dict)
    words: Mapping[str, torch.Tensor] = field(default_factory=dict)
    configs: Mapping[str, LoraConfig] = field(default_factory=dict)


def load_adapter(path: Path) -> LoraAdapter:
    """Read the LoRA in `path`, a safetensors file or a folder as diffusers or PEFT saves it.

    Raises AdapterError naming the file and the tensor: not a safetensors file, keys of another layout (LoKr, say),
    halves without their other half, or shapes that do not fit together.
    """
    name = PEFT_FILE if (path / PEFT_CONFIG).is_file() else LORA_FILE
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise AdapterError(f"{file}: no such file (expected a .safetensors file, or a folder with {name})")
    try:
        metadata = read_header(file).metadata
    except FormatError as error:
        raise AdapterError(str(error)) from None
    return parse_adapter(file, load_file(file), metadata)


def parse_adapter(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> LoraAdapter:
    """Return the LoRA that these tensors and this safetensors metadata of `file` make up.

    PEFT's config is in the same folder, or in `file` where that is a folder. Nothing is copied. Raises AdapterError as
    `load_adapter` does.
    """
    if is_words(tensors):
        encoders = check_words(file, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
        words = {encoders[name]: tensor.reshape(-1, tensor.shape[-1]) for name, tensor in tensors.items()}
        return LoraAdapter(file, {}, words=words)
    if is_peft(list(tensors)) and peft_config_of(file).is_file():
        return LoraAdapter(file, {"model": _peft_pairs(file, tensors)})
    if is_lora(tensors) and is_convertible(tensors):
        if longest := [name for name in tensors if len(name) > MAX_NAME_CHARS]:
            raise AdapterError(f"{file}: tensor {shown(longest[0])} has a name of {len(longest[0])} characters")
        return LoraAdapter(file, {}, dict(tensors), configs=read_lora_configs(file, metadata))
    return parse_named(file, tensors, metadata)


def parse_named(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> LoraAdapter:
    """Return the LoRA of tensors that are named as diffusers saves them. Raises AdapterError as `load_adapter` does."""
    halves: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        component, module_path, kind = _split(file, name)
        halves.setdefault(component, {}).setdefault(module_path, {})[kind] = tensor
    if not halves:
        raise AdapterError(f"{file}: holds no tensors")
    configs = read_lora_configs(file, metadata)
    return LoraAdapter(
        file,
        {
            component: {
                module_path: _pair(file, f"{component}.{module_path}", parts, configs.get(component, LoraConfig()))
                for module_path, parts in modules.items()
            }
            for component, modules in halves.items()
        },
    )


def _peft_pairs(file: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, LoraPair]:
    config = read_peft_config(peft_config_of(file))
    pairs = {}
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for path, target in peft_targets(file, shapes, use_dora=config.use_dora).items():
        down, up, alpha = tensors[target.down], tensors[target.up], config.alpha_of(path)
        _check_floating(file, path, down, up)
        scale = config.scale(target.rank if alpha is None else alpha, target.rank)
        named = {} if target.magnitude is None else {"magnitude": tensors[target.magnitude]}
        pairs[path] = LoraPair(down, up, scale, *_magnitude(file, path, named, down, up))
    return pairs


def _split(file: Path, name: str) -> tuple[str, str, str]:
    component, _, rest = name.partition(".")
    for suffix, kind in NAMED_SUFFIXES.items():
        module_path = rest.removesuffix(f".{suffix}")
        if component in COMPONENTS and module_path != rest and len(name) <= MAX_NAME_CHARS:
            return component, module_path, kind
    raise AdapterError(
        f"{file}: tensor {shown(name)} is not of the diffusers/PEFT layout, expected "
        f"'<component>.<module>.<suffix>' with a component of {', '.join(COMPONENTS)} "
        f"and a suffix of {', '.join(NAMED_SUFFIXES)}"
    )


def _pair(file: Path, name: str, tensors: Mapping[str, torch.Tensor], config: LoraConfig) -> LoraPair:
    for kind, suffix in (("down", "lora_A.weight"), ("up", "lora_B.weight")):
        if kind not in tensors:
            raise AdapterError(f"{file}: tensor '{name}.{suffix}' is missing")
    down, up = tensors["down"], tensors["up"]
    if not 2 <= down.ndim <= 5 or up.ndim != down.ndim or up.shape[1] != down.shape[0] or down.shape[0] == 0:
        raise AdapterError(
            f"{file}: tensors of {name!r} do not fit: lora_A {tuple(down.shape)}, lora_B {tuple(up.shape)}, "
            "expected (rank, in) and (out, rank), or the same with the axes of a kernel"
        )
    _check_floating(file, name, down, up)
    if config.use_dora and "magnitude" not in tensors:
        raise AdapterError(f"{file}: tensor '{name}.lora_magnitude_vector' is missing, and its config says use_dora")
    rank, magnitude = down.shape[0], _magnitude(file, name, tensors, down, up)
    return LoraPair(down, up, config.scale(_alpha(file, name, tensors, config, rank), rank), *magnitude)


def _magnitude(
    file: Path, name: str, tensors: Mapping[str, torch.Tensor], down: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor | None, bool]:
    """Return the lengths of a DoRA, flat, and whether they are by input: those have the shape (1, in)."""
    magnitude = tensors.get("magnitude")
    if magnitude is None:
        return None, False
    by_input = tuple(magnitude.shape) == (1, down.shape[1])
    if not magnitude.is_floating_point() or not (by_input or magnitude.numel() == up.shape[0]):
        raise AdapterError(
            f"{file}: lora_magnitude_vector of {name!r} is {magnitude.dtype} {tuple(magnitude.shape)}, expected "
            f"{up.shape[0]} numbers"
        )
    return magnitude.flatten().float(), by_input


def _check_floating(file: Path, name: str, down: torch.Tensor, up: torch.Tensor) -> None:
    if not (down.is_floating_point() and up.is_floating_point()):
        raise AdapterError(f"{file}: tensors of {name!r} are {down.dtype} and {up.dtype}, expected floating point")


def _alpha(file: Path, name: str, tensors: Mapping[str, torch.Tensor], config: LoraConfig, rank: int) -> float:
    """Return the tensor's word, else the training config's, else the rank (then the scale is 1, as in stock)."""
    if "alpha" not in tensors:
        configured = config.alpha_of(name.partition(".")[2])
        return rank if configured is None else configured
    if tensors["alpha"].numel() != 1:
        raise AdapterError(f"{file}: tensor '{name}.alpha' has shape {tuple(tensors['alpha'].shape)}, expected one")
    alpha = tensors["alpha"].item()
    if not is_finite(alpha):
        raise AdapterError(f"{file}: alpha of {name!r} is {alpha!r}, expected a finite number")
    return float(alpha)
