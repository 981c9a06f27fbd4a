"""Checkpoint -> store -> tensors: the bytes that went in come out, each kept once."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import threading
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from weights.dtypes import ITEM_BYTES
from weights.errors import FormatError, StoreError, StoreVersionError
from weights.externalize import externalize
from weights.formats.lora import METADATA_KEY
from weights.formats.safetensors import read_header
from weights.formats.weight_files import LORA_FILE
from weights.loader import load_from_store
from weights.maintenance import gc, remove_model
from weights.manifest import EXTENT_ALIGNMENT, TENSOR_ALIGNMENT, Component, ExtentRef, Layout, Manifest, TensorRef
from weights.reading.extents import read_extent
from weights.storage.hashing import hash_tensors
from weights.storage.meta import StoreMeta
from weights.storage.sharing import SharedExtents
from weights.store import WeightStore
from weights.torch_dtypes import TORCH_DTYPES
from weights.verification import verify

LAYOUTS: tuple[Layout, ...] = ("combined", "separate", "inline")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    def value(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
        return tensor.dtype, tensor.shape, raw(tensor)

    return {name: value(tensor) for name, tensor in ours.items()} == {
        name: value(tensor) for name, tensor in theirs.items()
    }


def refs(manifest: Manifest) -> list[TensorRef]:
    return [ref for part in manifest.components.values() for ref in part.tensors.values()]


def random_tensors() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, a scalar, an empty one, and the same bytes twice."""
    tensors = {}
    for number, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        data = torch.randint(
            0, 2 if dtype is torch.bool else 256, (number * 37 + 1, 3, dtype.itemsize), dtype=torch.uint8
        )
        tensors[name] = data.view(dtype).squeeze(-1)
    equal = {"first": torch.arange(5.0), "second": torch.arange(5.0)}
    return tensors | equal | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_round_trip_is_byte_equal(store: WeightStore, write_model) -> None:
    source = write_model("m", random_tensors())
    manifest = externalize(store, "m", source)
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))
    assert store.manifest("m") == manifest
    assert (manifest.kind, manifest.class_name, manifest.source) == ("llm", "TinyForCausalLM", str(source))


def test_layout_is_aligned_and_packed_once(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": random_tensors(), "unet": {"w": torch.rand(1000)}})
    manifest = externalize(store, "p", source)
    refs = [ref for part in manifest.components.values() for ref in part.tensors.values()]
    assert all(ref.offset % TENSOR_ALIGNMENT == 0 for ref in refs)
    assert all(extent.offset % EXTENT_ALIGNMENT == 0 for extent in manifest.extents.values())
    assert all(ref.offset + ref.nbytes <= manifest.extents[ref.extent].nbytes for ref in refs)
    one = manifest.extents_of(["vae"]), manifest.extents_of(["unet"])
    assert not set(one[0]) & set(one[1])
    assert [file.name for file in store.packs.iterdir()] == ["p_weight_combined"]


@pytest.mark.parametrize("limit", [8192, 5000, 1024])
def test_extents_stay_under_the_limit(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", limit)
    sizes = [100, 7900, 1, 513, 4000, 511, 512, 20_000, 1, 3000]
    source = write_model("m", {f"t{i:02}": torch.randint(0, 255, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)})
    manifest = externalize(store, "m", source)
    assert len(manifest.extents) > 3
    for extent in manifest.extents.values():
        inside = [ref for ref in manifest.components["model"].tensors.values() if ref.extent == extent.id]
        assert extent.nbytes <= limit or len(inside) == 1
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))


def test_equal_tensors_are_stored_once_across_models(store: WeightStore, write_model, write_pipeline) -> None:
    shared = torch.rand(5000)
    first = externalize(
        store, "a", write_model("a", {"x": shared, "y": shared.clone(), "z": shared.clone().view(50, 100)})
    )
    assert sum(extent.nbytes for extent in first.extents.values()) == shared.nbytes
    own = torch.rand(10)
    second = externalize(store, "b", write_model("b", {"other": shared, "own": own}))
    assert (store.packs / "b_weight_combined").stat().st_size == own.nbytes
    assert set(first.extents) < set(second.extents)
    third = externalize(store, "c", write_pipeline("c", {"vae": {"w": shared}, "unet": {"w": own}}))
    assert not (store.packs / "c_weight_combined").exists()
    assert torch.equal(load_from_store(store.path, "c")["vae"]["w"], shared)
    assert third.components["vae"].tensors["w"].sha256 == first.components["model"].tensors["x"].sha256


