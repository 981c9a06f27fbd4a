"""Checkpoints in a stock layout: diffusers pipeline, transformers model, LoRA, GGUF, bare files; as components.

Folders: diffusers `model_index.json` with one folder per component; a ControlNet; a LoRA of diffusers or PEFT;
transformers `config.json` beside `model.safetensors` or its shards with `model.safetensors.index.json`;
sentence-transformers `modules.json`, or one Dense module of such a model; one GGUF model. Files: safetensors, GGUF,
KuiperLLama `.bin`, and torch's pickles for who asks. Symlinks are followed, as model hubs' caches consist of them.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from weights.formats import classifier, dense_head
from weights.formats.control_files import CONTROL_CLASSES, control_kind, is_control_file, read_control_file, why_alone
from weights.formats.encoder_files import read_stages
from weights.formats.folder import (
    LORA_FILE,
    check_index,
    is_plain_name,
    read_json,
    safetensors_files,
    torch_files,
)
from weights.formats.gguf import folder_files, gguf_set, read_gguf_model
from weights.formats.ip_adapter import ENCODER as IP_ENCODER
from weights.formats.ip_adapter import (
    IP_CLASS,
    canonical_name,
    check_encoder,
    is_ip_adapter,
    is_ip_adapter_folder,
    read_ip_adapter,
)
from weights.formats.ip_adapter import LIBRARY as IP_LIBRARY
from weights.formats.kuiper import read_kuiper
from weights.formats.language_models import body_of, named_class
from weights.formats.learned_words import WORDS_CLASS, WORDS_FILE, check_words, check_words_base, is_words_file
from weights.formats.lora import (
    PEFT_CLASS,
    PEFT_CONFIG,
    PEFT_FILE,
    check_named_base,
    check_peft_base,
    is_lora,
    is_peft,
    peft_config_of,
    peft_targets,
    read_lora_configs,
    read_peft_config,
)
from weights.formats.low_precision import PLAIN_METHODS, read_as_plain
from weights.formats.own_draft import DRAFT, with_draft
from weights.formats.published_quantization import ComputedTensor, read_quantized
from weights.formats.safetensors import read_header
from weights.formats.source import CONFIG_FILE, AdapterBase, Checkpoint, SourceComponent
from weights.formats.tensors import SourceTensor, split_rows
from weights.formats.untrusted import shown
from weights.formats.upscaler import LIBRARY as UPSCALER
from weights.formats.upscaler import is_upscaler, read_upscaler, upscaler_tensors
from weights.records.errors import AdapterError, FormatError
from weights.records.manifest import ModelKind, WeightFormat

if TYPE_CHECKING:
    from weights.formats.source import BasePipeline

_QUANTIZATION = "quantization_config"
_ZIP_MAGIC = b"PK\3\4"
_PROTOCOLS = (b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5")  # how a pickle of protocol 2 to 5 begins
_CLASS_NAME = re.compile(r"_*[A-Z]")  # how it begins
# Ends of the names of classes that have no weights, or none that are needed to serve a pipeline.
_WEIGHTLESS = (
    *("Tokenizer", "TokenizerFast", "TokenizersBackend", "SentencePieceBackend", "Scheduler", "Processor"),
    *("ProcessorFast", "FeatureExtractor", "Guidance", "SafetyChecker"),
)
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "BertGenerationDecoder")  # ends of their class names, or a name
_SEEING_MODELS = "ForConditionalGeneration"  # of those that see too, where the config has a vision tower


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
    module = importlib.import_module("weights.conversion.torch_file")
    tensors: Mapping[str, SourceTensor] = module.read_torch_file(path)
    return tensors


def read_checkpoint(
    path: Path,
    *,
    component: str | None = None,
    allow_torch: bool = False,
    like: BasePipeline | None = None,
    parts: Mapping[str, Path] = MappingProxyType({}),
) -> Checkpoint:
    """Recognise the folder or file and read every header. `component` keeps one component of a pipeline only.

    `like` is the pipeline that a single file is of (in GGUF: its denoiser), whose configs and tokenizers it takes.
    `parts` are what it gets, by component: a "vae" in the place of its own, a small "preview_vae", a language model's
    "draft".
    `allow_torch` also reads torch's pickles (no code in them is run), where there are no safetensors.
    Raises FormatError: nothing there, unknown layout, a file that its header does not fit; AdapterError for a LoRA
    whose metadata cannot be used.
    """
    if parts:
        found = read_checkpoint(path, allow_torch=allow_torch, like=like)
        if vaes := {name: one for name, one in parts.items() if name != DRAFT}:
            found = importlib.import_module("weights.conversion.own_vae").with_vaes(found, vaes)
        if DRAFT in parts:
            found = with_draft(found, read_checkpoint(parts[DRAFT], allow_torch=allow_torch))
        return _only(found, component)
    layout = recognise(path)
    if like is not None:
        if layout != "file" or path.suffix not in (".safetensors", ".gguf"):
            what = f"a file of {path.suffix!r}" if layout == "file" else f"a folder in the layout of {layout}"
            raise FormatError(f"{path}: {what}; `like` is for a single .safetensors or .gguf file")
        if is_control_file(path):
            return read_control_file(path, like)
        # By name: it takes torch and diffusers, which the control plane does without.
        module = importlib.import_module("weights.conversion.single_file")
        read = module.read_gguf_denoiser if path.suffix == ".gguf" else module.read_single_file
        return _only(read(path, like), component)
    if layout == "diffusers":
        return _diffusers(path, component, allow_torch)
    if component is not None:
        raise FormatError(f"{path}: component {component!r} asked for, but this is no pipeline (no model_index.json)")
    match layout:
        case "file":
            return _single_file(path, allow_torch)
        case "adapter":
            return _adapter(path / LORA_FILE) if (path / LORA_FILE).is_file() else _words(path / WORDS_FILE)
        case "ip_adapter":
            return _ip_adapter(path)
        case "peft":
            return _peft(path)
        case "transformers":
            return _transformers(path, allow_torch)
        case "gguf":
            return _gguf(path, folder_files(path))


def recognise(path: Path) -> Literal["file", "diffusers", "adapter", "ip_adapter", "peft", "transformers", "gguf"]:
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
        if (path / LORA_FILE).is_file() or (path / WORDS_FILE).is_file():
            return "adapter"
        if is_ip_adapter_folder(path):
            return "ip_adapter"
        if (path / PEFT_CONFIG).is_file() and ((path / PEFT_FILE).is_file() or not safetensors_files(path)):
            return "peft"
        if (path / "config.json").is_file() and (safetensors_files(path) or not folder_files(path)):
            return "transformers"
        if folder_files(path):
            return "gguf"
        snapshots = sorted(entry.name for entry in path.glob("snapshots/*"))[:3]
    except OSError as error:
        raise FormatError(f"{path}: {error.strerror or error}") from error
    if snapshots:
        raise FormatError(f"{path}: a hub's cache; name a snapshot in it, such as {path / 'snapshots' / snapshots[-1]}")
    raise FormatError(
        f"{path}: unknown layout; expected model_index.json (diffusers), config.json (transformers), {LORA_FILE}, "
        f"{PEFT_CONFIG} (PEFT), one GGUF model, or the name of a single file"
    )


def check_lora_base(lora: Checkpoint, base: AdapterBase) -> None:
    """Check that a LoRA, or a word, is for models of the base's kind, and as far as the headers tell for this one.

    Raises AdapterError naming the base, and the layer that it does not have.
    """
    wanted, what = ("llm", "language models") if lora.class_name == PEFT_CLASS else ("diffusion", "diffusion pipelines")
    if base.kind != wanted:
        raise AdapterError(f"{lora.path}: a LoRA of {what}, which cannot change {base.model!r}, of kind {base.kind!r}")
    shapes = {name: tensor.shape for name, tensor in lora.components[0].tensors.items()}
    if lora.class_name == PEFT_CLASS:
        check_peft_base(lora.path, peft_targets(lora.path, shapes), base)
    elif lora.class_name == WORDS_CLASS:
        check_words_base(lora.path, shapes, base)
    else:
        check_named_base(lora.path, shapes, base)


def is_controlnet(path: Path) -> bool:
    """Return whether it is a ControlNet or a T2I-Adapter: a folder whose config says so, or a file.

    Raises FormatError.
    """
    file = path / "config.json"
    return is_control_file(path) or (file.is_file() and _is_control_class(read_json(file)))


def _is_control_class(config: Mapping[str, Any]) -> bool:
    class_name = str(config.get("_class_name"))
    return class_name in CONTROL_CLASSES or class_name.endswith("ControlNetModel")


_OF_ITS_OWN: Final = ("conv_in.weight", "pos_embed.pos_embed")
_WITHOUT_COMMON_LAYERS: Final = "ControlNetXSAdapter"  # which has a denoiser's names for layers of other sizes


def check_same_layers(net: Checkpoint, part: Any, base: AdapterBase) -> None:
    """Check that the layers that a ControlNet has in common with a denoiser, the `part`, have the shapes of that one's.

    Its first layer is its own, since that of an inpainting model reads more, and so is how many places it knows. Raises
    AdapterError naming the tensor.
    """
    if part.format != "safetensors" or net.class_name == _WITHOUT_COMMON_LAYERS:
        return
    for name, tensor in net.components[0].tensors.items():
        layer = part.tensors.get(name)
        if layer is not None and name not in _OF_ITS_OWN and list(layer.shape) != list(tensor.shape):
            given, wanted = list(tensor.shape), list(layer.shape)
            raise AdapterError(f"{net.path}: tensor {name} has shape {given}, which in {base.model!r} is {wanted}")


def weighted_parts(folder: Path) -> dict[str, tuple[str, str]]:
    """Return library and class of those parts of a pipeline's folder that may have weights. Raises FormatError."""
    parts = _pipeline_parts(folder)
    return {name: part for name, part in parts.items() if not part[1].endswith(_WEIGHTLESS)}


