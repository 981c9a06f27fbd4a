"""The next extent and its source, one step after another."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from kit.seeding import seeded_random

from cluster.peers.fetch_queue import (
    GIVE_UP_S,
    MAX_FETCHES,
    WINDOW,
    AskRegistry,
    Fetch,
    FetchQueue,
    GiveUp,
    Located,
    Question,
    Read,
    Wait,
)
from cluster.peers.known_sources import MAX_PEERS
from cluster.peers.protocol import PeerAddress
from cluster.peers.sources import (
    AVOID_S,
    DAMAGED_S,
    MAX_OFFERS,
    PATIENCE_S,
    BandwidthEstimate,
    FetchOutcome,
    PeerOffer,
    PeerRecord,
    PeerShare,
)

NBYTES = 10**8


def queue(*ids: str, now_s: float = 0.0) -> FetchQueue:
    found = FetchQueue(random.Random(1), max_claims=8)
    found.add_extents(dict.fromkeys(ids, NBYTES), now_s)
    return found


def at(node: str) -> PeerAddress:
    return PeerAddress(node, 1)


def offers(nodes: str) -> list[PeerOffer]:
    return [PeerOffer(at(node), node) for node in nodes]


def ask(found: FetchQueue, answer: Located | None, now_s: float = 0.0) -> Question:
    """Return its question, which is answered at once."""
    step = found.next_step(now_s)
    assert isinstance(step, AskRegistry), step
    found.apply_answer(step.question, answer, now_s)
    return step.question


def step_id(step: object) -> str:
    assert isinstance(step, Fetch | Read)
    return step.id


def test_an_unknown_extent_is_asked_for_once_while_other_threads_wait() -> None:
    found = queue("a", "b")
    step = found.next_step(0.0)
    assert isinstance(step, AskRegistry)
    assert (sorted(step.question.ids), step.question.max_claims, step.question.insist) == (["a", "b"], 8, None)
    assert found.next_step(0.0) == Wait(math.inf)
    found.apply_answer(step.question, Located(claimed=("a",), reading={"b": "other"}), 0.0)
    assert step_id(found.next_step(0.0)) == "a"


def test_a_node_that_cannot_read_claims_nothing_and_waits_for_the_others() -> None:
    found = queue("a", "b")
    found.can_read = False
    assert ask(found, Located(), now_s=0.0).max_claims == 0
    assert isinstance(found.next_step(0.0), Wait), "it does not ask again at once"
    assert ask(found, None, now_s=1.0).insist is None
    assert isinstance(found.next_step(1.0), Wait), "without the registry it waits as well"
    ask(found, Located(offers={"a": offers("x")}, reading={"b": "y"}), now_s=2.0)
    step = found.next_step(2.0)
    assert isinstance(step, Fetch)
    found.end_refused_fetch(step.id, FetchOutcome(failed=[at("x")]), 2.0)
    assert ask(found, Located(offers={"a": offers("x")}, reading={"b": "y"}), now_s=2.0).insist is None
    assert isinstance(found.next_step(2.0), Wait), "whoever failed is the only one: another may read it"
    assert ask(found, Located(offers={"a": offers("z")}), now_s=4.0).insist is None
    step = found.next_step(4.0)
    assert step == Fetch("a", step.plan), "the next that has it"
    found.end_fetch("a", FetchOutcome(), 4.0)
    found.can_read = True
    assert ask(found, Located(claimed=("b",)), now_s=6.0).max_claims == 8, "its storage has come"
    assert step_id(found.next_step(6.0)) == "b"


def test_a_node_that_cannot_read_gives_up_when_nothing_comes_for_long() -> None:
    found = queue("a", "b")
    found.can_read = False
    now_s = 0.0
    while now_s <= GIVE_UP_S:
        step = found.next_step(now_s)
        assert not isinstance(step, GiveUp)
        if isinstance(step, AskRegistry):
            found.apply_answer(step.question, Located(), now_s)
        now_s += 1.0
    given_up = set()
    for _ in "ab":
        step = found.next_step(now_s)
        assert isinstance(step, GiveUp)
        given_up.add(step.id)
        found.end_read(step.id, None, now_s)
    assert (given_up, found.num_waiting) == ({"a", "b"}, 0)


@pytest.mark.parametrize(
    "late", [Located(reading={"a": "other"}), Located(offers={"a": [PeerOffer(PeerAddress("x", 1), "x")]}), None]
)
def test_an_answer_that_comes_after_the_extent_was_given_up_changes_nothing(late: Located | None) -> None:
    found = queue("a")
    found.can_read = False
    asked = found.next_step(GIVE_UP_S - 0.1)
    assert isinstance(asked, AskRegistry)
    assert found.next_step(GIVE_UP_S + 0.1) == GiveUp("a")
    assert found.apply_answer(asked.question, late, GIVE_UP_S + 0.2) == []
    found.end_read("a", None, GIVE_UP_S + 0.3)
    assert (found.num_waiting, found.withdraw_extent()) == (0, None)
    now_s = 2 * GIVE_UP_S
    found.add_extents({"b": NBYTES}, now_s)
    both = Located(offers={"a": offers("x"), "b": offers("x")})
    assert ask(found, both, now_s).ids == ("b",)
    assert step_id(found.next_step(now_s)) == "b"


def test_claims_that_come_after_the_extent_was_withdrawn_are_given_back() -> None:
    found = queue("a", "b")
    asked = found.next_step(0.0)
    assert isinstance(asked, AskRegistry)
    withdrawn = found.withdraw_extent()
    (left,) = {"a", "b"} - {withdrawn}
    assert found.apply_answer(asked.question, Located(claimed=("a", "b")), 0.0) == [withdrawn]
    assert step_id(found.next_step(0.0)) == left
    assert found.num_waiting == 0


@pytest.mark.parametrize("can_read", [True, False] * 5)
def test_in_any_order_every_extent_ends_once(can_read: bool) -> None:
    """Many threads, and answers that come late: what an extent's end was, nothing brings back."""
    chance = seeded_random()
    found = FetchQueue(chance, max_claims=2)
    wanted, now_s, ended = {f"e{number}" for number in range(12)}, 0.0, list[str]()
    found.can_read = can_read
    found.add_extents(dict.fromkeys(sorted(wanted), NBYTES), now_s)
    asked: list[Question] = []
    running: list[Fetch | Read | GiveUp] = []
    for _ in range(4000):
        now_s += chance.choice([0.0, 0.1, 1.0, GIVE_UP_S])
        if asked and chance.random() < 0.3:
            question = asked.pop()
            ids = [*question.ids, chance.choice(sorted(wanted))]
            claimed = tuple(ids[: question.max_claims])
            answers: list[Located | None] = [
                None,
                Located(reading=dict.fromkeys(ids, "other")),
                Located(offers={id_: offers("xyz"[: chance.randrange(1, 4)]) for id_ in ids}, claimed=claimed),
            ]
            found.apply_answer(question, chance.choice(answers), now_s)
        elif running and chance.random() < 0.5:
            step = running.pop(chance.randrange(len(running)))
            peers = list(getattr(getattr(step, "plan", None), "addresses", ()))
            if isinstance(step, Fetch) and chance.random() < 0.5:
                kinds = {kind: peers if chance.random() < 0.5 else [] for kind in ("busy", "failed", "corrupt")}
                found.end_refused_fetch(step.id, FetchOutcome(**kinds), now_s)
                continue
            if isinstance(step, Fetch):
                found.end_fetch(step.id, FetchOutcome([PeerShare(peers[0], NBYTES, 0.1)]), now_s)
            else:
                found.end_read(step.id, 0.1 if isinstance(step, Read) else None, now_s)
            ended.append(step.id)
        elif chance.random() < 0.02 and (withdrawn := found.withdraw_extent()):
            ended.append(withdrawn)
        elif found.num_waiting:
            step = found.next_step(now_s)
            if isinstance(step, AskRegistry):
                asked.append(step.question)
            elif not isinstance(step, Wait):
                running.append(step)
        assert found.num_waiting == len(wanted) - len(ended) - len(running)
    assert sorted(ended + [step.id for step in running]) == sorted(set(ended) | {step.id for step in running})


