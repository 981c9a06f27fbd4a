"""gc: what nobody needs goes, what a manifest names stays."""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from unit.weights.comparing import files

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.layouts import convert
from weights.operations.maintenance import Moment, gc, remove_model, this_moment
from weights.operations.repair import verify
from weights.platform.durable import allocated_bytes
from weights.records.errors import ModelNotStored, StoreError
from weights.records.manifest import Layout
from weights.storage.index import StoreIndex, StoreMeta
from weights.storage.store import WeightStore

LAYOUTS: tuple[Layout, ...] = ("combined", "separate", "inline")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_in_use_is_left_as_it_is(store: WeightStore, write_model, layout: Layout) -> None:
    for name in ("a", "b"):
        externalize(store, name, write_model(name, {"w": torch.rand(5000), "v": torch.rand(3)}), layout=layout)
    assert gc(store).removed == ()
    before = files(store.path)
    report = gc(store)
    assert (report.removed, report.num_tensors, report.freed_bytes, report.unfreed_bytes) == ((), 0, 0, 0)
    assert files(store.path) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_removed_model_goes_and_what_it_shared_stays(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 100_000)
    shared = torch.rand(5000)
    externalize(store, "a", write_model("a", {"shared": shared, "own": torch.rand(50_000)}), layout=layout)
    externalize(store, "b", write_model("b", {"shared": shared}), layout=layout)
    before = allocated_bytes(store.packs)
    remove_model(store, "a")
    assert store.model_names() == ["b"]
    with pytest.raises(ModelNotStored, match="stored: b"):
        remove_model(store, "a")
    planned = gc(store, dry_run=True)
    assert (store.models / "a").exists()
    report = gc(store)
    assert report == planned
    assert report.num_tensors == (0 if layout == "inline" else 1)
    # Of a file that is alive in part, the blocks at the borders stay.
    assert before - allocated_bytes(store.packs) >= 200_000 - 2 * 4096
    assert report.freed_bytes >= 200_000 - 2 * 4096
    assert not (store.models / "a").exists()
    assert gc(store).freed_bytes == 0
    assert verify(store, deep=True).damages == ()
    assert torch.equal(load_from_store(store.path, "b")["model"]["shared"], shared)
    externalize(store, "a", store.path.parent / "sources" / "a", layout=layout)
    assert verify(store, deep=True).damages == ()


def test_an_earlier_version_goes_after_its_grace(store: WeightStore, write_model) -> None:
    """The clock starts when it is first seen unneeded, however old its files are."""
    old = externalize(store, "m", write_model("m", {"w": torch.rand(10)}))
    new = externalize(store, "m", write_model("m", {"w": torch.rand(11)}))
    for path in (*store.packs.iterdir(), store.skeleton(old)):
        os.utime(path, (0, 0))
    start_s = random.uniform(1e9, 2e9)
    assert gc(store, grace_s=60, now=lambda: Moment(start_s + 1e6), dry_run=True).removed == ()  # nor does it start one
    assert gc(store, grace_s=60, now=lambda: Moment(start_s)).removed == ()
    assert gc(store, grace_s=60, now=lambda: Moment(start_s + 59)).removed == ()
    assert store.skeleton(old).is_dir()
    report = gc(store, grace_s=60, now=lambda: Moment(start_s + 61))
    assert [str(path) for path in report.removed] == [
        "packs/m_weight_combined",
        f"models/{old.skeleton}",
    ]
    assert not store.skeleton(old).exists()
    assert store.skeleton(new).is_dir()
    assert verify(store, deep=True).damages == ()


