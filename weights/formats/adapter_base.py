"""A model as its adapters see it: what their headers and configs are compared with when they are registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.dtypes import cast_target, config_name
from weights.formats.pipeline_parts import PIPELINES
from weights.manifest import ModelKind


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """A model that an adapter is for: components by name, of its manifest or of its checkpoint, with their tensors.

    `folder` has its configs. `fingerprint` is its version in the store, "" for one that is not there. `dtype` is what
    `denoiser_dtype` tells.
    """

    model: str
    kind: ModelKind
    class_name: str | None
    folder: Path
    components: Mapping[str, Any]
    fingerprint: str = ""
    dtype: str = ""


def denoiser_dtype(class_name: str | None, components: Mapping[str, Any], dtypes: Mapping[str, str]) -> str:
    """Return `float_dtype` of a pipeline's denoiser, "" for what has none. `dtypes` are those wanted, by component."""
    parts = PIPELINES.get(class_name or "")
    if parts is None or parts.denoiser not in components:
        return ""
    return float_dtype(components[parts.denoiser], dtypes.get(parts.denoiser, "auto"))


def float_dtype(part: Any, wanted: str = "auto") -> str:
    """Return the config's name of the one floating type that a component's plain tensors have in the store.

    "" where they have several or none. `wanted` is a dtype as `weights.dtypes.cast_target` takes it.
    """
    types = {cast_target(tensor.dtype, wanted) for tensor in part.tensors.values()}
    names = {config_name(one) for one in types} - {""}
    return names.pop() if len(names) == 1 else ""