def read_pipeline_parts(folder: Path, *, allow_torch: bool = False) -> dict[str, SourceComponent]:
    """Read the headers of those components of a pipeline's folder that have weights. Raises FormatError."""
    found = {
        name: read_component(folder / name, name, library, class_name, name, allow_torch)
        for name, (library, class_name) in _pipeline_parts(folder).items()
    }
    return {name: _plain(folder, part) for name, part in found.items() if part is not None}


def _pipeline_parts(folder: Path) -> dict[str, tuple[str, str]]:
    parts = {}
    for name, value in read_json(folder / "model_index.json").items():
        is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)
        # An option of the pipeline may be two numbers, or two names: of layers, say, which are no classes' names.
        if name.startswith("_") or not is_pair or not _CLASS_NAME.match(value[1]):
            continue
        if not is_plain_name(name):  # it is a folder's name; anything else could point out of the checkpoint
            raise FormatError(f"{folder / 'model_index.json'}: component {shown(name)} is not a plain name")
        parts[name] = value[0], value[1]
    return parts


def _diffusers(path: Path, only: str | None, allow_torch: bool) -> Checkpoint:
    # Tokenizers and solvers have a folder as well, but no weights: they belong to the skeleton.
    components = read_pipeline_parts(path, allow_torch=allow_torch)
    for name, (_, class_name) in _pipeline_parts(path).items():
        if only is None and name not in components and _needs_weights(path / name, class_name):
            raise FormatError(
                f"{path / name}: no weights of component {name!r}, a {shown(class_name)} (a file that was not copied? "
                "a part that a pipeline lacks is [null, null] in its model_index.json)"
            )
    if only is None and not components:
        raise FormatError(f"{path}: model_index.json names no component that has safetensors weights")
    class_name = str(read_json(path / "model_index.json").get("_class_name"))
    headers = plain_configs(path, components.values())
    return _only(Checkpoint(path, "diffusion", class_name, tuple(components.values()), headers), only)


