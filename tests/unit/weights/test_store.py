"""The store's own files: versions, damage, names."""

from __future__ import annotations

import contextlib
import errno
import json
import sqlite3
from pathlib import Path

import pytest
import torch

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.maintenance import gc
from weights.operations.repair import verify
from weights.records.errors import ModelNotStored, StoreError, StoreVersionError, WeightsError
from weights.records.manifest import Layout
from weights.storage.index import StoreMeta
from weights.storage.store import WeightStore, manifest_text


@pytest.fixture
def store(tmp_path: Path, write_model) -> WeightStore:
    store = WeightStore(tmp_path / "store")
    externalize(store, "m", write_model("m", {"w": torch.rand(3)}))
    return store


def test_opening_creates_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "new")
    assert store.index.read_meta().tensors == {}
    assert store.model_names() == []
    with pytest.raises(ModelNotStored, match=r"no model 'm' in .*new \(stored: none\)"):
        store.manifest("m")
    assert not store.path.exists()


def test_an_unknown_model_lists_the_known_ones(store: WeightStore, write_model) -> None:
    externalize(store, "b", write_model("b", {"w": torch.rand(3)}))
    with pytest.raises(ModelNotStored, match=r"no model 'x' .*\(stored: b, m\)"):
        store.manifest("x")
    for number in range(60):
        (store.models / f"n{number}").mkdir()
        (store.models / f"n{number}" / "manifest.json").touch()
    with pytest.raises(ModelNotStored, match=r"\(stored: b, m, n0, .* and 12 more\)"):
        store.manifest("x")


def test_a_newer_store_is_refused_and_kept(store: WeightStore, write_model) -> None:
    with contextlib.closing(sqlite3.connect(store.index_file)) as index:
        for pragma in ("user_version", "application_id"):
            index.execute(f"PRAGMA {pragma} = 4")
    before = store.index_file.read_bytes()
    with pytest.raises(StoreVersionError, match=r"index\.sqlite: store version 4, this library reads version 3"):
        store.index.read_meta()
    for attempt in (lambda: externalize(store, "n", write_model("n", {"w": torch.rand(3)})), lambda: gc(store)):
        with pytest.raises(StoreVersionError):
            attempt()
    assert store.index_file.read_bytes() == before
    assert store.model_names() == ["m"]


@pytest.mark.parametrize("more", [{}, {"compression": "zstd"}])
def test_a_newer_store_without_an_index_is_refused_and_kept(store: WeightStore, write_model, more: dict) -> None:
    store.index_file.unlink()
    text = json.dumps({"version": 3, "extents": {}, **more})
    store.meta_file.write_text(text)
    for attempt in (lambda: externalize(store, "n", write_model("n", {"w": torch.rand(3)})), lambda: gc(store)):
        with pytest.raises(StoreVersionError, match=r"meta\.json: store version 3, this library reads version 2"):
            attempt()
    assert store.meta_file.read_text() == text
    assert not store.index_file.exists()


@pytest.mark.parametrize(
    "meta",
    [
        b'{"version": 1, "tensors": {"00": {"extent": "e", "offset": 0, "nbytes": 4}}, "extents": {}}',
        b'{"version": 2, "extents": {}}',
        *(b"", b"{", b"[]", b"\xff\xfe", b'{"tensors": 3}'),
        None,
    ],
)
def test_a_store_without_an_index_is_read_from_its_manifests(
    store: WeightStore, write_model, meta: bytes | None
) -> None:
    """Stores of before had only a meta.json."""
    expected = store.index.read_meta()
    store.index_file.unlink()
    if meta is not None:
        store.meta_file.write_bytes(meta)
    assert store.index.read_meta() == expected
    assert not store.index_file.exists()
    packs = sorted(store.packs.iterdir())
    source = write_model("n", {"w": load_from_store(store.path, "m")["model"]["w"]})
    externalize(store, "n", source)
    assert sorted(store.packs.iterdir()) == packs
    assert store.index.read_meta() == expected
    gc(store)
    assert StoreMeta.model_validate_json(store.meta_file.read_bytes()) == expected