def test_a_shared_component_is_the_same_module(store: WeightStore, write_pipeline) -> None:
    vae = random_tensors()
    keys = []
    for name in ("a", "b"):
        source = write_pipeline(name, {"vae": vae, "unet": {"w": torch.rand(4)}})
        keys.append(externalize(store, name, source).components)
    assert keys[0]["vae"].module_key == keys[1]["vae"].module_key
    assert keys[0]["unet"].module_key != keys[1]["unet"].module_key


def test_what_a_lora_says_beside_its_tensors_is_part_of_its_identity(store: WeightStore, tmp_path: Path) -> None:
    tensors = {"unet.q.lora_A.weight": torch.rand(2, 300), "unet.q.lora_B.weight": torch.rand(300, 2)}
    keys = []
    for number, config in enumerate([{"unet.lora_alpha": 4}, {"unet.lora_alpha": 64}, {"unet.lora_alpha": 4}]):
        source = tmp_path / f"lora{number}"
        source.mkdir()
        save_file(tensors, source / LORA_FILE, metadata={METADATA_KEY: json.dumps(config)})
        keys.append(externalize(store, f"lora{number}", source).components["lora"].module_key)
    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
    assert len(list(store.packs.iterdir())) == 1


def test_what_a_library_never_reads_is_no_part_of_an_identity(store: WeightStore, write_pipeline) -> None:
    vae = {"w": torch.rand(4)}
    keys = []
    for name, metadata in (("a", {"format": "pt"}), ("b", {"format": "np", "made": "yesterday"})):
        source = write_pipeline(name, {"vae": vae})
        save_file(vae, source / "vae" / "diffusion_pytorch_model.safetensors", metadata=metadata)
        keys.append(externalize(store, name, source).components["vae"].module_key)
    assert keys[0] == keys[1]


def test_what_a_gguf_header_says_is_part_of_the_identity(store: WeightStore, tmp_path: Path) -> None:
    weights, keys = np.random.default_rng().random((4, 64), np.float32), []
    for base in (1e4, 1e6):
        source = tmp_path / f"{base:.0f}.gguf"
        writer = gguf.GGUFWriter(source, "llama")
        writer.add_rope_freq_base(base)
        writer.add_tensor("w", weights)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        keys.append(externalize(store, f"m{base:.0f}", source).components["model"].module_key)
    assert keys[0] != keys[1]


def test_no_name_can_stand_for_two_tensors() -> None:
    def component(*names: str) -> Component:
        refs = {
            name: TensorRef(extent="e", offset=0, nbytes=4, dtype="F32", shape=(1,), sha256="0" * 64) for name in names
        }
        return Component(name="c", library="l", class_name=None, folder=".", tensors=refs, config_hash="h")

    pair, forged = component("a", "b"), component(f"a\0F32\0(1,)\0{'0' * 64}\nb")
    assert pair.weights_hash != forged.weights_hash
    assert component("a", "b").structure_key != component("a\0F32\0(1,)\0b").structure_key


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
    monkeypatch.setattr("weights.externalize.hash_tensors", None)
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

    for name, where in (("add_packs", "store"), ("publish_model", "store"), ("new_pack_name", "elsewhere")):
        with monkeypatch.context() as patch:
            patch.setattr(WeightStore, name, full)
            with pytest.raises(StoreError, match=f"/{where}: disk full: 40 bytes were needed"):
                externalize(store, "m", source, weight_dir=tmp_path / "elsewhere")
    assert store.model_names() == []
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_changed_source_is_a_new_version_and_the_old_pack_stays(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10), "kept": torch.arange(100)})
    old = externalize(store, "m", source)
    old_file = (store.packs / "m_weight_combined").read_bytes()
    write_model("m", {"w": torch.rand(11), "kept": torch.arange(100)})
    new = externalize(store, "m", source)
    assert new.fingerprint != old.fingerprint
    assert (store.packs / "m_weight_combined").read_bytes() == old_file
    assert store.skeleton(old).is_dir()
    assert store.skeleton(new).is_dir()
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))
    assert new.components["model"].tensors["kept"] == old.components["model"].tensors["kept"]