def _plain(path: Path, part: SourceComponent) -> SourceComponent:
    """Return a part of a pipeline without low precision that no engine computes with. Raises FormatError."""
    return replace(part, tensors=read_as_plain(path / part.folder, part.tensors, part.metadata))


def plain_configs(path: Path, parts: Iterable[SourceComponent]) -> dict[str, bytes]:
    """Return the configs of parts that were quantized and are plain now, without what said so."""
    found = {}
    for part in parts:
        file = path / part.folder / CONFIG_FILE
        config = read_json(file) if file.is_file() else {}
        is_computed = any(isinstance(tensor, ComputedTensor) for tensor in part.tensors.values())
        if is_computed and _is_read_as_plain(config):
            del config[_QUANTIZATION]
            found[(PurePosixPath(part.folder) / CONFIG_FILE).as_posix()] = json.dumps(config, indent=2).encode()
    return found


def _is_read_as_plain(config: Mapping[str, Any]) -> bool:
    method = config.get(_QUANTIZATION)
    return isinstance(method, dict) and method.get("quant_method") in PLAIN_METHODS


def _only(pipeline: Checkpoint, component: str | None) -> Checkpoint:
    """Return the pipeline, or one component of it as a model of its own. Raises FormatError for one that it lacks."""
    if component is None:
        return pipeline
    chosen = tuple(part for part in pipeline.components if part.name == component)
    if not chosen:
        known = ", ".join(part.name for part in pipeline.components)
        raise FormatError(f"{pipeline.path}: no component {component!r} with weights (known: {known})")
    return replace(pipeline, kind="embedding", class_name=chosen[0].class_name, components=chosen)


