"""`infra.bench evict`: bytes that move under a budget, by value and by least recent use; simulated."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from weights.residency.contents import Contents
from weights.residency.policy import Popularity
from weights.residency.room_plan import plan_room

SHARES: Final = (0.4, 0.6, 0.75, 1.0)  # the budget, of the popular models' bytes
# A trace as platforms see it: 12 of 200 models get 99 % of the requests, Zipf among them.
NUM_MODELS, NUM_POPULAR, TAIL_SHARE = 200, 12, 0.01
NUM_REQUESTS, NUM_SEEDS = 5000, 3
_Model = tuple[str, ...]  # the components of a model


def _draw_trace(rng: random.Random, num_requests: int, change_every: int | None = None) -> list[int]:
    models = rng.sample(range(NUM_MODELS), NUM_MODELS)
    zipf = [1 / rank for rank in range(1, NUM_POPULAR + 1)]
    weights = [(1 - TAIL_SHARE) * share / sum(zipf) for share in zipf]
    weights += [TAIL_SHARE / (NUM_MODELS - NUM_POPULAR)] * (NUM_MODELS - NUM_POPULAR)
    trace: list[int] = []
    while len(trace) < num_requests:
        trace += rng.choices(models, weights, k=min(change_every or num_requests, num_requests - len(trace)))
        popular, rare = rng.randrange(NUM_POPULAR), rng.randrange(NUM_POPULAR, NUM_MODELS)
        models[popular], models[rare] = models[rare], models[popular]
    return trace


def _bytes_moved_by_lru(trace: Sequence[_Model], sizes: dict[str, int], max_models: float, budget: float) -> int:
    """Simulate LRU of whole models, bounded by their number and by their bytes; return the bytes moved."""
    resident: OrderedDict[_Model, int] = OrderedDict()
    moved = 0
    for model in trace:
        if model not in resident:
            nbytes = sum(sizes[part] for part in model)
            while resident and (len(resident) >= max_models or sum(resident.values()) + nbytes > budget):
                resident.popitem(last=False)
            resident[model] = nbytes
            moved += nbytes
        resident.move_to_end(model)
    return moved


def _bytes_moved_by_value(trace: Sequence[_Model], sizes: dict[str, int], budget: int, half_life: float) -> int:
    now = [0.0]
    table: Contents[None] = Contents(budget, lambda: now[0], never_used=Popularity(half_life))
    moved = 0
    for now[0], model in enumerate(trace):
        wanted = {part: sizes[part] for part in model}
        plan = plan_room(table, wanted)
        assert not plan.missing_bytes
        table.evict(plan.evict)
        for part in wanted:
            if part not in table.entries:
                table.adopt(part, sizes[part], None)
                moved += sizes[part]
            table.use(table.entries[part])
        assert table.used_bytes <= budget
    return moved


def _moved_bytes_ratios(share: float, change_every: int | None, shared_bytes: float = 0.0) -> tuple[float, float]:
    """Return (count-LRU / ours, byte-LRU / ours) in bytes moved, with a budget of `share` of the popular bytes.

    Serve's multiplexing takes a number of models and no bytes, so it is set to what fits whatever the models are.
    """
    by_count = by_bytes = ours = 0
    for seed in range(NUM_SEEDS):
        rng = random.Random(seed)
        numbers = _draw_trace(rng, NUM_REQUESTS, change_every)
        whole = [round(math.exp(rng.uniform(math.log(1000), math.log(24_000)))) for _ in range(NUM_MODELS)]
        # Families of ten fine-tunes share encoders and VAE when `shared_bytes` is not 0.
        sizes = {f"family{i // 10}": round(whole[i] * shared_bytes) for i in range(0, NUM_MODELS, 10)}
        sizes |= {
            f"own{i}": round(whole[i - i % 10 if shared_bytes else i] * (1 - shared_bytes)) for i in range(NUM_MODELS)
        }
        models = [(f"family{i // 10}", f"own{i}") for i in range(NUM_MODELS)]
        bytes_of = [sum(sizes[part] for part in model) for model in models]
        popular = sorted(range(NUM_MODELS), key=numbers[:1000].count)[-NUM_POPULAR:]
        budget = max(int(share * sum(bytes_of[i] for i in popular)), 2 * max(bytes_of))
        trace = [models[i] for i in numbers]
        by_count += _bytes_moved_by_lru(trace, sizes, budget // max(bytes_of), budget)
        by_bytes += _bytes_moved_by_lru(trace, sizes, math.inf, budget)
        ours += _bytes_moved_by_value(trace, sizes, budget, half_life=500)
    return by_count / ours, by_bytes / ours


def measure_eviction() -> dict[str, Any]:
    """Return ratios by share, with models popular all the time."""
    found = {share: _moved_bytes_ratios(share, None) for share in SHARES}
    return {
        "models": NUM_MODELS,
        "popular": NUM_POPULAR,
        "requests": NUM_REQUESTS,
        "seeds": NUM_SEEDS,
        "shares": {str(share): {"by_count": count, "by_bytes": nbytes} for share, (count, nbytes) in found.items()},
    }


def print_eviction_figures(figures: dict[str, Any], as_json: bool) -> None:
    """Print a table of budgets, or one JSON object."""
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
        return
    table = Table("budget / popular bytes", "LRU that counts models / ours", "LRU over bytes / ours")
    for share, found in figures["shares"].items():
        table.add_row(share, f"{found['by_count']:.2f}", f"{found['by_bytes']:.2f}")
    Console().print(table)
