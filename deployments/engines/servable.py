"""Reasons why a checkpoint cannot be served, found in its headers and configs, before its weights are read.

The rules are the engines' own, asked without torch, but for language models that transformers computes: the import
process of the registry asks here (by name, for the engines stand above it), and so does `atelier check`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from deployments.engines.adapter_bases import check_base
from deployments.engines.diffusion.families import FAMILIES, family_of
from deployments.engines.diffusion.known_solvers import check_solver
from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.embedding_rules import read_pooling_rule, read_prompts, stages_of
from deployments.engines.libraries.library_classes import check_model_class, named_class
from deployments.engines.libraries.tokenizer_files import check_tokenizer
from deployments.engines.llm.models.decoder_tensors import (
    check_gguf_decoder,
    check_kuiper_decoder,
    check_packed_decoder,
)
from deployments.engines.llm.models.gguf_config import gguf_headers
from deployments.engines.llm.models.gguf_tokenizer import check_gguf_tokenizer
from deployments.engines.llm.models.known import check_config, drafted_classes, has_own_layers, named_decoder
from deployments.engines.llm.models.stock_classes import DRAFTS_FOR, PAGED, SEEING
from deployments.engines.records.protocol import EngineError
from deployments.engines.stock.known import check_class, check_part, check_parts, is_stock_class, parts_of
from deployments.engines.text.known import ENCODER_CLASSES, POOLINGS, check_head, encoder_class, read_scoring_rule
from weights.formats import dense_head
from weights.formats.classifier import SUFFIX
from weights.formats.encoder_files import STAGES_FILE, tokenizer_folder
from weights.formats.gguf import DENOISERS, TEXT_ENCODERS
from weights.formats.ip_adapter import ENCODER, ENCODER_CLASS, image_encoder_class, read_ip_adapter
from weights.formats.kuiper import read_kuiper
from weights.formats.pipeline_parts import why_incomplete
from weights.formats.source import AdapterBase, Checkpoint, SourceComponent
from weights.records.errors import AdapterError, FormatError
from weights.records.manifest import ModelKind

_ALL_IN_ONE: Final = ("model.diffusion_model.", "first_stage_model.", "double_blocks.", "joint_blocks.")
_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
_CONTROL_CLASSES: Final = sorted({name for family in FAMILIES.values() for name in family.adapters.control_keys})


def why_unservable(checkpoint: Checkpoint, bases: Sequence[AdapterBase] = (), dtype: str = "auto") -> str | None:
    """Return why no engine could run the checkpoint, in the words that its first request would get; None if one can.

    `bases` are the models that an adapter is for, which it has to fit when it is stored with that `dtype`. Whether
    there is memory for it is for others to say.
    """
    try:
        if check := _CHECKS.get(checkpoint.kind):
            check(checkpoint)
        for base in bases:
            check_base(checkpoint, base, dtype)
    except (EngineError, FormatError, AdapterError) as error:
        return str(error)
    return None


def _check_pipeline(checkpoint: Checkpoint) -> None:
    if is_stock_class(checkpoint.class_name or ""):
        _check_stock_pipeline(checkpoint)
        return
    family, folder = family_of(checkpoint.class_name or ""), checkpoint.root
    if lack := why_incomplete(checkpoint):
        raise EngineError(lack)
    components = {component.name: component for component in checkpoint.components}
    for name in (family.denoiser_name, "vae"):
        if components[name].library != "diffusers":
            raise EngineError(f"{folder / name}: of library {components[name].library!r}, expected one of diffusers")
        config = read_config(folder / name / "config.json")
        class_name = components[name].class_name or named_class(config, folder / name)
        check_model_class("diffusers", class_name, folder / name, config)
    if reason := family.network.refusal(read_config(folder / family.denoiser_name / "config.json")):
        raise EngineError(f"{folder}: {reason}")
    index = read_config(folder / "model_index.json")
    check_solver(folder, index)
    read_config(folder / "scheduler" / "scheduler_config.json")
    for use in family.texts.encoders(None, "truncate"):
        if use.component in components:  # stock does without some
            _check_encoder(checkpoint, components[use.component])
    if family.references.most:
        _check_processor(folder / "processor")


def _check_stock_pipeline(checkpoint: Checkpoint) -> None:
    folder, class_name = checkpoint.root, checkpoint.class_name or ""
    index = read_config(folder / "model_index.json")
    if isinstance(index.get("_class_name"), list):
        raise EngineError(f"{folder}: a pipeline by code that comes with the model, which is never run")
    try:
        source = check_class(class_name)
    except EngineError as error:
        raise EngineError(f"{folder}: {error}") from None
    check_parts(class_name, folder, index)
    components = {component.name: component for component in checkpoint.components}
    for name, (library, part_class) in parts_of(class_name, index).items():
        if name in source.accepted and name not in components:
            check_part(library, part_class, folder / name)
    for name, component in components.items():
        config = checkpoint.config_of(name)
        check_model_class(component.library, component.class_name or "", folder / name, config)
        if component.library == "transformers" and (method := config.get("quantization_config")):
            raise EngineError(f"{folder / name}: quantized text encoders are not supported ({_method(method)})")


def _check_embedding(checkpoint: Checkpoint) -> None:
    for component in checkpoint.components:
        if component.library == dense_head.LIBRARY:
            path = checkpoint.root / component.folder / "config.json"
            check_head(dense_head.read_dense_config(path), path)
        else:
            _check_encoder(checkpoint, component)


def _check_classifier(checkpoint: Checkpoint) -> None:
    if (stages := stages_of(checkpoint.path)) and stages[1:]:
        where = checkpoint.path / STAGES_FILE
        raise EngineError(f"{where}: a classifier with a stage {stages[1].name!r} behind it is not supported")
    _check_embedding(checkpoint)
    read_scoring_rule(checkpoint.path)


def _check_encoder(checkpoint: Checkpoint, component: SourceComponent) -> None:
    root, folder = checkpoint.root, checkpoint.root / component.folder
    if component.library != "transformers":
        raise EngineError(f"{folder}: of library {component.library!r}, expected an encoder of transformers")
    class_name = encoder_class(folder, component.class_name)
    config = checkpoint.config_of(component.folder)
    if class_name not in ENCODER_CLASSES:
        check_model_class("transformers", class_name, folder, config)
    if method := config.get("quantization_config"):
        raise EngineError(f"{folder}: quantized text encoders are not supported ({_method(method)})")
    check_tokenizer(root / tokenizer_folder(component.folder))
    if not class_name.startswith("CLIP") and not class_name.endswith(SUFFIX):
        read_pooling_rule(folder, POOLINGS, takes_dense=True)
        read_prompts(folder)


def _method(quantization: object) -> str:
    return str(quantization.get("quant_method")) if isinstance(quantization, Mapping) else "of an unknown method"


def _check_language_model(checkpoint: Checkpoint, *, is_draft: bool = False) -> None:
    path = checkpoint.path
    if checkpoint.draft is not None:
        _check_drafting(checkpoint, checkpoint.draft)
        _check_language_model(checkpoint.draft, is_draft=True)
    if headers := gguf_headers(path):
        check_gguf_decoder(headers)
        check_gguf_tokenizer(headers[0].metadata)
        return
    if path.is_file():
        raise EngineError(f"{path}: has no tokenizer: put it into a folder, beside its config.json and tokenizer.json")
    class_name = check_config(checkpoint.config, path / "config.json", is_draft=is_draft)
    sees = class_name in SEEING
    if not is_draft:  # whose tokens are the model's
        check_tokenizer(path)
    if (path / "generation_config.json").is_file():
        read_config(path / "generation_config.json")
    _check_decoder_tensors(checkpoint, is_draft=is_draft)
    if sees:
        _check_processor(path)


def _check_drafting(model: Checkpoint, draft: Checkpoint) -> None:
    """Raise EngineError for a model that can have no draft model, or not this one."""
    class_name = named_decoder(draft.config)
    if class_name in DRAFTS_FOR:
        own = check_config(model.config, model.path / "config.json")
        if own not in drafted_classes(class_name):
            raise EngineError(f"{draft.path}: a {class_name} drafts for a {DRAFTS_FOR[class_name]}, not for a {own}")
        return
    for checkpoint in (draft, model):
        path = checkpoint.path
        if gguf_headers(path):  # of our decoders
            continue
        own = check_config(checkpoint.config, path / "config.json")
        if own not in PAGED and not has_own_layers(own):
            raise EngineError(
                f"{path}: a {own} is no draft model and has none: expected a model of text alone whose attention "
                "runs over the paged cache"
            )


def _check_decoder_tensors(checkpoint: Checkpoint, *, is_draft: bool) -> None:
    """Raise EngineError for a decoder that lacks a tensor, or has one of another shape than its config says."""
    (component, *_) = checkpoint.components
    config, path = checkpoint.config, checkpoint.path
    given = {name: (tensor.dtype, tensor.shape) for name, tensor in component.tensors.items()}
    quantization = config.get("quantization_config")
    try:
        if component.format == "kuiper":
            for file in component.files:
                check_kuiper_decoder(read_kuiper(path / component.folder / file), config)
        elif component.format != "safetensors":
            return
        elif has_own_layers(named_decoder(config)):
            group_size = quantization.get("group_size", 0) if isinstance(quantization, Mapping) else 0
            check_packed_decoder(named_decoder(config), config, given, group_size)
        elif quantization is None:
            # It needs torch, which others do without: only transformers knows what its classes are made of.
            check_stock = importlib.import_module("deployments.engines.llm.models.registry").check_stock_tensors
            check_stock(path, {name: shape for name, (_, shape) in given.items()}, is_draft=is_draft)
    except EngineError as error:
        raise error if str(path) in str(error) else EngineError(f"{path}: {error}") from None


def _check_processor(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _PROCESSOR_FILES):
        raise EngineError(f"{folder}: has no image processor: {_PROCESSOR_FILES[0]} is missing")


def _check_head(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / "config.json"
    check_head(dense_head.read_dense_config(path), path)


def _check_controlnet(checkpoint: Checkpoint) -> None:
    if checkpoint.class_name not in _CONTROL_CLASSES:
        raise EngineError(
            f"{checkpoint.path}: a {checkpoint.class_name}, which is not served as an adapter (those that are: "
            f"{', '.join(_CONTROL_CLASSES)}); it may be a part of a pipeline's folder"
        )


def _check_upscaler(checkpoint: Checkpoint) -> None:
    (component,) = checkpoint.components
    dtypes = {tensor.dtype for tensor in component.tensors.values()}
    if len(dtypes) != 1 or not dtypes <= _FLOATS:
        raise EngineError(
            f"{checkpoint.path}: an upscaler with tensors of {', '.join(sorted(dtypes))}; expected one of "
            f"{', '.join(sorted(_FLOATS))} for all"
        )


def _check_ip_adapter(checkpoint: Checkpoint) -> None:
    folder, (component,) = checkpoint.path / ENCODER, checkpoint.components
    config = read_config(folder / "config.json")
    shapes = {key: one.shape for key, one in component.tensors.items()}
    wanted = image_encoder_class(read_ip_adapter(folder, shapes).kind)
    if (class_name := named_class(config, folder)) != wanted:
        raise EngineError(f"{folder}: a {class_name}, and this IP-Adapter reads images by a {wanted}")
    head = component.tensors[f"{ENCODER}.visual_projection.weight"].shape if wanted == ENCODER_CLASS else ()
    for key, given in zip(("projection_dim", "hidden_size"), head, strict=False):
        if config.get(key, given) != given:
            raise EngineError(f"{folder}: config.json has {key} {config[key]}, and its weights have {given}")
    dtypes = {tensor.dtype for tensor in component.tensors.values()} - {"I64"}  # numbers of positions, in old files
    if not dtypes <= _FLOATS:
        raise EngineError(f"{checkpoint.path}: an IP-Adapter with tensors of {', '.join(sorted(dtypes - _FLOATS))}")


def _refuse_tensors(checkpoint: Checkpoint) -> None:
    path, (component,) = checkpoint.path, checkpoint.components
    if component.format == "gguf" and checkpoint.class_name in (*DENOISERS, *TEXT_ENCODERS):
        what = "denoiser" if checkpoint.class_name in DENOISERS else "text encoder"
        raise EngineError(
            f"{path}: a {what} alone (GGUF architecture {checkpoint.class_name!r}): name the pipeline that it is "
            "`like`, by the id of a model or as a folder that has its configs and its other parts (`like: flux`)"
        )
    if component.format == "gguf":
        raise EngineError(f"{path}: GGUF architecture {checkpoint.class_name!r} is no language model that is served")
    if any(name.startswith(_ALL_IN_ONE) for name in component.tensors):
        raise EngineError(
            f"{path}: a whole model in one file, without configs and tokenizer: name the pipeline that it is `like`, "
            "by the id of a model or as a folder that has them (`like: sdxl-base`)"
        )
    raise EngineError(
        f"{path}: bare tensors, without a config of the model that uses them: name a model's folder, or the pipeline "
        "that they are `like`, by the id of a model or as a folder (`like: flux`)"
    )


_CHECKS: Final[Mapping[ModelKind, Callable[[Checkpoint], None]]] = {
    "diffusion": _check_pipeline,
    "embedding": _check_embedding,
    "reranker": _check_classifier,
    "classifier": _check_classifier,
    "head": _check_head,
    "llm": _check_language_model,
    "controlnet": _check_controlnet,
    "upscaler": _check_upscaler,
    "ip_adapter": _check_ip_adapter,
    "tensors": _refuse_tensors,
}
