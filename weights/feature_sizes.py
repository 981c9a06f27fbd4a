"""Vector sizes of encoders and heads, told from manifest and skeleton alone.

A pipeline's tensors are placed in memory before its models are built, and typed before anything has run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.errors import FormatError
from weights.formats.dense_head import read_dense_config
from weights.formats.untrusted import is_size, load_json, shown
from weights.formats.weight_files import is_plain_name, read_json
from weights.manifest import Component, Manifest


@dataclass(frozen=True, slots=True)
class FeatureSizes:
    """Numbers per item; None where nobody says. An embedding model takes text, so it has only `out_features`.

    `labels` name what a head gives, in order, where its config does.
    """

    in_features: int | None = None
    out_features: int | None = None
    labels: tuple[str, ...] = ()


def feature_sizes(manifest: Manifest, skeleton: Path) -> FeatureSizes:
    """Return the sizes of an "embedding" or "head"; empty ones for other kinds."""
    if manifest.kind not in ("embedding", "head") or len(manifest.components) != 1:
        return FeatureSizes()
    (component,) = manifest.components.values()
    if manifest.kind == "head":
        out_features, in_features = component.tensors["linear.weight"].shape
        return FeatureSizes(in_features, out_features, _labels(skeleton / component.folder))
    return FeatureSizes(out_features=_embedding_size(component, skeleton / component.folder))


def _labels(folder: Path) -> tuple[str, ...]:
    try:
        return read_dense_config(folder / "config.json").labels or ()
    except FormatError:  # the head itself will say what is wrong with it
        return ()


def _embedding_size(component: Component, folder: Path) -> int | None:
    try:
        config = read_json(folder / "config.json")
        projected = ("projection_dim",) if component.class_name == "CLIPTextModelWithProjection" else ()
        names = (*projected, "hidden_size", "d_model")
        size = next((config[name] for name in names if is_size(config.get(name))), None)
        pooling = None if (component.class_name or "").startswith("CLIP") else _pooling_folder(folder)
        return size and size * _num_pooled(read_json(pooling / "config.json")) if pooling else size
    except FormatError:  # the encoder itself will say what is wrong with it
        return None


def _pooling_folder(folder: Path) -> Path | None:
    """Find the pooling stage of a sentence-transformers folder in modules.json. Raises FormatError."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    try:
        stages = load_json(path.read_text("utf-8"))
        poolings = [stage["path"] for stage in stages if stage["type"].endswith("Pooling")]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FormatError(f"{path}: {error}") from None
    if not poolings:
        return None
    if not isinstance(poolings[-1], str) or not is_plain_name(poolings[-1]):
        raise FormatError(f"{path}: {shown(poolings[-1])} is not a folder beside it")
    return folder / poolings[-1]


def _num_pooled(pooling: Mapping[str, Any]) -> int:
    """Count the concatenated ways of pooling, in both spellings of sentence-transformers."""
    mode = pooling.get("pooling_mode")
    if mode is not None:
        return len(mode) if isinstance(mode, list) else 1
    return sum(bool(value) for name, value in pooling.items() if name.startswith("pooling_mode_")) or 1
