"""Checkpoint -> store -> tensors: the bytes that went in come out, each kept once."""

from __future__ import annotations

import errno
import itertools
import os
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from unit.weights.comparing import files, random_tensors, same

from weights.formats.folder import LORA_FILE
from weights.formats.safetensors import read_header
from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.maintenance import gc, remove_model
from weights.operations.repair import verify
from weights.records.errors import FormatError, StoreError
from weights.records.manifest import Layout
from weights.storage.hashing import hash_tensors
from weights.storage.pack_folder import PackFolder
from weights.storage.store import WeightStore

LAYOUTS: tuple[Layout, ...] = ("combined", "separate", "inline")


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def test_round_trip_is_byte_equal(store: WeightStore, write_model) -> None:
    source = write_model("m", random_tensors())
    manifest = externalize(store, "m", source)
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))
    assert store.manifest("m") == manifest
    assert (manifest.kind, manifest.class_name, manifest.source) == ("llm", "TinyForCausalLM", str(source))


@pytest.mark.parametrize("wanted", NAMES)
def test_casting_rounds_as_torch_does(store: WeightStore, write_model, wanted: str) -> None:
    special = torch.tensor(
        [0.0, -0.0, 1e-45, 6e-8, 1e-40, 65504, 65519, 65520, 1e30, 3.4e38, float("inf"), float("nan")]
    )
    ties = 1 + torch.arange(64) * 2.0**-9
    values = torch.cat([special, -special, ties, torch.randn(1000), torch.randn(1000) * 1e-6]).double()
    tensors = {str(dtype): values.to(dtype) for dtype in FLOATS}
    others = {"int": torch.arange(4), "fp8": torch.randn(8).to(torch.float8_e4m3fn), "empty": torch.zeros(0)}
    source = write_model("m", tensors | others)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        externalize(store, "m", source, dtype=wanted)
    loaded = load_from_store(store.path, "m")["model"]
    for name, tensor in tensors.items():
        assert loaded[name].dtype == NAMES[wanted]
        torch.testing.assert_close(loaded[name], tensor.to(NAMES[wanted]), rtol=0, atol=0, equal_nan=True)
    assert (loaded["int"].dtype, loaded["fp8"].dtype) == (torch.int64, torch.float8_e4m3fn)
    assert loaded["empty"].dtype == NAMES[wanted]


