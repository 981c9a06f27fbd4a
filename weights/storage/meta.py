"""meta.json: which tensors the store has, and where. Derived from the manifests, so it can be made again from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
    """Contents of meta.json. Mutable: a writer adds to it under the lock and publishes it whole.

    Every publish rewrites all of it. Tensors are listed under their extent because that is compact: of 1,000,000
    tensors the file has 77 MB and is read and written in 3 s; one record per tensor took 148 MB and 10 s.
    """

    model_config = ConfigDict(extra="forbid")
    version: Literal[2] = STORE_VERSION
    extents: dict[ExtentId, StoredExtent] = {}
    _extent_of: dict[str, str] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        self._extent_of = {sha256: id_ for id_, extent in self.extents.items() for sha256 in extent.tensors}

    @property
    def tensors(self) -> Mapping[str, str]:
        """Extent id by sha256."""
        return self._extent_of

    def locate(self, sha256: str) -> tuple[ExtentRef, int]:
        """The extent of a tensor that the store has, and its offset there."""
        id_ = self._extent_of[sha256]
        return self.extent(id_), self.extents[id_].tensors[sha256]

    def extent(self, id_: str) -> ExtentRef:
        """The extent as manifests name it."""
        return ExtentRef(id=id_, **self.extents[id_].model_dump(exclude={"tensors"}))

    def add(self, extent: ExtentRef, tensors: Mapping[str, int]) -> None:
        """Enter tensors (offset by sha256) that lie in `extent`; those that are known already stay where they are."""
        new = {sha256: offset for sha256, offset in tensors.items() if sha256 not in self._extent_of}
        if not new:
            return
        known = self.extents.get(extent.id)
        self.extents[extent.id] = StoredExtent(
            **extent.model_dump(exclude={"id"}), tensors=(known.tensors if known else {}) | new
        )
        self._extent_of |= dict.fromkeys(new, extent.id)

    def forget_tensors(self, hashes: Iterable[str]) -> None:
        """So that they are written anew. Their old bytes stay until `gc`."""
        for sha256 in hashes:
            del self.extents[self._extent_of.pop(sha256)].tensors[sha256]

    def keep_extents(self, keep: Callable[[str], bool]) -> None:
        """Forget the extents whose id `keep` refuses, and their tensors."""
        self.extents = {id_: extent for id_, extent in self.extents.items() if keep(id_)}
        self.model_post_init(None)


def meta_of(manifests: Iterable[Manifest]) -> StoreMeta:
    """What meta.json has to say when these are all models. Tensors of `inline` models are private to them."""
    meta = StoreMeta()
    for manifest in manifests:
        if manifest.layout == "inline":
            continue
        places: dict[str, dict[str, int]] = {id_: {} for id_ in manifest.extents}
        for component in manifest.components.values():
            for ref in component.tensors.values():
                places[ref.extent][ref.sha256] = ref.offset
        for id_, tensors in places.items():
            meta.add(manifest.extents[id_], tensors)
    return meta
