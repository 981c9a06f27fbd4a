"""Tensors of a model of the store, read one by one and checked by their identity."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weights.errors import ExtentCorrupt, FormatError
from weights.formats.tensors import FileTensor
from weights.manifest import Component, Manifest
from weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a pack; a SourceTensor like those of checkpoints."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def read(self) -> bytes:
        """The bytes. Raises ExtentCorrupt when they are not there, or not the ones that were stored."""
        try:
            data = FileTensor(self.file, self.offset, self.nbytes, self.dtype, self.shape).read()
        except FormatError as error:
            raise ExtentCorrupt(f"tensor {self.name}: {error}") from error
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise ExtentCorrupt(
                f"{self.file}: bytes {self.offset}..{self.offset + self.nbytes} are not those of tensor {self.name}"
            )
        return data


def stored_tensors(store: WeightStore, manifest: Manifest, component: Component) -> Mapping[str, StoredTensor]:
    """The component's tensors by name. Raises StoreError for a pack that leads out of the store."""
    packs = {id_: store.pack_file(manifest.extents[id_].pack) for id_ in {r.extent for r in component.tensors.values()}}
    return {
        name: StoredTensor(
            name=f"{component.name}.{name}",
            file=packs[ref.extent],
            offset=manifest.extents[ref.extent].offset + ref.offset,
            nbytes=ref.nbytes,
            dtype=ref.dtype,
            shape=ref.shape,
            sha256=ref.sha256,
        )
        for name, ref in component.tensors.items()
    }
