"""The directory brings checkpoints into the store from wherever they are, each for itself."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import boto3
import numpy as np
import pytest
from kit.seeding import seeded_rng
from moto.server import ThreadedMotoServer
from safetensors.numpy import save_file
from unit.weights.sources.hub_server import Hub, serving

from cluster.jobs.disk import files_folder
from cluster.jobs.file_book import MODEL_PURPOSE, SILENT_S, new_file_id
from cluster.peers.protocol import Located, PeerAddress, Question, ResidencyReport
from cluster.records.errors import FileInUse, ModelUnknown, NotKept, RegistrationRefused, WeightsUnavailable
from cluster.registry.actor import WAITING, WATCHING, WeightRegistry, registry_class
from cluster.registry.directory import DirectoryChange, Entry
from cluster.registry.extent_locations import ResidencyMap
from cluster.registry.importing import ImportSettings, import_checkpoint
from cluster.registry.manifests import ModelSummary
from cluster.registry.served_models import ServedModels
from configs.admission import AdmissionConfig
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from configs.model import AdapterConfig, ModelConfig
from weights.storage.store import WeightStore

at = PeerAddress.parse


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
    head = {
        "in_features": 5,
        "out_features": 3,
        "bias": False,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (folder / "config.json").write_text(json.dumps(head))
    save_file({"linear.weight": seeded_rng().random((3, 5), np.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def imports_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a process of their own, which takes a second to start."""

    class Here:
        def __init__(self, settings: ImportSettings) -> None:
            self._settings = settings

        def import_model(self, entry: Entry, roots: tuple[Path, ...] | None) -> ModelSummary:
            return import_checkpoint(WeightStore(self._settings.store), entry, self._settings.options, roots)

    monkeypatch.setattr("cluster.registry.actor.ImportProcess", Here)


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
    assert (await models.find_model("far")).state == "ready"
    far, near = await models.manifest("far"), await models.manifest("near")
    assert far.components == near.components
    assert far.source == "s3://models/team/far"
    assert (tmp_path / "store/sources/models/team%2Ffar/model.safetensors").is_file()


async def test_a_bucket_out_of_reach_makes_its_own_model_unavailable(tmp_path: Path, checkpoint: Path) -> None:
    with socket.socket() as probe:  # bound, but nobody listens
        probe.bind(("127.0.0.1", 0))
        models = await registry(tmp_path, checkpoint, f"http://127.0.0.1:{probe.getsockname()[1]}")
        assert (await models.find_model("near")).state == "ready"
        status = await models.find_model("far")
    assert status.state == "unavailable"
    assert "s3://models/team/far: " in status.error
    with pytest.raises(WeightsUnavailable, match=r"s3://models/team/far"):
        await models.manifest("far")


