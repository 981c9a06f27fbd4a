"""Replicas on shared memory keep what they have built until their node calls the weights back.

Keeper, client and host are the real ones; only Ray between them is not.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from kit.waiting import until
from unit.cluster.keeper.local_keeper import ActorHandle, FakeStore, User, ray_get

from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.keeper.ray_extents import RayExtents
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from deployments.modules.cache import Lease, ModuleCache
from weights.records.errors import BudgetExceeded
from weights.records.manifest import Component, ExtentRef, Manifest, TensorRef

WAIT_S = 10
# Models by name: component -> (what the weights are, bytes). Equal weights are the same module.
MODELS = {
    "a": {"unet": ("a", 60), "vae": ("shared", 30)},
    "b": {"unet": ("b", 60), "vae": ("shared", 30)},
    "c": {"unet": ("c", 60), "text": ("d", 30)},
}


class Module:
    """A built module: it holds the tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


class Node:
    """A keeper over packs with the weights of MODELS."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self.manifests = {name: self._manifest(folder, name) for name in MODELS}
        self.keeper = NodeKeeper(
            str(folder), budget_bytes, "node", KeeperSettings(audit_bytes_per_s=0, max_wait_s=5.0), store=FakeStore()
        )
        self.replicas: list[Replica] = []

    def replica(self, name: str, **options: Any) -> Replica:
        self.replicas.append(Replica(self, name, **options))
        return self.replicas[-1]

    async def listening(self) -> None:
        """Wait until the keeper may call all those that have asked it for something."""
        for replica in [replica for replica in self.replicas if replica.extents._ear]:
            await until(lambda found=replica: found.name in self.keeper.memory.held._book.recalls)  # type: ignore[misc]

    @property
    def used_bytes(self) -> int:
        return self.keeper.memory.held.residents.used_bytes

    def close(self) -> None:
        for replica in self.replicas:
            replica.extents.close()
        for replica in self.replicas:
            if replica.extents._ear:
                replica.extents._ear.join(WAIT_S)
        self.keeper.close()

    def _manifest(self, folder: Path, name: str) -> Manifest:
        components, extents = {}, {}
        for part, (weights, nbytes) in MODELS[name].items():
            data = np.full(nbytes, ord(weights[0]), np.uint8).tobytes()
            (folder / weights).write_bytes(data)
            checksum = xxhash.xxh3_128_hexdigest(data)
            extents[weights] = ExtentRef(id=weights, pack=weights, offset=0, nbytes=nbytes, checksum=checksum)
            sha256 = hashlib.sha256(data).hexdigest()
            ref = TensorRef(extent=weights, offset=0, nbytes=nbytes, dtype="U8", shape=(nbytes,), sha256=sha256)
            components[part] = Component(
                name=part, library="fake", class_name="Fake", folder=part, tensors={"w": ref}, config_hash="h"
            )
        return Manifest(
            model=name,
            kind="diffusion",
            class_name="Fake",
            skeleton=name,
            source="",
            fingerprint="",
            components=components,
            extents=extents,
        )


class _Maker(Builder):
    """Makes the modules of a replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    def __call__(self, component: Component, skeleton: Path, tensors: Mapping[str, torch.Tensor]) -> Module:
        self._replica.num_built += 1
        assert self._replica.slow.wait(WAIT_S)
        return Module(dict(tensors))


class Replica(ModuleCache):
    """One replica; `slow` blocks builds until it is set."""

    def __init__(self, node: Node, name: str, budget_bytes: int = 2**20) -> None:
        self.node, self.name = node, name
        self.num_built = 0
        self.overdue: list[bool] = []
        self.slow = threading.Event()
        self.slow.set()
        self.extents = RayExtents(ActorHandle(node.keeper), name, User(on_recall=self._called))
        budget = ModuleBudget(budget_bytes)
        super().__init__(self._manifest_of, self.extents, Path("/store"), budget, _Maker(self), kept=self.extents)

    def _called(self, extents: Any, is_overdue: bool) -> None:
        self.overdue.append(is_overdue)
        self.release_recalled(extents, is_overdue)

    async def _manifest_of(self, model: str, version: str | None) -> Manifest:
        return self.node.manifests[model]

    async def use(self, model: str, seconds: float = 0.0) -> Lease:
        async with self.lease(model, lambda _: True) as lease:
            for name, module in lease.modules.items():
                weights, _ = MODELS[model][name]
                assert set(module.tensors["w"].tolist()) == {ord(weights[0])}
            await asyncio.sleep(seconds)
            return lease


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Node]]:
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", ray_get)
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.is_initialized", lambda: True)
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 3600.0)
    monkeypatch.setattr("cluster.keeper.actor.RECALL_POLL_S", 0.05)
    made: list[Node] = []

    def make(budget_bytes: int) -> Node:
        made.append(Node(tmp_path, budget_bytes))
        return made[-1]

    yield make
    for one in made:
        one.close()


async def test_models_that_the_node_holds_stay_built_whatever_the_replicas_budget(node) -> None:
    replica = node(1000).replica("r")
    for model in ("a", "b", "c") * 3:
        await replica.use(model)
    assert replica.num_built == 5
    assert (await replica.use("a")).report.switch_ms < 50
    shown = replica.describe()
    assert (shown["resident_bytes"], shown["leased_bytes"]) == (240, 0)
    assert shown["charged_bytes"] == 5 * 8192


