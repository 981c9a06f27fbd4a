"""Summaries of the store, and garbage collection: remove what no manifest names. The manifests are the truth, so
nothing published can be lost.

At every moment of a run, killed or not, each byte range that a manifest names is there, and neither the index nor
meta.json names a range that is not: they are published without the dead tensors before their bytes go. On a disk too
full for that they are deleted first, and made again in the room that was freed.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from weights.platform.durable import allocated_bytes, dead_ranges, disk_errors, punch, remove_path, sync
from weights.records.errors import DiskFull, StoreError, WeightsError
from weights.records.manifest import Manifest, TensorRef
from weights.sources.mirrors import SOURCES_FOLDER, remove_mirror, unused_mirrors
from weights.storage.index import WHOLE_END, StoreIndex, Unneeded
from weights.storage.staging import STAGED, is_dead, sweep
from weights.storage.store import WeightStore

_SKELETONS: Final = "skeleton*"
_STARTS: Final = "//boot/"  # no path of a store begins so
_TOLERANCE_S: Final = 1.0
_Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class GcReport:
    """A list of what was removed, or would be: paths relative to the store, and bytes on disk.

    `unfreed_bytes` lie between tensors that are alive, in files in which no holes can be made: the file system makes
    none, or the file has another hard link, as in a backup by `cp -al`.
    """

    removed: tuple[PurePosixPath, ...]
    num_tensors: int
    freed_bytes: int
    unfreed_bytes: int


class Moment(NamedTuple):
    """A moment in Unix time, and in a time that nobody sets: the seconds since the machine's start `boot`.

    "" where that is not known.
    """

    unix_s: float
    boot: str = ""
    up_s: float = 0.0


def this_moment() -> Moment:
    """Return the moment by this machine's clocks."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return Moment(time.time(), boot, time.clock_gettime(time.CLOCK_BOOTTIME))
    except (OSError, AttributeError):  # of no Linux
        return Moment(time.time())


def gc(
    store: WeightStore, *, grace_s: float = 0.0, now: Callable[[], Moment] = this_moment, dry_run: bool = False
) -> GcReport:
    """Remove everything that no manifest names: packs, ranges of packs, skeletons, entries of the index, mirrors of
    URLs that no model came from, leftovers of the dead.

    Packs, skeletons and mirrors stay until a run finds that an earlier one saw them unneeded `grace_s` seconds ago, and
    they were not needed in between: replicas may still run an earlier version of a model. Setting the clock between two
    runs of one machine makes nothing older. A mirror that is being filled or read stays. Makes a damaged index again,
    and meta.json. Raises, and deletes nothing, when a manifest cannot be read or the store is of a newer version: what
    those need is unknown.
    """
    if not store.path.is_dir():
        raise StoreError(f"{store.path}: no such store")
    with store.locked(), disk_errors(store.path, 0):
        manifests = _read_all(store)
        known, forgotten = store.index.read(lambda index: _look_up(index, manifests)) or (set(), 0)
        moment = now()
        before, mark = _as_if_never_set(known, moment)
        clocks = _aged(dict(_unneeded(store, manifests)), before, moment.unix_s)
        whole, partly = _ripe(clocks, moment.unix_s - grace_s)
        staged = [path for path in sorted(store.path.glob(STAGED)) if is_dead(path)]
        staged_bytes = sum(map(allocated_bytes, staged))
        if dry_run:
            removed, freed, unfreed = _free(store, whole, partly, dry_run=True)
        else:
            sweep(store.path, STAGED)
            young = [clock for clock in clocks if clock.path not in whole]
            young += mark if young else []
            with _noted(store, manifests, young, makes_room=bool(whole or partly)):
                removed, freed, unfreed = _free(store, whole, partly)
    paths = [path.relative_to(store.path) for path in (*removed, *staged)]
    return GcReport(tuple(map(PurePosixPath, paths)), forgotten, freed + staged_bytes, unfreed)


def rebuild_index(store: WeightStore) -> int:
    """Make the index say what the manifests say, and write it as meta.json; returns how many tensors the store has.

    Raises StoreError when there is no store, when a manifest cannot be read, or when it is of a newer version.
    """
    if not store.path.is_dir():
        raise StoreError(f"{store.path}: no such store")
    with store.locked(), disk_errors(store.path, 0):
        manifests = _read_all(store)
        store.index.run(lambda index: index.follow(manifests))
        store.index.write_meta()
        return store.index.run(StoreIndex.num_tensors)


