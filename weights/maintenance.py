"""Cleaning a store: what no manifest names goes. The manifests are the truth, so nothing published can be lost.

At every moment of a run, killed or not, each byte range that a manifest names is there, and meta.json names no range
that is not: it is published without the dead tensors before their bytes go.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from weights.errors import StoreError, StoreVersionError, WeightsError
from weights.manifest import Manifest
from weights.storage.durable import disk_errors, remove, sync
from weights.storage.meta import StoreMeta, meta_of
from weights.storage.punching import allocated_bytes, dead_ranges, punch
from weights.storage.staging import is_dead, sweep
from weights.store import STAGED, WeightStore

SKELETONS: Final = "skeleton*"


@dataclass(frozen=True, slots=True)
class GcReport:
    """What went, or would go: paths relative to the store, and bytes on disk.

    `unfreed_bytes` lie between tensors that are alive, on a file system that cannot make holes in files.
    """

    removed: tuple[PurePosixPath, ...]
    num_tensors: int
    freed_bytes: int
    unfreed_bytes: int


def gc(
    store: WeightStore, *, grace_s: float = 0.0, now: Callable[[], float] = time.time, dry_run: bool = False
) -> GcReport:
    """Remove what no manifest names: packs, ranges of packs, skeletons, entries of meta.json, leftovers of the dead.

    Packs and skeletons that were written less than `grace_s` seconds ago stay: replicas may still run an earlier
    version of a model. Makes a damaged meta.json again. Raises, and deletes nothing, when a manifest cannot be read
    or meta.json is of a newer version: what those need is unknown.
    """
    if not store.path.is_dir():
        raise StoreError(f"{store.path}: no such store")
    with store.locked(), disk_errors(store.path, 0):
        manifests = _read_all(store)
        forgotten = _rewrite_meta(store, manifests.values(), dry_run=dry_run)
        horizon = now() - grace_s
        dead = [path for path in _dead(store, manifests.values()) if path.lstat().st_mtime <= horizon]
        staged = [path for path in sorted(store.path.glob(STAGED)) if is_dead(path)]
        removed = [path.relative_to(store.path) for path in (*dead, *staged)]
        freed = sum(allocated_bytes(path) for path in (*dead, *staged))
        unfreed = 0
        for pack, ranges in _dead_ranges(store, manifests.values(), horizon):
            nbytes = sum(end - begin for begin, end in ranges)
            before = allocated_bytes(pack)
            if dry_run:  # some of them may be holes already
                freed += min(nbytes, max(0, before + nbytes - pack.stat().st_size))
            elif punch(pack, ranges):
                freed += before - allocated_bytes(pack)
            else:
                unfreed += nbytes
        if not dry_run:
            _remove(store, dead)
    return GcReport(tuple(map(PurePosixPath, removed)), forgotten, freed, unfreed)


def remove_model(store: WeightStore, model: str) -> None:
    """Unpublish `model`; its bytes go with the next `gc`. Raises ModelNotStored with the known names."""
    with store.locked(), disk_errors(store.path, 0):
        folder = store.models / model
        if model not in store.model_names():
            store.manifest(model)  # says what is known
        (folder / "manifest.json").unlink()
        sync(folder)


def _read_all(store: WeightStore) -> Mapping[str, Manifest]:
    try:
        return store.manifests()
    except WeightsError as error:
        raise StoreError(f"nothing was deleted: what this model needs is unknown: {error}") from error


def _rewrite_meta(store: WeightStore, manifests: Iterable[Manifest], *, dry_run: bool) -> int:
    """Publish a meta.json that has what the manifests need; returns how many tensors it has no more."""
    needed = meta_of(manifests)
    try:
        before = store.read_meta()
    except StoreVersionError:
        raise
    except StoreError:
        before = StoreMeta()
        is_changed = True
    else:
        is_changed = before.tensors.keys() != needed.tensors.keys() or before.extents.keys() != needed.extents.keys()
    if is_changed and not dry_run:
        store.write_meta(needed)
    return len(before.tensors.keys() - needed.tensors.keys())


def _dead(store: WeightStore, manifests: Iterable[Manifest]) -> Iterator[Path]:
    """Packs and skeletons that no manifest names, and model folders that are left without one."""
    manifests = list(manifests)
    packs = {PurePosixPath(extent.pack).parts[0] for manifest in manifests for extent in manifest.extents.values()}
    yield from (path for path in sorted(store.packs.iterdir()) if path.name not in packs)
    skeletons = {store.skeleton(manifest) for manifest in manifests}
    yield from (path for path in sorted(store.models.glob(f"*/{SKELETONS}")) if path not in skeletons)


def _dead_ranges(
    store: WeightStore, manifests: Iterable[Manifest], horizon: float
) -> Iterator[tuple[Path, list[tuple[int, int]]]]:
    """The same of packs that are alive in part. The files of `inline` are whole files of another format: untouched."""
    live: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for manifest in manifests:
        for extent in manifest.extents.values():
            if "/" not in extent.pack:
                live[extent.pack].add((extent.offset, extent.offset + extent.nbytes))
    for name, ranges in sorted(live.items()):
        path = store.packs / name
        # A symlink may lead out of the store, where nothing is ours to change.
        if path.is_symlink() or not path.is_file() or path.stat().st_mtime > horizon:
            continue
        if dead := list(dead_ranges(ranges, path.stat().st_size)):
            yield path, dead


def _remove(store: WeightStore, dead: Iterable[Path]) -> None:
    for path in dead:
        remove(path)
    sweep(store.path, STAGED)
    for folder in store.models.iterdir():
        with contextlib.suppress(OSError):  # not empty, or not a folder: something of somebody
            folder.rmdir()
