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
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deployments.engines.protocol import EngineError
from weights.loading.modules import UninitializedOnMeta, assign, listed, tied_groups, without_value

LIBRARIES = ("diffusers", "transformers")


def build_module(
    library: str,
    class_name: str | None,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    optional_parts: Collection[str] = (),
) -> nn.Module:
    """The model of `folder`/config.json with `tensors` as its parameters, in eval mode, without gradients.

    `class_name` None takes the class that config.json names. The compute dtype is the tensors' own:
    whatever dtype the config mentions is not looked at. `optional_parts` names direct children (a BERT's
    "pooler") that become None when none of their tensors is given. Raises EngineError when tensors are
    missing, unexpected or of another shape; old names that the library itself still understands are
    accepted, if they need no arithmetic.
    """
    config = read_config(folder / "config.json")
    cls = _resolve_class(library, class_name, config, folder)
    module = _skeleton(cls, folder, config)
    named = _rename_like_stock(module, tensors, folder)
    _drop_absent_parts(module, named, optional_parts)
    _check_names(module, named, folder)
    assign(module, named)
    _check_complete(module, folder)
    return module.eval().requires_grad_(False)


def import_class(library: str, class_name: str | None) -> None:
    """Pay for the import of a class before the first request needs it: the libraries import lazily, for seconds."""
    if library in LIBRARIES and class_name:
        getattr(importlib.import_module(library), class_name, None)


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises EngineError naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
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


def _skeleton(cls: type[Any], folder: Path, config: Mapping[str, Any]) -> Any:
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


def _rename_like_stock(module: Any, tensors: Mapping[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """Names of older checkpoints as the module has them today (pure renames only)."""
    expected = module.state_dict()
    if all(name in expected for name in tensors):
        return dict(tensors)
    if hasattr(module, "_fix_state_dict_keys_on_load"):  # diffusers: attention blocks of old VAEs
        named = dict(tensors)
        module._fix_state_dict_keys_on_load(named)
        return named
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if not isinstance(transform, WeightRenaming)]
    named = {}
    for name, tensor in tensors.items():
        new_name, converter = rename_source_key(name, renamings, converters, module.base_model_prefix, expected)
        if converter is not None:
            raise EngineError(f"{folder}: tensor {name!r} is in an old layout; save the model again with transformers")
        named[new_name] = tensor
    return named


def _drop_absent_parts(module: nn.Module, named: Mapping[str, torch.Tensor], parts: Collection[str]) -> None:
    for part in parts:
        if isinstance(getattr(module, part, None), nn.Module) and not any(n.startswith(f"{part}.") for n in named):
            setattr(module, part, None)


def _check_names(module: Any, named: Mapping[str, torch.Tensor], folder: Path) -> None:
    expected = module.state_dict()
    tied = {name for group in tied_groups(module) if any(n in named for n in group) for name in group}
    missing = [name for name in expected if name not in named and name not in tied]
    missing = _without(missing, getattr(module, "_keys_to_ignore_on_load_missing", None))
    if missing:
        raise EngineError(f"{folder}: {listed(missing, 'tensor')} missing for a {type(module).__name__}")
    ignored = set(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Persistent in old checkpoints, computed today; transformers ignores them for every class.
    ignored |= {r"(^|\.)position_ids$", r"rotary_emb\.inv_freq"}
    unexpected = _without((name for name in named if name not in expected), ignored)
    if unexpected:
        raise EngineError(f"{folder}: a {type(module).__name__} has no place for {listed(unexpected, 'tensor')}")
    for name, tensor in named.items():
        if name in expected and tensor.shape != expected[name].shape:
            raise EngineError(
                f"{folder}: tensor {name!r} has shape {tuple(tensor.shape)}, "
                f"the config asks for {tuple(expected[name].shape)}"
            )


def _check_complete(module: nn.Module, folder: Path) -> None:
    if left := without_value(module):
        raise EngineError(f"{folder}: {listed(left, 'tensor')} of {type(module).__name__} got no value")


def _without(names: Iterable[str], patterns: Collection[str] | None) -> list[str]:
    found = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if not any(pattern.search(name) for pattern in found)]
