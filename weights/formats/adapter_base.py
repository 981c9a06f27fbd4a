"""A model as its adapters see it: what their headers and configs are compared with when they are registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weights.manifest import ModelKind


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """A model that an adapter is for: components by name, of its manifest or of its checkpoint, with their tensors.

    `folder` has its configs. `fingerprint` is its version in the store, "" for one that is not there.
    """

    model: str
    kind: ModelKind
    class_name: str | None
    folder: Path
    components: Mapping[str, Any]
    fingerprint: str = ""