def _needs_weights(folder: Path, class_name: str) -> bool:
    """Return True for a model without weights: config.json says that it is one, or nothing at all is there."""
    if class_name.endswith(_WEIGHTLESS):
        return False
    try:
        return (folder / "config.json").is_file() or not folder.is_dir() or not any(folder.iterdir())
    except OSError as error:
        raise FormatError(f"{folder}: {error.strerror or error}") from error


def _transformers(path: Path, allow_torch: bool) -> Checkpoint:
    config = read_json(path / "config.json")
    if dense_head.is_dense_config(config):
        return _dense_head(path, allow_torch)
    if _is_control_class(config):
        return _controlnet(path, str(config["_class_name"]), allow_torch)
    class_name = named_class(config)
    if not isinstance(class_name, str | None):
        raise FormatError(f"{path / 'config.json'}: architectures must be a list of names, got {shown(class_name)}")
    sees = str(class_name).endswith(_SEEING_MODELS) and isinstance(config.get("vision_config"), dict)
    kind: ModelKind = "llm" if sees or str(class_name).endswith(_LANGUAGE_MODELS) else "embedding"
    if str(class_name).endswith(classifier.SUFFIX):
        is_ranking = len(classifier.read_labels(config, path / "config.json")) == 1
        kind = "reranker" if is_ranking else "classifier"
    model = read_component(path, "model", "transformers", class_name, ".", allow_torch)
    if model is None and (file := _kuiper_file(path)):
        kuiper = read_kuiper(file)
        model = SourceComponent("model", "kuiper", class_name, ".", dict(kuiper.tensors), {}, (file.name,), "kuiper")
        return Checkpoint(path, "llm", class_name, (model,), {f"{file.name}.header": kuiper.raw})
    if model is None:
        raise FormatError(f"{path}: no safetensors weights beside config.json (model.safetensors or its shards)")
    if kind == "llm" and (plain := read_quantized(path, config, str(class_name), model.tensors)):
        return Checkpoint(path, kind, class_name, (replace(model, tensors=plain.tensors),), {CONFIG_FILE: plain.config})
    model = _plain(path, model) if _is_read_as_plain(config) else model
    headers = plain_configs(path, [model])
    if kind == "embedding" and class_name:
        class_name, body = body_of(class_name, model.tensors)
        model = replace(model, class_name=class_name, tensors=dict(body))
    model = replace(model, tensors=split_rows(str(config.get("model_type")), model.tensors))
    return Checkpoint(path, kind, class_name, (model, *_dense_stages(path, allow_torch, kind)), headers)


