"""Which node is said to hold what."""

from __future__ import annotations

import random
import time

import pytest

from cluster.peers.peer_protocol import PeerAddress
from cluster.residency_map import ExtentDirectory

ONE, TWO, THREE = (PeerAddress(f"10.0.0.{number}", 7000) for number in (1, 2, 3))


def nodes(found: ExtentDirectory, id_: str, but_not: str = "") -> list[str]:
    return [offer.node for offer in found.locate([id_], but_not).get(id_, [])]


def test_others_that_hold_an_extent_are_named_with_their_address() -> None:
    found = ExtentDirectory()
    found.report("one", ONE, ["a", "b"], [], full=True)
    found.report("two", TWO, ["b"], [], full=False)
    offers = found.locate(["a", "b", "c"], but_not="two")
    assert {id_: [(offer.node, offer.address) for offer in of] for id_, of in offers.items()} == {
        "a": [("one", ONE)],
        "b": [("one", ONE)],
    }
    assert nodes(found, "b") == ["one", "two"]


def test_reports_add_remove_and_replace() -> None:
    found = ExtentDirectory()
    found.report("one", ONE, ["a", "b"], [], full=False)
    found.report("one", ONE, ["c"], ["a", "never"], full=False)
    assert [nodes(found, id_) for id_ in "abc"] == [[], ["one"], ["one"]]
    found.report("one", ONE, ["a"], [], full=True)
    assert [nodes(found, id_) for id_ in "abc"] == [["one"], [], []]
    assert found.num_extents("one") == 1


def test_a_node_without_a_server_is_sent_to_nobody() -> None:
    found = ExtentDirectory()
    found.report("one", None, ["a"], [], full=True)
    assert found.locate(["a"], but_not="two") == {}
    found.report("one", ONE, [], [], full=False)
    assert nodes(found, "a") == ["one"]


def test_a_node_that_left_takes_its_copies_along() -> None:
    found = ExtentDirectory()
    found.report("one", ONE, ["a"], [], full=True)
    found.report("two", TWO, ["a"], [], full=True)
    found.forget("one")
    found.forget("one")
    assert nodes(found, "a") == ["two"]
    found.report("one", THREE, ["b"], [], full=False)
    assert (nodes(found, "a"), nodes(found, "b")) == (["two"], ["one"])


@pytest.mark.parametrize("seed", range(10))
def test_both_directions_agree_after_any_reports(seed: int) -> None:
    chance, truth, found = random.Random(seed), {name: set[str]() for name in "xyz"}, ExtentDirectory()
    for _ in range(100):
        node = chance.choice("xyz")
        added, removed = (set(chance.sample("abcdefgh", 3)) for _ in range(2))
        added -= removed
        full = chance.random() < 0.2
        found.report(node, ONE, sorted(added), sorted(removed), full=full)
        truth[node] = added if full else (truth[node] - removed) | added
    for id_ in "abcdefgh":
        assert nodes(found, id_) == [node for node in "xyz" if id_ in truth[node]]


def test_a_model_of_ten_thousand_is_located_within_a_millisecond() -> None:
    found = ExtentDirectory()
    for node in range(8):
        ids = [f"{model:05}-{extent:02}" for model in range(node, 10_000, 2) for extent in range(30)]
        found.report(str(node), ONE, ids, [], full=True)
    wanted = [[f"{model:05}-{extent:02}" for extent in range(30)] for model in range(100, 10_000, 100)]
    start = time.perf_counter()
    for ids in wanted:
        assert len(found.locate(ids, but_not="0")) == 30
    assert (time.perf_counter() - start) / len(wanted) < 1e-3
