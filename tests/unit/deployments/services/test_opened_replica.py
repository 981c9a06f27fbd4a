"""A replica opens its way to the node's keeper: damage and recalls arrive at its modules, and at its encodings.

Replica, keeper and client are the real ones; only Ray between them is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from unit.cluster.keeper.local_keeper import ActorHandle, FakeStore, ray_get

from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.keeper.records import Recall
from cluster.records.errors import WeightsUnavailable
from cluster.registry.directory import ModelRecord
from cluster.registry.model_files import read_files, write_files
from configs.cluster import ClusterConfig, StoreConfig
from deployments.modules.encoders import TextEncoderBuilder, is_text_encoder
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from deployments.services.model_replica import ModelReplica
from deployments.services.text_encoder import TextEncoderService
from deployments.services.worker import Worker
from deployments.text.cache import EncodingCache, EncodingKey
from weights.operations.externalize import externalize
from weights.storage.store import WeightStore

pytestmark = pytest.mark.slow  # imports diffusers

DEMO = Path(__file__).parents[4] / "infra/demo/models"
MODEL = "digits-flux"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    store = WeightStore(tmp_path_factory.mktemp("opened") / "store")
    externalize(store, MODEL, DEMO / MODEL, dtype="float32")
    return store


class Answer:
    """An answer of an actor, to be awaited or asked for by `ray_get`."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value

    def __await__(self) -> Generator[None, None, Any]:
        yield
        return self._value


class Cluster:
    """The registry of one node, its keeper, and what replicas open of both."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        models = [{"id": MODEL, "path": str(DEMO / MODEL)}]
        self.config = ClusterConfig.model_validate({"store": {"path": str(store.path)}, "models": models})
        entry = self.config.entries[MODEL]
        self.keeper = NodeKeeper(
            str(store.packs), 2**30, "node", KeeperSettings(audit_bytes_per_s=0), store=FakeStore()
        )
        self.registry = SimpleNamespace(
            keeper=SimpleNamespace(remote=lambda node_id, replica: Answer(ActorHandle(self.keeper))),
            manifest=SimpleNamespace(remote=lambda model, version: Answer(store.manifest(model))),
            report_attach=SimpleNamespace(remote=lambda *reported: Answer(None)),
            list_models=SimpleNamespace(remote=lambda: Answer([ModelRecord(MODEL, "ready", entry=entry)])),
        )

    async def damage(self, replica: ModelReplica, component: str) -> None:
        """Write into shared weights; the audit finds it, and the replica sends its heartbeat."""
        refs = self.store.manifest(MODEL).components[component].tensors
        ref = max(refs.values(), key=lambda ref: ref.nbytes)
        held = self.keeper.memory.held.residents.held(ref.extent)
        assert held is not None
        held.view[ref.offset + 3] ^= 0x7F
        self.keeper.memory.audit.round()
        replica._module_cache._provider.beat()
        await asyncio.sleep(0)


@pytest.fixture
def cluster(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster(store)
    monkeypatch.setattr(ray, "get", ray_get)
    monkeypatch.setattr(
        ray,
        "get_runtime_context",
        lambda: SimpleNamespace(get_node_id=lambda: "node", get_actor_name=lambda: "worker#1"),
    )
    for name, found in (("connect_registry", lambda config: made.registry), ("replica_calls_on_loopback", bool)):
        monkeypatch.setattr(f"deployments.services.model_replica.{name}", found)
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 3600.0)
    yield made
    made.keeper.close()


async def test_a_worker_builds_damaged_weights_anew_and_gives_kept_ones_back(cluster: Cluster) -> None:
    worker = object.__new__(Worker)  # the rest of its constructor needs Serve
    settings = cluster.config.worker
    await worker._open(cluster.config, "worker", settings, ComponentBuilder(settings))

    async def built() -> tuple[str, ...]:
        async with worker._module_cache.lease(MODEL, is_denoise_component) as lease:
            return lease.report.built

    assert await built() == ("transformer", "vae")
    assert await built() == ()
    await cluster.damage(worker, "transformer")
    assert await built() == ("transformer",)
    assert await built() == ()
    kept = tuple({ref.extent for ref in cluster.store.manifest(MODEL).components["transformer"].tensors.values()})
    answer = worker._module_cache._provider.handle_recall(Recall(kept))
    assert set(answer.given_back) == set(kept)
    assert await built() == ("transformer",)


async def test_a_text_encoder_forgets_what_damaged_weights_may_have_encoded(cluster: Cluster) -> None:
    service = object.__new__(TextEncoderService)
    service._cache = EncodingCache(2**20)
    settings = cluster.config.text_encoder
    await service._open(cluster.config, "text-encoder", settings, TextEncoderBuilder())

    async def source() -> str:
        async def compute_many(keys: Sequence[EncodingKey]) -> list[dict[str, torch.Tensor]]:
            return [{"hidden": torch.zeros(3)} for _ in keys]

        key = EncodingKey("m", "float32", "none", (1, 2))
        return (await service._cache.get_all([key], compute_many))[key].source

    async with service._module_cache.lease(MODEL, is_text_encoder) as lease:
        encoders = lease.modules
    assert [await source(), await source()] == ["computed", "local"]
    await cluster.damage(service, "text_encoder_2")
    assert await source() == "computed"
    async with service._module_cache.lease(MODEL, is_text_encoder) as lease:
        assert lease.modules["text_encoder_2"] is not encoders["text_encoder_2"]
        assert lease.modules["text_encoder"] is encoders["text_encoder"]


async def test_a_registry_that_was_ended_is_started_anew_by_a_replica_that_comes_or_is_still_there(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another config may have superseded it, and Ray told the replica only after it had its handle."""

    async def die(*_: Any) -> Any:
        raise ray.exceptions.ActorDiedError

    ended = SimpleNamespace(keeper=SimpleNamespace(remote=die), manifest=SimpleNamespace(remote=die))
    found = iter([ended, cluster.registry, cluster.registry])
    monkeypatch.setattr("deployments.services.model_replica.connect_registry", lambda config: next(found))
    worker = object.__new__(Worker)
    settings = cluster.config.worker
    await worker._open(cluster.config, "worker", settings, ComponentBuilder(settings))
    assert worker._registry is cluster.registry
    worker._registry = ended
    assert await worker._fetch_manifest(MODEL, None) == cluster.store.manifest(MODEL)
    assert next(found, None) is None