async def test_the_replicas_budget_bounds_what_is_private(node) -> None:
    replica = node(1000).replica("r", budget_bytes=3 * 8192)
    for model in ("a", "b"):
        await replica.use(model)
    assert len(replica.resident()) == 3
    await replica.use("c")
    assert len(replica.resident()) == 3
    assert replica.node.keeper.stats().holders == {"r": 240}  # what is not built any more is mapped still
    before = replica.node.keeper.stats().num_evicted
    await replica.use("a")
    assert replica.node.keeper.stats().num_evicted == before
    small = replica.node.replica("small", budget_bytes=8192)
    with pytest.raises(BudgetExceeded, match="this replica's budget"):
        await small.use("a")


async def test_another_replica_gets_the_room_of_what_is_only_kept(node) -> None:
    here = node(100)
    one, two = here.replica("one"), here.replica("two")
    await one.use("a")
    await here.listening()
    start_s = time.monotonic()
    await two.use("c")
    assert time.monotonic() - start_s < 0.4
    assert here.used_bytes <= 100
    assert one.resident() == {}
    assert here.keeper.stats().holders == {"two": 90}
    await one.use("a")
    assert two.resident() == {}


async def test_an_answer_does_not_wait_for_the_event_loop(node) -> None:
    here = node(100)
    one = here.replica("one")
    await one.use("a")
    await here.listening()
    took_s: list[float] = []

    def other() -> None:
        start_s = time.monotonic()
        here.keeper.acquire([*here.manifests["c"].extents.values()], "other")
        took_s.append(time.monotonic() - start_s)

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.4)  # the loop is busy
    thread.join(WAIT_S)
    assert took_s[0] < 0.3


async def test_a_model_whose_requests_run_is_not_given_up(node) -> None:
    here = node(100)
    one, two = here.replica("one"), here.replica("two")
    await one.use("a")
    running = asyncio.create_task(one.use("a", seconds=0.2))
    await asyncio.sleep(0.02)
    waiting = asyncio.create_task(two.use("c"))
    await until(lambda: bool(one.overdue))
    assert len(one.resident()) == 2
    await running
    await asyncio.wait_for(waiting, 0.5)
    assert here.used_bytes <= 100


async def test_a_stream_of_requests_that_overlap_does_not_keep_others_out(node) -> None:
    """Once its use is overdue, only requests that run already are served before the other replica.

    In requests and not in seconds: on a busy machine everything takes ten times as long. A stream that keeps the
    other out makes it fail, after the keeper's `max_wait_s`.
    """
    here = node(100)
    one, two = here.replica("one"), here.replica("two")
    await one.use("a")
    stop = asyncio.Event()
    num_served = 0

    async def stream() -> None:
        nonlocal num_served
        while not stop.is_set():
            await one.use("a", seconds=0.05)
            num_served += 1

    streams = [asyncio.create_task(stream()) for _ in range(2)]
    await asyncio.sleep(0.03)
    other = asyncio.create_task(two.use("c"))
    await until(lambda: True in one.overdue or other.done())
    num_before = num_served
    await other
    num_meanwhile = num_served - num_before
    stop.set()
    await asyncio.gather(*streams)
    assert True in one.overdue
    assert num_meanwhile <= 4  # the two that ran, and at most two after the other had its turn


async def test_requests_that_each_hold_a_part_of_what_they_need_get_on(node) -> None:
    """Each replica has one module of the other's request's room; neither gets all without the other's."""
    here = node(120)
    one, two = here.replica("one"), here.replica("two")
    start_s = time.monotonic()
    for _ in range(5):
        await asyncio.gather(one.use("a"), two.use("c"), one.use("b"), two.use("b"))
        assert here.used_bytes <= 120
    assert time.monotonic() - start_s < 5.0


async def test_a_pinned_model_is_not_given_up(node) -> None:
    here = node(200)
    one, two = here.replica("one"), here.replica("two")
    await one.use("a")
    await one.pin("a", lambda _: True)
    await one.use("c")
    await here.listening()
    await two.use("b")
    one.release_recalled(["a", "shared"], True)
    assert len([key for key, slot in one._modules.slots.items() if "a" in slot.models]) == 2


async def test_prefetch_takes_nothing_from_others(node) -> None:
    here = node(100)
    one, two = here.replica("one"), here.replica("two")
    await one.use("a")
    await here.listening()
    await two.prefetch("c", lambda _: True)
    assert len(one.resident()) == 2
    assert two.resident() == {}


async def test_what_was_given_up_keeps_no_memory(node) -> None:
    here = node(100)
    one, two = here.replica("one"), here.replica("two")
    await one.use("a")
    await here.listening()
    gc.collect()
    gc.disable()
    try:
        gone = [weakref.ref(here.keeper.memory.held.residents.held(id_).ref.array) for id_ in ("a", "shared")]
        await two.use("c")
        await until(lambda: not any(ref() is not None for ref in gone))
    finally:
        gc.enable()


async def test_many_switches_of_two_replicas_all_end_within_the_nodes_budget(node) -> None:
    here = node(120)
    one, two = here.replica("one"), here.replica("two")
    longest_s, over = 0.0, []

    async def switch(replica: Replica, models: str) -> None:
        nonlocal longest_s
        for number in range(40):
            start_s = time.monotonic()
            await replica.use(models[number % len(models)], seconds=0.002)
            longest_s = max(longest_s, time.monotonic() - start_s)
            if (used := here.used_bytes) > 120:
                over.append(used)

    await asyncio.gather(switch(one, "ac"), switch(two, "cb"), switch(one, "b"), switch(two, "a"))
    assert over == []
    assert longest_s < 2.0
    for replica in (one, two):
        assert replica.describe()["leased_bytes"] == 0
