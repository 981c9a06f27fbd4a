"""A module of diffusers or transformers around tensors that already exist.

The structure comes from the library and the folder's config.json; the parameters *are* the given tensors.
Nothing is copied and nothing is ever written in place, because the tensors may be read-only views of
shared memory.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from deployments.engines.libraries.config_files import read_config
from deployments.engines.libraries.library_classes import LIBRARIES, check_library, named_class, no_class
from deployments.engines.libraries.library_seam import (
    checkpoint_layout,
    ignored_names,
    rename_by_diffusers,
    rename_by_transformers,
)
from deployments.engines.nn.fp8_linear import take_scales
from deployments.engines.nn.packed_linear import take_blocks
from deployments.engines.nn.packed_weights import Arithmetic
from deployments.engines.records.protocol import EngineError
from weights.loading.modules import Binding, UninitializedOnMeta, find_places, listed, tied_groups, without_value

logger = logging.getLogger("atelier.engines")

# The libraries import lazily and in circles: two threads that begin at different places see half of a module each.
IMPORT_LOCK = threading.RLock()


def build_module(
    library: str,
    class_name: str | None,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    optional_parts: Collection[str] = (),
    kinds: Mapping[str, str] = MappingProxyType({}),
    arithmetic: Arithmetic = "fast",
) -> nn.Module:
    """Build the model of `folder`/config.json around `tensors`, in eval mode, without gradients.

    `class_name` None takes the class that config.json names. The compute dtype is the tensors' own:
    whatever dtype the config mentions is not looked at. `optional_parts` names direct children (a BERT's
    "pooler") that become None when none of their tensors is given. `kinds` are the types of tensors that are
    blocks of ggml, by name, whose products are of that `arithmetic`. Raises EngineError when tensors are
    missing, unexpected or of another shape; old names that the library itself still understands are
    accepted, if they need no arithmetic.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    skeleton = build_skeleton(
        library, class_name, folder, shapes, optional_parts=optional_parts, kinds=kinds, arithmetic=arithmetic
    )
    skeleton.binding.put_tensors(tensors)
    return skeleton.module


