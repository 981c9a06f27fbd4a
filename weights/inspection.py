"""Summaries of the store: a model tensor by tensor, and how much deduplication saves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from weights.manifest import Manifest
from weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class ExternalWeight:
    """A tensor: `id` is its sha256, `path` the file relative to the store, `offset` its first byte in that file.

    `is_delta`: the tensor is stored as a difference from another model's; `offset` is where that of its extent begins.
    """

    id: str
    component: str
    name: str
    path: PurePosixPath
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    extent: str
    is_delta: bool = False


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """Sums over models: `given_bytes` of all tensors, `stored_bytes` of the extents with these, each place once.

    A model's own sum has the bases that its deltas need, which another model mostly has as well.
    """

    num_models: int
    num_tensors: int
    given_bytes: int
    stored_bytes: int


def summarize(store: WeightStore, model: str) -> list[ExternalWeight]:
    """Return every tensor of `model`, in order. Raises ModelNotStored with the known names."""
    manifest = store.manifest(model)
    plain = manifest.plain_extents
    return [
        ExternalWeight(
            id=ref.sha256,
            component=component.name,
            name=name,
            path=PurePosixPath("packs", manifest.extents[ref.extent].pack),
            offset=manifest.extents[ref.extent].offset + (ref.offset if ref.extent in plain else 0),
            nbytes=ref.nbytes,
            dtype=ref.dtype,
            shape=ref.shape,
            extent=ref.extent,
            is_delta=ref.extent not in plain,
        )
        for component in manifest.components.values()
        for name, ref in component.tensors.items()
    ]


def totals(store: WeightStore, model: str | None = None) -> StoreTotals:
    """Count the bytes of one model, or of the whole store."""
    return _totals(store.manifests().values() if model is None else [store.manifest(model)])


def _totals(manifests: Iterable[Manifest]) -> StoreTotals:
    manifests = list(manifests)
    runs = {run for manifest in manifests for extent in manifest.extents.values() for run in extent.runs()}
    return StoreTotals(
        num_models=len(manifests),
        num_tensors=sum(len(component.tensors) for manifest in manifests for component in manifest.components.values()),
        given_bytes=sum(manifest.nbytes for manifest in manifests),
        stored_bytes=sum(run.nbytes for run in runs),
    )
