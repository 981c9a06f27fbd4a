"""Sources that count as unchanged, and what it costs to find out."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from weights.formats.tensors import FileTensor
from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.source_mark import HEAD_BYTES, NUM_SAMPLES, SAMPLE_BYTES, source_mark
from weights.storage.store import WeightStore

EPOCH_NS = 10**18


def freeze(folder: Path) -> None:
    """Set times as SOURCE_DATE_EPOCH and `tar --mtime` do."""
    for file in folder.rglob("*"):
        os.utime(file, ns=(EPOCH_NS, EPOCH_NS))


def test_a_retrained_model_of_equal_names_sizes_and_dates_is_another_version(store: WeightStore, write_model) -> None:
    folders = {}
    for name in ("first", "retrained"):
        folders[name] = write_model(name, {"w": torch.rand(1000)})
        freeze(folders[name])
    sizes = [{file.name: file.stat().st_size for file in folder.iterdir()} for folder in folders.values()]
    assert sizes[0] == sizes[1]
    first = externalize(store, "m", folders["first"])
    second = externalize(store, "m", folders["retrained"])
    assert first.fingerprint != second.fingerprint
    found = load_from_store(store.path, "m")["model"]["w"]
    assert torch.equal(found, load_file(folders["retrained"] / "model.safetensors")["w"])


def test_a_file_that_is_written_over_in_place_is_seen(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(1000)})
    freeze(source)
    first = externalize(store, "m", source)
    save_file({"w": torch.rand(1000)}, source / "model.safetensors")
    freeze(source)
    assert externalize(store, "m", source).fingerprint != first.fingerprint


def test_a_byte_that_no_sample_has_is_seen_though_the_date_is_set_back(store: WeightStore, write_model) -> None:
    """A date can be set, the time of the change cannot."""
    source = write_model("m", {"w": torch.zeros(10**6)})
    file = source / "model.safetensors"
    freeze(source)
    first = externalize(store, "m", source)
    place = HEAD_BYTES + (file.stat().st_size - HEAD_BYTES - SAMPLE_BYTES) // NUM_SAMPLES - 3  # just before a sample
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(b"\x3f")
    freeze(source)
    second = externalize(store, "m", source)
    assert second.fingerprint != first.fingerprint
    found = load_from_store(store.path, "m")["model"]["w"]
    assert torch.equal(found, load_file(file)["w"])
    assert found.count_nonzero() == 1


FIELDS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")


@pytest.mark.parametrize("field", FIELDS)
def test_each_thing_that_a_file_system_says_of_a_file_counts(
    write_model, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    before, fstat = source_mark(source, {}), os.fstat

    def other(descriptor: int) -> SimpleNamespace:
        status = fstat(descriptor)
        told = {name: getattr(status, name) for name in FIELDS}
        return SimpleNamespace(**told | {field: told[field] + 1})

    assert source_mark(source, {}) == before
    monkeypatch.setattr(os, "fstat", other)
    assert source_mark(source, {}) != before


def test_the_same_file_under_another_path_is_looked_at_again(write_model, tmp_path: Path) -> None:
    """Hard links have one inode, and whatever belongs to it."""
    source, linked = write_model("m", {"w": torch.rand(10)}), tmp_path / "linked"
    linked.mkdir()
    for file in source.iterdir():
        os.link(file, linked / file.name)
    assert source_mark(source, {}) != source_mark(linked, {})


@pytest.mark.parametrize("place", [8, -1])
def test_headers_and_samples_count_where_the_file_system_says_nothing_new(
    write_model, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    source = write_model("m", {"w": torch.zeros(10**6)})
    file, fstat = source / "model.safetensors", os.fstat
    known = {path.stat().st_ino: path.stat() for path in source.iterdir()}

    def as_before(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        return known.get(status.st_ino, status)

    monkeypatch.setattr(os, "fstat", as_before)
    before = source_mark(source, {})
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    assert source_mark(source, {}) != before


def test_equal_bytes_elsewhere_are_the_same_version_and_nothing_is_written(
    store: WeightStore, write_pipeline, tmp_path: Path
) -> None:
    source = write_pipeline("p", {"vae": {"w": torch.rand(1000)}, "unet": {"w": torch.rand(10)}})
    first = externalize(store, "m", source)
    inodes = {file: file.stat().st_ino for folder in (store.packs, store.models) for file in folder.rglob("*")}
    copy = tmp_path / "elsewhere"
    shutil.copytree(source, copy)
    second = externalize(store, "m", copy)
    assert second.fingerprint == first.fingerprint
    assert second.components == first.components
    assert second.extents == first.extents
    assert second.source == str(copy)
    changed = {file for file, inode in inodes.items() if file.stat().st_ino != inode}
    assert changed == {store.models / "m" / "manifest.json"}


def test_what_is_unchanged_is_not_read_again(store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model("m", {"w": torch.rand(10**6), "v": torch.rand(10)})
    first = externalize(store, "m", source)
    read: list[int] = []
    pread = os.pread

    def counted(descriptor: int, nbytes: int, offset: int) -> bytes:
        read.append(nbytes)
        return pread(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr(FileTensor, "read", lambda tensor: pytest.fail(f"{tensor} was read"))
    assert externalize(store, "m", source) == first
    assert 0 < sum(read) <= 2 * (HEAD_BYTES + NUM_SAMPLES * SAMPLE_BYTES)


@pytest.mark.parametrize("nbytes", [0, 1, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + 100_000, 3 * HEAD_BYTES])
def test_samples_cover_small_files_and_the_ends_of_large_ones(tmp_path: Path, nbytes: int) -> None:
    file = tmp_path / "x.safetensors"
    data = bytearray(random.randbytes(nbytes))

    def mark() -> str:
        """Return the mark of a mirror: its bytes alone count."""
        file.write_bytes(data)
        return source_mark(file, {}, etags={file.name: "e"})

    before = mark()
    assert mark() == before
    for place in {0, min(nbytes, HEAD_BYTES) - 1, nbytes - 1} if nbytes else set():
        data[place] ^= 1
        assert mark() != before
        data[place] ^= 1
    assert mark() == before
    assert source_mark(file, {}, etags={file.name: "other"}) != before
    assert source_mark(file, {"dtype": "float32"}, etags={file.name: "e"}) != before


def test_hidden_files_and_those_of_others_do_not_count(write_model) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    before = source_mark(source, {})
    for name in (".lock", ".cache/x.json", "picture.png"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    assert source_mark(source, {}) == before
    (source / "tokenizer.json").write_text("{}")
    assert source_mark(source, {}) != before
