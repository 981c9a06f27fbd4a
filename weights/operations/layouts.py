"""Convert models between layouts, and write them back as stock checkpoints."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

from weights.platform.durable import copy_tree, disk_errors, move, sync_tree
from weights.records.errors import StoreError
from weights.records.manifest import Layout, Manifest
from weights.storage.hashing import HashedTensor, Progress, hash_tensors
from weights.storage.publishing import Draft, DraftComponent, publish_draft
from weights.storage.staging import claimed_folder, sweep
from weights.storage.stock import rewrite_index, writable, write_files
from weights.storage.store import WeightStore, stored_tensors


def convert(
    store: WeightStore, model: str, layout: Layout, weight_dir: Path | None = None, progress: Progress | None = None
) -> Manifest:
    """Publish `model` anew in another layout; all that is read of it is checked. `progress` gets the bytes of that.

    An extent that another model of the store uses as well stays where it is: one copy serves both. What is left of
    the old layout goes with the next `gc`. Raises ExtentCorrupt when the stored bytes are damaged.
    """
    manifest = store.manifest(model)
    if manifest.layout == layout:
        return manifest
    parts = manifest.components.values()
    hashed = hash_tensors({part.name: stored_tensors(store, manifest, part) for part in parts}, progress=progress)
    return publish_again(store, manifest, hashed, layout, weight_dir, relocates=True)


def publish_again(
    store: WeightStore,
    manifest: Manifest,
    hashed: Mapping[str, dict[str, HashedTensor]],
    layout: Layout,
    weight_dir: Path | None = None,
    *,
    relocates: bool = False,
) -> Manifest:
    """Publish a model of the store anew from its tensors, by component. `relocates`: see `Draft`.

    Raises StoreError when it was published by somebody else meanwhile, or has lost its configs.
    """

    def recheck() -> None:
        if store.manifest(manifest.model) != manifest:
            raise StoreError(f"model {manifest.model!r} was published anew meanwhile; nothing was changed")

    parts = manifest.components.values()
    draft = Draft(
        model=manifest.model,
        kind=manifest.kind,
        class_name=manifest.class_name,
        source=manifest.source,
        fingerprint=manifest.fingerprint,
        skeleton=manifest.skeleton,
        components=[DraftComponent(part.model_copy(update={"tensors": {}}), hashed[part.name]) for part in parts],
        write_skeleton=lambda target: _copy_skeleton(store, manifest, target),
        recheck=recheck,
        relocates=relocates,
        source_mark=manifest.source_mark,
        base=manifest.base,
    )
    return publish_draft(store, draft, layout, weight_dir)


def write_inline(store: WeightStore, model: str, target: Path, progress: Progress | None = None) -> None:
    """Write `model` as the stock checkpoint it came from into `target`, which must be empty or not exist.

    Every tensor is checked on its way; one is in memory at a time. PyTorch pickles come back as safetensors.
    `progress` gets the bytes that are written.
    Raises StoreError (target in use, disk full), ExtentCorrupt; `target` is complete or untouched.
    """
    manifest = store.manifest(model)
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise StoreError(f"{target}: exists and is not an empty folder; nothing is overwritten")
    partial = f".{target.name}.partial-*"
    with disk_errors(target.parent, manifest.nbytes):
        sweep(target.parent, partial)
        with claimed_folder(target.parent / partial.replace("*", uuid.uuid4().hex)) as folder:
            checkpoint = folder / "checkpoint"
            _write_checkpoint(store, manifest, checkpoint, progress)
            sync_tree(checkpoint)
            move(checkpoint, target)  # onto an empty folder is fine, onto one that was filled meanwhile an error


def _write_checkpoint(store: WeightStore, manifest: Manifest, target: Path, progress: Progress | None) -> None:
    done_bytes, total_bytes = 0, manifest.nbytes

    def note(nbytes: int) -> None:
        nonlocal done_bytes
        done_bytes += nbytes
        if progress:
            progress(done_bytes, total_bytes)

    skeleton = store.skeleton(manifest)
    _copy_skeleton(store, manifest, target)
    for component in manifest.components.values():
        folder = target / component.folder
        record = writable(component)
        tensors = stored_tensors(store, manifest, component, note)
        contents = write_files(folder, skeleton / component.folder, record, tensors)
        if record.format == "safetensors" and len(record.files) > 1:
            rewrite_index(folder, record, contents)
        for file in component.files:
            (folder / f"{file}.header").unlink(missing_ok=True)


def _copy_skeleton(store: WeightStore, manifest: Manifest, target: Path) -> None:
    skeleton = store.skeleton(manifest)
    if not skeleton.is_dir():
        raise StoreError(f"{skeleton}: missing; model {manifest.model!r} has lost its configs")
    copy_tree(skeleton, target)