def test_places_that_no_manifest_names_are_forgotten_though_their_tensors_are_known(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that is killed before its manifest; a model that shares half of its pack; then the rest goes."""
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 40_000)
    x, y = torch.rand(9000), torch.rand(9000)
    externalize(store, "m", write_model("m", {"x": x, "y": y}), layout="separate")

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WeightStore, "publish_model", kill)
        with pytest.raises(KeyboardInterrupt):
            convert(store, "m", "combined")
    externalize(store, "k", write_model("k", {"x": x}))
    gc(store)
    assert verify(store, deep=True).damages == ()
    manifests = store.manifests().values()
    named = {(extent.pack, extent.offset) for manifest in manifests for extent in manifest.extents.values()}
    assert {(extent.pack, extent.offset) for extent in store.index.read_meta().extents.values()} <= named
    externalize(store, "n", write_model("n", {"y": y}))
    assert torch.equal(load_from_store(store.path, "n")["model"]["y"], y)


def test_what_is_needed_again_begins_a_new_grace(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    externalize(store, "m", source, layout="separate")
    remove_model(store, "m")
    assert gc(store, grace_s=60, now=lambda: Moment(1000.0)).removed == ()
    externalize(store, "m", source, layout="separate")
    remove_model(store, "m")
    assert gc(store, grace_s=60, now=lambda: Moment(1100.0)).removed == ()
    assert len(gc(store, grace_s=60, now=lambda: Moment(1161.0)).removed) == 2


def test_a_range_of_a_pack_goes_after_its_grace(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 40_000)
    x, y, z = (torch.rand(9000) for _ in range(3))
    externalize(store, "all", write_model("all", {"x": x, "y": y, "z": z}))
    externalize(store, "xz", write_model("xz", {"x": x, "z": z}))
    externalize(store, "z", write_model("z", {"z": z}))
    pack = store.packs / "all_weight_combined"
    full = allocated_bytes(pack)
    remove_model(store, "all")
    gc(store, grace_s=60, now=lambda: Moment(0.0))
    remove_model(store, "xz")
    gc(store, grace_s=60, now=lambda: Moment(50.0))
    assert allocated_bytes(pack) == full
    gc(store, grace_s=60, now=lambda: Moment(61.0))  # y; x is younger
    assert full - allocated_bytes(pack) == 36_864
    gc(store, grace_s=60, now=lambda: Moment(111.0))
    assert full - allocated_bytes(pack) == 2 * 36_864
    assert verify(store, deep=True).damages == ()


@pytest.mark.parametrize("set_by_s", [1e6, -1e6, 30.0, 0.0])
def test_a_clock_that_is_set_makes_nothing_older_or_younger(store: WeightStore, write_model, set_by_s: float) -> None:
    externalize(store, "m", write_model("m", {"w": torch.rand(10)}))
    remove_model(store, "m")

    def at(seconds: float, set_by_s: float = 0.0, boot: str = "b") -> Moment:
        return Moment(2e6 + seconds + set_by_s, boot, 500.0 + seconds)

    assert gc(store, grace_s=60, now=lambda: at(0)).removed == ()
    assert gc(store, grace_s=60, now=lambda: at(20)).removed == ()
    for seconds in (40, 59):
        assert gc(store, grace_s=60, now=lambda seconds=seconds: at(seconds, set_by_s)).removed == ()
    if set_by_s != 30.0:  # back again, by somebody who has noticed
        assert gc(store, grace_s=60, now=lambda: at(59)).removed == ()
        set_by_s = 0.0
    assert len(gc(store, grace_s=60, now=lambda: at(61, set_by_s)).removed) == 2
    assert store.index.read(StoreIndex.unneeded) == set()


def test_after_a_restart_of_the_machine_the_wall_clock_counts(store: WeightStore, write_model) -> None:
    externalize(store, "m", write_model("m", {"w": torch.rand(10)}))
    remove_model(store, "m")
    gc(store, grace_s=60, now=lambda: Moment(1000.0, "b", 500.0))
    assert gc(store, grace_s=60, now=lambda: Moment(1059.0, "c", 5.0)).removed == ()
    assert len(gc(store, grace_s=60, now=lambda: Moment(1061.0, "d", 7.0)).removed) == 2


def test_a_run_that_finds_what_the_one_before_found_writes_nothing(store: WeightStore, write_model) -> None:
    externalize(store, "m", write_model("m", {"w": torch.rand(10)}))
    remove_model(store, "m")
    gc(store, grace_s=60)
    before = files(store.path), store.index_file.stat().st_mtime_ns
    assert gc(store, grace_s=60).removed == ()
    assert (files(store.path), store.index_file.stat().st_mtime_ns) == before
    assert this_moment().boot == this_moment().boot
    assert abs(this_moment().unix_s - time.time()) < 60


def test_a_lost_index_starts_all_clocks_anew(store: WeightStore, write_model) -> None:
    externalize(store, "m", write_model("m", {"w": torch.rand(10)}))
    remove_model(store, "m")
    gc(store, grace_s=60, now=lambda: Moment(0.0))
    store.index_file.unlink()
    assert gc(store, grace_s=60, now=lambda: Moment(61.0)).removed == ()
    assert len(gc(store, grace_s=60, now=lambda: Moment(122.0)).removed) == 2


@pytest.mark.parametrize("layout", ["separate", "combined"])
@pytest.mark.parametrize("failure", ["publish", "kill"])
def test_a_conversion_that_failed_before_its_manifest_ties_nothing_to_its_packs(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, layout: Layout, failure: str
) -> None:
    """The index names the packs that the conversion wrote; the manifest still names the old ones."""
    first: Layout = "combined" if layout == "separate" else "separate"
    tensors = {"w": torch.rand(9000), "v": torch.rand(40)}
    externalize(store, "m", write_model("m", tensors), layout=first)

    def fail(*_: object) -> None:
        if failure == "kill":
            raise KeyboardInterrupt
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(WeightStore, "publish_model", fail)
        with pytest.raises((StoreError, KeyboardInterrupt)):
            convert(store, "m", layout)
    assert store.manifest("m").layout == first
    gc(store)
    assert verify(store, deep=True).damages == ()
    places = {(extent.pack, extent.offset) for extent in store.manifest("m").extents.values()}
    assert {(extent.pack, extent.offset) for extent in store.index.read_meta().extents.values()} == places
    written = StoreMeta.model_validate_json(store.meta_file.read_bytes())
    assert written == store.index.read_meta()
    externalize(store, "n", write_model("n", tensors), layout=layout)
    assert verify(store, deep=True).damages == ()
    for name, tensor in load_from_store(store.path, "n")["model"].items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize("damage", [b"", b"{", b'{"version": 99}'])
def test_nothing_goes_while_a_manifest_cannot_be_read(store: WeightStore, write_model, damage: bytes) -> None:
    for name in ("a", "b", "c"):
        externalize(store, name, write_model(name, {"w": torch.rand(1000)}))
    remove_model(store, "c")
    (store.models / "a" / "manifest.json").write_bytes(damage)
    before = files(store.path)
    with pytest.raises(StoreError, match=r"nothing was deleted.*a/manifest\.json.*`remove a` and bring it in again"):
        gc(store)
    assert files(store.path) == before
    # The others can still be worked with.
    convert(store, "b", "inline")
    convert(store, "b", "combined")
    assert store.model_names() == ["a", "b"]
    remove_model(store, "a")
    gc(store)
    assert [pack.name for pack in store.packs.iterdir()] == ["b_weight_combined"]


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff", None])
def test_damaged_indices_are_made_again(store: WeightStore, write_model, damage: bytes | None) -> None:
    source = write_model("a", {"w": torch.rand(1000), "v": torch.rand(3)})
    externalize(store, "a", source)
    expected = store.index.read_meta()
    for file in (store.index_file, store.meta_file):
        file.unlink(missing_ok=True) if damage is None else file.write_bytes(damage)
    gc(store)
    assert store.index.read_meta() == expected
    assert StoreMeta.model_validate_json(store.meta_file.read_bytes()) == expected
    externalize(store, "b", source)
    assert [pack.name for pack in store.packs.iterdir()] == ["a_weight_combined"]


def test_indices_are_published_before_bytes_go(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill after any deletion leaves nothing that refers to what is gone."""
    for name in ("a", "b", "c"):
        externalize(store, name, write_model(name, {"w": torch.rand(1000), "v": torch.rand(3)}), layout="separate")
    remove_model(store, "a")
    remove_model(store, "c")
    num_removed = 0

    def remove_one(path: Path) -> None:
        nonlocal num_removed
        num_removed += 1
        for meta in (store.index.read_meta(), StoreMeta.model_validate_json(store.meta_file.read_bytes())):
            assert path.name not in {extent.pack for extent in meta.extents.values()}
        assert verify(store, deep=True).damages == ()
        path.unlink() if path.is_file() else None
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("weights.operations.maintenance.remove_path", remove_one)
        for _ in range(4):
            with pytest.raises(KeyboardInterrupt):
                gc(store)
            assert verify(store, deep=True).damages == ()
    assert num_removed == 4
    gc(store)
    assert len(list(store.packs.iterdir())) == 2


def test_where_holes_are_refused_the_bytes_are_reported(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = torch.rand(5000)
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 40_000)
    externalize(store, "a", write_model("a", {"a": torch.rand(9000), "z": shared}))
    externalize(store, "b", write_model("b", {"z": shared}))
    remove_model(store, "a")
    with monkeypatch.context() as patch:
        patch.setattr("weights.operations.maintenance.punch", lambda path, ranges: False)
        report = gc(store)
    assert (report.removed[1:], report.freed_bytes >= 0) == ((), True)
    assert report.unfreed_bytes == 36_864
    size = (store.packs / "a_weight_combined").stat().st_size
    assert gc(store).freed_bytes == 36_864
    assert (store.packs / "a_weight_combined").stat().st_size == size
    assert verify(store, deep=True).damages == ()


def test_a_hard_linked_copy_of_the_store_keeps_every_byte_that_its_manifests_name(
    store: WeightStore, write_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = torch.rand(5000)
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 40_000)
    externalize(store, "a", write_model("a", {"a": torch.rand(9000), "z": shared}))
    externalize(store, "b", write_model("b", {"z": shared}))
    externalize(store, "c", write_model("c", {"c": torch.rand(9000)}))
    shutil.copytree(store.path, tmp_path / "backup", copy_function=os.link)  # as `cp -al` and `rsync --link-dest`
    backup = WeightStore(tmp_path / "backup")
    for model in ("a", "c"):
        remove_model(store, model)
    planned = gc(store, dry_run=True)
    report = gc(store)
    assert report == planned
    assert (report.freed_bytes < 36_864, report.unfreed_bytes) == (True, 36_864)
    assert not (store.packs / "c_weight_combined").exists()
    for one in (store, backup):
        assert verify(one, deep=True).damages == ()
    assert backup.model_names() == ["a", "b", "c"]
    shutil.rmtree(backup.path)
    assert gc(store).freed_bytes >= 36_864
    assert verify(store, deep=True).damages == ()


def test_symlinks_are_removed_and_never_followed(store: WeightStore, write_model, tmp_path: Path) -> None:
    manifest = externalize(store, "a", write_model("a", {"w": torch.rand(3000)}))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(bytes(100_000))
    (store.packs / "dead").symlink_to(outside)
    (store.models / "a" / "skeleton-dead").symlink_to(outside)
    (store.path / ".staged-dead").symlink_to(outside)
    pack = store.packs / manifest.extents_of(["model"])[0].pack
    pack.rename(outside / "pack")
    with (outside / "pack").open("ab") as file:
        file.write(bytes(50_000))
    pack.symlink_to(outside / "pack")
    gc(store)
    assert files(outside)["precious"] == bytes(100_000)
    assert allocated_bytes(outside / "pack") >= 60_000
    assert not (store.packs / "dead").is_symlink()
    assert pack.is_symlink()


def test_what_converting_leaves_goes(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(3000), "v": torch.rand(40)})
    externalize(store, "m", source)
    for layout, names in (("inline", {"m_inline"}), ("combined", {"m_weight_combined"})):
        convert(store, "m", layout)
        gc(store)
        assert {pack.name for pack in store.packs.iterdir()} == names
        assert verify(store, deep=True).damages == ()


def test_a_folder_that_is_no_store_is_said(store: WeightStore) -> None:
    with pytest.raises(StoreError, match="no such store"):
        gc(store)
    assert not store.path.exists()


def test_a_disk_that_refuses_is_said(store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch) -> None:
    externalize(store, "a", write_model("a", {"w": torch.rand(10)}))

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StoreError, match="Read-only file system"):
            remove_model(store, "a")
        with pytest.raises(StoreError, match="Read-only file system"):
            gc(store)
    gc(store)
    assert list(store.packs.iterdir()) == []
