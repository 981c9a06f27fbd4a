"""Summaries of the store: a model tensor by tensor, and how much deduplication saves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from weights.manifest import Manifest
from weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class ExternalWeight:
    """A tensor: `id` is its sha256, `path` the file relative to the store, `offset` its first byte in that file."""

    id: str
    component: str
    name: str
    path: PurePosixPath
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    extent: str


@dataclass(frozen=True, slots=True)
class StoreTotals:
    """Sums over models: `given_bytes` of all tensors, `stored_bytes` of the extents with these, each place once."""

    num_models: int
    num_tensors: int
    given_bytes: int
    stored_bytes: int


def summarize(store: WeightStore, model: str) -> list[ExternalWeight]:
    """Return every tensor of `model`, in order. Raises ModelNotStored with the known names."""
    manifest = store.manifest(model)
    return [
        ExternalWeight(
            id=ref.sha256,
            component=component.name,
            name=name,
            path=PurePosixPath("packs", manifest.extents[ref.extent].pack),
            offset=manifest.extents[ref.extent].offset + ref.offset,
            nbytes=ref.nbytes,
            dtype=ref.dtype,
            shape=ref.shape,
            extent=ref.extent,
        )
        for component in manifest.components.values()
        for name, ref in component.tensors.items()
    ]


def totals(store: WeightStore, model: str | None = None) -> StoreTotals:
    """Count the bytes of one model, or of the whole store."""
    return _totals(store.manifests().values() if model is None else [store.manifest(model)])


def _totals(manifests: Iterable[Manifest]) -> StoreTotals:
    manifests = list(manifests)
    places = {
        (extent.pack, extent.offset, extent.nbytes) for manifest in manifests for extent in manifest.extents.values()
    }
    return StoreTotals(
        num_models=len(manifests),
        num_tensors=sum(len(component.tensors) for manifest in manifests for component in manifest.components.values()),
        given_bytes=sum(manifest.nbytes for manifest in manifests),
        stored_bytes=sum(nbytes for _, _, nbytes in places),
    )
