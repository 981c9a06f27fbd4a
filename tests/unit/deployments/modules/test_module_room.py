"""Room by tensors, against trying every set of victims."""

from __future__ import annotations

import itertools
import random

from deployments.modules.room import Holding, RoomPlan, distinct_bytes, plan_room
from weights.residency import Resident


def holding(key: str, tensors: dict[str, int], **options: object) -> Holding:
    fields = {"last_used": 0.0, "reload_s": 1.0} | options
    return Holding(Resident(key, sum(tensors.values()), **fields), tensors)  # type: ignore[arg-type]


def random_holdings(rng: random.Random) -> list[Holding]:
    sizes = {f"t{i}": rng.randint(1, 9) for i in range(8)}
    return [
        holding(
            f"m{i}",
            {name: sizes[name] for name in rng.sample(sorted(sizes), rng.randint(1, 4))},
            last_used=float(i),
            reload_s=rng.choice([1.0, 2.0, 5.0]),
            popularity=rng.choice([1.0, 3.0]),
            leases=int(rng.random() < 0.2),
            pinned=rng.random() < 0.1,
        )
        for i in range(rng.randint(0, 6))
    ]


def test_the_plan_fits_evicts_nothing_in_vain_and_gives_up_only_when_nothing_helps() -> None:
    rng = random.Random()
    seen = set()
    for _ in range(400):
        holdings = random_holdings(rng)
        wanted = {f"t{i}": holding_bytes(holdings, f"t{i}", rng) for i in rng.sample(range(12), 3)}
        budget_bytes = rng.randint(5, 45)
        plan = plan_room(holdings, wanted, budget_bytes)
        may_go = [holding.resident.key for holding in holdings if not holding.stays]
        fits = [
            set(gone)
            for n in range(len(may_go) + 1)
            for gone in itertools.combinations(may_go, n)
            if total(holdings, wanted, gone) <= budget_bytes
        ]
        if plan.missing_bytes:
            assert not fits
            assert plan.missing_bytes == total(holdings, wanted, may_go) - budget_bytes
            assert plan.evict == ()
        else:
            assert set(plan.evict) in fits
            assert not any(gone < set(plan.evict) for gone in fits)
        seen.add((bool(plan.missing_bytes), bool(plan.evict)))
    assert seen == {(True, False), (False, True), (False, False)}


def holding_bytes(holdings: list[Holding], name: str, rng: random.Random) -> int:
    return next((h.tensors[name] for h in holdings if name in h.tensors), rng.randint(1, 9))


def total(holdings: list[Holding], wanted: dict[str, int], gone: object) -> int:
    return distinct_bytes(wanted, *(h.tensors for h in holdings if h.resident.key not in gone))  # type: ignore[operator]


def test_what_saves_the_least_time_per_byte_goes_first() -> None:
    slow = holding("slow", {"a": 10}, reload_s=9.0)
    popular = holding("popular", {"b": 10}, popularity=20.0)
    plain = holding("plain", {"c": 10}, last_used=99.0)
    assert plan_room([slow, popular, plain], {"d": 10}, 30) == RoomPlan(("plain",))
    assert plan_room([slow, popular, plain], {"d": 20}, 30) == RoomPlan(("plain", "slow"))


def test_equals_go_by_least_recent_use() -> None:
    holdings = [holding(key, {key: 10}, last_used=used) for key, used in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    assert plan_room(holdings, {"d": 20}, 30) == RoomPlan(("b", "c"))


def test_a_module_that_shares_everything_frees_nothing_and_stays() -> None:
    base = holding("base", {"vae": 10, "unet": 20}, leases=1)
    shared = holding("shared", {"vae": 10}, reload_s=0.0)
    other = holding("other", {"x": 20})
    assert plan_room([base, shared, other], {"y": 20}, 50) == RoomPlan(("other",))
