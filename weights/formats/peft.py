"""LoRAs of language models as PEFT saves them: adapter_config.json beside adapter_model.safetensors.

Tensors are `base_model.model.<module path>.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank). Source: peft
0.21, `LoraConfig` and `utils/save_and_load.py:get_peft_model_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weights.errors import AdapterError, FormatError
from weights.formats.adapter_base import AdapterBase
from weights.formats.lora import MAX_NAME_CHARS, LoraConfig, check_lora_options
from weights.formats.untrusted import shown
from weights.formats.weight_files import read_json

PEFT_CONFIG: Final = "adapter_config.json"
PEFT_FILE: Final = "adapter_model.safetensors"
PEFT_CLASS: Final = "PeftModelForCausalLM"
_PREFIX: Final = "base_model.model."
_HALVES: Final = {".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B"}
_MAGNITUDE: Final = "lora_magnitude_vector"  # of a DoRA
_PARTS: Final = {**_HALVES, f".{_MAGNITUDE}": _MAGNITUDE, f".{_MAGNITUDE}.weight": _MAGNITUDE}
_DEFAULT_RANK = _DEFAULT_ALPHA = 8  # PEFT's
# Options that change what the layers compute, each with what it is. What only training heeds is not looked at.
_UNSUPPORTED: Final = {
    "modules_to_save": "a copy of whole modules",
    "trainable_token_indices": "changed token vectors",
    "target_parameters": "a LoRA of bare parameters",
    "layer_replication": "repeated layers",
    "alora_invocation_tokens": "an activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "arrow_config": "Arrow",
    "monteclora_config": "MonteCLoRA",
}
# Parts of tensors' names that tell what else is in a file.
_FOREIGN: Final = {
    "lora_embedding_": "a LoRA of token vectors is not supported",
    ".base_layer.": "a copy of the base's weights; save it with save_embedding_layers=False",
}


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear layer that a LoRA changes: the names of its tensors, and the sizes of the layer and between them.

    `magnitude` is that of a DoRA.
    """

    down: str
    up: str
    rank: int
    in_features: int
    out_features: int
    magnitude: str | None = None


def is_peft(names: Sequence[str]) -> bool:
    """Return whether a file with tensors of these names is a LoRA that PEFT saved."""
    return bool(names) and all(name.startswith(_PREFIX) for name in names)


def read_peft_config(file: Path) -> LoraConfig:
    """Read adapter_config.json. Raises AdapterError naming the file and the key: what cannot be read or computed."""
    try:
        options = {"r": _DEFAULT_RANK, "lora_alpha": _DEFAULT_ALPHA} | read_json(file)
    except FormatError as error:
        raise AdapterError(str(error)) from None
    expected: dict[str, tuple[Any, ...]] = {
        "peft_type": ("LORA",),
        "task_type": ("CAUSAL_LM", None),
        "bias": ("none", None),
    }
    for option, known in expected.items():
        if options.get(option) not in known:
            raise AdapterError(f"{file}: {option} is {shown(options.get(option))}, expected {known[0]!r}")
    for option, what in _UNSUPPORTED.items():
        if options.get(option):
            raise AdapterError(f"{file}: {option}={shown(options[option])}: {what} is not supported")
    if options["lora_alpha"] is None:
        raise AdapterError(f"{file}: lora_alpha is null, expected a number")
    return check_lora_options(file, "", options)


def peft_targets(file: Path, shapes: Mapping[str, Sequence[int]], *, use_dora: bool = False) -> dict[str, LoraTarget]:
    """Return what tensors of these names and shapes change, by module path; with `use_dora` each has a magnitude.

    Raises AdapterError naming the file and the tensor: an unknown name, a half without the other, shapes that do not
    fit together.
    """
    halves: dict[str, dict[str, str]] = {}
    for name in shapes:
        path, half = _split(file, name)
        halves.setdefault(path, {})[half] = name
    if not halves:
        raise AdapterError(f"{file}: holds no tensors")
    targets = {path: _target(file, path, names, shapes) for path, names in halves.items()}
    lacking = [path for path, target in targets.items() if use_dora and target.magnitude is None]
    if lacking:
        raise AdapterError(
            f"{file}: tensor '{_PREFIX}{lacking[0]}.{_MAGNITUDE}' is missing, and the config says use_dora"
        )
    return targets


def check_peft_base(file: Path, targets: Mapping[str, LoraTarget], base: AdapterBase) -> None:
    """Check that a model has the layers that a LoRA changes, as far as its manifest tells.

    A GGUF or Kuiper file names them otherwise: there the engine looks. Raises AdapterError naming the layer.
    """
    model = base.components.get("model")
    if model is None or model.format in ("gguf", "kuiper"):
        return
    known = {_renamed(name): ref.shape for name, ref in model.tensors.items()}
    known.setdefault("lm_head.weight", known.get("model.embed_tokens.weight", ()))
    for path, target in targets.items():
        shape = known.get(_renamed(f"{path}.weight"))
        if shape is None:
            raise AdapterError(f"{file}: changes {path!r}, which {base.model!r} does not have")
        if tuple(shape) != (target.out_features, target.in_features):
            raise AdapterError(
                f"{file}: changes a layer {path!r} of shape {[target.out_features, target.in_features]}, "
                f"which in {base.model!r} is {list(shape)}"
            )


def _split(file: Path, name: str) -> tuple[str, str]:
    for suffix, half in _PARTS.items():
        path = name.removeprefix(_PREFIX).removesuffix(suffix)
        if name == _PREFIX + path + suffix and path and len(name) <= MAX_NAME_CHARS:
            return path, half
    why = next((f": {reason}" for part, reason in _FOREIGN.items() if part in name), "")
    raise AdapterError(
        f"{file}: tensor {shown(name)} is not of PEFT's layout, expected "
        f"'{_PREFIX}<module>' with {' or '.join(_HALVES)}{why}"
    )


def _target(file: Path, path: str, names: Mapping[str, str], shapes: Mapping[str, Sequence[int]]) -> LoraTarget:
    for suffix, half in _HALVES.items():
        if half not in names:
            raise AdapterError(f"{file}: tensor '{_PREFIX}{path}{suffix}' is missing")
    down, up = tuple(shapes[names["lora_A"]]), tuple(shapes[names["lora_B"]])
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or 0 in (*down, *up):
        raise AdapterError(
            f"{file}: tensors of {path!r} do not fit: lora_A {down}, lora_B {up}, expected (rank, in) and (out, rank)"
        )
    magnitude = names.get(_MAGNITUDE)
    if magnitude is not None and tuple(shapes[magnitude]) != (up[0],):
        raise AdapterError(
            f"{file}: {_MAGNITUDE} of {path!r} has the shape {tuple(shapes[magnitude])}, expected {(up[0],)}"
        )
    return LoraTarget(names["lora_A"], names["lora_B"], down[0], down[1], up[0], magnitude)


def _renamed(name: str) -> str:
    """Return a tensor's name as all have it: Mixtral's checkpoints call a layer's experts otherwise."""
    return name.replace(".block_sparse_moe.", ".mlp.")
