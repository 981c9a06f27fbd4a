"""Shares by weight against their definition, and who has the most against a plain count."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from kit.drawing import seeds

from cluster.admission.shares import Crowd, fill, given_until
from configs.admission import AdmissionConfig


def test_an_amount_is_filled_by_weight_up_to_what_each_wants() -> None:
    assert fill(10.0, {"a": (1.0, 100.0), "b": (1.0, 100.0)}) == {"a": 5.0, "b": 5.0}
    assert fill(10.0, {"a": (1.0, 2.0), "b": (1.0, 100.0)}) == {"a": 2.0, "b": 8.0}
    assert fill(12.0, {"a": (3.0, 100.0), "b": (1.0, 100.0)}) == {"a": 9.0, "b": 3.0}
    assert sum(fill(10.0, {"a": (1.0, 2.0), "b": (1.0, 3.0)}).values()) == 5.0
    assert fill(1.0, {}) == {}


@seeds(50)
def test_who_wants_more_has_as_much_by_weight_as_all_others_who_do(seed: int) -> None:
    rng = random.Random(seed)
    claims = {number: (rng.uniform(0.01, 10.0), rng.uniform(0.1, 20.0)) for number in range(rng.randint(1, 12))}
    total = sum(most for _, most in claims.values())
    amount = rng.uniform(0.0, 1.3) * total
    given = fill(amount, claims)
    assert sum(given.values()) == pytest.approx(min(amount, total))
    levels = [given[key] / weight for key, (weight, most) in claims.items() if given[key] < most * (1 - 1e-9)]
    assert levels == pytest.approx([max(levels, default=0.0)] * len(levels))
    assert all(given[key] <= most for key, (_, most) in claims.items())
    if levels:
        assert given_until(levels[0], claims.values()) == pytest.approx(amount)


def config_of(weights: Mapping[str, float]) -> AdmissionConfig:
    return AdmissionConfig.model_validate({"tenants": {name: {"weight": one} for name, one in weights.items()}})


@seeds(50)
def test_the_longest_line_by_weight_makes_room(seed: int) -> None:
    rng = random.Random(seed)
    weights = {name: rng.choice([0.5, 1.0, 2.0, 4.0]) for name in "abcdef"}
    crowd, counts = Crowd(config_of(weights)), Counter[str]()
    for _ in range(400):
        name = rng.choice("abcde")
        if counts[name] and rng.random() < 0.48:
            counts[name] -= 1
            crowd.remove(name)
        else:
            counts[name] += 1
            crowd.add(name)
        if rng.random() < 0.02:
            weights.update({name: rng.choice([0.5, 1.0, 2.0, 4.0]) for name in "abcde"})
            crowd.reweigh(config_of(weights))
        asking = rng.choice("abcdef")
        own = (counts[asking] + 1) / weights[asking]
        longest = max([counts[other] / weights[other] for other in counts], default=0.0)
        richer = crowd.richer_than(asking)
        if longest > own:
            assert richer is not None
            assert richer[0] == longest
            assert counts[richer[1]] / weights[richer[1]] == longest
        else:
            assert richer is None
    assert len(crowd) == counts.total()
