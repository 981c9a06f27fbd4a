"""The store's own files: versions, damage, names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from weights.errors import ModelNotStored, StoreError, StoreVersionError, WeightsError
from weights.externalize import externalize
from weights.store import WeightStore


@pytest.fixture
def store(tmp_path: Path, write_model) -> WeightStore:
    store = WeightStore(tmp_path / "store")
    externalize(store, "m", write_model("m", {"w": torch.rand(3)}))
    return store


def test_opening_creates_nothing(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "new")
    assert store.read_meta().tensors == {}
    assert store.model_names() == []
    with pytest.raises(ModelNotStored, match=r"no model 'm' in .*new \(stored: none\)"):
        store.manifest("m")
    assert not store.path.exists()


def test_an_unknown_model_lists_the_known_ones(store: WeightStore, write_model) -> None:
    externalize(store, "b", write_model("b", {"w": torch.rand(3)}))
    with pytest.raises(ModelNotStored, match=r"no model 'x' .*\(stored: b, m\)"):
        store.manifest("x")


@pytest.mark.parametrize("more", [{}, {"compression": "zstd"}])
def test_a_newer_store_is_refused_and_kept(store: WeightStore, write_model, more: dict[str, str]) -> None:
    text = json.dumps({"version": 2, "tensors": {}, "extents": {}, **more})
    (store.path / "meta.json").write_text(text)
    with pytest.raises(StoreVersionError, match=r"meta\.json: store version 2, this library reads version 1"):
        store.read_meta()
    with pytest.raises(StoreVersionError):
        externalize(store, "n", write_model("n", {"w": torch.rand(3)}))
    assert (store.path / "meta.json").read_text() == text


@pytest.mark.parametrize("more", [{}, {"compression": "zstd"}])
def test_a_newer_manifest_is_refused(store: WeightStore, more: dict[str, str]) -> None:
    file = store.models / "m" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"version": 2} | more))
    with pytest.raises(StoreVersionError, match=r"manifest\.json: manifest version 2, this library reads version 1"):
        store.manifest("m")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"tensors": 3}', b'{"extents": {"a": {}}}'])
def test_a_damaged_meta_is_named(store: WeightStore, damage: bytes) -> None:
    (store.path / "meta.json").write_bytes(damage)
    with pytest.raises(StoreError, match=r"meta\.json: damaged"):
        store.read_meta()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": 1}'])
def test_a_damaged_manifest_is_named(store: WeightStore, damage: bytes) -> None:
    (store.models / "m" / "manifest.json").write_bytes(damage)
    with pytest.raises(WeightsError, match=r"m/manifest\.json: damaged manifest"):
        store.manifest("m")


def test_a_field_of_a_manifest_is_named(store: WeightStore) -> None:
    file = store.models / "m" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["components"]["model"]["tensors"]["w"]["nbytes"] = "many"
    file.write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match=r"components\.model\.tensors\.w\.nbytes"):
        store.manifest("m")


def test_pack_names_are_never_reused(store: WeightStore) -> None:
    assert store.new_pack_name("n") == "n_weight_combined"
    assert store.new_pack_name("m") == "m_weight_combined.2"
    (store.packs / "m_weight_combined.2").touch()
    assert store.new_pack_name("m") == "m_weight_combined.3"


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
