"""Claims on encodings: one computes, all get it, and nobody waits for one who is gone. On a clock of the test's."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.encodings.ledger import EncodingLedger, Waiter
from cluster.encodings.records import Answer

CLAIM_S, MAX_CLAIM_S = 3.0, 10.0


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ledger(max_bytes: int = 1000) -> tuple[EncodingLedger[str], Clock]:
    clock = Clock()
    return EncodingLedger(max_bytes, claim_s=CLAIM_S, max_claim_s=MAX_CLAIM_S, clock=clock), clock


def waiting(book: EncodingLedger[str], digest: str, holder: str) -> list[Answer[str]]:
    """Return what it will be told."""
    told: list[Answer[str]] = []
    assert book.wait(digest, Waiter(holder, told.append)) is None
    return told


def test_the_first_computes_and_all_others_get_it() -> None:
    book, _ = ledger()
    assert book.find_or_claim("d", "a") == Answer("yours")
    assert book.find_or_claim("d", "b") == Answer("wait")
    others = [waiting(book, "d", holder) for holder in "bcd"]
    book.publish("d", "encoding", 100, 1.0)
    assert others == [[Answer("found", "encoding")]] * 3
    assert book.find_or_claim("d", "e") == Answer("found", "encoding")
    stats = book.stats()
    assert (stats.claimed, stats.waits, stats.published, stats.hits, stats.in_flight) == (1, 3, 1, 1, 0)


def test_who_waits_when_it_is_published_meanwhile_has_it_at_once() -> None:
    book, _ = ledger()
    book.find_or_claim("d", "a")
    book.publish("d", "encoding", 100, 1.0)
    told: list[Any] = []
    assert book.wait("d", Waiter("b", told.append)) == Answer("found", "encoding")
    assert told == []


def test_a_silent_claimant_loses_his_claim_to_the_one_who_waited_longest() -> None:
    book, clock = ledger()
    book.find_or_claim("d", "a")
    first, second = waiting(book, "d", "b"), waiting(book, "d", "c")
    clock.now_s = CLAIM_S - 0.1
    book.expire()
    assert first == []
    clock.now_s = CLAIM_S
    book.expire()
    assert (first, second) == ([Answer("yours")], [])
    clock.now_s = 2 * CLAIM_S
    book.expire()
    assert second == [Answer("yours")]
    book.publish("d", "encoding", 1, 1.0)
    assert (len(first), len(second), book.stats().lost_claims) == (1, 1, 2)


def test_a_claim_that_nobody_else_wanted_ends_silently_and_is_the_next_ones() -> None:
    book, clock = ledger()
    book.find_or_claim("d", "a")
    clock.now_s = CLAIM_S
    assert book.find_or_claim("d", "b") == Answer("yours")
    book.publish("d", "late", 1, 1.0)  # by a, who was only slow: it is the same encoding
    assert book.find_or_claim("d", "c") == Answer("found", "late")
    book.publish("d", "again", 1, 1.0)
    assert book.find_or_claim("d", "c") == Answer("found", "late")


def test_a_claim_is_renewed_while_the_holder_is_at_it_but_not_for_ever() -> None:
    book, clock = ledger()
    book.find_or_claim("d", "a")
    told = waiting(book, "d", "b")
    for now_s in range(1, int(MAX_CLAIM_S)):
        clock.now_s = float(now_s)
        book.renew(["d", "unknown"], "a")
        book.renew(["d"], "somebody else")
        book.expire()
        assert told == []
    clock.now_s = MAX_CLAIM_S
    book.renew(["d"], "a")
    book.expire()
    assert told == [Answer("yours")]
    book.renew(["d"], "a")  # it is b's now
    clock.now_s += CLAIM_S
    book.expire()
    assert book.stats().in_flight == 0


def test_an_abandoned_claim_is_the_next_ones_at_once() -> None:
    book, _ = ledger()
    book.find_or_claim("d", "a")
    told = waiting(book, "d", "b")
    book.abandon("d", "b")
    assert told == []
    book.abandon("d", "a")
    assert told == [Answer("yours")]
    book.abandon("d", "b")
    book.abandon("d", "b")
    assert (book.stats().in_flight, book.stats().abandoned) == (0, 2)


def test_who_has_left_is_not_given_the_claim() -> None:
    book, _ = ledger()
    book.find_or_claim("d", "a")
    told: list[Any] = []
    waiter = Waiter("b", told.append)
    book.wait("d", waiter)
    stays = waiting(book, "d", "c")
    book.stop_waiting("d", waiter)
    book.stop_waiting("unknown", waiter)
    book.abandon("d", "a")
    assert (told, stays) == ([], [Answer("yours")])


def test_a_claimant_who_asks_again_still_has_it() -> None:
    book, clock = ledger()
    book.find_or_claim("d", "a")
    clock.now_s = 2.0
    assert book.find_or_claim("d", "a") == Answer("yours")
    clock.now_s = 2.0 + CLAIM_S - 0.1
    assert book.find_or_claim("d", "b") == Answer("wait")


def test_what_cannot_be_kept_reaches_those_who_wait() -> None:
    book, _ = ledger(max_bytes=100)
    for number, give in enumerate([lambda: book.publish("d", "x", 101, 1.0), lambda: book.hand_out("d", "x")], 1):
        book.find_or_claim("d", "a")
        told = waiting(book, "d", "b")
        give()
        assert told == [Answer("found", "x")]
        assert book.find_or_claim("d", "a") == Answer("yours")
        assert (book.stats().refused, book.stats().entries) == (number, 0)


def test_what_is_forgotten_is_computed_anew_and_claims_stay() -> None:
    book, _ = ledger()
    for digest in ("d", "e"):
        book.find_or_claim(digest, "a")
    book.publish("d", "wrong", 10, 1.0)
    told = waiting(book, "e", "b")
    book.forget_all()
    assert (book.stats().entries, book.stats().nbytes, book.stats().in_flight) == (0, 0, 1)
    assert book.find_or_claim("d", "b") == Answer("yours")
    book.publish("e", "sound", 10, 1.0)
    assert told == [Answer("found", "sound")]


def test_use_of_copies_elsewhere_makes_an_entry_popular() -> None:
    book, clock = ledger(max_bytes=2)
    for digest in "ab":
        book.publish(digest, digest, 1, 1.0)
    clock.now_s = 1.0
    book.note_uses(["a", "unknown"])
    book.publish("c", "c", 1, 1.0)
    assert book.find_or_claim("a", "h").state == "found"
    assert book.find_or_claim("b", "h").state == "yours"


def test_stats_are_plain_values() -> None:
    book, _ = ledger()
    book.publish("d", "x", 2**9, 1.0)
    book.publish("k", "x", 2**7, 1.0, keep=True)
    stats = asdict(book.stats())
    assert all(isinstance(value, int | float) for value in stats.values())
    assert (stats["entries"], stats["kept"], stats["kept_bytes"]) == (2, 1, 128)
    assert stats["entries_per_gib"] == 2 * 2**30 / 640


@dataclass
class Replica:
    """Asks for one digest at a time, and computes, publishes, gives up, falls silent or dies as it is told."""

    name: str
    wants: str | None = None
    has: str | None = None  # a claim
    told: list[Answer[str]] = field(default_factory=list)
    dead: bool = False


@settings(max_examples=50, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 300))
def test_whatever_replicas_do_nobody_waits_for_ever_and_the_budget_holds(rng: random.Random, max_bytes: int) -> None:
    book, clock = ledger(max_bytes)
    replicas = [Replica(str(number)) for number in range(6)]

    def hear(replica: Replica, answer: Answer[str]) -> None:
        assert answer.state != "wait"
        assert answer.payload in (None, replica.wants)
        replica.has = replica.wants if answer.state == "yours" else None
        replica.wants = None

    def turn(replica: Replica) -> None:
        while replica.told:
            hear(replica, replica.told.pop())
        if replica.has:
            act = rng.choice(["publish", "abandon", "renew", "silent", "die"])
            digest, replica.has = replica.has, replica.has if act in ("renew", "silent") else None
            if act == "publish":
                book.publish(digest, digest, rng.randint(1, 120), rng.random(), keep=rng.random() < 0.3)
            elif act == "abandon":
                book.abandon(digest, replica.name)
            elif act == "renew":
                book.renew([digest], replica.name)
            elif act == "die":
                replica.dead = sum(not other.dead for other in replicas) > 1
        elif replica.wants is None:
            replica.wants = rng.choice("xyz")
            if answer := book.wait(replica.wants, Waiter(replica.name, replica.told.append)):
                hear(replica, answer)

    for _ in range(rng.randint(1, 60)):
        clock.now_s += rng.choice([0.0, 0.5, CLAIM_S])
        book.expire()
        turn(rng.choice([replica for replica in replicas if not replica.dead]))
        stats = book.stats()
        assert stats.nbytes <= max_bytes
        assert stats.kept_bytes <= max_bytes // 4
        assert {digest: [one.holder] for digest, one in book._computing.items()} == {
            digest: list(claims) for digest, claims in book._claims._claims.items()
        }

    # Nobody does anything any more: each silent claim ends, and everybody who waits gets his turn.
    for _ in replicas:
        clock.now_s += MAX_CLAIM_S
        book.expire()
    assert all(replica.told or replica.wants is None for replica in replicas)
    assert book.stats().waiting == 0


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_while_claimants_live_each_encoding_is_computed_once(rng: random.Random, num_replicas: int) -> None:
    book, clock = ledger(10**6)
    num_computed: Counter[str] = Counter()
    running: list[tuple[str, str]] = []
    told: list[list[Answer[str]]] = []
    asking = [(digest, str(number)) for digest in "xyz" for number in range(num_replicas)]
    rng.shuffle(asking)
    while asking or running:
        clock.now_s += rng.choice([0.0, 1.0])
        for digest, holder in running:
            book.renew([digest], holder)
        book.expire()
        if asking and (rng.random() < 0.8 or not running):
            digest, holder = asking.pop()
            told.append([])
            if answer := book.wait(digest, Waiter(holder, told[-1].append)):
                told[-1].append(answer)
            if told[-1] == [Answer("yours")]:
                num_computed[digest] += 1
                running.append((digest, holder))
        elif clock.now_s < MAX_CLAIM_S:
            digest, holder = running.pop(rng.randrange(len(running)))
            book.publish(digest, digest, 1, 1.0)
        else:
            return  # slower than any claim may last: that is the other test's business
    assert set(num_computed.values()) == {1}
    assert all(len(answers) == 1 for answers in told)
