"""The map of residency: offers of holders, and claims on extents that nobody holds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from kit.clock import Clock
from kit.drawing import seeds

from cluster.peers.protocol import Located, PeerAddress, Question, ResidencyReport
from cluster.peers.sources import MAX_OFFERS
from cluster.registry.extent_locations import LOAD_S, ResidencyMap

ONE, TWO, THREE = (PeerAddress(f"10.0.0.{number}", 7000) for number in (1, 2, 3))


def directory(clock: Clock | None = None, seed: int = 0) -> ResidencyMap:
    clock = clock or Clock(10.0)
    return ResidencyMap(clock, random.Random(seed))


def ask(*ids: str, max_claims: int = 0, insist: str | None = None) -> Question:
    return Question(ids, max_claims, insist)


def nodes(found: ResidencyMap, id_: str, but_not: str = "") -> list[str]:
    return sorted(offer.node for offer in found.locate(but_not, ask(id_)).offers.get(id_, []))


def test_others_that_hold_an_extent_are_named_with_their_address() -> None:
    found = directory()
    found.report_residency("one", ResidencyReport(ONE, ["a", "b"], [], is_full=True))
    found.report_residency("two", ResidencyReport(TWO, ["b"], [], is_full=False))
    offers = found.locate("two", ask("a", "b", "c")).offers
    assert {id_: [(offer.node, offer.address) for offer in of] for id_, of in offers.items()} == {
        "a": [("one", ONE)],
        "b": [("one", ONE)],
    }
    assert nodes(found, "b") == ["one", "two"]


def test_reports_add_remove_and_replace() -> None:
    found = directory()
    found.report_residency("one", ResidencyReport(ONE, ["a", "b"], [], is_full=False))
    found.report_residency("one", ResidencyReport(ONE, ["c"], ["a", "never"], is_full=False))
    assert [nodes(found, id_) for id_ in "abc"] == [[], ["one"], ["one"]]
    found.report_residency("one", ResidencyReport(ONE, ["a"], [], is_full=True))
    assert [nodes(found, id_) for id_ in "abc"] == [["one"], [], []]
    assert list(found._nodes["one"].extents) == ["a"]


def test_a_node_without_a_server_is_offered_to_nobody() -> None:
    found = directory()
    found.report_residency("one", ResidencyReport(None, ["a"], [], is_full=True))
    assert found.locate("two", ask("a")).offers == {}
    found.report_residency("one", ResidencyReport(ONE, [], [], is_full=False))
    assert nodes(found, "a") == ["one"]


def test_a_node_that_left_takes_its_copies_along() -> None:
    found = directory()
    found.report_residency("one", ResidencyReport(ONE, ["a"], [], is_full=True))
    found.report_residency("two", ResidencyReport(TWO, ["a"], [], is_full=True))
    found.forget("one")
    found.forget("one")
    assert nodes(found, "a") == ["two"]
    found.report_residency("one", ResidencyReport(THREE, ["b"], [], is_full=False))
    assert (nodes(found, "a"), nodes(found, "b")) == (["two"], ["one"])


@seeds(50)
def test_both_directions_agree_after_any_reports(seed: int) -> None:
    chance, truth, found = random.Random(seed), {name: set[str]() for name in "xyz"}, directory()
    for _ in range(100):
        node = chance.choice("xyz")
        added, removed = (set(chance.sample("abcdefgh", 3)) for _ in range(2))
        added -= removed
        full = chance.random() < 0.2
        found.report_residency(node, ResidencyReport(ONE, sorted(added), sorted(removed), is_full=full))
        truth[node] = added if full else (truth[node] - removed) | added
    for id_ in "abcdefgh":
        assert nodes(found, id_) == [node for node in "xyz" if id_ in truth[node]]


class CountedList(list[Any]):
    """Counts its elements that are looked at."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        CountedList.num_read += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        for element in super().__iter__():
            CountedList.num_read += 1
            yield element


