"""Checkpoints in a stock layout: diffusers pipeline, transformers model, LoRA, GGUF, bare files; as components.

Folders: diffusers `model_index.json` with one folder per component; a ControlNet; a LoRA of diffusers or PEFT;
transformers `config.json` beside `model.safetensors` or its shards with `model.safetensors.index.json`;
sentence-transformers `modules.json`, or one Dense module of such a model; one GGUF model. Files: safetensors, GGUF,
KuiperLLama `.bin`, and torch's pickles for who asks. Symlinks are followed, as model hubs' caches consist of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from weights.errors import AdapterError, FormatError
from weights.formats import dense_head
from weights.formats.folder import files_below
from weights.formats.gguf_model import folder_files, gguf_set, read_gguf_model
from weights.formats.kuiper import read_kuiper
from weights.formats.lora import is_kohya, read_lora_configs
from weights.formats.peft import PEFT_CLASS, PEFT_CONFIG, PEFT_FILE, check_peft_base, peft_targets, read_peft_config
from weights.formats.safetensors import read_header
from weights.formats.tensors import SourceTensor
from weights.formats.untrusted import shown
from weights.formats.weight_files import LORA_FILE, is_plain_name, read_json, safetensors_files, torch_files
from weights.manifest import Manifest, ModelKind, WeightFormat

_ZIP_MAGIC = b"PK\3\4"
_PROTOCOLS = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")  # how a pickle of protocol 2 to 5 begins
SKELETON_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".md", ".tiktoken"})
_MAX_SKELETON_FILE_BYTES = 64 * 2**20


def _is_pickle(path: Path) -> bool:
    """Return True when the file begins as torch's do: a zip archive, or a bare pickle."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from None
    return magic == _ZIP_MAGIC or magic[:2] in _PROTOCOLS


def _read_pickle(path: Path, *, allow_torch: bool) -> Mapping[str, SourceTensor]:
    """Read the tensors of a torch file. Raises FormatError unless allowed, and for all but plain tensors.

    It takes a permission because even torch's restricted reader is a program that interprets its input.
    """
    if not allow_torch:
        raise FormatError(
            f"{path}: a pickle, which is only read where that is allowed (allow_torch); better: save it as safetensors"
        )
    # By name, so that only who reads a pickle imports torch: the control plane imports these modules.
    module = importlib.import_module("weights.formats.torch_file")
    tensors: Mapping[str, SourceTensor] = module.read_torch_file(path)
    return tensors


@dataclass(frozen=True, slots=True)
class SourceComponent:
    """A module of a checkpoint, with its tensors; `folder` is relative to the checkpoint, `files` to `folder`."""

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
        """Yield all files needed beside the weights: configs, tokenizers, templates. Relative paths."""
        return skeleton_files(self.path)


def skeleton_files(folder: Path) -> Iterator[Path]:
    """Yield the skeleton files of a folder, relative to it; none of a file. Raises FormatError."""
    if not folder.is_dir():
        return
    for file in files_below(folder):
        if file.suffix in SKELETON_SUFFIXES and (folder / file).stat().st_size <= _MAX_SKELETON_FILE_BYTES:
            yield file


def read_checkpoint(path: Path, *, component: str | None = None, allow_torch: bool = False) -> Checkpoint:
    """Recognise the folder or file and read every header. `component` keeps one component of a pipeline only.

    `allow_torch` also reads torch's pickles (no code in them is run), where there are no safetensors.
    Raises FormatError: nothing there, unknown layout, a file that its header does not fit; AdapterError for a LoRA
    whose metadata cannot be used.
    """
    layout = recognise(path)
    if layout == "diffusers":
        return _diffusers(path, component, allow_torch)
    if component is not None:
        raise FormatError(f"{path}: component {component!r} asked for, but this is no pipeline (no model_index.json)")
    match layout:
        case "file":
            return _single_file(path, allow_torch)
        case "adapter":
            return _adapter(path / LORA_FILE)
        case "peft":
            return _peft(path)
        case "transformers":
            return _transformers(path, allow_torch)
        case "gguf":
            return _gguf(path, folder_files(path))


