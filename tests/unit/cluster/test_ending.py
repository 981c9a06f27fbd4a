"""Named actors end in order, whatever some of them do, and those of other clusters stay."""

from __future__ import annotations

from functools import partial

import pytest

from cluster.process.ray_calls import end_actors
from cluster.records.actor_names import names_of_cluster
from cluster.records.errors import SessionError

OF_ONE = partial(names_of_cluster, "one")


class NamedActors:
    """Ray's named actors. Killing takes a while, and fails for those in `stubborn` as often as that says."""

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.stubborn: dict[str, int] = {}
        self.ended: list[str] = []
        self._ending: list[str] = []

    def listed(self, all_namespaces: bool) -> list[dict[str, str]]:
        ending, self._ending = self._ending, []
        self.names = [name for name in self.names if name not in ending]
        assert all_namespaces
        mine = [{"name": name, "namespace": "atelier"} for name in self.names]
        return [*mine, {"name": "registry:one:a", "namespace": "somebody else's"}]

    def get(self, name: str, namespace: str) -> str:
        return name

    def kill(self, name: str) -> None:
        if self.stubborn.get(name, 0):
            self.stubborn[name] -= 1
            raise ConnectionError(f"{name} does not listen\nat all")
        self.ended.append(name)
        self._ending = [*self._ending, name]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> NamedActors:
    made = NamedActors("keeper:one:b:n", "keeper:one:a:n", "registry:one:a", "registry:one:b", "registry:two:a")
    monkeypatch.setattr("ray.util.list_named_actors", made.listed)
    monkeypatch.setattr("ray.get_actor", made.get)
    monkeypatch.setattr("ray.kill", made.kill)
    monkeypatch.setattr("cluster.process.ray_calls._POLL_S", 0.001)
    return made


def test_all_of_a_clusters_actors_end_whatever_config_they_had_and_whichever_fails(actors: NamedActors) -> None:
    actors.stubborn = {"registry:one:a": 3, "keeper:one:a:n": 1}
    end_actors(OF_ONE)
    assert actors.names == ["registry:two:a"]
    assert actors.ended.index("registry:one:b") < actors.ended.index("keeper:one:b:n")
    end_actors(OF_ONE)


def test_an_actor_that_stays_is_named_and_the_others_end(actors: NamedActors) -> None:
    actors.stubborn = {"registry:one:a": 10**9}
    with pytest.raises(SessionError, match=r"would not end: registry:one:a: registry:one:a does not listen$"):
        end_actors(OF_ONE, timeout_s=0.05)
    assert actors.names == ["registry:one:a", "registry:two:a"]
