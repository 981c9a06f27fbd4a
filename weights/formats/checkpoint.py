"""A checkpoint folder in a stock layout -> its components: diffusers pipeline, transformers model, LoRA.

Layouts: diffusers `model_index.json` with one folder per component; transformers `config.json` beside
`model.safetensors` or its shards with `model.safetensors.index.json`; sentence-transformers `modules.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weights.errors import FormatError
from weights.formats.safetensors import SafetensorsHeader, read_header
from weights.formats.tensors import SourceTensor
from weights.manifest import ModelKind, WeightFormat

LORA_FILE = "pytorch_lora_weights.safetensors"
# One component's weights, by precedence: diffusers' and transformers' names, whole before sharded.
_WEIGHT_STEMS = ("diffusion_pytorch_model", "model")
_SKELETON_SUFFIXES = {".json", ".txt", ".model", ".jinja", ".md", ".tiktoken"}
_MAX_SKELETON_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class SourceComponent:
    """One module of a checkpoint, with its tensors; `folder` is relative to the checkpoint, `files` to `folder`."""

    name: str
    library: str
    class_name: str | None
    folder: str
    tensors: dict[str, SourceTensor]
    metadata: dict[str, str]
    files: tuple[str, ...]
    format: WeightFormat = "safetensors"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A recognised folder or file. `class_name` is the pipeline class, or the architecture of a single model.

    `headers` are files that the skeleton gets beside those of the folder: what a weight file holds besides tensors
    and what it takes to write the file again.
    """

    path: Path
    kind: ModelKind
    class_name: str | None
    components: tuple[SourceComponent, ...]
    headers: Mapping[str, bytes] = field(default_factory=dict)

    def skeleton_files(self) -> Iterator[Path]:
        """Everything that is needed beside the weights: configs, tokenizers, templates. Relative paths."""
        if not self.path.is_dir():
            return
        for file in sorted(self.path.rglob("*")):
            fits = file.is_file() and file.suffix in _SKELETON_SUFFIXES
            if fits and file.stat().st_size <= _MAX_SKELETON_FILE_BYTES:
                yield file.relative_to(self.path)


def read_checkpoint(path: Path, *, component: str | None = None) -> Checkpoint:
    """Recognise the folder and read every header. `component` keeps one component of a pipeline only.

    Raises FormatError: no such folder, unknown layout, a file that its header does not fit.
    """
    if not path.is_dir():
        raise FormatError(f"{path}: no such folder")
    if (path / "model_index.json").is_file():
        return _diffusers(path, component)
    if component is not None:
        raise FormatError(f"{path}: component {component!r} asked for, but this is no pipeline (no model_index.json)")
    if (path / LORA_FILE).is_file():
        return _adapter(path)
    if (path / "config.json").is_file():
        return _transformers(path)
    raise FormatError(
        f"{path}: unknown layout; expected model_index.json (diffusers), config.json (transformers) or {LORA_FILE}"
    )


def _diffusers(path: Path, only: str | None) -> Checkpoint:
    index = _read_json(path / "model_index.json")
    components = []
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2 or value[0] is None:
            continue
        if Path(name).name != name:  # it is a folder's name; anything else could point out of the checkpoint
            raise FormatError(f"{path / 'model_index.json'}: component {name!r} is not a plain name")
        # Tokenizers and solvers have a folder as well, but no weights: they belong to the skeleton.
        if _weight_files(path / name):
            components.append(_component(path / name, name, str(value[0]), str(value[1]), name))
    if only is None:
        if not components:
            raise FormatError(f"{path}: model_index.json names no component that has safetensors weights")
        return Checkpoint(path, "diffusion", str(index.get("_class_name")), tuple(components))
    chosen = [component for component in components if component.name == only]
    if not chosen:
        known = ", ".join(component.name for component in components)
        raise FormatError(f"{path}: no component {only!r} with weights (known: {known})")
    return Checkpoint(path, "embedding", chosen[0].class_name, tuple(chosen))


def _transformers(path: Path) -> Checkpoint:
    config = _read_json(path / "config.json")
    architectures = config.get("architectures") or [None]
    class_name = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(class_name, str | None):
        raise FormatError(f"{path / 'config.json'}: architectures must be a list of names, got {architectures!r}")
    sentence = (path / "modules.json").is_file()
    kind: ModelKind = "llm" if str(class_name).endswith("ForCausalLM") and not sentence else "embedding"
    if not _weight_files(path):
        raise FormatError(f"{path}: no safetensors weights beside config.json (model.safetensors or its shards)")
    return Checkpoint(path, kind, class_name, (_component(path, "model", "transformers", class_name, "."),))


def _adapter(path: Path) -> Checkpoint:
    header = read_header(path / LORA_FILE)
    lora = SourceComponent("lora", "peft", None, ".", dict(header.tensors), dict(header.metadata), (LORA_FILE,))
    return Checkpoint(path, "adapter", None, (lora,))


def _component(folder: Path, name: str, library: str, class_name: str | None, relative: str) -> SourceComponent:
    tensors: dict[str, SourceTensor] = {}
    metadata: dict[str, str] = {}
    files = _weight_files(folder)
    for file in files:
        header: SafetensorsHeader = read_header(file)
        for tensor, entry in header.tensors.items():
            if tensor in tensors:
                raise FormatError(f"{file}: tensor {tensor!r} is also in {tensors[tensor].file.name}")
            tensors[tensor] = entry
        metadata.update(header.metadata)
    return SourceComponent(name, library, class_name, relative, tensors, metadata, tuple(file.name for file in files))


def _weight_files(folder: Path) -> list[Path]:
    for stem in _WEIGHT_STEMS:
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            return _shards(folder, index)
    return []


def _shards(folder: Path, index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise FormatError(f"{index}: no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # A shard name is a plain file name; anything else could point out of the checkpoint.
        if Path(name).name != name or not (folder / name).is_file():
            raise FormatError(f"{index}: shard {name!r} is not a file beside it")
    return [folder / name for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise FormatError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value
