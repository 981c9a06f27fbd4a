"""A disk that is really full: a small tmpfs, filled to the last page, or all but a few."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.weights.small_disk import PAGE_BYTES, fill, free_pages

from weights.operations.externalize import externalize
from weights.operations.layouts import convert
from weights.operations.maintenance import Moment, gc, remove_model
from weights.operations.repair import repair, verify
from weights.platform.durable import allocated_bytes, remove_path
from weights.records.errors import DiskFull
from weights.storage.index import StoreMeta
from weights.storage.store import WeightStore

WRITERS: dict[str, Callable[[WeightStore, Path], Any]] = {
    "combined": lambda store, source: externalize(store, "new", source),
    "separate": lambda store, source: externalize(store, "new", source, layout="separate"),
    "inline": lambda store, source: externalize(store, "new", source, layout="inline"),
    "convert": lambda store, source: convert(store, "b", "combined"),
    "repair": lambda store, source: repair(store, ["b"]),
}


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.rand(700) for i in range(20)} | more


def check(store: WeightStore, *models: str) -> None:
    """Check that models are whole and that index and meta.json name nothing that is gone."""
    assert store.model_names() == [*models]
    assert verify(store, deep=True).damages == ()
    places = {(extent.pack, extent.offset) for found in store.manifests().values() for extent in found.extents.values()}
    meta = StoreMeta.model_validate_json(store.meta_file.read_bytes())
    assert {(extent.pack, extent.offset) for extent in meta.extents.values()} <= places
    assert store.index.read_meta() == meta


@pytest.mark.parametrize("index", ["sound", "damaged", "lost"])
def test_gc_frees_a_full_disk(disk: Path, write_model, index: str) -> None:
    store = WeightStore(disk / "store")
    for name in "ab":
        externalize(store, name, write_model(name, tensors()), layout="separate" if name == "b" else "combined")
    gc(store)
    remove_model(store, "b")
    if index == "damaged":
        store.index_file.write_bytes(store.index_file.read_bytes().replace(b"CREATE TABLE", b"CREATE T\xff\xfeLE"))
    if index == "lost":
        store.index_file.unlink()
    fill(disk)
    assert free_pages(disk) == 0
    planned = gc(store, dry_run=True)
    assert gc(store) == planned
    assert planned.freed_bytes == 21 * PAGE_BYTES  # the packs and the skeleton
    assert free_pages(disk) >= 10  # and the index, which was lost, is there again
    check(store, "a")


def test_gc_of_a_full_disk_keeps_the_clocks_of_what_is_young(disk: Path, write_model) -> None:
    store = WeightStore(disk / "store")
    for name in "abc":
        externalize(store, name, write_model(name, tensors()))
    remove_model(store, "a")
    gc(store, grace_s=60, now=lambda: Moment(1000.0))
    remove_model(store, "b")
    fill(disk)
    assert [
        str(path) for path in gc(store, grace_s=60, now=lambda: Moment(1061.0)).removed if path.parts[0] == "packs"
    ] == ["packs/a_weight_combined"]
    check(store, "c")
    assert gc(store, grace_s=60, now=lambda: Moment(1120.0)).removed == ()
    assert len(gc(store, grace_s=60, now=lambda: Moment(1122.0)).removed) == 2


def test_gc_of_a_full_disk_without_anything_dead_changes_nothing(disk: Path, write_model) -> None:
    store = WeightStore(disk / "store")
    externalize(store, "a", write_model("a", tensors()))
    gc(store)
    fill(disk)
    assert gc(store).removed == ()
    check(store, "a")
    remove_model(store, "a")
    with pytest.raises(DiskFull):
        gc(store, grace_s=60)
    assert store.meta_file.exists()
    assert gc(store).freed_bytes


def test_what_dead_writers_left_goes_first(disk: Path, write_model) -> None:
    store = WeightStore(disk / "store")
    externalize(store, "a", write_model("a", tensors()))
    (store.path / ".staged-dead").mkdir()
    (store.path / ".staged-dead" / ".alive").touch()
    (store.path / ".staged-dead" / "pack").write_bytes(bytes(50 * PAGE_BYTES))
    fill(disk)
    assert gc(store).freed_bytes == 50 * PAGE_BYTES
    check(store, "a")


@pytest.mark.drawn
@pytest.mark.parametrize("writer", [*WRITERS])
def test_a_writer_of_a_full_disk_takes_none_of_it(disk: Path, write_model, writer: str) -> None:
    """However much is left: it is done, or refused with no more taken than a skeleton and pages of the index."""
    source, num_done = write_model("new", tensors()), 0
    for left in (0, 1, 9, 16, 17, 18, 19, 20, 21, 22, 23, 26, 30, 34, 38, 42, 46, 60, 90, 150):
        store = WeightStore(disk / "store")
        for name in "ab":
            externalize(store, name, write_model(name, tensors()), layout="separate" if name == "b" else "combined")
        gc(store)
        if writer == "repair":
            pack = next(pack for pack in sorted(store.packs.iterdir()) if pack.name.startswith("weight_"))
            pack.write_bytes(bytes(pack.stat().st_size))
        fill(disk, left)
        before = allocated_bytes(store.path)
        found: Any = None
        with contextlib.suppress(DiskFull):
            found = WRITERS[writer](store, source)
        is_done = found is not None and not getattr(found, "damages", ())
        assert verify(store, deep=True).damages == () or (writer == "repair" and not is_done)
        assert is_done or allocated_bytes(store.path) - before <= 6 * PAGE_BYTES
        assert not list(store.path.glob(".staged*"))
        shutil.rmtree(store.path)
        (disk / "filler").unlink()
        num_done += is_done
        if num_done > 1:
            return
    assert num_done


class _Full:
    """A disk as SQLite and Python see a full one, until a pack is deleted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_refused = 0
        self.is_full = True
        full = self

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
                if full.is_full and sql.startswith(("BEGIN", "CREATE")):
                    full.num_refused += 1
                    error = sqlite3.OperationalError("database or disk is full")
                    error.sqlite_errorcode = sqlite3.SQLITE_FULL
                    raise error
                return super().execute(sql, *values)

        patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Connection))
        patch.setattr(Path, "write_bytes", functools.partialmethod(_Full._write, self, Path.write_bytes))
        patch.setattr("weights.operations.maintenance.remove_path", self._remove)

    @staticmethod
    def _write(path: Path, full: _Full, write: Callable[[Path, bytes], int], data: bytes) -> int:
        if full.is_full:
            full.num_refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, data)

    def _remove(self, path: Path) -> None:
        self.is_full = False
        remove_path(path)


def test_gc_frees_first_what_is_dead_when_nothing_can_be_written(
    tmp_path: Path, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path / "store")
    for name in "ab":
        externalize(store, name, write_model(name, tensors()))
    gc(store)
    remove_model(store, "b")
    with monkeypatch.context() as patch:
        full = _Full(patch)
        assert gc(store).freed_bytes >= 20 * 700 * 4
        assert full.num_refused == 1
    check(store, "a")
    with monkeypatch.context() as patch:
        _Full(patch)
        with pytest.raises(DiskFull):
            externalize(store, "new", write_model("new", tensors()))
    check(store, "a")
