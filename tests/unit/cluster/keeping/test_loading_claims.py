"""The first who asks for an extent gets it for all."""

from __future__ import annotations

from cluster.keeping.loading_claims import LoadingClaims


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_first_gets_it_and_the_others_hear_of_that() -> None:
    claims = LoadingClaims(Clock())
    assert claims.claim(["a", "b"], "first") == {}
    assert claims.claim(["b", "c"], "second") == {"b": "first"}
    assert claims.claim(["a", "c"], "third") == {"a": "first", "c": "second"}
    assert claims.claim(["a", "b"], "first") == {}


def test_who_has_it_or_failed_has_no_claim_any_more() -> None:
    claims = LoadingClaims(Clock())
    claims.claim(["a", "b"], "first")
    claims.settle("second", ["a"])
    assert claims.claim(["a"], "second") == {"a": "first"}
    claims.settle("first", ["a", "unknown"])
    assert claims.claim(["a", "b"], "second") == {"b": "first"}
    assert claims.claim(["a"], "first") == {"a": "second"}


def test_a_node_that_is_gone_or_silent_for_long_has_none() -> None:
    clock = Clock()
    claims = LoadingClaims(clock, claim_s=10.0)
    claims.claim(["a"], "gone")
    claims.claim(["b"], "silent")
    claims.forget("gone")
    assert claims.claim(["a", "b"], "next") == {"b": "silent"}
    clock.now_s = 10.0
    assert claims.claim(["b"], "next") == {}
