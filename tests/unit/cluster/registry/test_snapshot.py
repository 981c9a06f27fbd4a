"""The registry snapshot follows the registry, through its death and its restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from kit.waiting import until
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.process.ray_calls import NamedActor
from cluster.records.errors import ModelUnknown
from cluster.registry.actor import WeightRegistry
from cluster.registry.directory import Directory, DirectoryChange, ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.model import ModelConfig


class Registry:
    """A registry's handle. While it is `dead` every call fails as Ray's do."""

    def __init__(self, epoch: str, *ids: str) -> None:
        self.directory = Directory(epoch)
        self.dead = False
        self.num_polls = 0
        self.replicas: list[str | None] = []
        self._changed = asyncio.Event()
        for id_ in ids:
            self.put(id_)

    def put(self, id_: str, fingerprint: str = "one") -> None:
        self.directory.apply(ModelRecord(id_, "ready", "llm", 1, fingerprint, entry=ModelConfig(id=id_, path="/m")))
        self.stir()

    def stir(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=getattr(type(self), f"on_{method}").__get__(self))

    async def on_watch(self, revision: int, epoch: str, timeout_s: float, replica: str | None) -> DirectoryChange:
        self.num_polls += 1
        self.replicas.append(replica)
        while not self.dead and not (change := self.directory.changes_since(revision, epoch)):
            await self._changed.wait()
        if self.dead:
            raise ActorDiedError()
        return change

    async def on_find_model(self, model: str) -> ModelRecord:
        if self.dead:
            raise ActorDiedError()
        if found := self.directory.get(model):
            return found
        raise RayTaskError("find_model", "Traceback of the actor", ModelUnknown(f"no model {model!r}"))


class Place:
    """The place where registries are found; `pauses_s` is how long the snapshot waited between its tries."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.pauses_s: list[float] = []

    async def pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        await asyncio.sleep(0)


@pytest.fixture
def place() -> Place:
    return Place(Registry("first", "a", "b"))


@pytest.fixture
async def snapshot(place: Place) -> AsyncIterator[RegistrySnapshot]:
    made = RegistrySnapshot(NamedActor(lambda: place.registry), place.pause)
    await made.ready()
    yield made
    made.close()


def version(snapshot: RegistrySnapshot, model: str) -> str | None:
    found = snapshot.find_model(model)
    return found.fingerprint if found else None


async def test_the_copy_is_there_when_it_is_ready_and_follows(place: Place, snapshot: RegistrySnapshot) -> None:
    assert [record.id for record in snapshot] == ["a", "b"]
    place.registry.put("c")
    place.registry.put("a", "two")
    await until(lambda: version(snapshot, "c"))
    assert version(snapshot, "a") == "two"
    assert snapshot.find_model("nope") is None
    assert place.registry.num_polls <= 4


async def test_the_copy_serves_while_the_registry_is_dead_and_finds_the_next_one(
    place: Place, snapshot: RegistrySnapshot
) -> None:
    place.registry.dead = True
    place.registry.stir()
    await until(lambda: len(place.pauses_s) > 8)
    assert version(snapshot, "a") == "one"
    with pytest.raises(ActorDiedError):
        await snapshot.call_registry(WeightRegistry.find_model, "a")
    assert place.pauses_s[:3] == [0.05, 0.1, 0.2]
    assert max(place.pauses_s) == 2.0
    place.registry = Registry("second", "a", "z")
    await until(lambda: version(snapshot, "z"))
    assert [record.id for record in snapshot] == ["a", "z"]


async def test_a_registry_that_answers_somebody_is_followed_at_once(place: Place) -> None:
    """The next try may be seconds away: until then the copy would show what a caller knows to be gone."""

    async def never_end(seconds: float) -> None:
        place.pauses_s.append(seconds)
        await asyncio.Event().wait()

    snapshot = RegistrySnapshot(NamedActor(lambda: place.registry), never_end)
    await snapshot.ready()
    for epoch, ids in (("second", ["b"]), ("third", ["c"])):
        place.registry.dead = True
        place.registry.stir()
        num_pauses = len(place.pauses_s)
        await until(lambda num_pauses=num_pauses: len(place.pauses_s) > num_pauses)  # type: ignore[misc]
        place.registry = Registry(epoch, *ids)
        if epoch == "second":
            with pytest.raises(ModelUnknown):
                await snapshot.call_registry(WeightRegistry.find_model, "a")
        else:
            await snapshot.call_registry(WeightRegistry.find_model, "c")
        await until(lambda ids=ids: [record.id for record in snapshot] == ids)  # type: ignore[misc]
    snapshot.close()


async def test_asking_raises_the_registrys_own_error(snapshot: RegistrySnapshot) -> None:
    assert (await snapshot.call_registry(WeightRegistry.find_model, "a")).id == "a"
    with pytest.raises(ModelUnknown, match="no model 'x'"):
        await snapshot.call_registry(WeightRegistry.find_model, "x")


async def test_a_watch_that_was_not_begun_can_ask(place: Place) -> None:
    assert (
        await RegistrySnapshot(NamedActor(lambda: place.registry)).call_registry(WeightRegistry.find_model, "b")
    ).id == "b"


async def test_a_snapshot_that_cannot_connect_tries_again(place: Place) -> None:
    tries: list[int] = []

    def connect() -> Registry:
        tries.append(1)
        if len(tries) < 3:
            raise ConnectionError("no cluster yet")
        return place.registry

    snapshot = RegistrySnapshot(NamedActor(connect), place.pause)
    await asyncio.wait_for(snapshot.ready(), 10)
    assert (len(tries), version(snapshot, "a")) == (3, "one")
    snapshot.close()


@pytest.mark.parametrize("replica", ["ingress", None])
async def test_a_registry_knows_which_replica_watches_it(place: Place, replica: str | None) -> None:
    snapshot = RegistrySnapshot(NamedActor(lambda: place.registry), replica=replica)
    await snapshot.ready()
    snapshot.close()
    assert set(place.registry.replicas) == {replica}


async def test_a_poll_that_nobody_ends_is_given_up_for_another_one(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wall clock that is set back stops the timers by which Ray tells of calls that died with their actor."""
    monkeypatch.setattr("cluster.registry.snapshot.POLL_S", 0.001)
    monkeypatch.setattr("cluster.registry.snapshot.LATE_S", 0.01)
    ended = asyncio.Event()
    watch = place.registry.on_watch

    async def lost_once(*arguments: Any) -> DirectoryChange:
        if place.registry.num_polls == 1:  # the second one
            place.registry.num_polls += 1
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()
        return await watch(*arguments)

    monkeypatch.setattr(Registry, "on_watch", lambda _, *arguments: lost_once(*arguments))
    snapshot = RegistrySnapshot(NamedActor(lambda: place.registry), place.pause)
    await snapshot.ready()
    await until(lambda: place.registry.num_polls == 2)
    place.registry.put("c")
    await until(lambda: version(snapshot, "c"), timeout_s=5.0)
    assert ended.is_set()
    snapshot.close()
