"""How long the vectors are that an encoder gives and a head takes, told from manifest and skeleton alone.

A pipeline's tensors are placed in memory before its models are built, and typed before anything has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.errors import FormatError
from weights.formats.weight_files import read_json
from weights.manifest import Component, Manifest


@dataclass(frozen=True, slots=True)
class FeatureSizes:
    """Numbers per item; None where nobody says. An embedding model takes text, so it has only `out_features`."""

    in_features: int | None = None
    out_features: int | None = None


def feature_sizes(manifest: Manifest, skeleton: Path) -> FeatureSizes:
    """Of an "embedding" or "head"; nothing for other kinds."""
    if manifest.kind not in ("embedding", "head") or len(manifest.components) != 1:
        return FeatureSizes()
    (component,) = manifest.components.values()
    if manifest.kind == "head":
        out_features, in_features = component.tensors["linear.weight"].shape
        return FeatureSizes(in_features, out_features)
    return FeatureSizes(out_features=_embedding_size(component, skeleton / component.folder))


def _embedding_size(component: Component, folder: Path) -> int | None:
    try:
        config = read_json(folder / "config.json")
        projected = ("projection_dim",) if component.class_name == "CLIPTextModelWithProjection" else ()
        names = (*projected, "hidden_size", "d_model")
        size = next((config[name] for name in names if isinstance(config.get(name), int)), None)
        pooling = folder / "1_Pooling" / "config.json"
        return size and size * _num_pooled(read_json(pooling)) if pooling.is_file() else size
    except FormatError:  # the encoder itself will say what is wrong with it
        return None


def _num_pooled(pooling: Mapping[str, Any]) -> int:
    """Several ways of pooling are concatenated. Both spellings of sentence-transformers."""
    mode = pooling.get("pooling_mode")
    if mode is not None:
        return 1 if isinstance(mode, str) else len(mode)
    return sum(bool(value) for name, value in pooling.items() if name.startswith("pooling_mode_")) or 1
