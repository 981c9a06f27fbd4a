"""Publish a model's hashed tensors as packs, index, skeleton and manifest, in the layout asked for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from weights.formats.tensors import FileTensor
from weights.platform.durable import disk_errors, sync_tree
from weights.records.errors import StoreError
from weights.records.manifest import Component, ExtentRef, Layout, Manifest, ModelKind, TensorRef
from weights.storage.hashing import HashedTensor
from weights.storage.index import StoredExtent, StoreIndex, StoreMeta
from weights.storage.packs import FileExtent, SharedExtents, copy_file, file_extents, write_combined, write_separate
from weights.storage.stock import WRITABLE_FORMATS, tensor_offsets, writable, write_files
from weights.storage.store import WeightStore, manifest_text


@dataclass(frozen=True, slots=True)
class DraftComponent:
    """A component whose tensors have no place yet: `record` has none. `root` is the folder that its files are in."""

    record: Component
    tensors: dict[str, HashedTensor]
    root: Path | None = None

    @property
    def is_copyable(self) -> bool:
        """Return whether its files have the tensors as they will be stored, in a format that can be written again."""
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


@dataclass(frozen=True, slots=True)
class Draft:
    """A model on its way into the store.

    `write_skeleton` fills a folder that does not exist yet. `recheck` is called under the lock: it returns the
    manifest when somebody else was faster, and raises when the source is not what was hashed any more. `relocates`:
    what no other model uses, and is not in the layout asked for, is written anew.
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
    relocates: bool = False
    source_mark: str = ""
    base: str = ""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for component in self.components for tensor in component.tensors.values())


@dataclass(frozen=True, slots=True)
class _Placed:
    """The components with the places of their tensors, and what it takes to make these true: staged packs by name,
    and extents for the index; `damaged` ones are in it and should not be."""

    components: list[Component]
    extents: dict[str, ExtentRef]
    packs: Mapping[str, Path]
    new: Mapping[str, StoredExtent] = field(default_factory=dict)
    damaged: Iterable[str] = ()


def publish_draft(store: WeightStore, draft: Draft, layout: Layout, staging: Path | None = None) -> Manifest:
    """Write the missing part of `draft` and publish it. Packs are staged in `staging`, or inside the store.

    Tensors shared with other models are read first: a damaged copy is not shared, and written anew. Raises FormatError
    when the source changed, StoreError when the disk is full or cannot be written, or when the manifest would be too
    large to be read; nothing is published then.
    """
    with (
        disk_errors(staging or store.path, draft.nbytes),
        store.staged("pack", staging) as pack,
        store.staged("skeleton") as skeleton,
    ):
        draft.write_skeleton(skeleton)
        shared = SharedExtents(store.packs, [component.tensors.values() for component in draft.components])
        files: list[_InlineComponent] = []
        # This takes long, and needs no lock: the files of `inline` are the model's own, and packs never change.
        if layout == "inline":
            files = _write_inline(pack, skeleton, draft.components)
        else:
            with store.locked():
                known = _shareable(store, draft, layout, shared)
            shared.choose(known)
        with store.locked():
            found = draft.recheck()
            if found is not None:
                return found
            if layout == "inline":
                placed = _place_inline(store, draft, pack, files)
            else:
                placed = _place_shared(store, draft, layout, pack, shared)
            manifest = _manifest(draft, layout, placed)
            text = manifest_text(manifest)
            with disk_errors(store.path, draft.nbytes), _undone_on_failure(store, placed.packs, draft.model, text):
                _enter(store, manifest, placed)
                store.publish_model(manifest, text, skeleton)
    return manifest


def _shareable(store: WeightStore, draft: Draft, layout: Layout, shared: SharedExtents) -> StoreMeta:
    """Return the extents and tensors of the index that the draft may share."""

    def look_up(index: StoreIndex) -> StoreMeta:
        known = index.find(shared.hashes)
        if draft.relocates:
            moved = {id_ for id_, extent in known.extents.items() if _layout_of(extent) != layout}
            known.forget_extents(moved - index.used_by_others(moved, draft.model))
        return known

    return store.index.run(look_up)


def _layout_of(extent: StoredExtent) -> Layout:
    return "separate" if [extent.pack] == [f"weight_{sha256}" for sha256 in extent.tensors] else "combined"


