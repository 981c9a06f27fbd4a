"""Summaries stand in for manifests as long as the store has what they say."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.seeding import seeded_rng
from safetensors.numpy import save_file
from unit.cluster.registry.model_sources import Sources

from cluster.registry.importing import import_checkpoint
from cluster.registry.manifests import SummaryFiles
from cluster.registry.registrations import Registrations
from cluster.registry.served_models import ServedModels
from configs.model import ModelConfig
from weights.operations.layouts import convert
from weights.records.manifest import Manifest, read_manifest
from weights.storage.store import WeightStore


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Manifests that were read."""
    paths: list[Path] = []

    def read(path: Path) -> Manifest:
        paths.append(path)
        return read_manifest(path)

    monkeypatch.setattr("weights.storage.store.read_manifest", read)
    return paths


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path / "store")


def model(folder: Path, num_tensors: int = 1, id_: str = "m") -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"]}))
    rng = seeded_rng()
    save_file({f"w{n}": rng.random(3, np.float32) for n in range(num_tensors)}, folder / "model.safetensors")
    return ModelConfig(id=id_, path=folder)


def test_an_unchanged_model_is_known_again_without_its_manifest(
    store: WeightStore, tmp_path: Path, opened: list[Path]
) -> None:
    entry = model(tmp_path / "m", num_tensors=300)
    first = import_checkpoint(store, entry)
    opened.clear()
    assert import_checkpoint(store, entry) == first
    assert opened == []
    manifest = store.manifest("m")
    assert (first.fingerprint, first.extents, first.nbytes) == (manifest.fingerprint, tuple(manifest.extents), 3600)


async def test_a_registry_that_starts_again_opens_no_manifest_until_one_is_asked_for(
    store: WeightStore, tmp_path: Path, opened: list[Path]
) -> None:
    entries = {f"m{n}": model(tmp_path / f"m{n}", num_tensors=10 * (n + 1), id_=f"m{n}") for n in range(12)}

    async def begin() -> ServedModels:
        registrations = Registrations(tmp_path / "r")
        models = ServedModels(
            entries, store, registrations, Sources(lambda entry: import_checkpoint(store, entry)), "e"
        )
        await models.begin_imports()
        assert {(await models.find_model(id_)).state for id_ in entries} == {"ready"}
        return models

    before = await begin()
    opened.clear()
    models = await begin()
    assert [(found.id, found.nbytes) for found in models.directory] == [(f.id, f.nbytes) for f in before.directory]
    assert models.extents.by_model == before.extents.by_model
    assert opened == []
    await models.manifest("m3")
    await models.manifest("m3")
    assert opened == [store.models / "m3/manifest.json"]


def change_source(store: WeightStore, entry: ModelConfig) -> None:
    model(Path(entry.path), num_tensors=2)


def convert_store(store: WeightStore, entry: ModelConfig) -> None:
    convert(store, entry.id, "separate")


def cut_pack(store: WeightStore, entry: ModelConfig) -> None:
    (pack,) = {extent.pack for extent in store.manifest(entry.id).extents.values()}
    path = store.packs / pack
    os.truncate(path, 4)


def lose_pack(store: WeightStore, entry: ModelConfig) -> None:
    (pack,) = {extent.pack for extent in store.manifest(entry.id).extents.values()}
    (store.packs / pack).unlink()


def lose_skeleton(store: WeightStore, entry: ModelConfig) -> None:
    path = store.skeleton(store.manifest(entry.id))
    path.rename(path.with_name("elsewhere"))


def lose_manifest(store: WeightStore, entry: ModelConfig) -> None:
    (store.models / entry.id / "manifest.json").unlink()


def damage(store: WeightStore, entry: ModelConfig) -> None:
    (file,) = store.path.glob("summaries/*.json")
    file.write_bytes(file.read_bytes()[:-20])


def flip_a_byte(store: WeightStore, entry: ModelConfig) -> None:
    (file,) = store.path.glob("summaries/*.json")
    content = bytearray(file.read_bytes())
    place = content.index(b'"fingerprint":"') + len('"fingerprint":"')
    content[place] = b"01"[content[place] == b"0"[0]]
    file.write_bytes(content)


@pytest.mark.parametrize(
    "happens", [change_source, convert_store, cut_pack, lose_pack, lose_skeleton, lose_manifest, damage, flip_a_byte]
)
def test_a_summary_does_not_count_when_something_else_is_there(
    store: WeightStore, tmp_path: Path, opened: list[Path], happens: Callable[[WeightStore, Any], None]
) -> None:
    entry = model(tmp_path / "m")
    before = import_checkpoint(store, entry)
    happens(store, entry)
    opened.clear()
    found = import_checkpoint(store, entry)
    manifest = store.manifest("m")
    assert (found.fingerprint, found.extents) == (manifest.fingerprint, tuple(manifest.extents))
    assert store.has_packs(manifest)
    assert opened
    assert (found.fingerprint == before.fingerprint) == (happens is not change_source)
    opened.clear()
    assert import_checkpoint(store, entry) == found  # and now there is a new one
    assert opened == []


def test_a_summary_goes_with_its_model_and_a_store_that_cannot_be_written_has_none(
    store: WeightStore, tmp_path: Path
) -> None:
    entry = model(tmp_path / "m")
    found = import_checkpoint(store, entry)
    files, mark = SummaryFiles(store), store.manifest("m").source_mark
    assert files.find("m", mark) == found
    assert files.find("m", "another") is files.find("other", mark) is None
    files.remove_summary("m")
    files.remove_summary("m")
    assert files.find("m", mark) is None
    (store.path / "summaries").rmdir()
    (store.path / "summaries").touch()
    assert import_checkpoint(store, entry) == found
