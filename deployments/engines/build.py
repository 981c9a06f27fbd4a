"""A module of diffusers or transformers around tensors that already exist.

The structure comes from the library and the folder's config.json; the parameters *are* the given tensors.
Nothing is copied and nothing is ever written in place, because the tensors may be read-only views of
shared memory.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from deployments.engines.nn.fp8_linear import take_scales
from deployments.engines.protocol import EngineError
from weights.loading.modules import Binding, UninitializedOnMeta, find_places, listed, tied_groups, without_value

LIBRARIES = ("diffusers", "transformers")
# The libraries import lazily and in circles: two threads that begin at different places see half of a module each.
IMPORT_LOCK = threading.RLock()


def build_module(
    library: str,
    class_name: str | None,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    optional_parts: Collection[str] = (),
) -> nn.Module:
    """Build the model of `folder`/config.json around `tensors`, in eval mode, without gradients.

    `class_name` None takes the class that config.json names. The compute dtype is the tensors' own:
    whatever dtype the config mentions is not looked at. `optional_parts` names direct children (a BERT's
    "pooler") that become None when none of their tensors is given. Raises EngineError when tensors are
    missing, unexpected or of another shape; old names that the library itself still understands are
    accepted, if they need no arithmetic.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    skeleton = build_skeleton(library, class_name, folder, shapes, optional_parts=optional_parts)
    skeleton.binding.put_tensors(tensors)
    return skeleton.module


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
) -> Skeleton:
    """Build what `build_module` does, without its tensors (of these names and shapes). Raises as it does."""
    config = read_config(folder / "config.json")
    with IMPORT_LOCK:
        cls = _resolve_class(library, class_name, config, folder)
        module = _blank_module(cls, folder, config)
    take_scales(module, shapes)
    names = _rename_like_stock(module, shapes, folder)
    _drop_absent_parts(module, names, optional_parts)
    _check_names(module, {new: shapes[old] for new, old in names.items()}, folder)
    binding = find_places(module, names)
    module.requires_grad_(False)
    return Skeleton(module.eval(), binding.renamed(names))


def import_class(library: str, class_name: str | None) -> None:
    """Pay for the import of a class before the first request needs it: the libraries import lazily, for seconds."""
    if library in LIBRARIES and class_name:
        with IMPORT_LOCK:
            getattr(importlib.import_module(library), class_name, None)


def read_config(path: Path) -> dict[str, Any]:
    """Read the JSON object in `path`. Raises EngineError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _resolve_class(library: str, class_name: str | None, config: Mapping[str, Any], folder: Path) -> type[Any]:
    if library not in LIBRARIES:
        raise EngineError(f"{folder}: unknown library {library!r} (known: {', '.join(LIBRARIES)})")
    if class_name is None:
        class_name = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
        if class_name is None:
            raise EngineError(f"{folder}: config.json names no class ('_class_name' or 'architectures')")
    package = importlib.import_module(library)
    cls = getattr(package, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module) and hasattr(cls, "from_pretrained")):
        near = difflib.get_close_matches(class_name, dir(package), n=3)
        raise EngineError(
            f"{folder}: {library} {package.__version__} has no model class {class_name!r}"
            + (f" (near names: {', '.join(near)})" if near else "")
        )
    return cls


def _blank_module(cls: type[Any], folder: Path, config: Mapping[str, Any]) -> Any:
    """The module with its parameters on `meta`; buffers are real, since some exist nowhere else."""
    try:
        with UninitializedOnMeta():
            if hasattr(cls, "config_class"):
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
    if hasattr(module, "_fix_state_dict_keys_on_load"):  # diffusers: attention blocks of old VAEs
        names = {name: name for name in given}
        module._fix_state_dict_keys_on_load(names)
        return names
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
    names = {}
    for name in given:
        new_name, converter = rename_source_key(name, renamings, converters, module.base_model_prefix, expected)
        if converter is not None:
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
    missing = _without(absent, getattr(module, "_keys_to_ignore_on_load_missing", None))
    if missing:
        raise EngineError(f"{folder}: {listed(missing, 'tensor')} missing for a {type(module).__name__}")
    ignored = set(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Persistent in old checkpoints, computed today; transformers ignores them for every class.
    ignored |= {r"(^|\.)position_ids$", r"rotary_emb\.inv_freq"}
    unexpected = _without((name for name in shapes if name not in expected), ignored)
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


def _without(names: Iterable[str], patterns: Collection[str] | None) -> list[str]:
    found = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(pattern.search(name) for pattern in found)]