def remove_model(store: WeightStore, model: str) -> None:
    """Unpublish `model`; its bytes go with the next `gc`. Raises ModelNotStored with the known names."""
    with store.locked(), disk_errors(store.path, 0):
        folder = store.models / model
        if not store.has_model(model):
            store.manifest(model)  # says what is known
        (folder / "manifest.json").unlink()
        sync(folder)


def _read_all(store: WeightStore) -> Sequence[Manifest]:
    """Read all manifests. Raises naming every unreadable one: the packs it needs would look unneeded."""
    manifests, problems = [], []
    for model in store.model_names():
        try:
            manifests.append(store.manifest(model))
        except WeightsError as error:
            problems.append(f"{error} (put the file back, or `remove {model}` and bring it in again)")
    if problems:
        raise StoreError(f"nothing was deleted: the extents of a model are unknown: {'; '.join(problems)}")
    return manifests


def _look_up(index: StoreIndex, manifests: Sequence[Manifest]) -> tuple[set[Unneeded], int]:
    """Return the files and ranges known to be unneeded, and how many tensors of the index no manifest names."""
    named = {ref.sha256 for manifest in manifests if manifest.layout != "inline" for ref in _tensors(manifest)}
    return index.unneeded(), len(index.everything().tensors.keys() - named)


@contextlib.contextmanager
def _noted(
    store: WeightStore, manifests: Sequence[Manifest], young: Sequence[Unneeded], *, makes_room: bool
) -> Iterator[None]:
    """Write index, meta.json and the clocks of what is still `young` before the block, in which the others go.

    On a full disk after it, if the block makes room: index and meta.json are deleted before, so that they name nothing
    that is gone. Raises DiskFull when there is not enough room even then.
    """

    def note_clocks(index: StoreIndex) -> None:
        index.follow(manifests)
        # Before they go: what comes back under the same name begins with a clock of its own.
        index.note_unneeded(young)

    def note() -> None:
        with disk_errors(store.path, 0):
            store.index.run(note_clocks)
            store.index.write_meta()

    is_full = False
    try:
        note()
    except DiskFull:
        if not makes_room:
            raise
        is_full = True
        store.index.remove()
    yield
    if is_full:
        note()


def _free(
    store: WeightStore, whole: Sequence[str], partly: Mapping[str, Sequence[_Range]], *, dry_run: bool = False
) -> tuple[list[Path], int, int]:
    """Remove whole paths and make holes in packs; return what went, the bytes freed, and those that could not be."""
    paths = [store.path / path for path in whole]
    freed_by = {path: allocated_bytes(path, own=True) for path in paths}
    removed, freed, unfreed = [], 0, 0
    for path in paths:
        if not dry_run:
            if path.is_relative_to(store.path / SOURCES_FOLDER):
                if not remove_mirror(path):
                    continue
            else:
                remove_path(path)
        removed.append(path)
        freed += freed_by[path]
    for pack, ranges in partly.items():
        more_freed, more_unfreed = _punch(store.path / pack, ranges, dry_run=dry_run)
        freed, unfreed = freed + more_freed, unfreed + more_unfreed
    if not dry_run:
        for folder in store.models.iterdir():
            with contextlib.suppress(OSError):  # not empty, or not a folder: something of somebody
                folder.rmdir()
    return removed, freed, unfreed


def _unneeded(store: WeightStore, manifests: Sequence[Manifest]) -> Iterator[tuple[str, list[_Range]]]:
    """Yield everything that no manifest names, by path: whole packs, skeletons, mirrors, and ranges of packs in use."""
    runs = {run for manifest in manifests for extent in manifest.extents.values() for run in extent.runs()}
    packs = {PurePosixPath(run.pack).parts[0] for run in runs}
    skeletons = {store.skeleton(manifest) for manifest in manifests}
    dead = [path for path in sorted(store.packs.iterdir()) if path.name not in packs]
    dead += [path for path in sorted(store.models.glob(f"*/{_SKELETONS}")) if path not in skeletons]
    dead += unused_mirrors(store.path / SOURCES_FOLDER, [manifest.source for manifest in manifests])
    for path in dead:
        yield str(path.relative_to(store.path)), [(0, WHOLE_END)]
    # The files of `inline` are whole files of another format: untouched.
    live: dict[str, set[_Range]] = defaultdict(set)
    for run in runs:
        if "/" not in run.pack:
            live[run.pack].add((run.offset, run.offset + run.nbytes))
    for name, ranges in sorted(live.items()):
        path = store.packs / name
        # A symlink may lead out of the store, where nothing is ours to change.
        if not path.is_symlink() and path.is_file():
            yield f"packs/{name}", list(dead_ranges(ranges, path.stat().st_size))