def recognise(path: Path) -> Literal["file", "diffusers", "adapter", "peft", "transformers", "gguf"]:
    """Tell the layout by the names of a few files, without a walk: a folder that is none may be a whole disk.

    Raises FormatError for what has none that is known.
    """
    try:
        if path.is_file():
            return "file"
        if not path.is_dir():
            raise FormatError(f"{path}: no such folder or file")
        if (path / "model_index.json").is_file():
            return "diffusers"
        if (path / LORA_FILE).is_file():
            return "adapter"
        if (path / PEFT_CONFIG).is_file() and ((path / PEFT_FILE).is_file() or not safetensors_files(path)):
            return "peft"
        if (path / "config.json").is_file() and (safetensors_files(path) or not folder_files(path)):
            return "transformers"
        if folder_files(path):
            return "gguf"
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from error
    raise FormatError(
        f"{path}: unknown layout; expected model_index.json (diffusers), config.json (transformers), {LORA_FILE}, "
        f"{PEFT_CONFIG} (PEFT), one GGUF model, or the name of a single file"
    )


def check_lora_base(lora: Checkpoint, base: Manifest) -> None:
    """Check that a LoRA is for models of the base's kind, and as far as the headers tell for this one.

    Raises AdapterError naming the base, and the layer that it does not have. Anything but a LoRA passes.
    """
    if lora.kind != "adapter":
        return
    wanted, what = ("llm", "language models") if lora.class_name == PEFT_CLASS else ("diffusion", "diffusion pipelines")
    if base.kind != wanted:
        raise AdapterError(f"{lora.path}: a LoRA of {what}, which cannot change {base.model!r}, of kind {base.kind!r}")
    if lora.class_name == PEFT_CLASS:
        shapes = {name: tensor.shape for name, tensor in lora.components[0].tensors.items()}
        check_peft_base(lora.path, peft_targets(lora.path, shapes), base)


def _diffusers(path: Path, only: str | None, allow_torch: bool) -> Checkpoint:
    index = read_json(path / "model_index.json")
    components = []
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2 or value[0] is None:
            continue
        if not is_plain_name(name):  # it is a folder's name; anything else could point out of the checkpoint
            raise FormatError(f"{path / 'model_index.json'}: component {shown(name)} is not a plain name")
        # Tokenizers and solvers have a folder as well, but no weights: they belong to the skeleton.
        part = _component(path / name, name, str(value[0]), str(value[1]), name, allow_torch)
        if part is not None:
            components.append(part)
    if only is None:
        if not components:
            raise FormatError(f"{path}: model_index.json names no component that has safetensors weights")
        return Checkpoint(path, "diffusion", str(index.get("_class_name")), tuple(components))
    chosen = [component for component in components if component.name == only]
    if not chosen:
        known = ", ".join(component.name for component in components)
        raise FormatError(f"{path}: no component {only!r} with weights (known: {known})")
    return Checkpoint(path, "embedding", chosen[0].class_name, tuple(chosen))


def _transformers(path: Path, allow_torch: bool) -> Checkpoint:
    config = read_json(path / "config.json")
    if dense_head.is_dense_config(config):
        return _dense_head(path, allow_torch)
    if str(config.get("_class_name")).endswith("ControlNetModel"):
        return _controlnet(path, str(config["_class_name"]), allow_torch)
    architectures = config.get("architectures") or [None]
    class_name = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(class_name, str | None):
        raise FormatError(f"{path / 'config.json'}: architectures must be a list of names, got {shown(architectures)}")
    kind: ModelKind = "llm" if str(class_name).endswith("ForCausalLM") else "embedding"
    model = _component(path, "model", "transformers", class_name, ".", allow_torch)
    if model is None and (file := _kuiper_file(path)):
        kuiper = read_kuiper(file)
        model = SourceComponent("model", "kuiper", class_name, ".", dict(kuiper.tensors), {}, (file.name,), "kuiper")
        return Checkpoint(path, "llm", class_name, (model,), {f"{file.name}.header": kuiper.raw})
    if model is None:
        raise FormatError(f"{path}: no safetensors weights beside config.json (model.safetensors or its shards)")
    return Checkpoint(path, kind, class_name, (model,))


def _controlnet(path: Path, class_name: str, allow_torch: bool) -> Checkpoint:
    net = _component(path, "controlnet", "diffusers", class_name, ".", allow_torch)
    if net is None:
        raise FormatError(f"{path}: no safetensors weights beside the config.json of a {class_name}")
    return Checkpoint(path, "controlnet", class_name, (net,))


def _kuiper_file(folder: Path) -> Path | None:
    """Return the one `.bin` of a folder, unless it is torch's: int8 weights beside the config that they lack."""
    files = [file for file in folder.glob("*.bin") if not file.name.startswith(".")]
    return files[0] if len(files) == 1 and not _is_pickle(files[0]) else None