def test_every_node_begins_elsewhere() -> None:
    ids = [f"e{index}" for index in range(40)]
    begun = set()
    for seed in range(50):
        found = FetchQueue(random.Random(seed), 1)
        found.add_extents(dict.fromkeys(ids, NBYTES), 0.0)
        step = found.next_step(0.0)
        assert isinstance(step, AskRegistry)
        begun.add(step.question.ids[0])
        assert len(step.question.ids) == WINDOW
    assert len(begun) > 20


def test_claims_come_first_because_others_wait_and_then_the_rarest_extent() -> None:
    found = queue(*"abcd")
    ask(found, Located(offers={"a": offers("wxyz"), "b": offers("w"), "c": offers("xy")}, claimed=("d",)))
    assert [step_id(found.next_step(0.0)) for _ in range(4)] == ["d", "b", "c", "a"]


def test_no_more_is_fetched_at_once_than_a_node_gives_and_storage_is_read_beside() -> None:
    ids = [f"e{index}" for index in range(MAX_FETCHES + 2)]
    found = queue(*ids)
    ask(found, Located(offers={id_: offers("x") for id_ in ids[1:]}, claimed=("e0",)))
    steps = [found.next_step(0.0) for _ in range(MAX_FETCHES + 1)]
    assert [type(step) for step in steps] == [Read] + [Fetch] * MAX_FETCHES
    assert found.next_step(0.0) == Wait(math.inf)
    found.end_fetch(step_id(steps[1]), FetchOutcome([PeerShare(at("x"), NBYTES, 0.1)]), 0.1)
    assert isinstance(found.next_step(0.1), Fetch)


