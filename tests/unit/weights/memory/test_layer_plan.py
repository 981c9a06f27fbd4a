"""The layers of a decoder compute on devices from the last one on, the others on the host."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from weights.memory.layer_plan import (
    AUTO,
    DecoderSizes,
    LayerPlan,
    decoder_sizes,
    host_names,
    largest_caches,
    layer_of,
    plan_layers,
)
from weights.records.errors import BudgetExceeded, WeightsError


def sizes_of(chance: random.Random) -> DecoderSizes:
    count = chance.randint(1, 40)
    caches = [16 + layer * chance.choice([0, 100]) for layer in range(count + 1)]
    return DecoderSizes([chance.randint(1, 999) for _ in range(count)], chance.randint(0, 300), sorted(caches), "norm")


def used(sizes: DecoderSizes, plan: LayerPlan, place: int) -> int:
    layers = plan.on(place)
    rest = 0 if place else sizes.rest_bytes
    return rest + sum(sizes.layers[layer] for layer in layers) + sizes.caches[len(layers)]


def test_every_plan_keeps_each_device_within_its_bytes_and_leaves_no_layer_off_that_has_room() -> None:
    chance = random.Random(random.getrandbits(30))
    for _ in range(500):
        sizes = sizes_of(chance)
        budgets = [chance.randint(0, 9000) for _ in range(chance.randint(1, 3))]
        if sizes.rest_bytes + sizes.caches[0] > budgets[0]:
            with pytest.raises(BudgetExceeded, match="norm need"):
                plan_layers(sizes, budgets, AUTO, "m")
            continue
        plan = plan_layers(sizes, budgets, AUTO, "m")
        for place, budget in enumerate(budgets):
            assert not plan.on(place) or used(sizes, plan, place) <= budget
        last = len(budgets) - 1
        placed = [last + 1 if place is None else place for place in plan.places]
        assert placed == sorted(placed, reverse=True), "each border is crossed once"
        if (hosts := plan.on(None)) and plan.on(last):
            with_next = LayerPlan((*plan.places[: hosts[-1]], last, *plan.places[hosts[-1] + 1 :]))
            assert used(sizes, with_next, last) > budgets[last]
        if hosts:
            with pytest.raises(BudgetExceeded, match="with their KV cache; the budget is"):
                plan_layers(sizes, budgets, AUTO, "m", has_host=False)
        else:
            assert plan_layers(sizes, budgets, AUTO, "m", has_host=False) == plan


def test_the_largest_caches_fill_the_devices_and_send_no_layer_to_the_host() -> None:
    chance = random.Random(random.getrandbits(30))
    grown = 0
    for _ in range(300):
        count, weights, rest = chance.randint(2, 30), chance.randint(100, 999), chance.randint(0, 300)
        budgets = [chance.randint(500, 20_000) for _ in range(chance.randint(1, 3))]
        host_bytes = chance.choice([None, chance.randint(0, 9000)])

        def sizes_of(nbytes: int, count: int = count, weights: int = weights, rest: int = rest) -> DecoderSizes:
            return DecoderSizes([weights] * count, rest, [nbytes * n // count for n in range(count + 1)], "norm")

        def hosts(nbytes: int, sizes_of: Any = sizes_of, budgets: Any = budgets, host_bytes: Any = host_bytes) -> int:
            return len(plan_layers(sizes_of(nbytes), budgets, AUTO, "m", has_host=host_bytes is not None).on(None))

        found = largest_caches(sizes_of, budgets, 100, host_bytes)
        assert found >= 100
        try:
            fewest = hosts(100)
        except BudgetExceeded:
            assert found == 100
            continue
        assert hosts(found) == fewest
        if found > 100:
            grown += 1
            assert not fewest or sizes_of(found).caches[fewest] <= (host_bytes or 0)
        more = found + max(2, found // 100)
        is_full = fewest and sizes_of(more).caches[fewest] > (host_bytes or 0)
        try:
            assert is_full or hosts(more) > fewest
        except BudgetExceeded:
            assert host_bytes is None or not fewest
    assert grown > 100


def test_a_number_takes_the_last_layers_and_a_pattern_those_of_whole_names() -> None:
    sizes = DecoderSizes([10] * 12, 5, [0] * 13, "norm")
    assert plan_layers(sizes, [1000], 0, "m").on(0) == ()
    assert plan_layers(sizes, [1000], 3, "m").on(0) == (9, 10, 11)
    assert plan_layers(sizes, [1000], 12, "m").on(None) == ()
    assert plan_layers(sizes, [1000], r"layers\.1", "m").on(0) == (1,)
    assert plan_layers(sizes, [1000], r"layers\.1.?", "m").on(0) == (1, 10, 11)
    assert plan_layers(sizes, [45], AUTO, "m").on(0) == (8, 9, 10, 11)


@pytest.mark.parametrize(
    ("wanted", "budget", "kind", "text"),
    [
        (13, 1000, WeightsError, "gpu_layers is 13, but 'm' has 12 layers, layers.0 to layers.11"),
        ("blocks", 1000, WeightsError, "gpu_layers 'blocks' is the name of no layer: 'm' has 12 layers, layers.0"),
        (
            3,
            34,
            BudgetExceeded,
            "gpu_layers 3 of 'm': layers 9, 10, 11 and norm need 35 bytes with their KV cache; the",
        ),
        (
            AUTO,
            4,
            BudgetExceeded,
            "'m': norm need 5 bytes on the device even where all layers are elsewhere; its budget is 4 bytes",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_names_and_bytes(wanted: int | str, budget: int, kind: type, text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        plan_layers(DecoderSizes([10] * 12, 5, [0] * 13, "norm"), [budget], wanted, "m")


def test_layers_that_the_host_would_compute_are_refused_where_it_computes_none() -> None:
    sizes = DecoderSizes([10] * 12, 5, [0] * 13, "norm")
    assert plan_layers(sizes, [100, 40], AUTO, "m", has_host=False).places == (1, 1, 1) + (0,) * 9
    for wanted in (3, "layers.7"):
        with pytest.raises(
            WeightsError, match=f"gpu_layers {wanted!r} leaves layers of 'm' to the host, and cpu is not"
        ):
            plan_layers(sizes, [100, 40], wanted, "m", has_host=False)


def test_the_embedding_stays_with_the_host_unless_it_is_the_head_too() -> None:
    layer = {f"model.layers.{number}.{leaf}.weight": 8 for number in range(3) for leaf in ("q_proj", "mlp.up")}
    names = {"model.embed_tokens.weight": 100, "model.norm.weight": 1, **layer}
    plan = LayerPlan((None, 0, 0))
    first = {"model.layers.0.q_proj.weight", "model.layers.0.mlp.up.weight"}
    assert host_names(names, plan) == first
    assert host_names({**names, "lm_head.weight": 100}, plan) == first | {"model.embed_tokens.weight"}
    assert host_names(names, LayerPlan((0, 0, 0))) == frozenset()
    assert host_names({**names, "lm_head.weight": 100}, LayerPlan((1, 0, 0))) == {"model.embed_tokens.weight"}
    assert host_names(["token_embd.weight", "blk.0.attn_q.weight", "output.weight"], LayerPlan((None,))) == {
        "token_embd.weight",
        "blk.0.attn_q.weight",
    }
    tied, own = decoder_sizes(names, 3, [0] * 4), decoder_sizes({**names, "lm_head.weight": 7}, 3, [0] * 4)
    assert (tied.layers, tied.rest_bytes, own.rest_bytes) == ([16] * 3, 101, 8)
    assert own.what == "lm_head.weight, model.norm.weight"
    assert [layer_of(name) for name in ("layers.7.x", "blk.12.y", "model.layers.3.z", "vision.layers.1.a")] == [
        7,
        12,
        3,
        None,
    ]
