"""The directory brings checkpoints into the store from wherever they are, each for itself."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer
from safetensors.numpy import save_file

from cluster.errors import ModelUnavailable
from cluster.models.directory import DirectoryChange, Entry
from cluster.models.importing import ImportSettings, import_model
from cluster.models.summaries import ModelSummary
from cluster.peers.extent_sources import ComingOffer, PeerOffer
from cluster.registry import WAITING, WATCHING, WeightRegistry, registry_class
from configs.cluster import ClusterConfig
from configs.merging import MergeConfig
from weights.store import WeightStore


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sEcReT")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "near"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["TinyForCausalLM"]}))
    save_file({"w": np.random.default_rng().random((3, 5), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def imports_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a process of their own, which takes a second to start."""

    class Here:
        def __init__(self, settings: ImportSettings) -> None:
            self._settings = settings

        def bring_in(self, entry: Entry) -> ModelSummary:
            return import_model(WeightStore(self._settings.store), entry, self._settings.options)

    monkeypatch.setattr("cluster.registry.ImportProcess", Here)


async def registry(tmp_path: Path, checkpoint: Path, endpoint: str) -> WeightRegistry:
    storage: dict[str, Any] = {"endpoint": endpoint, "region": "us-east-1"}
    config = {
        "store": {"path": tmp_path / "store", "object_storage": storage},
        "models": [{"id": "far", "path": "s3://models/team/far"}, {"id": "near", "path": checkpoint}],
    }
    made = object.__new__(WeightRegistry)  # as Ray makes it
    await made.__init__(ClusterConfig.model_validate(config), b"x" * 32)  # type: ignore[misc]
    return made


async def test_a_model_in_a_bucket_is_the_same_as_on_disk(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for file in checkpoint.iterdir():
        client.upload_file(str(file), "models", f"team/far/{file.name}")
    models = await registry(tmp_path, checkpoint, endpoint)
    assert (await models.status("far")).state == "ready"
    far, near = await models.manifest("far"), await models.manifest("near")
    assert far.components == near.components
    assert Path(far.source) == tmp_path / "store/sources/models/team%2Ffar"


async def test_a_bucket_out_of_reach_makes_its_own_model_unavailable(tmp_path: Path, checkpoint: Path) -> None:
    with socket.socket() as probe:  # bound, but nobody listens
        probe.bind(("127.0.0.1", 0))
        models = await registry(tmp_path, checkpoint, f"http://127.0.0.1:{probe.getsockname()[1]}")
        assert (await models.status("near")).state == "ready"
        status = await models.status("far")
    assert status.state == "unavailable"
    assert "s3://models/team/far: " in status.error
    with pytest.raises(ModelUnavailable, match=r"s3://models/team/far"):
        await models.manifest("far")


@pytest.mark.usefixtures("imports_here")
async def test_watchers_hear_of_a_change_when_it_happens(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await asyncio.gather(models.status("near"), models.status("far"))
    first = await models.watch(0, "", 20)
    assert [record.id for record in first.changed] == ["far", "near"]
    watchers = [asyncio.ensure_future(models.watch(first.revision, first.epoch, 20)) for _ in range(200)]
    await asyncio.sleep(0)
    await models.report_attach("near", "torn")
    for change in await asyncio.gather(*watchers):
        assert [(record.id, record.error) for record in change.changed] == [("near", "torn")]


@pytest.mark.usefixtures("imports_here")
async def test_a_watcher_that_waits_for_nothing_gets_nothing(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await asyncio.gather(models.status("near"), models.status("far"))
    first = await models.watch(0, "", 20)
    again = await models.watch(first.revision, first.epoch, 0.01)
    assert (bool(again), again.revision, again.epoch) == (False, first.revision, first.epoch)


@pytest.mark.usefixtures("imports_here")
async def test_keepers_tell_what_they_hold_and_others_are_sent_there(
    tmp_path: Path, checkpoint: Path, endpoint: str
) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await models.report_residency("n1", "10.0.0.1:7000", ["a", "b"], [], True)
    await models.report_residency("n2", "[fd00::1]:7001", ["b"], [], False)
    found = await models.locate(["a", "b", "c"], "n1")
    assert {id_: [(offer.node, str(offer.address)) for offer in offers] for id_, offers in found.items()} == {
        "b": [("n2", "[fd00::1]:7001")]
    }
    await models.report_residency("n2", "[fd00::1]:7001", [], ["b"], False)
    assert await models.locate(["b"], "n1") == {}


@pytest.mark.usefixtures("imports_here")
async def test_one_node_gets_what_nobody_has_and_the_others_hear_who(
    tmp_path: Path, checkpoint: Path, endpoint: str
) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    for number in (1, 2):
        await models.report_residency(f"n{number}", f"10.0.0.{number}:7000", [], [], True)
    assert await models.locate(["a", "b"], "n1") == {}
    (waiting,) = (await models.locate(["a"], "n2"))["a"]
    assert (type(waiting), waiting.node, str(waiting.address)) == (ComingOffer, "n1", "10.0.0.1:7000")
    await models.report_residency("n1", "10.0.0.1:7000", ["a"], ["b"], False)
    (having,) = (await models.locate(["a"], "n2"))["a"]
    assert (type(having), having.node) == (PeerOffer, "n1")
    assert await models.locate(["b"], "n2") == {}


@pytest.mark.usefixtures("imports_here")
async def test_it_remembers_how_text_encoders_merge(tmp_path: Path, checkpoint: Path) -> None:
    models = await registry(tmp_path, checkpoint, "http://127.0.0.1:1")
    assert await models.encoder_merging() is None
    await models.set_encoder_merging(merging := MergeConfig(max_batch_size=3))
    assert await models.encoder_merging() == merging


def test_those_who_watch_or_wait_count_among_their_own_calls() -> None:
    """As Ray understands it: whatever is not named here has a limit of its own."""
    groups = registry_class().__ray_metadata__.method_meta.concurrency_group_for_methods
    assert groups == {"watch": WATCHING} | dict.fromkeys(["register", "unregister", "status", "prefetch"], WAITING)


@pytest.mark.usefixtures("imports_here")
async def test_calls_of_another_group_come_from_another_loop(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await asyncio.gather(models.status("near"), models.status("far"))
    first = await models.watch(0, "", 20)

    def watch_elsewhere() -> DirectoryChange:
        change: DirectoryChange = asyncio.run(models.watch(first.revision, first.epoch, 20))
        return change

    watching = asyncio.ensure_future(asyncio.to_thread(watch_elsewhere))
    await models.report_attach("near", "torn")
    assert [record.error for record in (await watching).changed] == ["torn"]
