"""LoRA files: layouts, which pipelines they fit, and scales by the training config, which is JSON in the metadata.

Its keys are flat, `<component>.<option>`. Source: diffusers 0.42, `loaders/lora_base.py:_save_lora_weights`; peft 0.21,
`LoraConfig` and `utils/other.py:get_pattern_key`.

LoRAs of language models are as PEFT saves them: adapter_config.json beside adapter_model.safetensors, whose tensors are
`base_model.model.<module path>.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank). Source: the same
`LoraConfig`; `utils/save_and_load.py:get_peft_model_state_dict`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from weights.formats.folder import read_json
from weights.formats.learned_words import is_words
from weights.formats.source import AdapterBase
from weights.formats.untrusted import load_json, shown
from weights.records.errors import AdapterError, FormatError

METADATA_KEY: Final = "lora_adapter_metadata"
MAX_METADATA_CHARS: Final = 4 * 2**20  # the config of a large model that names every module has some 100 KB
MAX_PATTERNS: Final = 20_000
MAX_NAME_CHARS: Final = 1024
_UNSUPPORTED: Final = {"lora_bias": "a LoRA bias"}
# The layout of diffusers: a component, a module's path, and an end of these.
COMPONENTS: Final = ("transformer", "unet", "text_encoder", "text_encoder_2", "text_encoder_3")
NAMED_SUFFIXES: Final = {
    "lora_A.weight": "down",
    "lora_B.weight": "up",
    "alpha": "alpha",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_KOHYA_PREFIXES: Final = (
    *("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_", "lycoris_", "oft_unet_"),
)
# How the matrices of LoRAs end: by kohya's trainer and ComfyUI, by diffusers before PEFT, by XLabs; by PEFT.
_OLD_MATRICES: Final = tuple(
    f"{name}{half}.weight"
    for name in ("lora_", "lora.", "lora1.", "lora2.", "lora_linear_layer.")
    for half in ("down", "up")
)
_MATRICES: Final = (*_OLD_MATRICES, ".lora_A.weight", ".lora_B.weight", ".lora_A", ".lora_B")
# What PEFT calls a matrix within a model, by the name of its adapter: "default", mostly.
_OF_ADAPTER: Final = re.compile(r"(\.lora_[AB]|\.lora_magnitude_vector)\.[\w-]{1,64}(\.weight|\.bias)$")
_OF_LYCORIS: Final = (
    ".hada_w1_a",
    ".lokr_w1",
    ".lokr_w1_a",
    ".oft_blocks",
    ".oft_R.weight",
    ".on_input",
    ".a1.weight",
    ".diff",
    ".w_norm",
)
_REGEX_SIGN = re.compile(r"[\\^$*+?{}\[\]|()]")
PEFT_CONFIG: Final = "adapter_config.json"
PEFT_FILE: Final = "adapter_model.safetensors"
PEFT_CLASS: Final = "PeftModelForCausalLM"
_PREFIX: Final = "base_model.model."
_HALVES: Final = {".lora_A.weight": "lora_A", ".lora_B.weight": "lora_B"}
_MAGNITUDE: Final = "lora_magnitude_vector"  # of a DoRA
_PARTS: Final = {**_HALVES, f".{_MAGNITUDE}": _MAGNITUDE, f".{_MAGNITUDE}.weight": _MAGNITUDE}
_DEFAULT_RANK = _DEFAULT_ALPHA = 8  # PEFT's
# Options that change what the layers compute, each with what it is. What only training heeds is not looked at.
_UNSUPPORTED_PEFT: Final = {
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
class LoraConfig:
    """Scales of one component's pairs. `alpha` None: no scaling, as if alpha were the rank.

    A module's alpha is that of the first pattern that fits. `by_path`, `by_suffix` and `by_inner_suffix` map what a
    pattern names to (its place in the config, its alpha).
    """

    alpha: float | None = None
    use_rslora: bool = False
    use_dora: bool = False
    by_path: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    by_suffix: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    by_inner_suffix: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def alpha_of(self, module_path: str) -> float | None:
        """Return the alpha of a module: one look-up per part of its path, however many patterns there are."""
        found = [self.by_path.get(module_path), self.by_suffix.get(module_path)]
        rest = module_path
        while "." in rest:
            rest = rest.partition(".")[2]
            found += [self.by_suffix.get(rest), self.by_inner_suffix.get(rest)]
        return min((item for item in found if item is not None), default=(0, self.alpha))[1]

    def scale(self, alpha: float, rank: int) -> float:
        """Return the factor of a module's product: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def is_kohya(name: str) -> bool:
    """Return whether a tensor of this name is of a LoRA of kohya's trainer."""
    return name.startswith(_KOHYA_PREFIXES)