def _as_if_never_set(known: Collection[Unneeded], now: Moment) -> tuple[list[Unneeded], list[Unneeded]]:
    """Return the clocks as if nobody had set the wall clock since they began, and what the next run is to know this by.

    That is a range of no path: its end are the milliseconds since the start of the machine at `since_s`. Where it says
    what the clock says it stays as it is: the disk may be full.
    """
    clocks = [clock for clock in known if not clock.path.startswith(_STARTS)]
    if not now.boot:
        return clocks, []
    name, set_by_s = _STARTS + now.boot, 0.0
    for mark in (clock for clock in known if clock.path == name):
        set_by_s = (now.unix_s - mark.since_s) - (now.up_s - mark.end / 1000)
        if abs(set_by_s) <= _TOLERANCE_S:
            return clocks, [mark]
    moved = [clock._replace(since_s=clock.since_s + set_by_s) for clock in clocks]
    return moved, [Unneeded(name, 0, int(now.up_s * 1000), now.unix_s)]


def _ripe(clocks: Iterable[Unneeded], horizon_s: float) -> tuple[list[str], dict[str, list[_Range]]]:
    """Select what has been unneeded for `horizon_s` or longer: whole paths, and ranges of others."""
    by_path: dict[str, list[Unneeded]] = defaultdict(list)
    for clock in clocks:
        by_path[clock.path].append(clock)
    whole, partly = [], {}
    for path, pieces in by_path.items():
        ripe = [(piece.begin, piece.end) for piece in pieces if piece.since_s <= horizon_s]
        if any(piece.end == WHOLE_END for piece in pieces):
            if len(ripe) == len(pieces):
                whole.append(path)
        elif ripe:
            partly[path] = ripe
    return whole, partly


def _punch(pack: Path, ranges: Sequence[_Range], *, dry_run: bool) -> tuple[int, int]:
    """Punch holes; returns the bytes that were freed, or would be, and those that cannot be."""
    nbytes = sum(end - begin for begin, end in ranges)
    before = allocated_bytes(pack)
    if dry_run and pack.stat().st_nlink == 1:  # some of them may be holes already
        return min(nbytes, max(0, before + nbytes - pack.stat().st_size)), 0
    if not dry_run and punch(pack, ranges):
        return before - allocated_bytes(pack), 0
    return 0, nbytes


def _tensors(manifest: Manifest) -> Iterator[TensorRef]:
    for component in manifest.components.values():
        yield from component.tensors.values()


def _aged(unneeded: Mapping[str, Iterable[_Range]], before: Iterable[Unneeded], now_s: float) -> list[Unneeded]:
    """Give the unneeded ranges (begin, end) of each path their clocks: known ones continue, the rest begin at `now_s`.

    A clock that is ahead of `now_s` was set by a wrong one and begins anew. Ranges of a path do not overlap.
    """
    clocks: dict[str, list[Unneeded]] = defaultdict(list)
    for known in before:
        clocks[known.path].append(known)
    return [
        piece
        for path, ranges in unneeded.items()
        for begin, end in ranges
        for piece in _pieces(path, begin, end, sorted(clocks[path], key=lambda known: known.begin), now_s)
    ]


def _pieces(path: str, begin: int, end: int, clocks: Iterable[Unneeded], now_s: float) -> Iterator[Unneeded]:
    for known in clocks:
        first, last = max(begin, known.begin), min(end, known.end)
        if first >= last:
            continue
        if begin < first:
            yield Unneeded(path, begin, first, now_s)
        yield Unneeded(path, first, last, min(known.since_s, now_s))
        begin = last
    if begin < end:
        yield Unneeded(path, begin, end, now_s)


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