@pytest.mark.parametrize("damage", ["empty", "text", "half", "page", "row"])
def test_a_damaged_index_is_made_again_by_whoever_needs_it(store: WeightStore, write_model, damage: str) -> None:
    tensors = {f"t{i}": torch.rand(1 + i) for i in range(200)}
    externalize(store, "many", write_model("many", tensors))
    expected = store.index.read_meta()
    data = bytearray(store.index_file.read_bytes())
    match damage:
        case "empty":
            store.index_file.write_bytes(b"")
        case "text":
            store.index_file.write_bytes(b"no index at all" * 1000)
        case "half":
            store.index_file.write_bytes(data[: len(data) // 2])
        case "page":
            store.index_file.write_bytes(data[:4096] + b"\xff" * (len(data) - 4096))
        case "row":
            with contextlib.closing(sqlite3.connect(store.index_file)) as index, index:
                index.execute("UPDATE extents SET offset = 'x', checksum = x'00'")
    assert len(verify(store).damages) == (0 if damage == "row" else 1)
    packs = sorted(store.packs.iterdir())
    externalize(store, "twin", write_model("twin", tensors))
    assert sorted(store.packs.iterdir()) == packs
    assert store.index.read_meta() == expected
    assert verify(store, deep=True).damages == ()


def test_an_index_that_says_wrong_is_not_believed(store: WeightStore, write_model) -> None:
    """A flipped bit in a number is no damage that sqlite could see."""
    tensors = {f"t{i}": torch.rand(10) for i in range(4)}
    externalize(store, "a", write_model("a", tensors))
    with contextlib.closing(sqlite3.connect(store.index_file)) as index, index:
        index.execute("UPDATE tensors SET offset = 1536 - offset WHERE extent = (SELECT MAX(extent) FROM tensors)")
    externalize(store, "b", write_model("b", tensors))
    assert verify(store, deep=True).damages == ()


@pytest.mark.parametrize("more", [{}, {"compression": "zstd"}])
def test_a_newer_manifest_is_refused(store: WeightStore, more: dict[str, str]) -> None:
    file = store.models / "m" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 3} | more))
    with pytest.raises(StoreVersionError, match=r"manifest\.json: manifest version 3, this library reads version 2"):
        store.manifest("m")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}'])
def test_a_damaged_manifest_is_named(store: WeightStore, damage: bytes) -> None:
    (store.models / "m" / "manifest.json").write_bytes(damage)
    with pytest.raises(WeightsError, match=r"m/manifest\.json: damaged manifest"):
        store.manifest("m")


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("extent", {"id": "other"}, "calls itself 'other'"),
        ("extent", {"offset": 4095}, "begins at byte 4095, not a multiple of 4096"),
        ("extent", {"nbytes": 1, "offset": 2**63 - 1}, "begins at byte"),
        ("extent", {"offset": 2**63}, "less than"),
        ("extent", {"pack": "../else"}, "not a relative path inside its folder"),
        ("extent", {"pack": "/etc/passwd"}, "not a relative path inside its folder"),
        ("extent", {"pack": "a\\b"}, "not a relative path inside its folder"),
        ("extent", {"pack": ""}, "not a relative path inside its folder"),
        ("tensor", {"extent": "gone"}, "tensor model.w is in extent 'gone', which the manifest does not have"),
        ("tensor", {"offset": 512}, "ends at byte 524 of extent .*, which has 12 bytes"),
        ("tensor", {"offset": -1}, "greater than or equal to 0"),
        ("tensor", {"nbytes": 8}, r"F32 \[3\] takes 12 bytes, not 8"),
        ("tensor", {"shape": [3, *[1] * 64]}, "at most 64 items"),
        ("tensor", {"sha256": "0"}, "match pattern"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(
    store: WeightStore, kind: str, changes: dict[str, object], words: str
) -> None:
    file = store.models / "m" / "manifest.json"
    manifest = json.loads(file.read_text())
    (extent,) = manifest["extents"].values()
    record = extent if kind == "extent" else manifest["components"]["model"]["tensors"]["w"]
    record |= changes
    file.write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match=f"damaged manifest at .*{words}"):
        store.manifest("m")


@pytest.mark.parametrize(
    ("offset", "words"),
    [
        (0, None),  # the very same bytes: tied
        (512, None),
        (1, "at byte 1 is not aligned to 512 bytes"),
        (1536, None),  # to the last byte
        (2048, "ends at byte 2560 of extent .*, which has 2048 bytes"),
    ],
)
def test_tensors_lie_within_their_extent_and_are_tied_or_apart(
    store: WeightStore, offset: int, words: str | None
) -> None:
    """A second tensor of 512 bytes, beside one at the extent's beginning."""
    file = store.models / "m" / "manifest.json"
    manifest = json.loads(file.read_text())
    (extent,) = manifest["extents"].values()
    extent["nbytes"] = 2048
    tensors = manifest["components"]["model"]["tensors"]
    tensors["w"] |= {"shape": [128], "nbytes": 512}
    tensors["v"] = tensors["w"] | {"offset": offset}
    file.write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match=words) if words else contextlib.nullcontext():
        assert store.manifest("m").components["model"].tensors["v"].offset == offset
    for shape, nbytes in (([129], 516), ([127], 508)):
        tensors["v"] = tensors["w"] | {"shape": shape, "nbytes": nbytes}
        file.write_text(json.dumps(manifest))
        with pytest.raises(WeightsError, match=r"model\.[vw] overlaps tensor model\.[vw]"):
            store.manifest("m")


def test_a_field_of_a_manifest_is_named(store: WeightStore) -> None:
    file = store.models / "m" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["components"]["model"]["tensors"]["w"]["nbytes"] = "many"
    file.write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match=r"components\.model\.tensors\.w\.nbytes"):
        store.manifest("m")


