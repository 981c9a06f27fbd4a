"""Manifests are parsed once per manifest file, and again when `weights convert` or `repair` has rewritten it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from unit.cluster.registry.model_sources import Sources

from cluster.registry.importing import import_checkpoint
from cluster.registry.manifests import ManifestCache
from cluster.registry.registrations import Registrations
from cluster.registry.served_models import ServedModels
from configs.model import ModelConfig
from weights.operations.layouts import convert
from weights.records.errors import WeightsError
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore


class CountingStore(WeightStore):
    """A store that counts how often it parses a manifest."""

    num_reads = 0

    def manifest(self, model: str) -> Manifest:
        self.num_reads += 1
        return super().manifest(model)


def write_checkpoint(folder: Path, seed: int = 0) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    tensors = {name: np.random.default_rng((seed, ord(name))).random((30, 50), np.float32) for name in "vw"}
    save_file(tensors, folder / "model.safetensors")
    return ModelConfig(id="m", path=folder)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


@pytest.fixture
def version(store: CountingStore, tmp_path: Path) -> str:
    fingerprint = import_checkpoint(store, write_checkpoint(tmp_path / "m")).fingerprint
    store.num_reads = 0
    return fingerprint


def packs_of(manifest: Manifest) -> set[str]:
    return {extent.pack for extent in manifest.extents.values()}


async def test_a_manifest_is_parsed_once_for_all_who_wait_and_for_those_after_them(
    store: CountingStore, version: str
) -> None:
    cache = ManifestCache(store)
    found = await asyncio.gather(*(cache.get("m", version) for _ in range(20)))
    assert await cache.get("m", version) is found[0]
    assert (store.num_reads, cache.has("m", version), len(set(map(id, found)))) == (1, True, 1)


async def test_a_converted_model_is_read_again_because_its_bytes_have_moved(store: CountingStore, version: str) -> None:
    cache = ManifestCache(store)
    before = await cache.get("m", version)
    converted = convert(store, "m", "separate")
    after = await cache.get("m", version)
    assert after.fingerprint == before.fingerprint == version
    assert packs_of(after) == packs_of(converted) != packs_of(before)
    num_reads = store.num_reads
    assert await cache.get("m", version) is after
    assert store.num_reads == num_reads


async def test_the_registry_hands_out_the_new_places_and_pins_the_new_extents(
    store: CountingStore, tmp_path: Path
) -> None:
    entry = write_checkpoint(tmp_path / "m")
    models = ServedModels(
        {"m": entry},
        store,
        Registrations(tmp_path / "r"),
        Sources(lambda found: import_checkpoint(store, found)),
        "epoch",
    )
    await models.begin_imports()
    await models.find_model("m")
    before = await models.manifest("m")
    convert(store, "m", "separate")
    after = await models.manifest("m", before.fingerprint)
    assert packs_of(after) != packs_of(before)
    assert models.extents.by_model["m"] == tuple(after.extents)


async def test_a_version_that_the_store_has_replaced_or_lost_is_kept(
    store: CountingStore, version: str, tmp_path: Path
) -> None:
    cache = ManifestCache(store)
    before = await cache.get("m", version)
    newer = import_checkpoint(store, write_checkpoint(tmp_path / "m", seed=1)).fingerprint
    assert newer != version
    assert (await cache.get("m", version)).extents == before.extents
    assert (await cache.get("m", newer)).fingerprint == newer
    shutil.rmtree(store.models)
    assert (await cache.get("m", version)).extents == before.extents


async def test_a_version_that_is_not_known_any_more_is_not_remembered_under_its_name(
    store: CountingStore, version: str
) -> None:
    cache = ManifestCache(store)
    assert (await cache.get("m", "an older one")).fingerprint == version
    assert not cache.has("m", "an older one")


async def test_an_unreadable_manifest_is_tried_again(store: CountingStore, version: str) -> None:
    cache = ManifestCache(store)
    file = store.models / "m" / "manifest.json"
    sound = file.read_bytes()
    file.write_text("{")
    with pytest.raises(WeightsError):
        await cache.get("m", version)
    file.write_bytes(sound)
    assert (await cache.get("m", version)).fingerprint == version


async def test_the_least_recently_used_manifest_goes_first(store: CountingStore, tmp_path: Path) -> None:
    entry = write_checkpoint(tmp_path / "m")
    versions = {
        id_: import_checkpoint(store, entry.model_copy(update={"id": id_})).fingerprint for id_ in ("a", "b", "c")
    }
    cache = ManifestCache(store, max_manifests=2)
    for id_ in ("a", "b", "a", "c"):
        await cache.get(id_, versions[id_])
    assert [cache.has(id_, versions[id_]) for id_ in ("a", "b", "c")] == [True, False, True]


async def test_a_read_that_fails_is_every_waiting_calls_error_and_is_tried_again_by_the_next(
    store: CountingStore, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: str) -> Manifest:
        raise WeightsError("the disk is gone")

    cache = ManifestCache(store)
    with monkeypatch.context() as broken:
        broken.setattr(store, "manifest", fail)
        found = await asyncio.gather(*(cache.get("m", version) for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in found] == ["the disk is gone"] * 3
    assert not cache.has("m", version)
    assert (await cache.get("m", version)).fingerprint == version