def _dense_stages(path: Path, allow_torch: bool, kind: ModelKind) -> Iterator[SourceComponent]:
    """Yield the Dense layers that an embedding model of sentence-transformers has behind its pooling."""
    for stage in (read_stages(path) or ()) if kind == "embedding" else ():
        if stage.name == dense_head.CLASS_NAME:
            yield _dense_component(path / stage.folder, stage.folder, stage.folder, allow_torch)


def _controlnet(path: Path, class_name: str, allow_torch: bool) -> Checkpoint:
    net = read_component(path, "controlnet", "diffusers", class_name, ".", allow_torch)
    if net is None:
        raise FormatError(f"{path}: no safetensors weights beside the config.json of a {class_name}")
    return Checkpoint(path, "controlnet", class_name, (_plain(path, net),))


def _kuiper_file(folder: Path) -> Path | None:
    """Return the one `.bin` of a folder, unless it is torch's: int8 weights beside the config that they lack."""
    files = [file for file in folder.glob("*.bin") if not file.name.startswith(".")]
    return files[0] if len(files) == 1 and not _is_pickle(files[0]) else None


def _dense_head(path: Path, allow_torch: bool) -> Checkpoint:
    head = _dense_component(path, "model", ".", allow_torch)
    return Checkpoint(path, "head", dense_head.CLASS_NAME, (head,))


def _dense_component(path: Path, name: str, relative: str, allow_torch: bool) -> SourceComponent:
    config = dense_head.read_dense_config(path / "config.json")
    head = read_component(path, name, dense_head.LIBRARY, dense_head.CLASS_NAME, relative, allow_torch)
    if head is None:
        raise FormatError(f"{path}: no safetensors weights beside the config.json of a Dense module")
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in head.tensors.items()}
    dense_head.check_dense_tensors(path / head.files[0], config, tensors)
    return head


def _adapter(file: Path) -> Checkpoint:
    header = read_header(file)
    read_lora_configs(file, header.metadata)  # refused here, not by the first request that uses it
    lora = SourceComponent("lora", "peft", None, ".", dict(header.tensors), dict(header.metadata), (file.name,))
    return Checkpoint(file.parent if file.name == LORA_FILE else file, "adapter", None, (lora,))


def _words(file: Path) -> Checkpoint:
    header = read_header(file)
    check_words(file, {name: tensor.shape for name, tensor in header.tensors.items()})
    words = SourceComponent(
        "words", "peft", WORDS_CLASS, ".", dict(header.tensors), dict(header.metadata), (file.name,)
    )
    return Checkpoint(file.parent if file.name == WORDS_FILE else file, "adapter", WORDS_CLASS, (words,))


def _ip_adapter(path: Path) -> Checkpoint:
    files = [file for file in sorted(path.glob("*.safetensors")) if not file.name.startswith(".")]
    if len(files) != 1:
        names = ", ".join(file.name for file in files)
        raise FormatError(f"{path}: {len(files)} IP-Adapters beside one image_encoder ({names}); give each a folder")
    header = read_header(files[0])
    tensors: dict[str, SourceTensor] = dict(header.tensors)
    read_ip_adapter(files[0], {name: tensor.shape for name, tensor in tensors.items()})
    tensors = {canonical_name(name): tensor for name, tensor in tensors.items()}
    if not any(name.startswith(f"{IP_ENCODER}.") for name in tensors):  # as they are written back
        encoder = read_component(path / IP_ENCODER, IP_ENCODER, "transformers", None, IP_ENCODER, allow_torch=False)
        if encoder is None:
            raise FormatError(f"{path / IP_ENCODER}: no safetensors weights beside config.json")
        tensors |= {f"{IP_ENCODER}.{name}": tensor for name, tensor in encoder.tensors.items()}
    check_encoder(files[0], {name: tensor.shape for name, tensor in tensors.items()})
    adapter = SourceComponent("ip_adapter", IP_LIBRARY, IP_CLASS, ".", tensors, dict(header.metadata), (files[0].name,))
    config = (path / IP_ENCODER / CONFIG_FILE).read_bytes()
    # The encoder's config counts for the component's identity, so it stands beside it.
    return Checkpoint(path, "ip_adapter", IP_CLASS, (adapter,), {CONFIG_FILE: config})


