"""Rules for the embeddings of a model, as its folder has them: how one vector is made, and how short it may be.

Format: modules.json of sentence-transformers lists the stages; the Pooling stage has a folder with config.json. Source:
sentence-transformers 6.2, `sentence_transformer/modules/pooling.py`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from deployments.engines.build import read_config
from deployments.engines.protocol import EngineError

_STAGES: Final = ("Transformer", "Pooling", "Normalize")
# Order matters: several modes at once are concatenated in this one.
_MODE_FLAGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
}


class PoolingRule(NamedTuple):
    """The ways of making one vector of many, in the order in which they are concatenated; () where none is named."""

    modes: tuple[str, ...]
    normalize: bool


def read_pooling_rule(folder: Path, known: Collection[str]) -> PoolingRule | None:
    """Read what `folder`'s modules.json says; None without one.

    Raises EngineError for stages that are not supported, and for ways that are not `known`.
    """
    path = folder / "modules.json"
    if not path.exists():
        return None
    stages = [(str(stage["type"]).rsplit(".", 1)[-1], str(stage["path"])) for stage in _read_stages(path)]
    unknown = [name for name, _ in stages if name not in _STAGES]
    if unknown:
        raise EngineError(f"{path}: unknown stage {unknown[0]!r} (known: {', '.join(_STAGES)}){_way(stages)}")
    modes: tuple[str, ...] = ()
    for name, subfolder in stages:
        if name == "Pooling":
            config_path = folder / subfolder / "config.json"
            modes = _modes(config_path, read_config(config_path), known)
    return PoolingRule(modes, normalize=any(name == "Normalize" for name, _ in stages))


def check_dimensions(dimensions: int, size: int, config: Any) -> None:
    """Raise EngineError unless the first `dimensions` of a vector of `size` mean something.

    They do where config.json says that the model was trained for it, by `matryoshka_dimensions` or `is_matryoshka` (the
    keys that other servers read too).
    """
    if dimensions == size:
        return
    sizes = getattr(config, "matryoshka_dimensions", None)
    if not sizes and getattr(config, "is_matryoshka", None) is not True:
        raise EngineError(
            f"dimensions: {dimensions}, but the model has {size} and was not trained for fewer "
            "(no matryoshka_dimensions in its config)"
        )
    if sizes and dimensions not in sizes:
        raise EngineError(f"dimensions: {dimensions}; the model was trained for {', '.join(map(str, sizes))}")
    if dimensions > size:
        raise EngineError(f"dimensions: {dimensions}, but the model has {size}")


def _way(stages: list[tuple[str, str]]) -> str:
    """Return what can be done about a layer behind the pooling, or nothing when there is none."""
    folder = next((subfolder for name, subfolder in stages if name == "Dense"), None)
    if folder is None:
        return ""
    return f"; without that stage in modules.json, its folder {folder!r} can be served as a model of its own, a head"


def _read_stages(path: Path) -> list[Mapping[str, Any]]:
    try:
        stages = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}: cannot be read as JSON: {error}") from None
    if not (isinstance(stages, list) and all(isinstance(s, dict) and {"type", "path"} <= s.keys() for s in stages)):
        raise EngineError(f"{path}: expected a list of objects with 'type' and 'path'")
    return stages


def _modes(path: Path, config: Mapping[str, Any], known: Collection[str]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        unknown = [flag for flag in flags if _MODE_FLAGS.get(flag) not in known]
        modes = tuple(mode for flag, mode in _MODE_FLAGS.items() if flag in flags)
    else:
        modes = (given,) if isinstance(given, str) else tuple(given)
        unknown = [mode for mode in modes if mode not in known]
    if unknown:
        raise EngineError(f"{path}: unknown pooling {unknown[0]!r} (known: {', '.join(known)})")
    return modes
