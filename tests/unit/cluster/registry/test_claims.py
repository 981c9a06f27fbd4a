"""One node reads an extent for all, as long as it lives."""

from __future__ import annotations

import random

from kit.clock import Clock
from kit.drawing import seeds

from cluster.peers.protocol import RENEW_S
from cluster.registry.extent_locations import CLAIM_S, SLOW_S, _LoadingClaims

NOW_S = 50.0


def test_the_first_gets_it_and_the_others_hear_of_that() -> None:
    claims = _LoadingClaims()
    assert claims.loader("a", NOW_S) is None
    assert claims.claim("a", "first", NOW_S)
    assert not claims.claim("a", "second", NOW_S)
    assert claims.claim("a", "first", NOW_S)
    assert claims.claim("b", "second", NOW_S)
    assert [claims.loader(id_, NOW_S) for id_ in "abc"] == ["first", "second", None]


def test_who_has_it_or_failed_has_no_claim_any_more() -> None:
    claims = _LoadingClaims()
    claims.claim("a", "first", NOW_S)
    claims.settle("second", ["a"])
    assert claims.loader("a", NOW_S) == "first"
    claims.settle("first", ["a", "unknown"])
    assert claims.claim("a", "second", NOW_S)
    claims.settle("first", ["a"])
    assert claims.loader("a", NOW_S) == "second"


def test_a_node_that_is_gone_has_none() -> None:
    claims = _LoadingClaims()
    for id_ in "ab":
        claims.claim(id_, "gone", NOW_S)
    claims.claim("c", "other", NOW_S)
    claims.forget("gone")
    claims.forget("never seen")
    assert [claims.loader(id_, NOW_S) for id_ in "abc"] == [None, None, "other"]


def test_a_dead_reader_is_followed_soon_and_a_slow_one_is_not_dead() -> None:
    clock = Clock(50.0)
    claims = _LoadingClaims()
    claims.claim("dead", "dies", clock.now_s)
    claims.claim("slow", "lives", clock.now_s)
    for _ in range(10):
        clock.now_s += RENEW_S
        claims.renew(["slow"], "lives", clock.now_s)
    assert 10 * RENEW_S > CLAIM_S
    assert claims.claim("dead", "next", clock.now_s)
    assert not claims.claim("slow", "next", clock.now_s)


def test_a_very_slow_reader_gets_company_but_not_all_at_once() -> None:
    clock = Clock(50.0)
    claims = _LoadingClaims()
    claims.claim("a", "slow", clock.now_s)
    joined = []
    for second in range(int(5 * SLOW_S)):
        clock.now_s += 1.0
        claims.renew(["a"], "slow", clock.now_s)
        for node in joined:
            claims.renew(["a"], node[0], clock.now_s)
        if claims.loader("a", clock.now_s) is None and claims.claim("a", f"n{second}", clock.now_s):
            joined.append((f"n{second}", second + 1))
    assert [second for _, second in joined] == [SLOW_S, 2 * SLOW_S, 4 * SLOW_S]


@seeds(50)
def test_nothing_of_claims_that_ended_stays(seed: int) -> None:
    chance, clock = random.Random(seed), Clock(50.0)
    claims = _LoadingClaims()
    for _ in range(300):
        node, id_ = chance.choice("xyz"), chance.choice("abcd")
        match chance.randrange(5):
            case 0:
                claims.settle(node, [id_])
            case 1:
                claims.forget(node)
            case 2:
                clock.now_s += chance.random() * 4
            case _:
                granted = claims.claim(id_, node, clock.now_s)
                assert granted or claims.loader(id_, clock.now_s) not in (None, node)
    clock.now_s += CLAIM_S
    assert [claims.loader(id_, clock.now_s) for id_ in "abcd"] == [None] * 4
    assert (claims._claims, claims._by_holder) == ({}, {})