def _undivided(_: nn.Module, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return tensors


def build_language_model(
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    divide: Callable[[nn.Module, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = _undivided,
) -> nn.Module:
    """Build the class of transformers that its `config` names first, as `build_module` builds others.

    Tensors of layouts that the class reads otherwise are converted, which takes memory of their own: experts, which
    checkpoints have one by one and classes in one piece. What the class has no place for is left out with a warning, as
    transformers does. `divide` makes the module smaller, and returns its parts of the tensors. Raises EngineError.
    """
    folder = Path(config.name_or_path)
    with IMPORT_LOCK:
        module: Any = blank_language_model(config)
        converted = divide(module, _converted(module, tensors, folder))
    expected = module.state_dict()
    if surplus := [name for name in converted if name not in expected]:
        logger.warning("%s: %s of no %s, left out", folder, listed(surplus, "tensor"), type(module).__name__)
        converted = {name: tensor for name, tensor in converted.items() if name in expected}
    _check_names(module, {name: tuple(tensor.shape) for name, tensor in converted.items()}, folder)
    find_places(module, converted).put_tensors(converted)
    module.requires_grad_(False)
    return module.eval()


def blank_language_model(config: Any) -> nn.Module:
    """Build the class of transformers that its `config` names first, without weights. Raises EngineError."""
    folder = Path(config.name_or_path)
    with IMPORT_LOCK:
        module: nn.Module = _blank_module(
            _resolve_class("transformers", config.architectures[0], {}, folder), folder, config
        )
    return module


def converted_bytes(config: Any, sizes: Mapping[str, int]) -> int:
    """Return the bytes, of such tensors, that `build_language_model` converts. Raises EngineError as it does."""
    with IMPORT_LOCK:
        layout = checkpoint_layout(blank_language_model(config), sizes)
    return sum(sizes[name] for _, parts in layout.merged.values() for name, _ in parts)


def _converted(module: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Return tensors by the names that the module has for them."""
    layout = checkpoint_layout(module, tensors)
    converted = {new_name: tensors[name] for new_name, name in layout.renamed.items()}
    try:
        for new_name, (converter, parts) in layout.merged.items():
            for name, pattern in parts:
                converter.add_tensor(new_name, name, pattern, functools.partial(tensors.__getitem__, name))
            for target, made in converter.convert(new_name, model=module, config=module.config).items():
                converted[target] = made[0] if isinstance(made, list) else made
    except Exception as error:  # of shapes that do not go together, say
        raise EngineError(f"{folder}: the tensors do not fit a {type(module).__name__}: {error}") from error
    return converted


class Skeleton(NamedTuple):
    """A module without weights, and where tensors of the checkpoint's names go."""

    module: nn.Module
    binding: Binding


def build_skeleton(
    library: str,
    class_name: str | None,
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    optional_parts: Collection[str] = (),
    kinds: Mapping[str, str] = MappingProxyType({}),
    arithmetic: Arithmetic = "fast",
) -> Skeleton:
    """Build what `build_module` does, without its tensors (of these names and shapes). Raises as it does."""
    module = build_blank(library, class_name, folder)
    take_scales(module, shapes)
    take_blocks(module, kinds, arithmetic)
    names = _rename_like_stock(module, shapes, folder)
    _drop_absent_parts(module, names, optional_parts)
    _check_names(module, {new: shapes[old] for new, old in names.items()}, folder)
    binding = find_places(module, names)
    module.requires_grad_(False)
    return Skeleton(module.eval(), binding.renamed(names))


def build_blank(library: str, class_name: str | None, folder: Path) -> nn.Module:
    """Build the model of `folder`/config.json with parameters that have shapes and no memory. Raises EngineError."""
    config = read_config(folder / "config.json")
    with IMPORT_LOCK:
        module: nn.Module = _blank_module(_resolve_class(library, class_name, config, folder), folder, config)
    return module


def check_module(
    library: str,
    class_name: str | None,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    where: Path,
) -> None:
    """Raise EngineError where no model of that config could be built around tensors of these names and shapes."""
    with IMPORT_LOCK:
        module = _blank_module(_resolve_class(library, class_name, config, where), where, config)
    names = _rename_like_stock(module, shapes, where)
    _check_names(module, {new: shapes[old] for new, old in names.items()}, where)


def import_class(library: str, class_name: str | None) -> None:
    """Pay for the import of a class before the first request needs it: the libraries import lazily, for seconds."""
    if library in LIBRARIES and class_name:
        with IMPORT_LOCK:
            getattr(importlib.import_module(library), class_name, None)


def _resolve_class(library: str, class_name: str | None, config: Mapping[str, Any], folder: Path) -> type[Any]:
    class_name = class_name or named_class(config, folder)
    cls = getattr(_package(library, folder), class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, "from_pretrained")):
        raise EngineError(f"{folder}: {no_class(library, class_name, config)}")
    return cls


def _package(library: str, folder: Path) -> Any:
    """Return a library, or the folder of diffusers' pipelines that is called so."""
    check_library(library, folder)
    if library in LIBRARIES:
        return importlib.import_module(library)
    return getattr(importlib.import_module("diffusers.pipelines"), library)


def _blank_module(cls: type[Any], folder: Path, config: Any) -> Any:
    """The module with its parameters on `meta`; buffers are real, since some exist nowhere else.

    `config` is the content of config.json, or a config object of the class.
    """
    try:
        with UninitializedOnMeta():
            if hasattr(cls, "config_class") and isinstance(config, cls.config_class):
                module = cls(config)
            elif hasattr(cls, "config_class"):
                module = cls(cls.config_class.from_pretrained(folder, local_files_only=True))
            else:
                module = cls.from_config(dict(config))
    except Exception as error:  # configs are checked in many places, each with errors of its own
        raise EngineError(f"{folder}: config.json does not describe a {cls.__name__}: {error}") from error
    if hasattr(module, "tie_weights"):
        module.tie_weights()
    return module


def _rename_like_stock(module: Any, given: Collection[str], folder: Path) -> dict[str, str]:
    """Names as the module has them today -> names as in the checkpoint, which may be old (pure renames only)."""
    expected = module.state_dict()
    if all(name in expected for name in given):
        return {name: name for name in given}
    if (names := rename_by_diffusers(module, given)) is not None:
        return names
    names = {}
    for name, new_name in rename_by_transformers(module, given, expected).items():
        if new_name is None:
            raise EngineError(f"{folder}: tensor {name!r} is in an old layout; save the model again with transformers")
        names[new_name] = name
    return names


def _drop_absent_parts(module: nn.Module, named: Collection[str], parts: Collection[str]) -> None:
    for part in parts:
        if isinstance(getattr(module, part, None), nn.Module) and not any(n.startswith(f"{part}.") for n in named):
            setattr(module, part, None)


def _check_names(module: Any, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    expected = module.state_dict()
    tied = {name for group in tied_groups(module) if any(n in shapes for n in group) for name in group}
    absent = [name for name in expected if name not in shapes and name not in tied]
    may_lack, may_have = ignored_names(module)
    missing = _not_matching(absent, may_lack)
    if missing:
        raise EngineError(f"{folder}: {listed(missing, 'tensor')} missing for a {type(module).__name__}")
    # Persistent in old checkpoints, computed today; transformers ignores them for every class.
    ignored = {*may_have, r"(^|\.)position_ids$", r"rotary_emb\.inv_freq"}
    unexpected = _not_matching((name for name in shapes if name not in expected), ignored)
    if unexpected:
        raise EngineError(f"{folder}: a {type(module).__name__} has no place for {listed(unexpected, 'tensor')}")
    for name, shape in shapes.items():
        if name in expected and shape != tuple(expected[name].shape):
            raise EngineError(
                f"{folder}: tensor {name!r} has shape {shape}, the config asks for {tuple(expected[name].shape)}"
            )
    _check_complete(module, {name for name in expected if name in shapes} | tied, folder)


def _check_complete(module: nn.Module, given: Collection[str], folder: Path) -> None:
    if left := [name for name in without_value(module) if name not in given]:
        raise EngineError(f"{folder}: {listed(left, 'tensor')} of {type(module).__name__} got no value")


def _not_matching(names: Iterable[str], patterns: Collection[str] | None) -> list[str]:
    found = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(pattern.search(name) for pattern in found)]