def is_lora(names: Iterable[str]) -> bool:
    """Return whether a file with tensors of these names is a LoRA, in any layout."""
    return any(is_kohya(name) or without_adapter(name).endswith((*_MATRICES, *_OF_LYCORIS)) for name in names)


def without_adapter(name: str) -> str:
    """Return a tensor's name without that of its adapter, which PEFT has in it while the model is there."""
    return _OF_ADAPTER.sub(r"\1\2", name)


def is_convertible(names: Iterable[str]) -> bool:
    """Return whether a file with tensors of these names is in another layout than that of diffusers: kohya's, XLabs',
    ComfyUI's, DiffSynth's, that of diffusers before PEFT.
    """
    ends = tuple(f".{end}" for end in NAMED_SUFFIXES)

    def is_named(name: str) -> bool:
        component, _, rest = name.partition(".")
        return component in COMPONENTS and rest.endswith(ends) and not rest.startswith(_PREFIX)

    return not all(map(is_named, names))


def check_named_base(file: Path, shapes: Mapping[str, Sequence[int]], base: AdapterBase) -> None:
    """Check that a pipeline has what a LoRA changes whose tensors are named as diffusers saves them.

    Of text encoders only that there is one: their layers have several names. What is in other layouts is
    named by the engine. Raises AdapterError naming the component or layer.
    """
    for name, down in () if is_convertible(shapes) else shapes.items():
        component, _, rest = name.partition(".")
        path, is_down, _ = rest.rpartition(".lora_A.weight")
        if not is_down:
            continue
        if component not in base.components:
            known = ", ".join(base.components)
            raise AdapterError(f"{file}: changes a {component}, which {base.model!r} does not have (it has {known})")
        if component.startswith("text_encoder"):
            continue
        part, up = base.components[component], shapes.get(f"{component}.{path}.lora_B.weight", ())
        layer = part.tensors.get(f"{path}.weight")
        if layer is None:
            raise AdapterError(f"{file}: changes {component}.{path}, which {base.model!r} does not have")
        given = [*up[:1], *down[1:]]
        if part.format == "safetensors" and given != list(layer.shape):
            raise AdapterError(
                f"{file}: changes a layer {component}.{path} of shape {given}, which in {base.model!r} is "
                f"{list(layer.shape)}"
            )


def changes_text_encoders(names: Iterable[str]) -> bool:
    """Return whether an adapter with tensors of these names changes what a text encoder gives."""
    names = list(names)
    return is_words(names) or any(
        name.startswith(("text_encoder.", "text_encoder_2.", "text_encoder_3.", "text_encoders.", "lora_te"))
        for name in names
    )


def read_lora_configs(file: Path, metadata: Mapping[str, str]) -> dict[str, LoraConfig]:
    """Check the training config in a LoRA file's metadata; by component, none for a file without one.

    Raises AdapterError naming the file and the key: what is not JSON, too large, no number where one belongs, a kind of
    LoRA that is not supported, a pattern that is a regular expression.
    """
    raw = metadata.get(METADATA_KEY)
    if raw is None:
        return {}
    if len(raw) > MAX_METADATA_CHARS:
        raise AdapterError(f"{file}: metadata {METADATA_KEY!r} has {len(raw)} characters, limit {MAX_METADATA_CHARS}")
    try:
        config = load_json(raw)
    except ValueError as error:
        raise AdapterError(f"{file}: metadata {METADATA_KEY!r} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{file}: metadata {METADATA_KEY!r} is a JSON {type(config).__name__}, expected an object")
    options: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        component, _, option = key.partition(".")
        options.setdefault(component, {})[option] = value
    return {
        component: _check_lora_options(file, f"metadata says {shown(component)[1:-1]}.", values)
        for component, values in options.items()
    }


