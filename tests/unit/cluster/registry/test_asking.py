"""A question to the registry is waited for as long as the registry lives that was asked, and no longer."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from kit.waiting import until
from ray.exceptions import ActorUnavailableError

from cluster.process.ray_calls import NamedActor
from cluster.registry.actor import WeightRegistry
from cluster.registry.asking import Asking
from cluster.registry.snapshot import RegistrySnapshot
from deployments.services.model_replica import ModelReplica


def asking(was_heard: bool = True) -> Asking:
    made = Asking()
    made.was_heard = was_heard
    return made


class Registry:
    """A handle of a registry whose `find_model` answers after some looks; without `up_s` it says nothing."""

    def __init__(self, up_s: float | None, num_looks: int | None = None) -> None:
        self.up_s = SimpleNamespace(remote=self._up_s)
        self.find_model = SimpleNamespace(remote=self._find_model)
        self.num_looks = 0
        self.num_given_up = 0
        self.has_looked = asyncio.Event()
        self._life_s = up_s
        self._answers_after = num_looks

    async def _up_s(self) -> float:
        self.num_looks += 1
        if self.num_looks == self._answers_after:
            self.has_looked.set()
        if self._life_s is None:
            await asyncio.Event().wait()
        assert self._life_s is not None
        return self._life_s

    async def _find_model(self, model: str) -> str:
        try:
            await self.has_looked.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        return f"record of {model}"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.registry.asking.LOOK_S", 0.005)
    monkeypatch.setattr("cluster.registry.asking.SILENT_S", 0.05)


async def test_a_registry_that_lives_on_is_waited_for_however_long_it_takes() -> None:
    registry = Registry(1e6, num_looks=9)
    record: Any = await asking().ask(registry, WeightRegistry.find_model, "m")
    assert record == "record of m"
    assert registry.num_looks == 9
    assert registry.num_given_up == 0


@pytest.mark.parametrize(("up_s", "why"), [(-1.0, "another registry is in its place"), (None, "does not answer")])
async def test_one_that_was_replaced_or_is_silent_is_not_though_nobody_says_that_it_died(
    up_s: float | None, why: str
) -> None:
    registry = Registry(up_s)
    with pytest.raises(ActorUnavailableError, match=why):
        await asyncio.wait_for(asking().ask(registry, WeightRegistry.find_model, "m"), 10)
    await asyncio.sleep(0)
    assert registry.num_given_up == 1


async def test_a_call_that_waits_for_the_first_registry_to_start_is_its_own_and_lost_with_it() -> None:
    """It is younger than the call, as one in the place of another would be."""
    registry = Registry(0.0, num_looks=9)
    born_s = time.monotonic()

    async def up_s() -> float:
        await registry._up_s()
        return time.monotonic() - born_s

    registry.up_s = SimpleNamespace(remote=up_s)
    record: Any = await asking(was_heard=False).ask(registry, WeightRegistry.find_model, "m")
    assert record == "record of m"
    registry = Registry(0.0, num_looks=10**9)
    registry.up_s = SimpleNamespace(remote=up_s)
    asked = asyncio.ensure_future(asking(was_heard=False).ask(registry, WeightRegistry.find_model, "m"))
    await until(lambda: registry.num_looks > 3)
    born_s = time.monotonic()
    with pytest.raises(ActorUnavailableError, match="another registry"):
        await asyncio.wait_for(asked, 10)


async def test_a_registry_that_is_slow_to_start_is_asked_again_and_answers() -> None:
    """The question whether it lives may be lost, too."""
    registry, slow = Registry(1e6, num_looks=4), 2

    async def up_s() -> float:
        nonlocal slow
        if slow:
            slow -= 1
            await asyncio.Event().wait()
        return await registry._up_s()

    registry.up_s = SimpleNamespace(remote=up_s)
    record: Any = await asyncio.wait_for(asking().ask(registry, WeightRegistry.find_model, "m"), 10)
    assert record == "record of m"
    assert (slow, registry.num_looks) == (0, 4)


async def test_a_snapshot_says_that_the_registry_is_gone() -> None:
    snapshot = RegistrySnapshot(NamedActor(lambda: Registry(-1.0)))
    snapshot._asking.was_heard = True
    with pytest.raises(ActorUnavailableError, match="another registry"):
        await asyncio.wait_for(snapshot.call_registry(WeightRegistry.find_model, "m"), 10)


async def test_a_replica_asks_the_registry_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.services.model_replica.REGISTRY_PAUSE_S", 0.0)
    monkeypatch.setattr("deployments.services.model_replica.REGISTRY_RETRY_S", 0.002)  # from when it fails first
    registries = [Registry(-1.0), Registry(1e6, num_looks=2)]
    replica = object.__new__(ModelReplica)
    replica._asking = asking()
    # Ray's handle stays; the actor behind it is another one.
    handle: Any = SimpleNamespace(
        find_model=SimpleNamespace(remote=lambda model: registries[0].find_model.remote(model)),
        up_s=SimpleNamespace(remote=lambda: registries.pop(0).up_s.remote() if len(registries) > 1 else up_s()),
    )

    def up_s() -> Any:
        return registries[0].up_s.remote()

    replica._registry = handle
    record: Any = await asyncio.wait_for(replica._call_registry(WeightRegistry.find_model, "m"), 10)
    assert record == "record of m"
    assert registries[0].num_looks == 2
