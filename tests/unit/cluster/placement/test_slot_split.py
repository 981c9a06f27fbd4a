"""The split of a pool's slots: whole, within every replica, to those who have use for them, by priority and weight."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from kit.seeding import seeded_random

from cluster.admission.records import PoolClaims, ReplicaUse, SlotClaim
from cluster.placement.slot_split import PoolSplit, split_pool

SLOT = 0.25


def claims(
    used: Mapping[str, float] | None = None, waiting: int = 0, listed: tuple[str, ...] = ("a",), **more: Any
) -> PoolClaims:
    """An ingress that runs and waits for requests of a quarter of a replica; `more` are fields of what waits."""
    used = used or {}
    fields = {"priority": 2, "tenant": "t", "weight": 1.0, "oldest_age_s": 1.0, "next_share": SLOT} | more
    rate = fields.pop("share_per_s", 0.0)
    return PoolClaims(
        {name: ReplicaUse(used.get(name, 0.0), 0.0, {}, 0.0, name in listed) for name in (*listed, *used)},
        tuple(SlotClaim(2, fields["tenant"], fields["weight"], share, (name,)) for name, share in used.items()),
        (SlotClaim(share=waiting * SLOT, **fields),) if waiting else (),
        SLOT,
        rate,
    )


def split(**ingresses: PoolClaims) -> PoolSplit:
    return split_pool(ingresses, dict.fromkeys(ingresses, 0.0))


def test_an_ingress_alone_has_all() -> None:
    assert split(one=claims(listed=("a", "b"))).limits == {"one": {"a": 1.0, "b": 1.0}}


def test_slots_go_by_what_runs_and_waits_and_idle_ones_by_what_came() -> None:
    assert split(one=claims(waiting=30), other=claims(waiting=10)).limits == {"one": {"a": 0.75}, "other": {"a": 0.25}}
    idle = split(one=claims(share_per_s=3.0), other=claims(share_per_s=1.0))
    assert idle.limits == {"one": {"a": 0.75}, "other": {"a": 0.25}}
    few = split(one=claims(waiting=1), other=claims(waiting=100))
    assert few.limits == {"one": {"a": 0.25}, "other": {"a": 0.75}} or few.limits["other"] == {"a": 1.0}


def test_nobody_owns_what_another_one_waits_for() -> None:
    found = split(one=claims({"a": 0.75}, share_per_s=100.0), other=claims(waiting=2)).limits
    assert found["other"]["a"] >= SLOT
    assert found["one"]["a"] <= 0.75


def test_an_odd_slot_goes_to_who_waits_longest() -> None:
    for one_s, other_s in ((1.0, 2.0), (2.0, 1.0)):
        found = split(one=claims(waiting=9, oldest_age_s=one_s), other=claims(waiting=3, oldest_age_s=other_s)).limits
        assert found["one"]["a"] == 0.75  # three quarters, whoever waits longest
        found = split(one=claims(waiting=7, oldest_age_s=one_s), other=claims(waiting=7, oldest_age_s=other_s)).limits
        assert found["one"]["a"] == 0.5
        found = split(one=claims(waiting=5, oldest_age_s=one_s), other=claims(waiting=3, oldest_age_s=other_s)).limits
        assert found["one"]["a"] == (0.75 if one_s > other_s else 0.5)


def test_the_more_urgent_priority_goes_first_unless_the_other_one_was_overtaken() -> None:
    ingresses = {"one": claims(waiting=10, priority=1), "other": claims(waiting=10, priority=3)}
    waited_s = dict.fromkeys(ingresses, 0.0)
    assert split_pool(ingresses, waited_s).limits == {"one": {"a": 1.0}, "other": {"a": 0.0}}
    assert split_pool(ingresses, waited_s, {"other"}).limits == {"one": {"a": 0.75}, "other": {"a": 0.25}}


def test_tenants_share_by_weight_wherever_their_requests_are() -> None:
    """x has three times the weight of y; y's requests are in both ingresses, and count as one tenant's."""
    heavy = {"tenant": "x", "weight": 3.0}
    found = split(one=claims(waiting=40, **heavy), other=claims(waiting=400, tenant="y"))
    assert found.limits == {"one": {"a": 0.75}, "other": {"a": 0.25}}
    one, other, both = claims(waiting=40, **heavy), claims(waiting=20, tenant="y"), claims(waiting=20, tenant="y")
    mixed = PoolClaims(one.replicas, (), one.waiting + both.waiting, SLOT)
    assert split(one=mixed, other=other).capacity == pytest.approx({"one": 0.875, "other": 0.125})


def test_a_request_for_several_slots_gets_them_on_one_replica_when_it_waits_longest() -> None:
    large = {"next_share": 1.0, "oldest_age_s": 9.0, "listed": ("a", "b")}
    found = split(one=claims(waiting=4, **large), other=claims({"a": 0.5, "b": 0.25}, 40, ("a", "b"))).limits
    assert found["one"] == {"a": 0.0, "b": 1.0}
    assert found["other"]["b"] == 0.0
    later = split(
        one=claims(waiting=4, **large | {"oldest_age_s": 0.1}), other=claims({"a": 0.5, "b": 0.25}, 40, ("a", "b"))
    )
    assert sum(later.limits["other"].values()) == 2.0  # so few slots would be of no use to the first


def test_replicas_on_which_only_one_may_start_are_its_own() -> None:
    found = split(
        one=claims(waiting=9, replicas=("a",), listed=("a", "b")),
        other=claims(waiting=1, replicas=("b",), listed=("a", "b")),
    ).limits
    assert found["one"]["a"] == 1.0
    assert found["other"]["b"] >= SLOT


@pytest.mark.parametrize("used", [{}, {"a": SLOT}, {"b": 2 * SLOT}, {"a": SLOT, "b": SLOT}])
def test_slots_stay_on_the_replicas_where_they_are(used: Mapping[str, float]) -> None:
    """Also those beside the ones where requests run."""
    has = {"one": {"a": 0.5, "b": 0.5}, "other": {"a": 0.5, "b": 0.5}}
    ingresses = {}
    for name, running in (("one", used), ("other", {})):
        asked = claims(running, 10 - round(sum(running.values()) / SLOT), ("a", "b"))
        uses = {replica: replace(use, limit=has[name][replica]) for replica, use in asked.replicas.items()}
        ingresses[name] = replace(asked, replicas=uses)
    assert split(**ingresses).limits == has


def _random_claims(rng: random.Random, names: list[str]) -> PoolClaims:
    listed = [name for name in names if rng.random() < 0.9]
    used = {name: rng.randrange(3) * SLOT for name in names if rng.random() < 0.5}
    waiting = tuple(
        SlotClaim(
            rng.randint(1, 3),
            rng.choice("xyz"),
            rng.choice((1.0, 3.0)),
            rng.randint(1, 40) * SLOT,
            tuple(rng.sample(names, rng.randint(1, len(names)))) if rng.random() < 0.4 else None,
            rng.uniform(0, 10),
            rng.choice((SLOT, SLOT, 0.5, 1.0)),
        )
        for _ in range(rng.randrange(4))
    )
    return PoolClaims(
        {
            name: ReplicaUse(used.get(name, 0.0), rng.randrange(5) * SLOT, {}, 0.0, name in listed)
            for name in {*listed, *used}
        },
        tuple(SlotClaim(2, "x", 1.0, share, (name,)) for name, share in used.items() if share),
        waiting,
        rng.choice((SLOT, 1 / 8, 0.3)),
        rng.choice((0.0, 1.0, 50.0)),
    )


def test_whatever_is_claimed_no_replica_is_split_beyond_itself_and_all_of_it_is() -> None:
    rng = seeded_random()
    for _ in range(300):
        names = [f"r{n}" for n in range(rng.randint(1, 5))]
        ingresses = {f"i{n}": _random_claims(rng, names) for n in range(rng.randint(1, 4))}
        found = split_pool(ingresses, {name: rng.uniform(0, 1) for name in ingresses})
        least = min(each.least_share for each in ingresses.values())
        for replica in names:
            knows = [n for n, each in ingresses.items() if (u := each.replicas.get(replica)) and u.is_listed]
            given = [found.limits[name].get(replica, 0.0) for name in ingresses]
            assert min(given) >= 0
            assert sum(given) <= 1 + 1e-9
            if knows:
                assert sum(given) > 1 - least - 1e-9
            assert all(found.limits[name].get(replica, 0.0) == 0 for name in ingresses if name not in knows)
        assert all(capacity >= 0 for capacity in found.capacity.values())


def test_a_split_of_many_takes_milliseconds() -> None:
    rng = seeded_random()
    names = [f"r{n}" for n in range(64)]
    ingresses = {f"i{n}": _random_claims(rng, names) for n in range(8)}
    began_s = time.process_time()
    split_pool(ingresses, dict.fromkeys(ingresses, 0.0))
    assert time.process_time() - began_s < 0.25


def test_a_free_slot_is_not_reserved_for_a_most_urgent_request_that_nobody_overtook() -> None:
    ingresses = {"one": claims(waiting=1, priority=1, oldest_age_s=0.5), "other": claims({"a": 0.75}, 1, priority=1)}
    assert split(**ingresses).limits == {"one": {"a": 0.25}, "other": {"a": 0.75}}  # though the other waits longer