@pytest.mark.parametrize("node", ["", "10.0.0.1"])
@pytest.mark.usefixtures("imports_here")
async def test_a_model_that_is_on_another_node_alone_is_named_with_the_node_that_lacks_it(
    tmp_path: Path, checkpoint: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    monkeypatch.setattr("cluster.registry.actor._node_of_several", lambda: node)
    models = await registry(tmp_path, tmp_path / "elsewhere", endpoint)
    error = (await models.find_model("near")).error
    told = f" on node {node}, where the registry reads models: put it there, at the same path" if node else ""
    assert error == f"{tmp_path / 'elsewhere'}: no such folder or file{told}"


TORN = "worker 1 on node n: torn"


async def report_torn(models: WeightRegistry) -> None:
    """Have the only worker report that it cannot load "near"."""
    version = (await models.find_model("near")).fingerprint
    await models.report_attach("near", version, "app#worker#1", "n", "torn")


@pytest.mark.usefixtures("imports_here")
async def test_watchers_hear_of_a_change_when_it_happens(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await asyncio.gather(models.find_model("near"), models.find_model("far"))
    first = await models.watch(0, "", 20)
    assert [record.id for record in first.changed] == ["far", "near"]
    watchers = [asyncio.ensure_future(models.watch(first.revision, first.epoch, 20)) for _ in range(200)]
    await asyncio.sleep(0)
    await report_torn(models)
    for change in await asyncio.gather(*watchers):
        assert [(record.id, record.error) for record in change.changed] == [("near", TORN)]


@pytest.mark.usefixtures("imports_here")
async def test_a_watcher_that_waits_for_nothing_gets_nothing(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await asyncio.gather(models.find_model("near"), models.find_model("far"))
    first = await models.watch(0, "", 20)
    again = await models.watch(first.revision, first.epoch, 0.01)
    assert (bool(again), again.revision, again.epoch) == (False, first.revision, first.epoch)


@pytest.mark.usefixtures("imports_here")
async def test_a_reported_extent_is_offered_to_other_nodes(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await models.report_residency("n1", ResidencyReport(at("10.0.0.1:7000"), ["a", "b"], is_full=True))
    await models.report_residency("n2", ResidencyReport(at("[fd00::1]:7001"), ["b"]))
    found = await models.locate("n1", Question(("a", "b"), 0), 2)
    assert {id_: [(offer.node, str(offer.address)) for offer in offers] for id_, offers in found.offers.items()} == {
        "b": [("n2", "[fd00::1]:7001")]
    }
    found = await models.locate("n2", Question(("a",), 0))
    assert [(offer.node, offer.active_transfers) for offer in found.offers["a"]] == [("n1", 2)]
    await models.report_residency("n2", ResidencyReport(at("[fd00::1]:7001"), removed=["b"]))
    assert (await models.locate("n1", Question(("b",), 0))).offers == {}


@pytest.mark.usefixtures("imports_here")
async def test_one_node_claims_a_missing_extent_and_the_others_are_told_which(
    tmp_path: Path, checkpoint: Path, endpoint: str
) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    for number in (1, 2):
        await models.report_residency(f"n{number}", ResidencyReport(at(f"10.0.0.{number}:7000"), is_full=True))
    assert await models.locate("n1", Question(("a", "b"), 8)) == Located(claimed=("a", "b"))
    assert await models.locate("n2", Question(("a", "c"), 8)) == Located(reading={"a": "n1"}, claimed=("c",))
    await models.report_residency("n1", ResidencyReport(at("10.0.0.1:7000"), reading=["a", "b"]))
    await models.report_residency("n1", ResidencyReport(at("10.0.0.1:7000"), ["a"], ["b"]))
    found = await models.locate("n2", Question(("a", "b"), 8))
    assert [offer.node for offer in found.offers["a"]] == ["n1"]
    assert found.claimed == ("b",)


@pytest.mark.usefixtures("imports_here")
async def test_it_remembers_how_text_encoders_batch(tmp_path: Path, checkpoint: Path) -> None:
    models = await registry(tmp_path, checkpoint, "http://127.0.0.1:1")
    assert await models.encoder_batching() is None
    await models.set_encoder_batching(batching := BatchingConfig(max_batch_size=3))
    assert await models.encoder_batching() == batching


@pytest.mark.usefixtures("imports_here")
async def test_it_remembers_the_settings_of_admission(tmp_path: Path, checkpoint: Path) -> None:
    models = await registry(tmp_path, checkpoint, "http://127.0.0.1:1")
    assert await models.admission() is None
    await models.set_admission(admission := AdmissionConfig(max_waiting=3))
    assert await models.admission() == admission


@pytest.mark.usefixtures("imports_here")
async def test_the_report_of_residency_is_made_beside_the_event_loop(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes long in a large cluster, and the directory answers meanwhile."""
    models = await registry(tmp_path, checkpoint, "http://127.0.0.1:1")
    threads: list[int] = []

    def report(*_: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return {"nodes": [], "models": {}}

    monkeypatch.setattr("cluster.registry.actor.cluster_residency", report)
    assert await models.residency(["near"], 0, 10) == {"num_nodes": 0, "node_problems": [], "nodes": [], "models": {}}
    assert len(threads) == 1
    assert threads != [threading.get_ident()]


@pytest.mark.usefixtures("imports_here")
async def test_a_pin_ends_with_its_model(tmp_path: Path, checkpoint: Path) -> None:
    models = await registry(tmp_path, checkpoint, "http://127.0.0.1:1")
    told: list[dict[str, tuple[str, ...]]] = []

    async def answer(found: Any) -> Any:
        return found

    async def pin(extents_of: dict[str, tuple[str, ...]]) -> None:
        told.append(extents_of)

    methods = {
        "stats": lambda: answer(
            SimpleNamespace(generation="1", budget_bytes=1, address=None, num_holders=1, has_storage=True)
        ),
        "residents": lambda: answer([]),
        "pins": lambda: answer({}),
        "set_pins": pin,
    }
    handle = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
    models._keepers._handles["n1"] = handle  # type: ignore[index]
    await models.register(ModelConfig(id="more", path=checkpoint))
    assert await models.pin("near") == await models.pin("more") == {"n1": ""}
    shared = tuple((await models.manifest("near")).extents)
    await models.unregister("more")
    assert told == [{"near": shared}, {"near": shared, "more": shared}, {"near": shared}]
    with pytest.raises(ModelUnknown, match="more"):
        await models.pin("more", False)


@pytest.mark.usefixtures("imports_here")
async def test_a_model_of_a_hub_is_registered_where_a_pattern_fits(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    config = {
        "store": {"path": tmp_path / "store"},
        "models": [{"id": "near", "path": checkpoint}],
        "model_roots": ["hf://good-org/*"],
    }
    models = object.__new__(WeightRegistry)
    await models.__init__(ClusterConfig.model_validate(config), b"x" * 32)  # type: ignore[misc]
    with serving(Hub({"good-org/tiny": {"main": files}, "other/tiny": {"main": files}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with pytest.raises(RegistrationRefused, match="hf://other/tiny: no hf:// pattern of model_roots fits it"):
            await models.register(ModelConfig(id="x", path="hf://other/tiny"))
        assert hub.paths == []
        assert (await models.register(ModelConfig(id="x", path="hf://good-org/tiny"))).state == "ready"
        assert (await models.manifest("x")).components == (await models.manifest("near")).components
        missing = await models.register(ModelConfig(id="y", path="hf://good-org/none"))
        assert missing.state == "unavailable"
        assert "hf://good-org/none: no such model" in missing.error
    again = await models.register(ModelConfig(id="x", path="hf://good-org/tiny"))  # the hub is gone
    assert again.state == "ready"


@pytest.mark.usefixtures("imports_here")
async def test_a_model_may_be_registered_from_beside_a_configured_one_and_from_nowhere_else(
    tmp_path: Path, checkpoint: Path
) -> None:
    models = await registry(
        tmp_path / "c", Path(shutil.copytree(checkpoint, tmp_path / "c/near")), "http://127.0.0.1:1"
    )
    await models.find_model("near")
    for path in ("/", "/etc", checkpoint, tmp_path / "nowhere", tmp_path / "c/near/../../near"):
        with pytest.raises(RegistrationRefused) as caught:
            await models.register(ModelConfig(id="x", path=Path(path)))
        why = f"outside of the folders that models may come from (model_roots: {tmp_path / 'c'})"
        assert str(caught.value) == f"path: {path}: {why}"
    assert {record.id for record in await models.list_models()} == {"far", "near"}
    sibling = Path(shutil.copytree(checkpoint, tmp_path / "c/sibling"))
    assert (await models.register(ModelConfig(id="x", path=sibling))).state == "ready"
    (sibling / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "secret.json").write_text("{}")
    updated = await models.register(ModelConfig(id="x", path=sibling))
    assert "tokenizer.json: outside of the folders that models may come from" in updated.error
    assert updated.state == "ready"
    (tmp_path / "c/near/tokenizer.json").symlink_to(tmp_path / "secret.json")  # the config's own path is trusted
    assert (await models.register(ModelConfig(id="near", path=tmp_path / "c/near"))).error == ""


@pytest.mark.usefixtures("imports_here")
async def test_a_copy_of_object_storage_goes_with_the_last_model_from_there(
    tmp_path: Path, checkpoint: Path, endpoint: str
) -> None:
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for file in checkpoint.iterdir():
        for prefix in ("team/far", "team/other"):
            client.upload_file(str(file), "models", f"{prefix}/{file.name}")
    models = await registry(tmp_path, checkpoint, endpoint)
    await models.find_model("far")

    def copies() -> set[str]:
        return {file.parent.name for file in (tmp_path / "store/sources").glob("*/*/model.safetensors")}

    other = "s3://models/team/other"
    for id_ in ("x", "y"):
        assert (await models.register(ModelConfig(id=id_, path=other))).state == "ready"
    assert copies() == {"team%2Ffar", "team%2Fother"}
    await models.unregister("x")
    assert copies() == {"team%2Ffar", "team%2Fother"}
    await models.register(ModelConfig(id="y", path=checkpoint))  # another version, from elsewhere
    assert copies() == {"team%2Ffar"}
    await models.register(ModelConfig(id="y", path="s3://models/team/far"))
    await models.unregister("y")
    assert copies() == {"team%2Ffar"}  # the configured one is still from there


@pytest.mark.usefixtures("imports_here")
async def test_a_model_from_object_storage_is_served_while_that_is_out_of_reach(
    tmp_path: Path, checkpoint: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.create_bucket(Bucket="models")
    for file in checkpoint.iterdir():
        client.upload_file(str(file), "models", f"team/far/{file.name}")
    first = await (await registry(tmp_path, checkpoint, endpoint)).find_model("far")
    monkeypatch.setattr("weights.sources.bucket.MAX_RETRIES", 0)
    again = await (await registry(tmp_path, checkpoint, "http://127.0.0.1:1")).find_model("far")
    assert (again.state, again.fingerprint) == ("ready", first.fingerprint)
    assert "the version in the store is served" in again.error


def test_a_method_of_a_part_is_exposed_under_its_own_name() -> None:
    """`call_actor` calls a method of an actor by the name of the function."""
    methods = {name: method for name, method in vars(WeightRegistry).items() if inspect.isfunction(method)}
    assert {name: method.__name__ for name, method in methods.items()} == {name: name for name in methods}
    assert str(inspect.signature(WeightRegistry.locate)) == str(inspect.signature(ResidencyMap.locate))
    assert str(inspect.signature(WeightRegistry.find_model)) == str(inspect.signature(ServedModels.find_model))
    assert WeightRegistry.manifest.__doc__ == ServedModels.manifest.__doc__


@pytest.mark.usefixtures("imports_here")
async def test_an_applied_config_holds_at_once_and_after_a_restart_and_not_in_another_life(
    tmp_path: Path, checkpoint: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    first = await models.config()
    fields = first.model_dump(mode="json") | {"models": [{"id": "near", "path": checkpoint, "description": "nearer"}]}
    fields["admission"]["max_waiting"] = 7
    applied = ClusterConfig.model_validate(fields)
    await models.configure(applied)
    assert (await models.config(), await models.admission()) == (applied, applied.admission)
    assert await models.encoder_batching() is None
    assert [(record.id, record.description) for record in await models.list_models()] == [("near", "nearer")]
    monkeypatch.setattr("cluster.registry.actor._is_restarted", lambda: True)
    again = await registry(tmp_path, checkpoint, endpoint)  # Ray starts it with the first config
    assert (await again.config(), await again.admission()) == (applied, applied.admission)
    assert [record.id for record in await again.list_models()] == ["near"]
    monkeypatch.setattr("cluster.registry.actor._is_restarted", lambda: False)
    assert await (await registry(tmp_path, checkpoint, endpoint)).config() == first
    monkeypatch.setattr("cluster.registry.actor._is_restarted", lambda: True)
    assert await (await registry(tmp_path, checkpoint, endpoint)).config() == first


@pytest.mark.usefixtures("imports_here")
async def test_a_config_of_another_control_plane_is_refused_and_so_is_one_that_the_disk_does_not_take(
    tmp_path: Path, checkpoint: Path, endpoint: str
) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    first = await models.config()
    with pytest.raises(RegistrationRefused, match="has to start anew"):
        await models.configure(first.model_copy(update={"name": "other"}))
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "store" / "applied").write_text("no folder")
    with pytest.raises(NotKept, match="cannot be written"):
        await models.configure(first.model_copy(update={"models": first.models[1:]}))
    assert await models.config() == first
    assert len(await models.list_models()) == 2


@pytest.mark.usefixtures("imports_here")
async def test_a_config_that_was_applied_by_half_is_not_taken_for_done(
    tmp_path: Path, checkpoint: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    first = await models.config()
    await models._keepers.set_pinned("far", True)
    fields = first.model_dump(mode="json") | {"models": [{"id": "new", "path": checkpoint}]}
    wanted = ClusterConfig.model_validate(fields)
    sound = models._models._known._registrations.remove

    def remove(id_: str) -> None:
        if id_ == "new":
            raise OSError(116, "Stale file handle")
        sound(id_)

    with monkeypatch.context() as broken:
        broken.setattr(models._models._known._registrations, "remove", remove)
        with pytest.raises(OSError, match="Stale"):
            await models.configure(wanted)
    assert (await models.config()).entries == {}
    assert models._keepers._pinned == set()
    with monkeypatch.context() as restarted:
        restarted.setattr("cluster.registry.actor._is_restarted", lambda: True)
        assert await (await registry(tmp_path, checkpoint, endpoint)).config() == first
    await models.configure(wanted)
    assert await models.config() == wanted
    assert (await models.find_model("new")).state == "ready"
    assert [record.id for record in await models.list_models()] == ["new"]


@pytest.mark.parametrize("damage", ["", "{", '{"name": "atelier"}', "other"])
@pytest.mark.usefixtures("imports_here")
async def test_a_registry_that_restarts_beside_a_damaged_config_begins_with_its_first(
    tmp_path: Path, checkpoint: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    first = await models.config()
    file = tmp_path / "store" / "applied" / "atelier.json"
    file.parent.mkdir(parents=True)
    file.write_text(first.model_copy(update={"name": "other"}).model_dump_json() if damage == "other" else damage)
    monkeypatch.setattr("cluster.registry.actor._is_restarted", lambda: True)
    assert await (await registry(tmp_path, checkpoint, endpoint)).config() == first


def test_calls_that_watch_or_wait_have_groups_of_their_own() -> None:
    """Ray's groups of calls: whatever is not named here has a limit of its own."""
    groups = registry_class().__ray_metadata__.method_meta.concurrency_group_for_methods
    assert groups == {"watch": WATCHING} | dict.fromkeys(["register", "unregister", "find_model", "prefetch"], WAITING)


@pytest.mark.usefixtures("imports_here")
async def test_calls_of_another_group_come_from_another_loop(tmp_path: Path, checkpoint: Path, endpoint: str) -> None:
    models = await registry(tmp_path, checkpoint, endpoint)
    await asyncio.gather(models.find_model("near"), models.find_model("far"))
    first = await models.watch(0, "", 20)

    def watch_elsewhere() -> DirectoryChange:
        change: DirectoryChange = asyncio.run(models.watch(first.revision, first.epoch, 20))
        return change

    watching = asyncio.ensure_future(asyncio.to_thread(watch_elsewhere))
    await report_torn(models)
    assert [record.error for record in (await watching).changed] == [TORN]


@pytest.mark.usefixtures("imports_here")
async def test_a_control_plane_ends_with_the_last_of_the_replicas_that_asked_it(
    tmp_path: Path, checkpoint: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr("cluster.registry.node_rounds.end_control_plane", lambda config: ended.append(config.name))
    models = await registry(tmp_path, checkpoint, endpoint)
    monkeypatch.setattr(models._keepers, "keeper", lambda node_id: f"keeper of {node_id}")
    await models.watch(0, "", 20)  # the controller
    models._nodes.end_after_users([])
    assert models._users.names == frozenset()
    await models.watch(0, "", 20, "ingress")
    assert await models.keeper("n", "worker") == "keeper of n"
    models._nodes.end_after_users(models._users.names - {"worker"})
    models._keepers._silent.add("n")
    models._nodes.end_after_users(models._users.names)
    assert ended == []
    models._keepers._silent.clear()
    models._nodes.end_after_users([])
    assert ended == ["atelier"]


@pytest.mark.usefixtures("imports_here")
async def test_a_lora_is_registered_from_an_upload_which_stays_with_it(tmp_path: Path, checkpoint: Path) -> None:
    file = tmp_path / "ink.safetensors"
    name = "transformer.transformer_blocks.0.attn.to_q"
    weights = {f"{name}.lora_A.weight": (2, 8), f"{name}.lora_B.weight": (8, 2)}
    save_file({one: seeded_rng().random(shape, np.float32) for one, shape in weights.items()}, file)
    content = file.read_bytes()
    near = Path(shutil.copytree(checkpoint, tmp_path / "c/models/near"))
    models = await registry(tmp_path / "c", near, "http://127.0.0.1:1")
    await models.find_model("near")
    folder = files_folder(tmp_path / "c/store", (await models.config()).name)
    with pytest.raises(RegistrationRefused, match="outside of the folders that models may come from"):
        await models.register(AdapterConfig(id="ink", path=file, base=("near",)))
    for size in (len(content) - 1, len(content)):
        begun = await models.begin_model("", new_file_id(".safetensors"), size)
        assert await models.append_file("", begun.id, 0, content[:size]) == size
        assert await models.end_file("", begun.id, "ink", MODEL_PURPOSE, SILENT_S) is not None
        record = await models.register(AdapterConfig(id="ink", path=folder / begun.id, base=("near",)))
        assert (record.state == "ready") == (size == len(content)), record.error
        if size < len(content):
            assert "truncated" in record.error
    with pytest.raises(FileInUse):
        await models.forget_file("", begun.id)
    await models.unregister("ink")
    assert await models.forget_file("", begun.id)
