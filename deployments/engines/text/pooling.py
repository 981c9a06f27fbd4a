"""Pooling: one vector of many token vectors, as a sentence encoder makes it, read from a sentence-transformers folder.

Format: modules.json lists the stages; the Pooling stage has a folder with config.json. Source: sentence-
transformers 6.2, `sentence_transformer/modules/pooling.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deployments.engines.build import read_config
from deployments.engines.protocol import EngineError

# Order matters: several modes at once are concatenated in this one.
MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
MODES = tuple(MODE_FLAGS.values())
STAGES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class Pooling:
    """`modes` are concatenated; `normalize` scales the result to length 1."""

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = False

    def __call__(self, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
        """(B, L, D) and a 0/1 mask (B, L) -> (B, D * len(modes))."""
        pooled = torch.cat([_pool(mode, hidden_BLD, mask_BL) for mode in self.modes], dim=-1)
        return torch.nn.functional.normalize(pooled, p=2, dim=-1) if self.normalize else pooled


def load_pooling(folder: Path) -> Pooling:
    """Read what `folder`'s modules.json says; mean pooling without one, as sentence-transformers does."""
    path = folder / "modules.json"
    if not path.exists():
        return Pooling()
    stages = [(str(stage["type"]).rsplit(".", 1)[-1], str(stage["path"])) for stage in _read_stages(path)]
    unknown = [name for name, _ in stages if name not in STAGES]
    if unknown:
        raise EngineError(f"{path}: unknown stage {unknown[0]!r} (known: {', '.join(STAGES)}){_way(stages)}")
    modes: tuple[str, ...] = ("mean",)
    for name, subfolder in stages:
        if name == "Pooling":
            config_path = folder / subfolder / "config.json"
            modes = _modes(config_path, read_config(config_path))
    return Pooling(modes, normalize=any(name == "Normalize" for name, _ in stages))


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


def _modes(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        flags = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        unknown = [flag for flag in flags if flag not in MODE_FLAGS]
        modes = tuple(mode for flag, mode in MODE_FLAGS.items() if flag in flags) or ("mean",)
    else:
        modes = (given,) if isinstance(given, str) else tuple(given)
        unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise EngineError(f"{path}: unknown pooling {unknown[0]!r} (known: {', '.join(MODES)})")
    return modes


def _pool(mode: str, hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    if mode == "cls":
        return hidden_BLD[:, 0]
    mask_BL1 = mask_BL.unsqueeze(-1)
    if mode == "max":
        return hidden_BLD.masked_fill(mask_BL1 == 0, float("-inf")).amax(dim=1)
    # Sums of half-precision vectors lose bits; the stock library adds them up in float32 as well.
    summed_BD = (hidden_BLD * mask_BL1.to(hidden_BLD.dtype)).sum(dim=1, dtype=torch.float32)
    return (summed_BD / mask_BL1.sum(dim=1).clamp(min=1)).to(hidden_BLD.dtype)