def test_other_settings_are_another_version(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": {"w": torch.rand(4)}, "unet": {"w": torch.rand(4)}})
    assert set(externalize(store, "p", source).components) == {"vae", "unet"}
    part = externalize(store, "p", source, component="vae", dtype="float16")
    assert (part.kind, set(part.components)) == ("embedding", {"vae"})
    assert part.components["vae"].tensors["w"].dtype == "F16"


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

    monkeypatch.setattr("weights.externalize.hash_tensors", hash_slowly)
    with pytest.raises(FormatError, match="changed while it was read"):
        externalize(store, "m", source, layout=layout)
    assert store.model_names() == []
    assert not list(store.packs.iterdir() if store.packs.exists() else [])


def test_separate_has_a_file_per_tensor_and_takes_what_a_dead_writer_left(store: WeightStore, write_model) -> None:
    tensors = {f"t{i}": torch.rand(50 + i) for i in range(20)}
    names = {f"weight_{hashlib.sha256(raw(tensor)).hexdigest()}": raw(tensor) for tensor in tensors.values()}
    whole, damaged, *_ = names
    store.packs.mkdir(parents=True)
    (store.packs / whole).write_bytes(names[whole])
    (store.packs / damaged).write_bytes(bytes(len(names[damaged])))
    inode = (store.packs / whole).stat().st_ino
    manifest = externalize(store, "m", write_model("m", tensors | {"tied": tensors["t0"].clone()}), layout="separate")
    assert files(store.packs) == dict(sorted(names.items()))
    assert (store.packs / whole).stat().st_ino == inode
    assert all((ref.offset, manifest.extents[ref.extent].offset) == (0, 0) for ref in refs(manifest))
    before = files(store.packs)
    externalize(store, "n", write_model("n", tensors), layout="separate")
    assert files(store.packs) == before


def test_inline_keeps_the_files(store: WeightStore, write_pipeline) -> None:
    source = write_pipeline("p", {"vae": random_tensors(), "unet": {"w": torch.rand(1000)}})
    manifest = externalize(store, "p", source, layout="inline")
    copies = {f"p_inline/{name}": data for name, data in files(source).items() if name.endswith(".safetensors")}
    assert files(store.packs) == copies
    assert not (store.path / "meta.json").exists()
    for part in ("vae", "unet"):
        expected = load_file(source / part / "diffusion_pytorch_model.safetensors")
        assert same(load_from_store(store.path, "p")[part], expected)
    again = externalize(store, "q", source, layout="inline")
    assert again.extents.keys() == manifest.extents.keys()
    assert (store.packs / "q_inline").is_dir()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_extent_ids_are_equal_bytes(store: WeightStore, write_model, layout: Layout) -> None:
    """Nodes share extents by id: padding must not hide behind equal tensors."""
    tensors = {"a": torch.rand(3), "b": torch.rand(128), "c": torch.rand(128), "d": torch.rand(5)}
    ids: dict[str, bytes] = {}
    for number, chosen in enumerate(["abcd", "bc", "b", "a", "ab", "bca"]):
        for kind in LAYOUTS:
            store = WeightStore(store.path.parent / f"{number}-{kind}")
            source = write_model(f"m{number}", {name: tensors[name] for name in chosen})
            for extent in externalize(store, "m", source, layout=kind).extents.values():
                data = read_extent(store.packs, extent).tobytes()
                assert ids.setdefault(extent.id, data) == data
    assert len(set(ids.values())) == len(ids)


def test_a_cast_inline_is_stock_safetensors(store: WeightStore, write_model) -> None:
    tensors = {"w": torch.randn(30, 7), "i": torch.arange(5)}
    externalize(store, "m", write_model("m", tensors), layout="inline", dtype="bfloat16")
    expected = {"w": tensors["w"].bfloat16(), "i": tensors["i"]}
    assert same(load_file(store.packs / "m_inline" / "model.safetensors"), expected)
    assert same(load_from_store(store.path, "m")["model"], expected)


@pytest.mark.parametrize("limit", [4000, 100])
def test_inline_extents_stay_under_the_limit_and_aligned(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", limit)
    source = write_model("m", random_tensors())
    manifest = externalize(store, "m", source, layout="inline")
    for extent in manifest.extents.values():
        inside = [ref for ref in refs(manifest) if ref.extent == extent.id]
        assert extent.nbytes <= limit or len([ref for ref in inside if ref.nbytes]) == 1
        assert all(ref.offset % ITEM_BYTES[ref.dtype] == 0 for ref in inside)
    assert same(load_from_store(store.path, "m")["model"], load_file(source / "model.safetensors"))


def test_packs_are_staged_in_the_weight_dir(store: WeightStore, write_model, tmp_path: Path) -> None:
    folder = tmp_path / "fast-disk"
    seen = []

    def watch(self: WeightStore, staged: dict[str, Path]) -> None:
        seen.extend(staged.values())
        add_packs(self, staged)

    add_packs = WeightStore.add_packs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightStore, "add_packs", watch)
        for number, layout in enumerate(LAYOUTS):
            externalize(store, f"m{number}", write_model("m", {"w": torch.rand(9)}), layout=layout, weight_dir=folder)
    assert len(seen) == 3
    assert all(path.is_relative_to(folder) for path in seen)
    assert list(folder.iterdir()) == []
    assert verify(store, deep=True).damages == ()


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


def test_a_lost_pack_is_written_again(tmp_path: Path) -> None:
    """The source is unchanged, but what was stored of it is gone: storing it once more heals the store."""
    source = tmp_path / "source"
    source.mkdir()
    save_file({"w": torch.randn(5, 7), "b": torch.randn(7)}, source / "model.safetensors")
    (source / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    store = WeightStore(tmp_path / "store")
    first = externalize(store, "m", source)
    for pack in store.packs.iterdir():
        pack.unlink()
    again = externalize(store, "m", source)
    assert {ref.sha256 for ref in again.components["model"].tensors.values()} == {
        ref.sha256 for ref in first.components["model"].tensors.values()
    }
    for name, tensor in load_file(source / "model.safetensors").items():
        assert torch.equal(load_from_store(store.path, "m")["model"][name], tensor)


@pytest.mark.parametrize("lost", ["manifest", "skeleton"])
def test_what_is_damaged_of_a_model_is_written_again(store: WeightStore, write_model, lost: str) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    first = externalize(store, "m", source)
    if lost == "manifest":
        (store.models / "m" / "manifest.json").write_text("{")
    else:
        shutil.rmtree(store.skeleton(first))
    assert externalize(store, "m", source) == first
    assert store.manifest("m") == first
    assert (store.skeleton(first) / "config.json").is_file()
    assert [pack.name for pack in store.packs.iterdir()] == ["m_weight_combined"]


def test_a_manifest_of_a_newer_version_is_not_written_over(store: WeightStore, write_model) -> None:
    source = write_model("m", {"w": torch.rand(10)})
    externalize(store, "m", source)
    file = store.models / "m" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 99}))
    before = file.read_text()
    with pytest.raises(StoreVersionError, match="manifest version 99"):
        externalize(store, "m", source)
    assert file.read_text() == before