def test_an_unchanged_source_is_not_read_again(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    first = externalize(store, "m", source)
    before = files(store.path)
    assert externalize(store, "m", source) == first
    assert files(store.path) == before


def test_an_unchanged_source_needs_no_writable_store(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    first = externalize(store, "m", source)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr("weights.operations.externalize.hash_tensors", None)
    assert externalize(store, "m", source) == first
    monkeypatch.undo()
    (store.path / ".lock").unlink()
    (store.path / ".lock").mkdir()
    with pytest.raises(StoreError, match=r"store: cannot be written: Is a directory"):
        externalize(store, "n", source)


def test_a_full_store_is_told_from_a_full_weight_dir(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_model("m", {"w": torch.rand(10)})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps = (
        (PackFolder, "add", "store"),
        (WeightStore, "publish_model", "store"),
        (PackFolder, "new_name", "elsewhere"),
    )
    for owner, name, where in steps:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(StoreError, match=f"/{where}: disk full: 40 bytes were needed"):
                externalize(store, "m", source, weight_dir=tmp_path / "elsewhere")
    assert store.model_names() == []
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_skeleton_is_everything_but_the_weights(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": {"w": torch.rand(4)}})
    manifest = externalize(store, "p", source)
    expected = {name: data for name, data in files(source).items() if not name.endswith(".safetensors")}
    assert files(store.skeleton(manifest)) == expected


@pytest.mark.parametrize("name", ["m", "new"])
def test_a_failure_leaves_the_store_as_it_was(store: WeightStore, write_pipeline, write_model, name: str) -> None:
    externalize(store, "m", write_model("good", {"w": torch.rand(4)}))
    before = files(store.path)
    source = write_pipeline("bad", {"vae": {"w": torch.rand(4)}, "unet": {"w": torch.rand(4)}})
    file = source / "unet" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(FormatError, match=str(file)):
        externalize(store, name, source)
    with pytest.raises(FormatError, match="no such folder"):
        externalize(store, name, source / "gone")
    assert files(store.path) == before


@pytest.mark.drawn
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_said_and_publishes_nothing(
    store: WeightStore, write_pipeline, write_model, monkeypatch: pytest.MonkeyPatch, layout: Layout, code: int
) -> None:
    """Every flush to the disk fails once; what is there afterwards is a store, with all that was published."""
    externalize(store, "m", write_model("good", {"w": torch.rand(4)}))
    source = write_pipeline("p", {"vae": {"w": torch.rand(400)}, "unet": {"w": torch.rand(400), "b": torch.rand(3)}})
    lock = threading.Lock()
    for number in itertools.count():
        left = number

        def full(descriptor: int) -> None:
            nonlocal left
            with lock:
                left -= 1
            if left == -1:
                raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            try:
                externalize(store, "n", source, layout=layout)
            except StoreError as error:
                message = str(error)
            else:
                break
        if code == errno.ENOSPC:
            assert re.search(r"store: disk full: 3212 bytes were needed, \d+ were free; nothing", message)
        assert str(store.path) in message or os.strerror(code) in message
        assert not list(store.path.glob(".staged*"))
        assert "m" in store.model_names()
        assert verify(store, deep=True).damages == ()
        if "n" in store.model_names():  # the very last flush, of the folder that the manifest is in by then
            remove_model(store, "n")
        gc(store)
        assert [pack.name for pack in store.packs.iterdir()] == ["m_weight_combined"]
    assert left >= 0
    assert number >= 6
    assert verify(store, deep=True).damages == ()


def test_models_of_empty_tensors(store: WeightStore, write_model) -> None:
    for name, tensors in {
        "a": {"e": torch.zeros(0, 3)},
        "b": {"e": torch.zeros(2, 0, dtype=torch.int8)},
        "c": {},
    }.items():
        source = write_model(name, tensors)
        externalize(store, name, source)
        assert same(load_from_store(store.path, name)["model"], load_file(source / "model.safetensors"))


def test_an_adapter_keeps_its_metadata(store: WeightStore, tmp_path: Path) -> None:
    source = tmp_path / "lora"
    source.mkdir()
    save_file({"unet.q.lora_A.weight": torch.rand(2, 3)}, source / LORA_FILE, metadata={"rank": "2"})
    manifest = externalize(store, "bold", source)
    assert (manifest.kind, manifest.components["lora"].metadata) == ("adapter", {"rank": "2"})


def test_a_checkpoint_stays_in_memory_up_to_a_bound(write_model, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = read_header(write_model("m", {"w": torch.rand(100)}) / "model.safetensors").tensors
    for keep_bytes, is_kept in ((400, True), (399, False)):
        monkeypatch.setattr("weights.storage.hashing.KEEP_BYTES", keep_bytes)
        hashed = hash_tensors({"model": tensors})["model"]["w"]
        assert (hashed.data is not None) is is_kept
        assert bytes(hashed.read()) == bytes(tensors["w"].read())


@pytest.mark.parametrize("keep_bytes", [0, 2**20])
def test_a_source_that_changes_between_hashing_and_writing_is_refused(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, keep_bytes: int
) -> None:
    monkeypatch.setattr("weights.storage.hashing.KEEP_BYTES", keep_bytes)
    source = write_model("m", {"a": torch.rand(1000), "b": torch.rand(1000)})
    file = source / "model.safetensors"
    hashed = hash_tensors({"model": read_header(file).tensors})["model"]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    status = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    hashed["a"].read()
    if keep_bytes:
        hashed["b"].read()  # what was hashed is what will be written
    else:
        with pytest.raises(FormatError, match=r"model\.safetensors: tensor 'b' changed while it was read"):
            hashed["b"].read()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_source_that_changes_while_it_is_read_is_refused(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    source = write_model("m", {"a": torch.rand(1000)})

    def hash_slowly(*args: object) -> object:
        hashed = hash_tensors(*args)
        write_model("m", {"a": torch.rand(1000)})
        return hashed

    monkeypatch.setattr("weights.operations.externalize.hash_tensors", hash_slowly)
    with pytest.raises(FormatError, match="changed while it was read"):
        externalize(store, "m", source, layout=layout)
    assert store.model_names() == []
    assert not list(store.packs.iterdir() if store.packs.exists() else [])


def test_a_single_file_is_a_model(store: WeightStore, tmp_path: Path) -> None:
    tensors = random_tensors()
    file = tmp_path / "bare.safetensors"
    save_file(tensors, file, metadata={"made": "by hand"})
    for layout in LAYOUTS:
        manifest = externalize(store, layout, file, layout=layout)
        assert (manifest.kind, manifest.components["model"].metadata) == ("tensors", {"made": "by hand"})
        assert same(load_from_store(store.path, layout)["model"], tensors)
    assert (store.packs / "inline_inline" / "bare.safetensors").read_bytes() == file.read_bytes()


def test_names_that_no_manifest_can_have_are_refused(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"a\\b": {"w": torch.rand(4)}})
    with pytest.raises(FormatError, match=str(source)):
        externalize(store, "p", source)


def test_progress_grows_to_all_bytes(store: WeightStore, write_model) -> None:
    heard: list[tuple[int, int]] = []
    source = write_model("m", {f"w{i}": torch.rand(10 + i) for i in range(20)})
    manifest = externalize(store, "m", source, progress=lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert len(heard) == 20
    assert heard[-1] == (manifest.nbytes, manifest.nbytes)