def num_read(num_holders: int, num_extents: int = 200) -> int:
    found = directory()
    ids = [f"e{index}" for index in range(num_extents)]
    for number in range(num_holders):
        found.report_residency(f"n{number}", ResidencyReport(PeerAddress("10.0.0.1", number), ids, [], is_full=True))
    found._holders = {id_: CountedList(holders) for id_, holders in found._holders.items()}
    CountedList.num_read = 0
    located = found.locate("n0", ask(*ids))
    assert all(1 <= len(offers) <= MAX_OFFERS for offers in located.offers.values())
    assert len(located.offers) == num_extents
    return CountedList.num_read


def test_the_cost_of_a_question_does_not_grow_with_the_number_of_holders() -> None:
    assert num_read(10) <= 10 * 200
    assert num_read(1000) <= (MAX_OFFERS + 1) * 200
    assert num_read(4000) <= (MAX_OFFERS + 1) * 200


def test_offers_are_drawn_at_random_and_never_name_the_asker() -> None:
    found = directory()
    for number in range(20):
        found.report_residency(f"n{number}", ResidencyReport(PeerAddress("10.0.0.1", number), ["a"], [], is_full=True))
    drawn, first = Counter[str](), Counter[str]()
    for _ in range(2000):
        offers = found.locate("n7", ask("a")).offers["a"]
        assert len({offer.node for offer in offers}) == len(offers) == MAX_OFFERS
        drawn.update(offer.node for offer in offers)
        first[offers[0].node] += 1
    assert "n7" not in drawn
    assert len(first) == 19
    assert min(drawn.values()) > 300  # 421 are expected of each
    assert [found.locate("x", ask("a")) for found in map(twenty, (1, 1))] == [twenty(1).locate("x", ask("a"))] * 2


def twenty(seed: int) -> ResidencyMap:
    found = directory(seed=seed)
    for number in range(20):
        found.report_residency(f"n{number}", ResidencyReport(PeerAddress("10.0.0.1", number), ["a"], [], is_full=True))
    return found


def test_a_load_is_told_with_the_offer_as_long_as_it_is_fresh() -> None:
    clock = Clock(10.0)
    found = directory(clock)
    found.report_residency("one", ResidencyReport(ONE, ["a"], [], is_full=True, load=3))
    assert [offer.active_transfers for offer in found.locate("two", ask("a")).offers["a"]] == [3]
    found.locate("one", ask(), load=1)
    assert [offer.active_transfers for offer in found.locate("two", ask("a")).offers["a"]] == [1]
    clock.now_s += LOAD_S
    assert [offer.active_transfers for offer in found.locate("two", ask("a")).offers["a"]] == [0]


def test_missing_extents_are_shared_out_among_the_nodes() -> None:
    found = directory()
    for number in range(4):
        found.report_residency(f"n{number}", ResidencyReport(PeerAddress("10.0.0.1", number), [], [], is_full=True))
    assert found.locate("n0", ask(*"abcdef", max_claims=8)) == Located(claimed=("a", "b"))
    assert found.locate("n1", ask(*"abcdef", max_claims=1)) == Located(reading={"a": "n0", "b": "n0"}, claimed=("c",))
    found.report_residency("n0", ResidencyReport(ONE, ["a"], ["b"], is_full=False))  # the second could not be read
    located = found.locate("n2", ask(*"abc", max_claims=1))
    assert (nodes(found, "a"), located.claimed, located.reading) == (["n0"], ("b",), {"c": "n1"})
    found.forget("n1")
    assert found.locate("n3", ask("c", max_claims=1)).claimed == ("c",)


def test_a_node_that_is_alone_reads_as_much_as_it_asks_for() -> None:
    found = directory()
    found.report_residency("n0", ResidencyReport(ONE, [], [], is_full=True))
    assert found.locate("n0", ask(*"abcdef", max_claims=8)).claimed == tuple("abcdef")


def test_a_node_that_no_peer_serves_may_read_unless_another_reads_already() -> None:
    found = directory()
    found.report_residency("dead", ResidencyReport(ONE, ["a"], [], is_full=True))
    found.report_residency("n1", ResidencyReport(TWO, [], [], is_full=True))
    assert found.locate("n1", ask("a", max_claims=8)).claimed == ()
    assert found.locate("n1", ask("a", max_claims=8, insist="a")) == Located(claimed=("a",))
    assert found.locate("n2", ask("a", max_claims=8, insist="a")) == Located(reading={"a": "n1"})