@pytest.mark.parametrize("layout", ["combined", "separate", "inline"])
def test_a_manifest_that_could_not_be_read_is_not_published(
    store: WeightStore, write_model, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """It would stop `gc` for the whole store."""
    limit = (store.models / "m" / "manifest.json").stat().st_size + 100
    for module in ("weights.records.manifest", "weights.storage.store"):
        monkeypatch.setattr(f"{module}.MAX_MANIFEST_BYTES", limit)
    gc(store)
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    source = write_model("large", {f"t{i}": torch.rand(3) for i in range(3)})
    with pytest.raises(StoreError, match=rf"'large': its manifest takes \d+ bytes for 3 tensors, {limit} at most"):
        externalize(store, "large", source, layout=layout)
    assert {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == before
    assert gc(store).removed == ()
    assert externalize(store, "small", write_model("small", {"w": torch.rand(3)})).model == "small"


def test_a_name_that_is_no_text_is_refused(store: WeightStore, write_model) -> None:
    source = write_model("odd", {"w": torch.rand(3)})
    (source / "config.json").write_text('{"architectures": ["Tiny\\ud800"]}')
    with pytest.raises(WeightsError, match="no valid text"):
        externalize(store, "odd", source)
    assert store.model_names() == ["m"]


def test_pack_names_are_never_reused(store: WeightStore) -> None:
    assert store.pack_files.new_name("n_weight_combined") == "n_weight_combined"
    assert store.pack_files.new_name("m_weight_combined") == "m_weight_combined.2"
    (store.packs / "m_weight_combined.2").symlink_to("nowhere")
    assert store.pack_files.new_name("m_weight_combined") == "m_weight_combined.3"


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "a\0b", ".hidden", "x" * 129])
def test_a_model_name_is_a_plain_file_name(store: WeightStore, write_model, name: str) -> None:
    with pytest.raises(StoreError, match="model name"):
        externalize(store, name, write_model("n", {"w": torch.rand(3)}))
    with pytest.raises(ModelNotStored, match="stored: m"):
        store.manifest(name)


def test_a_manifest_that_is_a_folder_is_named(store: WeightStore) -> None:
    (store.models / "odd" / "manifest.json").mkdir(parents=True)
    assert store.model_names() == ["m", "odd"]
    with pytest.raises(StoreError, match=r"odd/manifest\.json: Is a directory"):
        store.manifest("odd")


@pytest.mark.parametrize("target", ["/etc/hostname", "../meta.json", "../../outside"])
def test_packs_that_lead_out_of_the_store_are_not_used(store: WeightStore, write_model, target: str) -> None:
    (store.path.parent / "outside").write_bytes(bytes(100))
    pack = store.packs / "m_weight_combined"
    pack.unlink()
    pack.symlink_to(target)
    with pytest.raises(StoreError, match="leads out of the store"):
        store.pack_files.path_of("m_weight_combined")
    assert not store.pack_files.has_all(store.manifest("m"))
    externalize(store, "m", store.path.parent / "sources" / "m")
    assert store.pack_files.has_all(store.manifest("m"))


def test_the_packs_folder_itself_may_be_elsewhere(store: WeightStore, tmp_path: Path) -> None:
    store.packs.rename(tmp_path / "large-disk")
    store.packs.symlink_to(tmp_path / "large-disk")
    assert store.pack_files.has_all(store.manifest("m"))
    assert set(load_from_store(store.path, "m")["model"]) == {"w"}


def test_what_cannot_be_a_store_is_said(tmp_path: Path, write_model) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="file: File exists"):
        externalize(WeightStore(tmp_path / "file" / "store"), "m", write_model("m", {"w": torch.rand(3)}))


def test_a_skeleton_that_is_there_is_kept(store: WeightStore) -> None:
    """A crash between removing and renaming would have lost a published model."""
    manifest = store.manifest("m")
    inode = store.skeleton(manifest).stat().st_ino
    with store.locked(), store.staged("skeleton") as skeleton:
        skeleton.mkdir()
        store.publish_model(manifest, manifest_text(manifest), skeleton)
    assert store.skeleton(manifest).stat().st_ino == inode
    assert (store.skeleton(manifest) / "config.json").exists()


def test_a_pack_on_another_file_system_is_copied(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def across(path: Path, target: Path) -> Path:
        if "elsewhere" in path.parts:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", across)
    with store.staged("x", store.path.parent / "elsewhere") as staged:
        staged.mkdir()
        (staged / "file").write_bytes(b"1")
        (staged / "folder").mkdir()
        (staged / "folder" / "inner").write_bytes(b"2")
        store.pack_files.add({"a": staged / "file", "b": staged / "folder"})
    assert ((store.packs / "a").read_bytes(), (store.packs / "b" / "inner").read_bytes()) == (b"1", b"2")
    assert not list(store.path.glob(".staged*"))


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_staged_is_gone_on_failure(store: WeightStore, is_folder: bool) -> None:
    def fail() -> None:
        with store.staged("x") as path:
            (path / "a").mkdir(parents=True) if is_folder else path.write_text("a")
            raise RuntimeError

    before = sorted(store.path.iterdir())
    with pytest.raises(RuntimeError):
        fail()
    assert sorted(store.path.iterdir()) == before