def _dense_head(path: Path, allow_torch: bool) -> Checkpoint:
    config = dense_head.read_dense_config(path / "config.json")
    head = _component(path, "model", dense_head.LIBRARY, dense_head.CLASS_NAME, ".", allow_torch)
    if head is None:
        raise FormatError(f"{path}: no safetensors weights beside the config.json of a Dense module")
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in head.tensors.items()}
    dense_head.check_dense_tensors(path / head.files[0], config, tensors)
    return Checkpoint(path, "head", dense_head.CLASS_NAME, (head,))


def _adapter(file: Path) -> Checkpoint:
    header = read_header(file)
    read_lora_configs(file, header.metadata)  # refused here, not by the first request that uses it
    lora = SourceComponent("lora", "peft", None, ".", dict(header.tensors), dict(header.metadata), (file.name,))
    return Checkpoint(file.parent if file.name == LORA_FILE else file, "adapter", None, (lora,))


def _peft(path: Path) -> Checkpoint:
    if not (path / PEFT_FILE).is_file():
        raise FormatError(f"{path}: no {PEFT_FILE} beside {PEFT_CONFIG} (a pickle has to be saved as safetensors)")
    read_peft_config(path / PEFT_CONFIG)
    header = read_header(path / PEFT_FILE)
    peft_targets(path / PEFT_FILE, {name: tensor.shape for name, tensor in header.tensors.items()})
    lora = SourceComponent("lora", "peft", PEFT_CLASS, ".", dict(header.tensors), dict(header.metadata), (PEFT_FILE,))
    # Its scales are in the config: a header, so that they count for the component's identity.
    return Checkpoint(path, "adapter", PEFT_CLASS, (lora,), {PEFT_CONFIG: (path / PEFT_CONFIG).read_bytes()})


def _component(
    folder: Path, name: str, library: str, class_name: str | None, relative: str, allow_torch: bool
) -> SourceComponent | None:
    """Return the weights of a folder, or None if it has none."""
    format_: WeightFormat = "safetensors"
    files = safetensors_files(folder)
    if not files and (files := torch_files(folder)):
        format_ = "torch"
    if not files:
        return None
    tensors: dict[str, SourceTensor] = {}
    metadata: dict[str, str] = {}
    for file in files:
        if format_ == "torch":
            found: Mapping[str, SourceTensor] = _read_pickle(file, allow_torch=allow_torch)
        else:
            header = read_header(file)
            found = header.tensors
            metadata.update(header.metadata)
        for tensor, entry in found.items():
            if tensor in tensors:
                raise FormatError(f"{file}: tensor {shown(tensor)} is also in {tensors[tensor].file.name}")
            tensors[tensor] = entry
    names = tuple(file.name for file in files)
    return SourceComponent(name, library, class_name, relative, tensors, metadata, names, format_)


def _single_file(path: Path, allow_torch: bool) -> Checkpoint:
    match path.suffix:
        case ".safetensors":
            header = read_header(path)
            if is_kohya(header.tensors):
                return _adapter(path)
            return _bare(path, "tensors", header.tensors, "safetensors", metadata=dict(header.metadata))
        case ".gguf":
            return _gguf(path, gguf_set(path))
        case ".bin" if not _is_pickle(path):
            kuiper = read_kuiper(path)
            return _bare(path, "llm", kuiper.tensors, "kuiper", headers={f"{path.name}.header": kuiper.raw})
        case ".bin" | ".pt" | ".pth":
            return _bare(path, "tensors", _read_pickle(path, allow_torch=allow_torch), "torch")
    raise FormatError(f"{path}: unknown kind of file {path.suffix!r} (known: .safetensors, .gguf, .bin, .pt, .pth)")


def _bare(
    path: Path,
    kind: ModelKind,
    tensors: Mapping[str, SourceTensor],
    format_: WeightFormat,
    *,
    metadata: dict[str, str] | None = None,
    headers: Mapping[str, bytes] | None = None,
) -> Checkpoint:
    model = SourceComponent("model", format_, None, ".", dict(tensors), metadata or {}, (path.name,), format_)
    return Checkpoint(path, kind, None, (model,), headers or {})


def _gguf(path: Path, files: list[Path]) -> Checkpoint:
    model = read_gguf_model(files)
    names = tuple(file.name for file in files)
    component = SourceComponent("model", "gguf", model.architecture, ".", dict(model.tensors), {}, names, "gguf")
    headers = {f"{file.name}.header": header.raw for file, header in model.headers.items()}
    return Checkpoint(path, "llm" if model.is_llm else "tensors", model.architecture, (component,), headers)
