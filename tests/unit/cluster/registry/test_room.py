"""A model that no budget holds: `atelier check` and the registry say so alike, before and after it is in the store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.cluster.registry.model_sources import Sources

from cluster.records.errors import ModelTooLarge
from cluster.registry.importing import import_checkpoint
from cluster.registry.registrations import Registrations
from cluster.registry.room import Room
from cluster.registry.served_models import ServedModels
from configs.cluster import ClusterConfig
from deployments.engines.needs import needs_of_manifest
from deployments.preflight import check_config
from weights.memory.layer_plan import DecoderSizes
from weights.memory.needs import Needs
from weights.storage.store import WeightStore

MODELS = Path(__file__).parents[4] / "infra/demo/models"
ON_HOST = [("adder", "worker"), ("digits-flux", "worker"), ("texts-bert", "text_encoder")]


def config_of(tmp_path: Path, **more: Any) -> tuple[ClusterConfig, Path]:
    entries = [{"id": name, "path": str(MODELS / name), "dtype": "float32"} for name, _ in ON_HOST]
    config = {"models": entries, **more, "store": {"path": str(tmp_path / "store"), **more.get("store", {})}}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(config))
    return ClusterConfig.model_validate(config), path


def said_by_check(path: Path) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for problem in check_config(path)[2]:
        found.setdefault(ON_HOST[int(problem.key.split(".")[1])][0], []).append(problem.text)
    return {name: "; ".join(texts) for name, texts in found.items()}


async def served(config: ClusterConfig, tmp_path: Path) -> ServedModels:
    store = WeightStore(tmp_path / "store")
    models = ServedModels(
        config.entries,
        store,
        Registrations(tmp_path / "registrations"),
        Sources(lambda entry: import_checkpoint(store, entry, needs_of=needs_of_manifest)),
        "e",
        room=Room.of(config),
    )
    await models.begin_imports()
    await asyncio.gather(*map(models.find_model, config.entries))
    return models


async def test_check_and_the_registry_count_alike_also_when_the_store_has_the_model(tmp_path: Path) -> None:
    config, path = config_of(tmp_path, store={"node_budget_bytes": 1000})
    read = said_by_check(path)
    models = await served(config, tmp_path)
    listed = {record.id: (record.state, record.error) for record in models.directory}
    assert read.keys() == listed.keys()
    assert listed == {name: ("does_not_fit", text) for name, text in read.items()}
    assert said_by_check(path) == read  # of the summaries in the store
    for name, section in ON_HOST:
        assert read[name].startswith("store.node_budget_bytes is 1000 bytes; ")
        needed = sum(models.directory.records[name].needs.services[section].values())
        assert 0 < needed <= models.directory.records[name].nbytes


async def test_a_model_that_needs_a_byte_more_does_not_fit_and_one_that_has_it_is_ready(tmp_path: Path) -> None:
    config, _ = config_of(tmp_path)
    models = await served(config, tmp_path)
    assert {record.state for record in models.directory} == {"ready"}
    exact = models.directory.records["adder"].nbytes
    tight, _ = config_of(tmp_path, store={"node_budget_bytes": exact - 1})
    await models.configure(tight.entries, Room.of(tight))
    record = models.directory.records["adder"]
    assert record.state == "does_not_fit"
    with pytest.raises(ModelTooLarge, match=r"model 'adder' does not fit: store\.node_budget_bytes is .* need 2\."):
        await models.check_fits("adder")
    enough, _ = config_of(tmp_path, store={"node_budget_bytes": exact})
    await models.configure(enough.entries, Room.of(enough))
    assert (models.directory.records["adder"].state, models.directory.records["adder"].error) == ("ready", "")
    await models.check_fits("adder")


async def test_devices_have_budgets_of_their_own(tmp_path: Path) -> None:
    worker = {"devices": ["sim:0", "sim:1"], "device_budget_bytes": 500_000}
    config, path = config_of(tmp_path, worker=worker, simulated={"num_devices": 2})
    read = said_by_check(path)
    assert "on each of 2 devices (worker.device_budget_bytes)" in read["adder"]
    listed = {record.id: record.error for record in (await served(config, tmp_path)).directory}
    assert {name: text for name, text in listed.items() if text} == read


def test_what_nobody_has_counted_fits(tmp_path: Path) -> None:
    config, _ = config_of(tmp_path, store={"node_budget_bytes": 1})
    assert [*Room.of(config).shortages("m", Needs())] == []


_SIZES = DecoderSizes([60, 61, 60], 40, [0, 1, 2, 3])


# Ours, whose layers can be apart without ranks as well, and one of transformers.
@pytest.mark.parametrize("needs", [Needs({}, (), _SIZES, _SIZES), Needs({"worker": {"model": 221}}, (), None, _SIZES)])
def test_each_rank_needs_its_share_of_the_layers(needs: Needs) -> None:
    def said(budget_bytes: int, **ranks: int) -> list[str]:
        worker = {"device": "sim", "device_budget_bytes": budget_bytes, "ranks": ranks}
        config = ClusterConfig.model_validate({"models": [{"id": "m", "path": "m"}], "worker": worker})
        return [lack.text for lack in Room.of(config).shortages("m", needs)]

    assert said(221) == said(131, tensor=2) == said(86, tensor=4) == []
    assert said(130, tensor=2) == ["worker.device_budget_bytes is 130 bytes; each of 2 ranks needs 131 bytes of 'm'"]
    assert bool(said(220)) == (needs.decoder is None)