def test_progress_grows_to_all_bytes(store: WeightStore, write_model) -> None:
    heard: list[tuple[int, int]] = []
    source = write_model("m", {f"w{i}": torch.rand(10 + i) for i in range(20)})
    manifest = externalize(store, "m", source, progress=lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert len(heard) == 20
    assert heard[-1] == (manifest.nbytes, manifest.nbytes)


def flip(store: WeightStore, manifest: Manifest, component: str, name: str) -> None:
    """One bit of a tensor of `manifest`, in the pack where it is."""
    ref = manifest.components[component].tensors[name]
    extent = manifest.extents[ref.extent]
    path = store.packs / extent.pack
    data = bytearray(path.read_bytes())
    data[extent.offset + ref.offset + random.randrange(ref.nbytes)] ^= 1 << random.randrange(8)
    path.write_bytes(data)


@pytest.mark.parametrize("layout", ["combined", "separate"])
@pytest.mark.parametrize("first", ["combined", "separate"])
@pytest.mark.parametrize("damage", ["shared", "neighbour", "cut", "hole", "gone"])
def test_a_new_model_shares_no_damage(
    store: WeightStore, write_model, layout: Layout, first: Layout, damage: str
) -> None:
    """Also where the damage is in what only the other model wants: a reader takes extents whole."""
    tensors = {"a": torch.rand(500), "b": torch.rand(500), "c": torch.rand(500)}
    old = externalize(store, "old", write_model("old", tensors), layout=first)
    extent = old.extents[old.components["model"].tensors["b"].extent]
    pack = store.packs / extent.pack
    match damage:
        case "shared":
            flip(store, old, "model", "b")
        case "neighbour":
            flip(store, old, "model", "c")
        case "cut":
            os.truncate(pack, pack.stat().st_size - 1)
        case "hole":
            pack.write_bytes(bytes(pack.stat().st_size))
        case "gone":
            pack.unlink()
    wanted = {name: tensors[name] for name in "ab"} | {"own": torch.rand(3)}
    externalize(store, "new", write_model("new", wanted), layout=layout)
    assert verify(store, "new", deep=True).damages == ()
    assert same(load_from_store(store.path, "new")["model"], wanted)
    num_packs = len(list(store.packs.iterdir()))
    again = externalize(store, "next", write_model("next", wanted), layout=layout)
    assert verify(store, "next", deep=True).damages == ()
    assert (again.extents, len(list(store.packs.iterdir()))) == (store.manifest("new").extents, num_packs)


def test_what_is_shared_is_read_once_and_without_the_lock(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.storage.packs.MAX_EXTENT_BYTES", 2000)
    tensors = {f"t{i}": torch.rand(400) for i in range(9)}
    externalize(store, "old", write_model("old", tensors))
    read: list[str] = []

    def watch(packs: Path, extent: ExtentRef) -> object:
        with (store.path / ".lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        read.append(extent.id)
        return read_extent(packs, extent)

    monkeypatch.setattr("weights.storage.sharing.read_extent", watch)
    wanted = {name: tensors[name] for name in ("t1", "t2", "t5")}
    new = externalize(store, "new", write_model("new", wanted | {"own": torch.rand(400)}))
    assert len(read) == 3
    assert set(read) == {new.components["model"].tensors[name].extent for name in wanted}


def test_what_another_writer_damages_meanwhile_is_found(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that appears between the reading and the lock is read under it."""
    tensors = {"a": torch.rand(500)}
    choose = SharedExtents.choose
    calls = 0

    def choose_later(self: SharedExtents, known: StoreMeta) -> set[str]:
        nonlocal calls
        calls += 1
        damaged = choose(self, known)
        if calls == 1:
            with monkeypatch.context() as patch:
                patch.setattr(SharedExtents, "choose", choose)
                flip(store, externalize(store, "fast", write_model("fast", tensors)), "model", "a")
        return damaged

    monkeypatch.setattr(SharedExtents, "choose", choose_later)
    externalize(store, "slow", write_model("slow", tensors))
    assert calls == 2
    assert verify(store, "slow", deep=True).damages == ()
    assert len(verify(store, "fast").damages) == 1


@pytest.mark.parametrize("layout", ["combined", "separate"])
def test_a_tiny_equal_tensor_ties_no_model_to_a_large_extent(
    store: WeightStore, write_pipeline, write_model, layout: Layout
) -> None:
    norm, large = torch.ones(64), torch.rand(100_000)
    large_one = externalize(store, "large", write_model("large", {"norm": norm, "w": large}), layout=layout)
    tiny = {"norm": norm, "v": torch.rand(100)}
    leased = [externalize(store, "tiny", write_model("tiny", tiny), layout=layout)]
    leased.append(externalize(store, "twin", write_model("twin", tiny), layout=layout))
    for manifest in leased:
        assert sum(extent.nbytes for extent in manifest.extents.values()) < 1024
        assert same(load_from_store(store.path, manifest.model)["model"], tiny)
    assert leased[0].extents == leased[1].extents
    # Within a model as well: each component is leased by itself.
    parts = {"a": {"w": torch.rand(100_000), "norm": torch.zeros(9)}, "b": {"norm": torch.zeros(9), "x": torch.rand(9)}}
    pipeline = externalize(store, "p", write_pipeline("p", parts), layout=layout)
    assert sum(extent.nbytes for extent in pipeline.extents_of(["b"])) < 1024
    # And who wants most of the large one shares it, norm and all, though there is a small copy.
    tuned = externalize(store, "tuned", write_model("tuned", {"norm": norm, "w": large, "v": torch.rand(3)}))
    assert large_one.extents.keys() <= tuned.extents.keys()
    assert len(tuned.extents) == len(large_one.extents) + 1
