"""A model's hashed tensors -> packs, meta.json, skeleton and manifest, in the layout asked for."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from weights.formats.tensors import FileTensor
from weights.manifest import Component, ExtentRef, Layout, Manifest, ModelKind, TensorRef
from weights.storage.durable import disk_errors, sync_tree
from weights.storage.hashing import HashedTensor
from weights.storage.inline import FileExtent, copy_file, file_extents
from weights.storage.meta import StoreMeta
from weights.storage.packs import write_combined, write_separate
from weights.storage.stock import WRITABLE_FORMATS, tensor_offsets, writable, write_files
from weights.store import WeightStore


@dataclass(frozen=True, slots=True)
class DraftComponent:
    """A component whose tensors have no place yet: `record` has none. `root` is the folder that its files are in."""

    record: Component
    tensors: dict[str, HashedTensor]
    root: Path | None = None

    @property
    def is_copyable(self) -> bool:
        """Whether its files have the tensors as they will be stored, in a format that can be written again."""
        if self.root is None or self.record.format not in WRITABLE_FORMATS:
            return False
        files = {self.root / self.record.folder / file for file in self.record.files}
        return all(
            isinstance(tensor.source, FileTensor)
            and tensor.source.file in files
            and tensor.dtype == tensor.source.dtype
            for tensor in self.tensors.values()
        )


_InlineComponent = tuple[DraftComponent, list[FileExtent]]
_Placed = tuple[list[Component], dict[str, ExtentRef]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A model on its way into the store.

    `write_skeleton` fills a folder that does not exist yet. `recheck` is called under the lock: it returns the
    manifest when somebody else was faster, and raises when the source is not what was hashed any more. `relocate`
    takes tensors out of the store's meta that are to be written anew.
    """

    model: str
    kind: ModelKind
    class_name: str | None
    source: str
    fingerprint: str
    skeleton: str
    components: Sequence[DraftComponent]
    write_skeleton: Callable[[Path], None]
    recheck: Callable[[], Manifest | None]
    relocate: Callable[[StoreMeta], None] = lambda meta: None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for component in self.components for tensor in component.tensors.values())


def publish(store: WeightStore, draft: Draft, layout: Layout, staging: Path | None = None) -> Manifest:
    """Write what the store lacks of `draft` and publish it. Packs are staged in `staging`, or inside the store.

    Raises FormatError when the source changed, StoreError when the disk is full or cannot be written; nothing is
    published then.
    """
    with (
        disk_errors(staging or store.path, draft.nbytes),
        store.staged("pack", staging) as pack,
        store.staged("skeleton") as skeleton,
    ):
        draft.write_skeleton(skeleton)
        # The files of `inline` are the model's own: the others need not wait while they are written.
        files = _write_inline(pack, skeleton, draft.components) if layout == "inline" else []
        with store.locked():
            known = draft.recheck()
            if known is not None:
                return known
            if layout == "inline":
                components, extents = _add_inline(store, draft, pack, files)
            else:
                components, extents = _add_shared(store, draft, layout, pack)
            manifest = _manifest(draft, layout, components, extents)
            with disk_errors(store.path, draft.nbytes):
                store.publish_model(manifest, skeleton)
    return manifest


def _add_shared(store: WeightStore, draft: Draft, layout: Layout, staged: Path) -> _Placed:
    """`combined` and `separate`: what meta.json has already, whoever brought it, is not written again."""
    meta = store.read_meta()
    store.forget_lost_packs(meta)
    draft.relocate(meta)
    tensors = [component.tensors.values() for component in draft.components]
    added: dict[str, Path] = {}
    if layout == "separate":
        added = write_separate(staged, store.packs, meta, itertools.chain.from_iterable(tensors))
        is_new = True
    else:
        name = store.new_pack_name(f"{draft.model}_weight_combined")
        is_new = write_combined(staged, name, meta, tensors)
        added = {name: staged} if is_new else {}
    if is_new:
        with disk_errors(store.path, draft.nbytes), _undone_on_failure(store, added):
            store.add_packs(added)
            store.write_meta(meta)
    components: list[Component] = []
    extents: dict[str, ExtentRef] = {}
    for component in draft.components:
        refs = {}
        for name, tensor in component.tensors.items():
            extent, offset = meta.locate(tensor.sha256)
            extents[extent.id] = extent
            refs[name] = _reference(tensor, extent, offset)
        components.append(component.record.model_copy(update={"tensors": refs}))
    return components, extents


def _write_inline(pack: Path, skeleton: Path, components: Sequence[DraftComponent]) -> list[_InlineComponent]:
    pack.mkdir()
    written = []
    for component in components:
        record, folder = writable(component.record), PurePosixPath(component.record.folder)
        (pack / folder).mkdir(parents=True, exist_ok=True)
        extents: list[FileExtent] = []
        if component.root is not None and component.is_copyable:
            for file in record.files:
                source, path = component.root / folder / file, str(folder / file)
                inside = {name: tensor for name, tensor in component.tensors.items() if tensor.source.file == source}
                extents += copy_file(source, pack / path, path, inside)
        else:
            contents = write_files(pack / folder, skeleton / folder, record, component.tensors)
            for file, names in contents.items():
                inside = {name: component.tensors[name] for name in names}
                offsets = tensor_offsets(pack / folder / file, record.format)
                extents += file_extents(pack / folder / file, str(folder / file), inside, offsets)
        written.append((component, extents))
    sync_tree(pack)
    return written


def _add_inline(store: WeightStore, draft: Draft, staged: Path, written: Sequence[_InlineComponent]) -> _Placed:
    pack = store.new_pack_name(f"{draft.model}_inline")
    components: list[Component] = []
    extents: dict[str, ExtentRef] = {}
    for component, placed_extents in written:
        refs = {}
        for placed in placed_extents:
            extent = placed.ref.model_copy(update={"pack": str(PurePosixPath(pack, placed.ref.pack))})
            extent = extents.setdefault(extent.id, extent)  # equal bytes: whichever of them is as good
            for name, offset in placed.offsets.items():
                refs[name] = _reference(component.tensors[name], extent, offset)
        tensors = {name: refs[name] for name in component.tensors}
        components.append(component.record.model_copy(update={"tensors": tensors}))
    with disk_errors(store.path, draft.nbytes), _undone_on_failure(store, [pack]):
        store.add_packs({pack: staged})
    return components, extents


def _reference(tensor: HashedTensor, extent: ExtentRef, offset: int) -> TensorRef:
    return TensorRef(
        extent=extent.id,
        offset=offset,
        nbytes=tensor.nbytes,
        dtype=tensor.dtype,
        shape=tensor.shape,
        sha256=tensor.sha256,
    )


def _manifest(draft: Draft, layout: Layout, components: Sequence[Component], extents: dict[str, ExtentRef]) -> Manifest:
    return Manifest(
        model=draft.model,
        kind=draft.kind,
        class_name=draft.class_name,
        skeleton=draft.skeleton,
        source=draft.source,
        fingerprint=draft.fingerprint,
        layout=layout,
        components={component.name: component for component in components},
        extents=dict(sorted(extents.items())),
    )


@contextlib.contextmanager
def _undone_on_failure(store: WeightStore, packs: Iterable[str]) -> Iterator[None]:
    """So that a full disk does not stay full. Nothing refers to the packs yet but, at worst, a meta.json whose
    writer forgets what is lost. HAZARD: must end before the manifest is published."""
    try:
        yield
    except BaseException:
        store.remove_packs(packs)
        raise
