"""The record of extents, their places and their tensors; written as meta.json for other programs.

Derived from the manifests, so it can be made again from them. The store itself asks its index for what it needs
(weights/storage/index.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from weights.manifest import ExtentRef, Hex128, Hex256, InsidePath, Manifest, Size

STORE_VERSION: Final = 2

ExtentId = Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]


class StoredExtent(BaseModel):
    """An extent and the offset of each of its tensors, by sha256."""

    model_config = ConfigDict(extra="forbid")
    pack: InsidePath
    offset: Size
    nbytes: Size
    checksum: Hex128
    tensors: dict[Hex256, Size]


class StoreMeta(BaseModel):
    """Contents of meta.json. A tensor may be in several extents: what is too small a part of one is written again.

    Tensors are listed under their extent because that is compact: of 1,000,000 tensors the file has 77 MB and is read
    and written in 3 s; one record per tensor took 148 MB and 10 s.
    """

    model_config = ConfigDict(extra="forbid")
    version: Literal[2] = STORE_VERSION
    extents: dict[ExtentId, StoredExtent] = {}
    _extents_of: dict[str, list[str]] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        self._extents_of = {}
        for id_, extent in self.extents.items():
            for sha256 in extent.tensors:
                self._extents_of.setdefault(sha256, []).append(id_)

    @property
    def tensors(self) -> Mapping[str, list[str]]:
        """Extent ids by tensor sha256."""
        return self._extents_of

    def extent(self, id_: str) -> ExtentRef:
        """Return the extent as manifests name it."""
        stored = self.extents[id_]
        return ExtentRef(id=id_, pack=stored.pack, offset=stored.offset, nbytes=stored.nbytes, checksum=stored.checksum)

    def add_extent(self, extent: ExtentRef, tensors: Mapping[str, int]) -> None:
        """Enter tensors (offset by sha256) that lie in `extent`. Equal ids are equal bytes: the latest place counts."""
        known = self.extents.get(extent.id)
        before = known.tensors if known else {}
        self.extents[extent.id] = StoredExtent(
            **extent.model_dump(exclude={"id", "delta"}), tensors=before | dict(tensors)
        )
        for sha256 in tensors.keys() - before.keys():
            self._extents_of.setdefault(sha256, []).append(extent.id)

    def forget_extents(self, ids: Iterable[str]) -> None:
        """Take extents out, with their tensors. Their bytes stay until `gc`."""
        for id_ in ids:
            for sha256 in self.extents.pop(id_).tensors:
                self._extents_of[sha256].remove(id_)
                if not self._extents_of[sha256]:
                    del self._extents_of[sha256]


def meta_of(manifests: Iterable[Manifest], before: StoreMeta | None = None) -> StoreMeta:
    """Build what meta.json says when these are all models. Tensors of `inline` models are private to them, and what is
    stored as a delta alone has no place.

    Where models name several places for one extent, it is the one that `before` has, if any: a copy that was
    written because another was damaged stays the one that is shared.
    """
    meta = StoreMeta()
    for manifest in manifests:
        if manifest.layout == "inline":
            continue
        tensors: dict[str, dict[str, int]] = {id_: {} for id_ in manifest.extents}
        for component in manifest.components.values():
            for ref in component.tensors.values():
                tensors[ref.extent][ref.sha256] = ref.offset
        for id_, extent in manifest.plain_extents.items():
            offsets = tensors[id_]
            is_preferred = before is not None and id_ in before.extents and before.extent(id_) == extent
            meta.add_extent(extent if id_ not in meta.extents or is_preferred else meta.extent(id_), offsets)
    return meta
