"""Weights that somebody writes to in shared memory: replicas that computed with them stop, and get on with fresh ones.

Keeper, client and host are the real ones; only Ray between them is not.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.cluster.keeper.local_keeper import ActorHandle, FakeStore, User, ray_get

from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.keeper.ray_extents import RayExtents
from configs.cluster import WorkerConfig
from deployments.modules.budget import ModuleBudget
from deployments.modules.cache import Lease, ModuleCache
from deployments.modules.loading import ComponentBuilder, is_denoise_component
from deployments.records.errors import ModelUnavailable
from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.records.manifest import Manifest
from weights.storage.store import WeightStore

DEMO = Path(__file__).parents[4] / "infra/demo/models"
MODEL, SIBLING = "digits-flux", "digits-flux-inverted"
WAIT_S = 30
DEVICES = ["cpu", "cpu-private"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    store = WeightStore(tmp_path_factory.mktemp("damaged") / "store")
    for name in (MODEL, SIBLING):
        externalize(store, name, DEMO / name, dtype="float32")
    return store


class Node:
    """A keeper, and replicas that hear of what it finds."""

    def __init__(self, store: WeightStore) -> None:
        self.store = store
        self.keeper = NodeKeeper(
            str(store.packs), 2**30, "node", KeeperSettings(audit_bytes_per_s=0), store=FakeStore()
        )

    def replica(self, device: str, name: str = "r") -> Replica:
        return Replica(self, device, name)

    def damage(self, model: str = MODEL, component: str = "transformer") -> str:
        """Write into the largest tensor of the component that is in shared memory. Returns the tensor's name."""
        refs = self.store.manifest(model).components[component].tensors
        name = max(refs, key=lambda name: refs[name].nbytes)
        held = self.keeper.memory.held.residents.held(refs[name].extent)
        assert held is not None
        held.view[refs[name].offset + refs[name].nbytes // 2 + 3] ^= 0x7F
        return name

    def find(self) -> None:
        self.keeper.memory.audit.round()


class Replica(ModuleCache):
    """On one event loop, as replicas are; sends a heartbeat when it is told to."""

    def __init__(self, node: Node, device: str, name: str, budget_bytes: int = 2**30) -> None:
        self.node = node
        self.builder = ComponentBuilder(WorkerConfig(device=device))
        loop = asyncio.get_running_loop()
        self.provider = RayExtents(
            ActorHandle(node.keeper),
            name,
            User(lambda extents: loop.call_soon_threadsafe(self.invalidate, extents)),
        )
        super().__init__(
            self._manifest_of,
            self.provider,
            node.store.models,
            ModuleBudget(budget_bytes, device),
            self.builder,
        )

    async def _manifest_of(self, model: str, version: str | None) -> Manifest:
        return self.node.store.manifest(model)

    async def beat(self) -> None:
        self.provider.beat()
        await asyncio.sleep(0)

    async def use(self, model: str = MODEL) -> Lease:
        async with self.lease(model, is_denoise_component) as lease:
            return lease

    def is_sound(self, lease: Lease) -> bool:
        """Return whether its modules have, bit for bit, the weights of the store."""
        expected = load_from_store(self.node.store.path, lease.manifest.model)
        return all(
            torch.equal(parameter, expected[component][name])
            for component, module in lease.modules.items()
            for name, parameter in module.state_dict().items()
            if name in expected[component]
        )


@pytest.fixture
def node(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", ray_get)
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 3600.0)
    made = Node(store)
    yield made
    made.keeper.close()


async def test_a_damaged_module_serves_no_new_request(node: Node) -> None:
    replica = node.replica("cpu")
    first = await replica.use()
    assert replica.is_sound(first)
    pipeline = first.bound(object)
    node.damage()
    assert not replica.is_sound(await replica.use())  # nobody knows yet
    node.find()
    await replica.beat()
    again = await replica.use()
    assert replica.is_sound(again)
    assert again.report.built == ("transformer",)  # the VAE is in another extent
    assert again.bound(object) is not pipeline
    assert node.keeper.stats().num_corrupt == 1
    await replica.beat()
    assert (await replica.use()).report.built == ()


@pytest.mark.parametrize("device", DEVICES)
async def test_a_request_that_runs_on_damaged_weights_is_told_and_the_next_is_not_disturbed(
    node: Node, device: str
) -> None:
    replica = node.replica(device)

    async def run() -> None:
        async with replica.lease(MODEL, is_denoise_component) as running:
            bound = running.bound(object)
            # On a device of its own the extents are given back by now, and still here.
            assert (node.keeper.stats().leased_bytes > 0) == (device == "cpu")
            damaged_key = running.manifest.components["transformer"].module_key
            node.damage()
            node.find()
            await replica.beat()
            before = [parameter.clone() for parameter in running.modules["transformer"].parameters()]
            other = await replica.use()
            assert replica.is_sound(other)
            assert other.modules["transformer"] is not running.modules["transformer"]
            assert other.bound(object) is not bound
            # Nobody took the weights away from the one that runs.
            for parameter, was in zip(running.modules["transformer"].parameters(), before, strict=True):
                assert torch.equal(parameter, was)
            assert [entry.key for entry in replica._modules.table.detached] == [damaged_key]
            shown = [entry["damaged"] for entry in replica.describe()["modules"] if entry["leases"]]
            assert sorted(shown) == [False, True]

    with pytest.raises(ModelUnavailable, match=r"'digits-flux' \(transformer\) were damaged .* withheld; try again"):
        await run()
    assert replica._modules.table.detached == []
    assert node.keeper.stats().leased_bytes == (node.keeper.stats().resident_bytes if device == "cpu" else 0)
    assert await replica.use()


async def test_what_a_device_was_given_of_a_damaged_copy_is_uploaded_again(node: Node) -> None:
    replica = node.replica("cpu-private")
    await node.replica("cpu", "other").use()
    name = node.damage()  # before the upload
    assert not replica.is_sound(await replica.use())
    assert node.keeper.memory.held.residents.bytes_by_holder().keys() == {"other"}
    refs = node.store.manifest(MODEL).components["transformer"].tensors
    beside = {ref.sha256: ref.nbytes for ref in refs.values() if ref.extent == refs[name].extent}
    node.find()
    await replica.beat()
    again = await replica.use()
    assert replica.is_sound(again)
    assert again.report.device_bytes == sum(beside.values())
    assert replica.describe()["arena"]["lingering_bytes"] == 0


async def test_what_is_damaged_while_it_is_built_is_built_again_before_it_serves(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in DEVICES:
        replica = node.replica(device, f"during-{device}")
        reached, go_on = threading.Event(), threading.Event()
        build = replica._filler._builder.build

        def slow(*arguments: Any, build: Callable[..., Any] = build, go: Any = (reached, go_on)) -> Any:
            go[0].set()
            assert go[1].wait(WAIT_S)
            return build(*arguments)

        monkeypatch.setattr(replica._filler._builder, "build", slow)
        using = asyncio.ensure_future(replica.use())
        assert await asyncio.to_thread(reached.wait, WAIT_S)
        node.damage()
        node.find()
        await replica.beat()
        go_on.set()
        lease = await asyncio.wait_for(using, WAIT_S)
        assert replica.is_sound(lease)
        assert replica._modules.table.detached == []


async def test_an_invalidated_module_counts_as_long_as_it_is_used(node: Node) -> None:
    """On a budget for one: the next request waits for the one that runs, and then gets on."""
    nbytes = sum(node.store.manifest(MODEL).components[name].nbytes for name in ("transformer", "vae"))
    replica = Replica(node, "cpu", "small", nbytes + 1000)
    waiting: list[asyncio.Future[Lease]] = []

    async def run() -> None:
        async with replica.lease(MODEL, is_denoise_component):
            node.damage()
            node.find()
            await replica.beat()
            waiting.append(asyncio.ensure_future(replica.use()))
            await asyncio.sleep(0)
            assert replica._modules.num_waiting == 1
            assert replica.evict(MODEL)

    with pytest.raises(ModelUnavailable):
        await run()
    assert replica.is_sound(await asyncio.wait_for(waiting[0], WAIT_S))


async def test_a_building_that_fails_after_its_weights_were_damaged_takes_nothing_of_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = node.replica("cpu")
    reached, go_on = threading.Event(), threading.Event()
    build = replica._filler._builder.build

    def fails_once(*arguments: Any) -> Any:
        monkeypatch.setattr(replica._filler._builder, "build", build)
        reached.set()
        assert go_on.wait(WAIT_S)
        raise ValueError("cannot be built")

    monkeypatch.setattr(replica._filler._builder, "build", fails_once)
    failing = asyncio.ensure_future(replica.use())
    assert await asyncio.to_thread(reached.wait, WAIT_S)
    node.damage()
    node.damage(component="vae")
    node.find()
    await replica.beat()
    good = await replica.use()
    go_on.set()
    with pytest.raises(ModelUnavailable, match="cannot be built"):
        await failing
    assert (await replica.use()).modules == good.modules
    assert replica.is_sound(good)
