"""Vector sizes of encoders and heads, told from manifest and skeleton alone.

A pipeline's tensors are placed in memory before its models are built, and typed before anything has run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from weights.formats import dense_head
from weights.formats.classifier import read_labels
from weights.formats.encoder_files import read_stages
from weights.formats.folder import read_json
from weights.formats.untrusted import is_size
from weights.records.errors import FormatError
from weights.records.manifest import ModelKind


@dataclass(frozen=True, slots=True)
class FeatureSizes:
    """Numbers per item; None where nobody says. What takes text has only `out_features`.

    `labels` name what a head, reranker or classifier gives, in order, where its config does.
    """

    in_features: int | None = None
    out_features: int | None = None
    labels: tuple[str, ...] = ()


class _ComponentHeader(Protocol):
    @property
    def class_name(self) -> str | None: ...
    @property
    def folder(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, Any]: ...


def feature_sizes(kind: ModelKind, components: Collection[_ComponentHeader], skeleton: Path) -> FeatureSizes:
    """Return the sizes of an encoder, classifier or "head", stored or not; empty ones for other kinds."""
    if kind not in ("embedding", "reranker", "classifier", "head") or not components:
        return FeatureSizes()
    *_, last = components
    if kind == "embedding" and last.class_name == dense_head.CLASS_NAME:  # behind the pooling
        return FeatureSizes(out_features=last.tensors["linear.weight"].shape[0])
    if len(components) != 1:
        return FeatureSizes()
    (component,) = components
    if kind in ("reranker", "classifier"):
        labels = _classes(skeleton / component.folder / "config.json")
        return FeatureSizes(out_features=len(labels) or None, labels=labels)
    if kind == "head":
        out_features, in_features = component.tensors["linear.weight"].shape
        return FeatureSizes(in_features, out_features, _labels(skeleton / component.folder))
    return FeatureSizes(out_features=_embedding_size(component, skeleton / component.folder))


def _classes(path: Path) -> tuple[str, ...]:
    try:
        return read_labels(read_json(path), path)
    except FormatError:  # the classifier itself will say what is wrong with it
        return ()


def _labels(folder: Path) -> tuple[str, ...]:
    try:
        return dense_head.read_dense_config(folder / "config.json").labels or ()
    except FormatError:  # the head itself will say what is wrong with it
        return ()


def _embedding_size(component: _ComponentHeader, folder: Path) -> int | None:
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
    poolings = [stage.folder for stage in read_stages(folder) or () if stage.name == "Pooling"]
    return folder / poolings[-1] if poolings else None


def _num_pooled(pooling: Mapping[str, Any]) -> int:
    """Count the concatenated ways of pooling, in both spellings of sentence-transformers."""
    mode = pooling.get("pooling_mode")
    if mode is not None:
        return len(mode) if isinstance(mode, list) else 1
    return sum(bool(value) for name, value in pooling.items() if name.startswith("pooling_mode_")) or 1