async def test_a_node_without_the_stores_folder_gets_the_configs_of_a_model_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Weights come to it from its peers: its keeper here."""
    elsewhere = WeightStore(tmp_path / "not-here")
    config = cluster.config.model_copy(update={"store": StoreConfig(path=elsewhere.path)})
    asked: list[str] = []

    def model_files(model: str, version: str) -> Any:
        asked.append(version)
        return Answer(read_files(cluster.store.models, cluster.store.manifest(model)))

    cluster.registry.model_files = SimpleNamespace(remote=model_files)
    manifest = cluster.store.manifest(MODEL)
    for _ in range(2):  # the second replica of that node finds what the first has brought
        worker = object.__new__(Worker)
        await worker._open(config, "worker", config.worker, ComponentBuilder(config.worker))
        async with worker._module_cache.lease(MODEL, is_denoise_component) as lease:
            assert lease.report.built == ("transformer", "vae")
            assert lease.skeleton == elsewhere.models / manifest.skeleton
    assert asked == [manifest.fingerprint]
    assert read_files(elsewhere.models, manifest) == read_files(cluster.store.models, manifest)
    assert [path.name for path in (elsewhere.models / MODEL).iterdir()] == [Path(manifest.skeleton).name]


def test_files_of_a_model_stay_within_its_folder_and_come_whole(
    store: WeightStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, models = store.manifest(MODEL), tmp_path / "models"
    for name in ("../outside", "/outside", "a/../../../outside"):
        with pytest.raises(ValueError, match="no path within the files"):
            write_files(models, manifest, {"config.json": b"{}", name: b"x"})
        assert list((models / MODEL).iterdir()) == []
    with pytest.raises(WeightsUnavailable, match="has lost its configs"):
        read_files(models, manifest)
    write_files(models, manifest, {"config.json": b"first"})
    write_files(models, manifest, {"config.json": b"second"})  # somebody else was first
    assert read_files(models, manifest) == {"config.json": b"first"}
    monkeypatch.setattr("cluster.registry.model_files.MAX_BYTES", 4)
    with pytest.raises(WeightsUnavailable, match="has 5 bytes, more than the 4"):
        read_files(models, manifest)


async def test_a_registry_that_restarts_is_waited_for_and_not_for_ever(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = object.__new__(Worker)
    settings = cluster.config.worker
    await worker._open(cluster.config, "worker", settings, ComponentBuilder(settings))
    num_asked = 0

    async def manifest(model: str, version: str | None) -> Any:
        nonlocal num_asked
        num_asked += 1
        if num_asked < 4:
            raise ray.exceptions.ActorUnavailableError("The actor is restarting.", None)
        return cluster.store.manifest(model)

    worker._registry = SimpleNamespace(manifest=SimpleNamespace(remote=manifest))
    monkeypatch.setattr("deployments.services.model_replica.REGISTRY_PAUSE_S", 0.0)
    assert await worker._fetch_manifest(MODEL, None) == cluster.store.manifest(MODEL)
    num_asked = -(10**9)
    monkeypatch.setattr("deployments.services.model_replica.REGISTRY_RETRY_S", 0.05)
    with pytest.raises(ray.exceptions.ActorUnavailableError):
        await worker._fetch_manifest(MODEL, None)
