"""A keeper that was restarted is told again what its node was told before, and what it was loading is up for others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.node_keepers import NodeKeepers
from cluster.peers.extent_sources import ComingOffer

DEFAULT_BUDGET_BYTES = 1000


class Call:
    """A method of an actor, as Ray has it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def remote(self, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return self._function(*arguments)


class Keeper:
    """What a keeper is told and asked."""

    def __init__(self, port: int) -> None:
        self.address = f"10.0.0.1:{port}"
        self.life = 0
        self.reachable = True
        self.restart()
        self.stats, self.residents = Call(self._stats), Call(lambda: self.extents)
        self.pin, self.unpin, self.set_budget = Call(self._pin), Call(self._unpin), Call(self._set_budget)

    def restart(self) -> None:
        self.life += 1
        self.budget_bytes = DEFAULT_BUDGET_BYTES
        self.pinned: set[str] = set()
        self.extents: list[Any] = []
        self.num_told = 0

    def _stats(self) -> Any:
        if not self.reachable:
            raise ConnectionError("it is starting")
        return SimpleNamespace(generation=f"life {self.life}", budget_bytes=self.budget_bytes, address=self.address)

    def _pin(self, ids: Sequence[str]) -> None:
        self.num_told += 1
        self.pinned.update(ids)

    def _unpin(self, ids: Sequence[str]) -> None:
        self.pinned.difference_update(ids)

    def _set_budget(self, budget_bytes: int) -> None:
        self.num_told += 1
        self.budget_bytes = budget_bytes


@pytest.fixture
def nodes() -> dict[str, Keeper]:
    return {"n1": Keeper(7001), "n2": Keeper(7002)}


@pytest.fixture
def keepers(nodes: dict[str, Keeper], monkeypatch: pytest.MonkeyPatch) -> NodeKeepers:
    monkeypatch.setattr(NodeKeepers, "_start", lambda _, node_id: nodes[node_id])
    monkeypatch.setattr("cluster.node_keepers.ray.kill", lambda _: None)
    return NodeKeepers("/packs", DEFAULT_BUDGET_BYTES, "registry")


async def test_a_restarted_keeper_gets_its_nodes_pins_and_budget_again(
    keepers: NodeKeepers, nodes: dict[str, Keeper]
) -> None:
    await keepers.follow(["n1", "n2"])
    await keepers.pin(["a", "b", "c"], True)
    await keepers.pin(["b"], False)
    nodes["n1"].budget_bytes = 70
    await keepers.follow(["n1", "n2"])
    nodes["n1"].restart()
    await keepers.follow(["n1", "n2"])
    assert [(node.pinned, node.budget_bytes) for node in nodes.values()] == [({"a", "c"}, 70), ({"a", "c"}, 1000)]
    nodes["n1"].restart()  # what was given again is not forgotten with the second life
    await keepers.follow(["n1", "n2"])
    assert (nodes["n1"].pinned, nodes["n1"].budget_bytes) == ({"a", "c"}, 70)


async def test_a_keeper_that_lives_on_is_told_nothing(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    await keepers.follow(["n1", "n2"])
    await keepers.pin(["a"], True)
    before = [node.num_told for node in nodes.values()]
    nodes["n1"].budget_bytes = 70
    for _ in range(3):
        await keepers.follow(["n1", "n2"])
    assert [node.num_told for node in nodes.values()] == before == [1, 1]
    assert nodes["n1"].budget_bytes == 70


async def test_what_was_pinned_while_a_keeper_was_away_or_in_another_life_of_the_registry_holds_on_every_node(
    keepers: NodeKeepers, nodes: dict[str, Keeper]
) -> None:
    nodes["n1"].extents = [SimpleNamespace(id="old", pinned=True), SimpleNamespace(id="loose", pinned=False)]
    await keepers.follow(["n1"])
    nodes["n1"].reachable = False
    await keepers.pin(["new"], True)
    nodes["n1"].restart()
    await keepers.follow(["n1", "n2"])
    assert (nodes["n1"].pinned, nodes["n2"].pinned) == (set(), {"old", "new"})  # it is not back yet
    nodes["n1"].reachable = True
    await keepers.follow(["n1", "n2"])
    assert nodes["n1"].pinned == {"old", "new"}


async def test_nobody_waits_for_what_a_restarted_keeper_was_loading(
    keepers: NodeKeepers, nodes: dict[str, Keeper]
) -> None:
    await keepers.follow(["n1", "n2"])
    assert keepers.locate(["a", "b"], "n1") == {}
    await keepers.follow(["n1", "n2"])
    (waiting,) = keepers.locate(["a"], "n2")["a"]
    assert (type(waiting), waiting.node) == (ComingOffer, "n1")  # the same life: still loading
    nodes["n1"].restart()
    await keepers.follow(["n1", "n2"])
    assert keepers.locate(["a", "b"], "n2") == {}
    (waiting,) = keepers.locate(["b"], "n1")["b"]
    assert waiting.node == "n2"


async def test_a_node_that_left_is_a_new_one_when_it_comes_back(keepers: NodeKeepers, nodes: dict[str, Keeper]) -> None:
    await keepers.follow(["n1", "n2"])
    nodes["n1"].budget_bytes = 70
    await keepers.follow(["n1", "n2"])
    await keepers.follow(["n2"])
    nodes["n1"].restart()
    await keepers.follow(["n1", "n2"])
    assert nodes["n1"].budget_bytes == DEFAULT_BUDGET_BYTES