def _place_shared(store: WeightStore, draft: Draft, layout: Layout, staged: Path, shared: SharedExtents) -> _Placed:
    """Place tensors as `combined` or `separate`: what the store has, whoever brought it, is not written again."""
    meta = _shareable(store, draft, layout, shared)
    damaged = shared.choose(meta)
    known = dict(meta.extents)
    tensors = [component.tensors.values() for component in draft.components]
    if layout == "separate":
        placements, packs = write_separate(staged, store.packs, meta, tensors)
    else:
        name = store.pack_files.new_name(f"{draft.model}_weight_combined")
        placements = write_combined(staged, name, meta, tensors)
        packs = {name: staged}
    new = {id_: extent for id_, extent in meta.extents.items() if known.get(id_) != extent}
    components: list[Component] = []
    extents: dict[str, ExtentRef] = {}
    for component, placement in zip(draft.components, placements, strict=True):
        refs = {}
        for name, tensor in component.tensors.items():
            extent = extents.setdefault(placement[tensor.sha256], meta.extent(placement[tensor.sha256]))
            refs[name] = _reference(tensor, extent, meta.extents[extent.id].tensors[tensor.sha256])
        components.append(component.record.model_copy(update={"tensors": refs}))
    return _Placed(components, extents, packs if new else {}, new, damaged)


def _enter(store: WeightStore, manifest: Manifest, placed: _Placed) -> None:
    """Put the packs in place, and then the index right."""
    if placed.packs:
        store.pack_files.add(placed.packs)
    needed = {f"packs/{PurePosixPath(extent.pack).parts[0]}" for extent in placed.extents.values()}
    store.index.run(
        lambda index: index.enter(
            manifest.model,
            placed.new,
            placed.extents if manifest.layout != "inline" else (),
            forgotten=placed.damaged,
            needed_paths=(*needed, f"models/{manifest.skeleton}"),
        )
    )


def publish_places(store: WeightStore, before: Manifest, after: Manifest, packs: Mapping[str, Path]) -> None:
    """Publish a model with its extents in other places, or other forms; the staged `packs` have what is new of these.

    Raises StoreError, and nothing is published, when the model was published by somebody else since it was `before`,
    or when a base of its deltas is needed by no model any more, so that its bytes may have been freed.
    """
    text = manifest_text(after)
    with store.locked(), disk_errors(store.path, 0), _undone_on_failure(store, packs, after.model, text):
        if store.find_manifest(before.model) != before:
            raise StoreError(f"model {before.model!r} was published anew meanwhile; nothing was changed")
        _refuse_lost_bases(store, after)
        if packs:
            store.pack_files.add(packs)
        plain, runs = after.plain_extents, {run for extent in after.extents.values() for run in extent.runs()}

        def enter(index: StoreIndex) -> None:
            lost = before.plain_extents.keys() - plain.keys()
            forgotten = lost - index.used_by_others(lost, after.model)
            needed = {f"packs/{PurePosixPath(run.pack).parts[0]}" for run in runs}
            index.enter(after.model, {}, plain, forgotten=forgotten, needed_paths=needed)

        store.index.run(enter)
        store.replace_manifest(after.model, text)


def _refuse_lost_bases(store: WeightStore, manifest: Manifest) -> None:
    named = {run for found in store.readable_manifests() for extent in found.extents.values() for run in extent.runs()}
    for extent in manifest.extents.values():
        for base in extent.delta.bases if extent.delta else ():
            if not named.issuperset(base.runs()):
                raise StoreError(
                    f"model {manifest.model!r}: {base.pack}, the base of extent {extent.id}, is of no model any more; "
                    "nothing was changed"
                )


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


def _place_inline(store: WeightStore, draft: Draft, staged: Path, written: Sequence[_InlineComponent]) -> _Placed:
    pack = store.pack_files.new_name(f"{draft.model}_inline")
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
    return _Placed(components, extents, {pack: staged})


def _reference(tensor: HashedTensor, extent: ExtentRef, offset: int) -> TensorRef:
    return TensorRef(
        extent=extent.id,
        offset=offset,
        nbytes=tensor.nbytes,
        dtype=tensor.dtype,
        shape=tensor.shape,
        sha256=tensor.sha256,
    )


def _manifest(draft: Draft, layout: Layout, placed: _Placed) -> Manifest:
    return Manifest(
        model=draft.model,
        kind=draft.kind,
        class_name=draft.class_name,
        skeleton=draft.skeleton,
        source=draft.source,
        fingerprint=draft.fingerprint,
        source_mark=draft.source_mark,
        base=draft.base,
        layout=layout,
        components={component.name: component for component in placed.components},
        extents=dict(sorted(placed.extents.items())),
    )


@contextlib.contextmanager
def _undone_on_failure(store: WeightStore, packs: Iterable[str], model: str, text: bytes) -> Iterator[None]:
    """Remove new packs on a failure, so that a full disk does not stay full, unless the manifest `text` is in place.

    Nothing refers to them before but, at worst, the index, whose places are read before they are shared. A pack that
    took the place of a damaged one stays.
    """
    new = [name for name in packs if not os.path.lexists(store.packs / name)]
    try:
        yield
    except BaseException:
        if not store.has_manifest(model, text):
            store.pack_files.remove(new)
        raise
