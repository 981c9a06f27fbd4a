"""Equal texts go to one replica, few move when replicas come or go, and no replica gets many more than the others."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable

import pytest
from kit.seeding import seeded_random

from cluster.records.text_routes import FEW_TEXTS, SPREAD, TextCalls, encoder_for, is_route, route_of

NUM_TEXTS = 4000


@pytest.fixture
def rng() -> random.Random:
    return seeded_random()


def replicas_of(rng: random.Random, number: int) -> set[str]:
    return {f"{rng.getrandbits(40):010x}" for _ in range(number)}


def routes_of(rng: random.Random, number: int) -> list[str]:
    return [route_of([f"a text about {rng.getrandbits(64)}"]) for _ in range(number)]


def placed(routes: Iterable[str], replicas: set[str]) -> dict[str, str]:
    return {route: encoder_for(route, replicas, {}) for route in routes}


def test_the_route_is_that_of_the_texts() -> None:
    texts = [["a"], ["a", "b"], ["b", "a"], ["ab"], ["a", ""], [""], [(1, 2)], [(1,), (2,)], ["\ud800"], ["ids 1"]]
    routes = [route_of(each) for each in texts]
    assert len(set(routes)) == len(texts)
    assert routes == [route_of(list(each)) for each in texts]
    assert all(map(is_route, routes))
    assert not is_route("f3a9k2l1")


def test_every_process_finds_the_same_replica() -> None:
    assert encoder_for(route_of(["a seven"]), {"a", "b", "c", "d"}, {}) == "d"
    assert encoder_for(route_of([(101, 7, 102)]), {"a", "b", "c", "d"}, {}) == "c"


@pytest.mark.parametrize("number", [2, 3, 5, 8])
def test_when_a_replica_comes_or_goes_only_its_own_texts_move(rng: random.Random, number: int) -> None:
    """So the caches of the others hit as before: (n - 1) / n of all texts, and chance."""
    replicas, routes = replicas_of(rng, number), routes_of(rng, NUM_TEXTS)
    victim = rng.choice(sorted(replicas))
    before, after = placed(routes, replicas), placed(routes, replicas - {victim})
    assert all(after[route] == name for route, name in before.items() if name != victim)
    share = sum(before[route] == after[route] for route in routes) / NUM_TEXTS
    assert share == pytest.approx((number - 1) / number, abs=5 * 0.5 / NUM_TEXTS**0.5)


def test_what_one_replica_leaves_is_spread_over_all_others(rng: random.Random) -> None:
    replicas, routes = replicas_of(rng, 5), routes_of(rng, NUM_TEXTS)
    victim = rng.choice(sorted(replicas))
    before, after = placed(routes, replicas), placed(routes, replicas - {victim})
    heirs = Counter(after[route] for route, name in before.items() if name == victim)
    assert len(heirs) == 4
    assert max(heirs.values()) < 1.5 * min(heirs.values())


def test_no_load_exceeds_the_bound_however_the_texts_fall(rng: random.Random) -> None:
    for _ in range(20):
        replicas, calls = replicas_of(rng, rng.randint(1, 6)), TextCalls()
        open_: list[tuple[str, str]] = []
        for route in routes_of(rng, 400):
            mean = (sum(calls.loads.values()) + 1) / len(replicas)
            name = calls.begin(route, replicas)
            assert calls.loads[name] <= max(FEW_TEXTS, SPREAD * mean + 1)
            open_.append((route, name))
            if rng.random() < 0.3:
                calls.end(*open_.pop(rng.randrange(len(open_))))
        assert sum(calls.loads.values()) == len(open_)
        for route, name in open_:
            calls.end(route, name)
        assert not calls.loads


def test_a_text_goes_elsewhere_when_its_replica_has_too_many() -> None:
    route = route_of(["a seven"])
    first = encoder_for(route, {"a", "b", "c"}, {})
    assert encoder_for(route, {"a", "b", "c"}, {first: FEW_TEXTS - 1}) == first
    second = encoder_for(route, {"a", "b", "c"}, {first: FEW_TEXTS})
    assert second == encoder_for(route, {"a", "b", "c"} - {first}, {})
    assert encoder_for(route, {"a", "b", "c"}, {"gone": 10**6, first: FEW_TEXTS - 1}) == first


def test_equal_texts_stay_together_whatever_else_there_is(rng: random.Random) -> None:
    """A thousand of them are one text to compute, and its replica stays the same while others fill up."""
    replicas, calls, route = replicas_of(rng, 3), TextCalls(), route_of(["a seven"])
    names = {calls.begin(route, replicas) for _ in range(1000)}
    assert len(names) == 1
    assert calls.loads == dict.fromkeys(names, 1)
    for other in routes_of(rng, 500):
        calls.begin(other, replicas)
        names.add(calls.begin(route, replicas))
    grown = replicas | replicas_of(rng, 5)
    names |= {calls.begin(route, grown) for _ in range(10)}
    assert len(names) == 1
    (name,) = names
    assert calls.begin(route, grown - {name}) != name
    for _ in range(1510):
        calls.end(route, name)
    assert calls.loads.total() == 501


def test_a_batch_counts_as_many_texts() -> None:
    calls, replicas = TextCalls(), {"a", "b"}
    batch = route_of([str(number) for number in range(50)])
    name = calls.begin(batch, replicas)
    assert calls.loads == {name: 50}
    (other,) = replicas - {name}
    assert {calls.begin(route_of([text]), replicas) for text in "qwertyuiop"} == {other}
    calls.end(batch, name)
    assert calls.loads == {other: 10}
