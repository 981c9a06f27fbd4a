"""Evicted models: their state, and the extents that no other loaded model shares."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from kit.seeding import seeded_rng
from safetensors.numpy import save_file
from unit.cluster.registry.model_sources import Sources
from unit.counting import operations

from cluster.registry.directory import Entry
from cluster.registry.importing import import_checkpoint
from cluster.registry.manifests import ModelSummary
from cluster.registry.registrations import Registrations
from cluster.registry.served_models import ServedModels
from configs.model import ModelConfig
from weights.operations.feature_sizes import FeatureSizes
from weights.records.errors import FormatError
from weights.storage.store import WeightStore


def write(folder: Path, **tensors: np.ndarray) -> ModelConfig:
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["TinyForCausalLM"]}')
    save_file(tensors, folder / "model.safetensors")
    return ModelConfig(id=folder.name, path=folder)


@pytest.fixture
async def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServedModels:
    """`a` and `b` have the same tensor; `own` has another, `broken` none."""
    store = WeightStore(tmp_path / "store")
    shared, own = seeded_rng().random((2, 50)).astype(np.float32)
    entries = [write(tmp_path / "a", w=shared), write(tmp_path / "b", w=shared), write(tmp_path / "own", w=own)]
    entries.append(ModelConfig(id="broken", path=tmp_path / "broken"))

    def import_or_fail(entry: Entry) -> ModelSummary:
        if entry.id == "broken":
            raise FormatError("it is torn")
        return import_checkpoint(store, entry)

    served = ServedModels(
        {entry.id: entry for entry in entries}, store, Registrations(tmp_path / "r"), Sources(import_or_fail), "e"
    )
    await served.begin_imports()
    for entry in entries:
        await served.find_model(entry.id)
    return served


def state(models: ServedModels, id_: str) -> str:
    found = models.directory.get(id_)
    assert found
    return found.state


async def test_only_a_ready_model_can_be_unloaded_and_loaded_again(models: ServedModels) -> None:
    revision = models.directory.revision
    models.directory.set_loaded("a", True)  # it is
    models.directory.set_loaded("broken", False)
    models.directory.set_loaded("broken", True)
    models.directory.set_loaded("unheard-of", False)
    assert models.directory.revision == revision
    models.directory.set_loaded("a", False)
    assert state(models, "a") == "unloaded"
    assert models.directory.revision == revision + 1
    models.directory.set_loaded("a", False)
    assert models.directory.revision == revision + 1  # watchers are told of changes only
    models.directory.set_loaded("a", True)
    assert (state(models, "a"), state(models, "broken")) == ("ready", "unavailable")


async def test_an_unloaded_model_still_serves(models: ServedModels) -> None:
    models.directory.set_loaded("a", False)
    assert (await models.manifest("a")).model == "a"


async def test_shared_extents_go_with_the_last_model_that_has_them(models: ServedModels) -> None:
    extents = models.extents.by_model
    assert extents["a"] == extents["b"]
    assert models.extents.of_no_other("own") == list(extents["own"])
    assert models.extents.of_no_other("a") == models.extents.of_no_other("b") == []
    models.directory.set_loaded("a", False)
    assert models.extents.of_no_other("b") == list(extents["b"])
    assert models.extents.of_no_other("a") == []  # the other one is loaded
    models.directory.set_loaded("a", True)
    assert models.extents.of_no_other("b") == []
    assert models.extents.of_no_other("unheard-of") == models.extents.of_no_other("broken") == []


async def test_a_model_is_known_whether_it_serves_or_not(models: ServedModels) -> None:
    models.directory.set_loaded("a", False)
    assert models.extents.is_known("a")
    assert models.extents.is_known("broken")
    assert not models.extents.is_known("unheard-of")


async def test_an_updated_model_shares_what_its_new_version_has(models: ServedModels, tmp_path: Path) -> None:
    shared, own = models.extents.by_model["a"], models.extents.by_model["own"]
    write_over = seeded_rng().random(50).astype(np.float32)
    save_file({"w": write_over}, tmp_path / "b" / "model.safetensors")
    await models.register(ModelConfig(id="b", path=tmp_path / "b"))
    assert models.extents.of_no_other("a") == list(shared)
    assert models.extents.of_no_other("b") == list(models.extents.by_model["b"]) != list(shared)
    await models.register(ModelConfig(id="more", path=tmp_path / "own"))
    assert models.extents.of_no_other("own") == []
    await models.unregister("more")
    assert models.extents.of_no_other("own") == list(own)


def test_what_it_costs_does_not_grow_with_the_number_of_models(tmp_path: Path) -> None:
    """Half of the extents are in every model."""

    def costs(num_models: int) -> int:
        store = WeightStore(tmp_path / "store")

        def import_checkpoint(entry: Entry) -> ModelSummary:
            own = [f"{entry.id}-{number}" for number in range(20)]
            extents = (*own, *(f"shared-{number}" for number in range(20)))
            return ModelSummary("llm", 1, entry.id, extents, FeatureSizes(), "", {})

        async def start() -> ServedModels:
            entries = {f"m{number}": ModelConfig(id=f"m{number}", path=tmp_path) for number in range(num_models)}
            served = ServedModels(entries, store, Registrations(tmp_path / "r"), Sources(import_checkpoint), "e")
            await served.begin_imports()
            for id_ in entries:
                await served.find_model(id_)
            return served

        served = asyncio.run(start())
        found: list[str] = []
        counted = operations(lambda: found.extend(served.extents.of_no_other("m3")))
        assert found == [f"m3-{number}" for number in range(20)]
        return counted

    assert costs(300) < 1.5 * costs(30)
