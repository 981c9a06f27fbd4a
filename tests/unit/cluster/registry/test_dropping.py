"""Dropping extents on every node: holders are named, and releases on their way are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.keeper.actor import KeeperSettings
from cluster.keeper.records import ResidentExtent
from cluster.registry.node_keepers import RELEASE_PAUSES_S, NodeKeepers


class Keeper:
    """`holders` by extent id; those of `leaving` leave at the drop of that number. Held extents stay."""

    def __init__(self, holders: dict[str, list[str]], pinned: Sequence[str] = ()) -> None:
        self.holders, self.pinned = holders, set(pinned)
        self.leaving: dict[str, int] = {}
        self.error: Exception | None = None
        self.dropped: list[list[str]] = []
        self.drop, self.residents = SimpleNamespace(remote=self._drop), SimpleNamespace(remote=self._residents)

    async def _drop(self, ids: list[str]) -> None:
        self.dropped.append(ids)
        for id_ in ids:
            if self.leaving.get(id_) == len(self.dropped):
                self.holders[id_] = []
            if id_ in self.holders and not self.holders[id_] and id_ not in self.pinned:
                del self.holders[id_]

    async def _residents(self, ids: list[str]) -> list[ResidentExtent]:
        if self.error:
            raise self.error
        found = {id_: self.holders[id_] for id_ in ids if id_ in self.holders}
        return [extent(id_, holders, id_ in self.pinned) for id_, holders in found.items()]


def extent(id_: str, holders: Sequence[str], pinned: bool) -> Any:
    return SimpleNamespace(id=id_, holders=tuple(holders), pinned=pinned)


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    times: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        times.append(seconds)
        await real(0)

    monkeypatch.setattr("cluster.registry.node_keepers.asyncio.sleep", sleep)
    return times


def keepers_of(monkeypatch: pytest.MonkeyPatch, *nodes: Keeper) -> NodeKeepers:
    by_name = {f"n{number}": node for number, node in enumerate(nodes)}
    monkeypatch.setattr(NodeKeepers, "_start", lambda _, node_id: by_name[node_id])
    keepers = NodeKeepers("/packs", 1000, "c:0", KeeperSettings())
    for name in by_name:
        keepers.keeper(name)
    return keepers


async def test_an_extent_without_holders_is_dropped_at_once(
    monkeypatch: pytest.MonkeyPatch, slept_s: list[float]
) -> None:
    first, second = Keeper({"a": [], "other": ["w"]}), Keeper({"b": []})
    assert await keepers_of(monkeypatch, first, second).drop(["a", "b"]) == []
    assert first.dropped == second.dropped == [["a", "b"]]
    assert (first.holders, second.holders) == ({"other": ["w"]}, {})
    assert slept_s == [0.0]


async def test_a_release_that_is_on_its_way_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, slept_s: list[float]
) -> None:
    node = Keeper({"a": ["w1"]})
    node.leaving = {"a": 3}
    assert await keepers_of(monkeypatch, node).drop(["a"]) == []
    assert slept_s == list(RELEASE_PAUSES_S[:3])


async def test_each_holder_is_named_once_and_pins_as_well(
    monkeypatch: pytest.MonkeyPatch, slept_s: list[float]
) -> None:
    first, second = Keeper({"a": ["w2", "w1"], "b": [], "x": ["not asked"]}), Keeper({"a": ["w1"], "c": []}, ["c"])
    assert await keepers_of(monkeypatch, first, second).drop(["a", "b", "c"]) == ["w1", "w2", "a pin"]
    assert slept_s == list(RELEASE_PAUSES_S)
    assert "b" not in first.holders  # what could go is gone


async def test_a_keeper_that_does_not_answer_does_not_delay_the_others(
    monkeypatch: pytest.MonkeyPatch, slept_s: list[float]
) -> None:
    """It is restarting, and begins empty."""
    gone = Keeper({"a": ["w"]})
    gone.error = ConnectionError("gone")
    assert await keepers_of(monkeypatch, gone, Keeper({"a": []})).drop(["a"]) == []