def test_without_an_answer_there_is_only_storage() -> None:
    found = queue("a", "b")
    ask(found, None)
    assert {step_id(found.next_step(0.0)), step_id(found.next_step(0.0))} == {"a", "b"}


def test_a_waiting_node_asks_less_and_less_often() -> None:
    found, now_s, times = queue("a"), 0.0, []
    for _ in range(50):
        step = found.next_step(now_s)
        if isinstance(step, Wait):
            assert step.until_s > now_s
            now_s = step.until_s
        else:
            ask_again = Located(reading={"a": "other"})
            assert isinstance(step, AskRegistry)
            assert step.question.insist is None  # somebody reads it: there is no hurry to do the same
            found.apply_answer(step.question, ask_again, now_s)
            times.append(now_s)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[0] <= 0.15
    assert 0.25 <= pauses[-1] <= 0.75
    assert sum(pauses[:5]) < sum(pauses[-5:])


def test_a_busy_peer_is_left_alone_for_a_moment_and_asked_again_while_another_extent_is_fetched() -> None:
    found = queue("a", "b")
    ask(found, Located(offers={"a": offers("x"), "b": offers("xy")}))
    assert step_id(found.next_step(0.0)) == "a"
    found.end_refused_fetch("a", FetchOutcome(busy=[at("x")]), 0.0)
    step = found.next_step(0.0)
    assert isinstance(step, Fetch)
    assert (step.id, step.plan.addresses) == ("b", (at("y"),))
    wait = found.next_step(0.0)
    assert isinstance(wait, Wait)
    assert ask(found, Located(offers={"a": offers("x")}), wait.until_s).insist is None
    later = found.next_step(wait.until_s)
    assert isinstance(later, Fetch | Wait)


def test_storage_is_asked_for_when_all_holders_failed_and_not_when_there_are_more() -> None:
    found = queue("a")
    ask(found, Located(offers={"a": offers("x")}))
    assert step_id(found.next_step(0.0)) == "a"
    found.end_refused_fetch("a", FetchOutcome(failed=[at("x")]), 0.0)
    assert ask(found, Located(offers={"a": offers("x")})).insist is None  # somebody else may have it by now
    assert ask(found, Located(reading={"a": "other"})).insist == "a"
    wait = found.next_step(0.0)
    assert isinstance(wait, Wait)
    # And a failure is forgotten.
    ask(found, Located(offers={"a": offers("x")}), AVOID_S + 1)
    assert isinstance(found.next_step(AVOID_S + 1), Fetch)


