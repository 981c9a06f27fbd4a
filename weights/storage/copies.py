"""All places that a tensor can be read from: packs of the store, and the checkpoints that its models came from."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weights.dtypes import cast
from weights.errors import ExtentCorrupt, FormatError, WeightsError
from weights.formats.checkpoint import read_checkpoint
from weights.formats.tensors import SourceTensor
from weights.manifest import Component, Manifest, TensorRef
from weights.storage.stored import StoredTensor
from weights.store import WeightStore

_Read = Callable[[], bytes | memoryview]
_BySource = dict[tuple[str, str], SourceTensor]  # by component and name


@dataclass
class CopiedTensor:
    """A SourceTensor that is read from the first of its copies that has the bytes of `sha256`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str
    copies: list[_Read]

    def read(self) -> bytes | memoryview:
        """The bytes. Raises ExtentCorrupt saying of every copy why it will not do."""
        problems = []
        for copy in self.copies:
            try:
                data = copy()
            except WeightsError as error:
                problems.append(str(error))
                continue
            if hashlib.sha256(data).hexdigest() == self.sha256:
                self.copies = [copy]
                return data
            problems.append("the source has other bytes than were stored")
        raise ExtentCorrupt(f"tensor {self.name}: no sound copy: {'; '.join(problems)}")


class Copies:
    """The copies of the `wanted` tensors, by sha256, in all models of the store. Sources are opened when needed."""

    def __init__(
        self, store: WeightStore, manifests: Iterable[Manifest], wanted: Collection[str], *, allow_torch: bool
    ) -> None:
        self._store = store
        self._allow_torch = allow_torch
        self._sources: dict[str, _BySource | WeightsError] = {}
        self._stored: dict[str, dict[tuple[str, int], tuple[Manifest, TensorRef]]] = defaultdict(dict)
        for manifest in manifests:
            for component in manifest.components.values():
                for ref in component.tensors.values():
                    if ref.sha256 in wanted:
                        extent = manifest.extents[ref.extent]
                        self._stored[ref.sha256][extent.pack, extent.offset + ref.offset] = manifest, ref

    def tensors(self, manifest: Manifest, component: Component) -> Mapping[str, CopiedTensor]:
        """The component's tensors by name: each from its own place, else from others, else from the source."""
        return {name: self._tensor(manifest, component, name, ref) for name, ref in component.tensors.items()}

    def _tensor(self, manifest: Manifest, component: Component, name: str, ref: TensorRef) -> CopiedTensor:
        label = f"{component.name}.{name}"
        places = [(manifest, ref), *self._stored.get(ref.sha256, {}).values()]
        extent = manifest.extents[ref.extent]
        copies = [self._in_store(label, *place) for place in places]
        copies.append(lambda: self._in_source(manifest, component.name, name, ref))
        return CopiedTensor(
            label, self._store.packs / extent.pack, ref.dtype, ref.shape, ref.nbytes, ref.sha256, copies
        )

    def _in_store(self, label: str, manifest: Manifest, ref: TensorRef) -> _Read:
        def read() -> bytes:
            extent = manifest.extents[ref.extent]
            file = self._store.pack_file(extent.pack)
            place = extent.offset + ref.offset
            return StoredTensor(label, file, place, ref.nbytes, ref.dtype, ref.shape, ref.sha256).read()

        return read

    def _in_source(self, manifest: Manifest, component: str, name: str, ref: TensorRef) -> bytes | memoryview:
        if manifest.source not in self._sources:
            try:
                self._sources[manifest.source] = self._open(manifest)
            except WeightsError as error:
                self._sources[manifest.source] = error
        source = self._sources[manifest.source]
        if isinstance(source, WeightsError):
            raise source
        tensor = source.get((component, name))
        if tensor is None:
            raise FormatError(f"{manifest.source}: has no tensor {component}.{name}")
        try:
            return cast(tensor.read(), tensor.dtype, ref.dtype)
        except KeyError:  # of a type that is not cast: not what was stored
            raise FormatError(f"{tensor.file}: tensor {name!r} is {tensor.dtype} by now, not {ref.dtype}") from None

    def _open(self, manifest: Manifest) -> _BySource:
        if manifest.kind == "program":
            raise FormatError(
                f"{manifest.source}: a program is not taken apart again; `remove` it and bring it in again"
            )
        checkpoint = read_checkpoint(Path(manifest.source), allow_torch=self._allow_torch)
        return {(part.name, name): tensor for part in checkpoint.components for name, tensor in part.tensors.items()}
