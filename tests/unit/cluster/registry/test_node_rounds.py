"""A registry's rounds over Ray's nodes: keepers start with a private Ray, and the last user ends the control plane."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.records.actor_names import cluster_key, keeper_name
from cluster.registry import node_rounds
from cluster.registry.node_rounds import NodeRounds
from cluster.registry.users import Users
from configs.cluster import ClusterConfig


def config_of(**more: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"name": "c", "models": [{"id": "m", "path": "/m"}], **more})


class Keepers:
    """Keepers that remember whom they followed."""

    def __init__(self) -> None:
        self.followed: list[tuple[list[str], list[str]]] = []
        self.may_have_holders = False

    async def follow(self, alive: Iterable[str], hosts: Iterable[str]) -> None:
        self.followed.append((sorted(alive), sorted(hosts)))


class Rounds:
    """Rounds over the nodes `alive`, on a Ray that knows actors of the names `named`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: ClusterConfig, *, was_restarted: bool = False) -> None:
        self.keepers, self.users, self.ended = Keepers(), Users(), list[str]()
        self.seen: list[frozenset[str]] = []
        self.alive, self.named, self.found = {"n1": "10.0.0.1"}, list[str](), dict[str, list[str]]()
        self.looked: list[set[str]] = []
        self.num_rounds = 0
        models = SimpleNamespace(loads=SimpleNamespace(follow_replicas=self.seen.append))
        given: Any = (config, self.keepers, models, self.users)
        self.rounds = NodeRounds(*given, was_restarted=was_restarted)
        for name, replaced in {
            "NODE_POLL_S": 0.0,
            "node_addresses": lambda: dict(self.alive),
            "named_everywhere": lambda: list(self.named),
            "end_control_plane": lambda config: self.ended.append(config.name),
            "_node_problems": self._look,
        }.items():
            monkeypatch.setattr(node_rounds, name, replaced)
        monkeypatch.setattr(ray, "is_initialized", self._goes_on)

    def _goes_on(self) -> bool:
        self.num_rounds -= 1
        return self.num_rounds >= 0

    def _look(self, config: ClusterConfig, due: dict[str, str]) -> dict[str, list[str]]:
        self.looked.append(set(due))
        return {node: self.found.get(node, []) for node in due}

    async def make(self, number: int = 1) -> None:
        self.num_rounds = number
        await self.rounds.follow()
        if self.rounds._looking:
            await self.rounds._looking


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rounds]:
    return lambda config=None, **more: Rounds(monkeypatch, config or config_of(), **more)


async def test_the_one_node_of_a_private_ray_has_its_keeper_at_once(rounds: Callable[..., Rounds]) -> None:
    private = rounds()
    await private.make(2)
    assert private.keepers.followed == [(["n1"], ["n1"]), (["n1"], [])]  # then those that replicas have started
    several = rounds()
    several.alive["n2"] = "10.0.0.2"
    several.named = [keeper_name(cluster_key(config_of()), "n2")]
    await several.make()
    assert several.keepers.followed == [(["n1", "n2"], ["n2"])]
    joined = rounds(config_of(ray={"address": "auto"}))
    await joined.make()
    assert joined.keepers.followed == [(["n1"], [])]


async def test_the_control_plane_ends_with_the_last_of_its_users(rounds: Callable[..., Rounds]) -> None:
    found = rounds()
    for name in ("a", "b"):
        found.users.add(name)
    found.named = ["a"]
    await found.make()
    assert (found.ended, found.seen) == ([], [{"a"}])
    found.named, found.keepers.may_have_holders = [], True
    await found.make()
    assert found.ended == []
    found.keepers.may_have_holders = False
    await found.make()
    assert found.ended == ["c"]


async def test_nodes_that_join_are_looked_at(rounds: Callable[..., Rounds]) -> None:
    found = rounds()
    assert found.rounds.problems == []
    await found.make()
    assert found.looked == []  # `up` has looked at those
    found.alive["n2"] = "10.0.0.2"
    await found.make()
    assert found.looked == [{"n2"}]
    again = rounds(was_restarted=True)
    await again.make()
    assert again.looked == [{"n1"}]


async def test_a_round_that_fails_is_told_and_the_next_is_made(
    rounds: Callable[..., Rounds], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = rounds()
    monkeypatch.setattr(node_rounds, "named_everywhere", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        await found.make(3)
    assert caplog.text.count("the nodes could not be looked at") == 3

    def fail(*_: Any) -> None:
        raise ray.exceptions.RayError("x\ny")

    monkeypatch.setattr(node_rounds, "_node_problems", fail)
    monkeypatch.setattr(node_rounds, "named_everywhere", list)
    await found.make()
    found.alive["n2"] = "10.0.0.2"
    await found.make()
    assert "nodes that join could not be looked at: x" in caplog.text


@pytest.mark.parametrize(
    ("proxy", "lacks", "needs"), [("haproxy", "", True), ("haproxy", "no program", False), ("serve", "", False)]
)
def test_nodes_need_haproxy_where_the_head_has_it(
    proxy: str, lacks: str, needs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_rounds, "why_no_haproxy", lambda: lacks)
    monkeypatch.setattr(node_rounds, "problems_by_node", lambda nodes, wanted, serving: {"wanted": wanted})
    wanted: Any = node_rounds._node_problems(config_of(http={"proxy": proxy}), {"n1": "10.0.0.1"})["wanted"]
    assert wanted.needs_haproxy is needs
    assert "http.port" in wanted.ports
