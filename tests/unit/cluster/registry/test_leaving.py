"""A superseded registry ends its own control plane, itself last, and asks only those of its own cluster."""

from __future__ import annotations

from typing import Any

import pytest
from unit.cluster.test_ending import NamedActors

from cluster.actor_names import NAMESPACE, cluster_key, controller_name, encodings_name, keeper_name, registry_name
from cluster.registry.leaving import leave_when_superseded
from cluster.registry.superseding import UNUSED_S, Use
from configs.cluster import ClusterConfig


def config(name: str, port: int) -> ClusterConfig:
    return ClusterConfig.model_validate({"name": name, "http": {"port": port}, "models": [{"id": "m", "path": "/m"}]})


OLD, NEW, OTHER = config("one", 8001), config("one", 8002), config("two", 8001)
KEEPER = keeper_name(cluster_key(OLD), "n")
LEFT = [encodings_name(cluster_key(OLD)), KEEPER, registry_name(OLD), controller_name(OLD)]
STAY = [registry_name(NEW), controller_name(NEW), keeper_name(cluster_key(NEW), "n"), registry_name(OTHER)]


class Actors(NamedActors):
    """Ray's named actors, some of them registries that tell their use; an exception is one that does not answer."""

    def __init__(self, uses: dict[str, Use | Exception]) -> None:
        super().__init__(*LEFT, *STAY)
        self.uses = uses

    def get(self, name: str, namespace: str) -> Any:
        assert namespace == NAMESPACE
        return Handle(name, self.uses.get(name, ConnectionError("it is restarting")))

    def kill(self, name: str) -> None:
        super().kill(str(name))


class Handle(str):
    """The handle of an actor, which is its name."""

    __slots__ = ("found",)

    def __new__(cls, name: str, found: Use | Exception) -> Handle:
        made = super().__new__(cls, name)
        made.found = found
        return made

    @property
    def use(self) -> Any:
        return self

    async def remote(self) -> Use:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> Actors:
    made = Actors({registry_name(NEW): Use(0.0), registry_name(OTHER): Use(0.0)})
    monkeypatch.setattr("ray.util.list_named_actors", made.listed)
    monkeypatch.setattr("ray.get_actor", made.get)
    monkeypatch.setattr("ray.kill", made.kill)
    monkeypatch.setattr("cluster.ending._POLL_S", 0.001)
    return made


async def test_all_of_its_own_end_and_itself_last(actors: Actors) -> None:
    actors.stubborn = {KEEPER: 2}
    await leave_when_superseded(OLD, lambda: Use(UNUSED_S))
    assert sorted(actors.names) == sorted(STAY)
    assert actors.ended[-1] == registry_name(OLD)
    assert actors.ended.count(registry_name(OLD)) == 1


async def test_a_replica_that_comes_while_the_others_are_asked_keeps_it(actors: Actors) -> None:
    uses = iter([Use(0.0)])
    await leave_when_superseded(OLD, lambda: next(uses))
    assert actors.ended == []


@pytest.mark.parametrize("answer", [ConnectionError("gone"), Use(UNUSED_S), None])
async def test_it_stays_while_no_other_of_its_cluster_is_in_use(actors: Actors, answer: Any) -> None:
    if answer is None:
        actors.names.remove(registry_name(NEW))
    else:
        actors.uses[registry_name(NEW)] = answer
    await leave_when_superseded(OLD, lambda: Use(1e6))
    assert actors.ended == []