def test_a_peer_with_a_damaged_copy_is_asked_for_its_other_extents_and_after_a_moment_for_a_fresh_copy() -> None:
    found = queue("a", "b")
    ask(found, Located(offers={"a": offers("x"), "b": offers("xy")}))
    assert step_id(found.next_step(0.0)) == "a"
    found.end_refused_fetch("a", FetchOutcome(corrupt=[at("x")]), 0.0)
    step = found.next_step(0.0)
    assert isinstance(step, Fetch)
    assert (step.id, step.plan.addresses) == ("b", (at("x"), at("y")))
    ask(found, Located(offers={"a": offers("xz")}))
    step = found.next_step(0.0)
    assert isinstance(step, Fetch)
    assert (step.id, step.plan.addresses) == ("a", (at("z"),))
    found.end_refused_fetch("a", FetchOutcome(failed=[at("z")]), 0.0)
    ask(found, Located(offers={"a": offers("x")}), 1.0)
    assert ask(found, Located(reading={"a": "x"}), 1.0).insist == "a"
    ask(found, Located(offers={"a": offers("x")}), DAMAGED_S)
    assert step_id(found.next_step(DAMAGED_S)) == "a"


def test_of_many_holders_others_are_asked_after_the_first_failed_but_not_for_ever() -> None:
    many, now_s = "abcd", 0.0
    assert len(many) == MAX_OFFERS
    found = queue("a")
    for node in many:
        found.sources.peers[at(node)] = PeerRecord().failed(0.0)
    ask(found, Located(offers={"a": offers(many)}))
    wait = found.next_step(now_s)
    assert isinstance(wait, Wait)
    assert ask(found, Located(offers={"a": offers(many)}), wait.until_s).insist is None
    assert ask(found, Located(claimed=("a",)), wait.until_s).insist == "a"  # this node may be the one that is cut off
    assert isinstance(found.next_step(wait.until_s), Read)


def test_peers_that_have_it_and_never_give_it_are_waited_for_with_patience() -> None:
    found, now_s = queue("a"), 0.0
    while True:
        step = found.next_step(now_s)
        match step:
            case AskRegistry() if step.question.insist:
                break
            case AskRegistry():
                found.apply_answer(step.question, Located(offers={"a": offers("x")}), now_s)
            case Fetch():
                found.end_refused_fetch("a", FetchOutcome(busy=[at("x")]), now_s)
            case Wait():
                now_s = step.until_s
            case _:
                raise AssertionError(step)
    assert PATIENCE_S < now_s < PATIENCE_S + 2


def test_clearly_faster_storage_is_read_although_another_node_reads_already() -> None:
    found = queue("a", "b")
    found.sources.storage = BandwidthEstimate(3e9, 1.0)
    ask(found, Located(offers={"a": offers("x")}, reading={"b": "other"}))
    assert step_id(found.next_step(0.0)) == "a"  # nothing is known of the peer: it is tried
    found.end_fetch("a", FetchOutcome([PeerShare(at("x"), NBYTES, NBYTES / 1e9)]), 0.1)
    ask(found, Located(reading={"b": "other"}), 1.0)
    assert isinstance(found.next_step(1.0), Read)


def test_a_transfer_is_counted_as_if_it_had_been_alone_with_its_link() -> None:
    found = queue("a", "b")
    ask(found, Located(offers={"a": offers("x"), "b": offers("y")}))
    assert {step_id(found.next_step(0.0)), step_id(found.next_step(0.0))} == {"a", "b"}
    found.end_fetch("a", FetchOutcome([PeerShare(at("x"), NBYTES, 0.2, load=1.0)]), 0.2)
    found.end_fetch("b", FetchOutcome([PeerShare(at("y"), NBYTES, 0.2, load=4.0)]), 0.2)
    # The first began alone and ended with another; the second shared the other's link with four.
    assert found.sources.peers[at("x")].gbps(0.2) == pytest.approx(1.5 * 0.5)
    assert found.sources.peers[at("y")].gbps(0.2) == pytest.approx(4 * 0.5)


def test_the_records_of_peers_are_bounded() -> None:
    found = FetchQueue(random.Random(1), 8)
    for number in range(2 * MAX_PEERS):
        now_s = number * 0.1
        found.add_extents({"a": NBYTES}, now_s)
        ask(found, Located(offers={"a": [PeerOffer(PeerAddress("10.0.0.1", number), "x")]}), now_s)
        assert step_id(found.next_step(now_s)) == "a"
        found.end_fetch("a", FetchOutcome([PeerShare(PeerAddress("10.0.0.1", number), NBYTES, 0.1)]), now_s)
    assert len(found.sources.peers) <= MAX_PEERS + 1
    assert not found._sizes