def _check_lora_options(file: Path, prefix: str, options: Mapping[str, Any]) -> LoraConfig:
    """Check the options of PEFT's LoraConfig that decide on scales; `prefix` goes before their names in messages.

    Raises AdapterError as `read_lora_configs` does.
    """

    def refused(option: str, reason: str) -> AdapterError:
        return AdapterError(f"{file}: {prefix}{option}={shown(options[option])}{reason}")

    for option, what in _UNSUPPORTED.items():
        if options.get(option):
            raise refused(option, f": {what} is not supported")
    for option in ("use_rslora", "use_dora"):
        if not isinstance(options.get(option), bool | None):
            raise refused(option, ", expected true or false")
    if options.get("lora_alpha") is not None and not is_finite(options["lora_alpha"]):
        raise refused("lora_alpha", ", expected a finite number")
    if options.get("r") is not None and not _is_rank(options["r"]):
        raise refused("r", ", expected a positive integer")
    for option in ("alpha_pattern", "rank_pattern"):
        patterns = options.get(option)
        if not isinstance(patterns, dict | None):
            raise refused(option, ", expected an object")
        if patterns and (len(patterns) > MAX_PATTERNS or max(map(len, patterns)) > MAX_NAME_CHARS):
            raise refused(option, f", expected at most {MAX_PATTERNS} names of {MAX_NAME_CHARS} characters")
    if not all(map(_is_rank, (options.get("rank_pattern") or {}).values())):
        raise refused("rank_pattern", ", expected positive integers")
    alphas = options.get("alpha_pattern") or {}
    if not all(map(is_finite, alphas.values())):
        raise refused("alpha_pattern", ", expected finite numbers")
    alpha = options.get("lora_alpha")
    return LoraConfig(
        None if alpha is None else float(alpha),
        bool(options.get("use_rslora")),
        bool(options.get("use_dora")),
        *_patterns(file, alphas),
    )


def _patterns(file: Path, alphas: Mapping[str, float]) -> tuple[dict[str, tuple[int, float]], ...]:
    r"""Index alphas by path, suffix and inner suffix, as PEFT matches `(.*\.)?(<pattern>)$`.

    PEFT writes the names of modules, after `^` for one path, or `.*\.` and an escaped name for what is inside of
    something. HAZARD: any other pattern would be a regular expression of a stranger; one match can take for ever, and
    holds the interpreter lock meanwhile.
    """
    by_path: dict[str, tuple[int, float]] = {}
    by_suffix: dict[str, tuple[int, float]] = {}
    by_inner_suffix: dict[str, tuple[int, float]] = {}
    for number, (pattern, alpha) in enumerate(alphas.items()):
        name, table = pattern, by_suffix
        if pattern.startswith("^"):
            name, table = pattern[1:], by_path
        elif pattern.startswith(r".*\."):
            name, table = pattern[4:], by_inner_suffix
        name = re.sub(r"\\([^A-Za-z0-9])", r"\1", name.removesuffix("$"))
        if not name or _REGEX_SIGN.search(name):
            raise AdapterError(
                f"{file}: alpha_pattern {shown(pattern)} is a regular expression; expected a module's name or its end"
            )
        table.setdefault(name, (number, float(alpha)))
    return by_path, by_suffix, by_inner_suffix


def is_finite(value: Any) -> bool:
    """Return True for a number that a float can hold; True and False are none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


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


def peft_config_of(file: Path) -> Path:
    """Return the path of PEFT's config of a LoRA, given as a folder or as a file in one."""
    return (file if file.is_dir() else file.parent) / PEFT_CONFIG


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
    for option, what in _UNSUPPORTED_PEFT.items():
        if options.get(option):
            raise AdapterError(f"{file}: {option}={shown(options[option])}: {what} is not supported")
    if options["lora_alpha"] is None:
        raise AdapterError(f"{file}: lora_alpha is null, expected a number")
    return _check_lora_options(file, "", options)


def peft_targets(file: Path, shapes: Mapping[str, Sequence[int]], *, use_dora: bool = False) -> dict[str, LoraTarget]:
    """Return the targets of tensors of these names and shapes, by module path; with `use_dora` each has a magnitude.

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