def _peft(path: Path) -> Checkpoint:
    if not (path / PEFT_FILE).is_file():
        raise FormatError(f"{path}: no {PEFT_FILE} beside {PEFT_CONFIG} (a pickle has to be saved as safetensors)")
    config = read_peft_config(path / PEFT_CONFIG)
    header = read_header(path / PEFT_FILE)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    peft_targets(path / PEFT_FILE, shapes, use_dora=config.use_dora)
    lora = SourceComponent("lora", "peft", PEFT_CLASS, ".", dict(header.tensors), dict(header.metadata), (PEFT_FILE,))
    # Its scales are in the config: a header, so that they count for the component's identity.
    return Checkpoint(path, "adapter", PEFT_CLASS, (lora,), {PEFT_CONFIG: (path / PEFT_CONFIG).read_bytes()})


def read_component(
    folder: Path, name: str, library: str, class_name: str | None, relative: str, allow_torch: bool
) -> SourceComponent | None:
    """Return the weights of a component's folder, or None if it has none. Raises FormatError."""
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
    check_index(folder, tensors)
    names = tuple(file.name for file in files)
    return SourceComponent(name, library, class_name, relative, tensors, metadata, names, format_)


def _single_file(path: Path, allow_torch: bool) -> Checkpoint:
    match path.suffix:
        case ".safetensors":
            header = read_header(path)
            if kind := control_kind(path, {name: tensor.shape for name, tensor in header.tensors.items()}):
                raise FormatError(why_alone(path, kind))
            if is_ip_adapter(header.tensors):  # those for FaceID have LoRAs in them, and no image_encoder beside them
                read_ip_adapter(path, {name: tensor.shape for name, tensor in header.tensors.items()})
            if is_lora(header.tensors) and not (is_peft(list(header.tensors)) and peft_config_of(path).is_file()):
                return _adapter(path)
            if is_words_file(path, header.tensors):
                return _words(path)
            if is_upscaler(header.tensors):
                return _upscaler(path, header.tensors, "safetensors", dict(header.metadata))
            return _bare(path, "tensors", header.tensors, "safetensors", metadata=dict(header.metadata))
        case ".gguf":
            return _gguf(path, gguf_set(path))
        case ".bin" if not _is_pickle(path):
            kuiper = read_kuiper(path)
            return _bare(path, "llm", kuiper.tensors, "kuiper", headers={f"{path.name}.header": kuiper.raw})
        case ".bin" | ".pt" | ".pth":
            tensors = _read_pickle(path, allow_torch=allow_torch)
            if is_upscaler(tensors):
                return _upscaler(path, tensors, "torch", {})
            return _bare(path, "tensors", tensors, "torch")
    raise FormatError(f"{path}: unknown kind of file {path.suffix!r} (known: .safetensors, .gguf, .bin, .pt, .pth)")


def _upscaler(
    path: Path, tensors: Mapping[str, SourceTensor], format_: WeightFormat, metadata: dict[str, str]
) -> Checkpoint:
    named = upscaler_tensors(path, tensors)
    net = read_upscaler(path, {name: tensor.shape for name, tensor in named.items()})
    model = SourceComponent("model", UPSCALER, net.kind, ".", named, metadata, (path.name,), format_)
    return Checkpoint(path, "upscaler", net.kind, (model,))


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
