"""Arrivals: Poisson, Zipf, bursts, a day's curve. Each generator draws from the given source of chance only."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from cluster.simulator.scenario import SimRequest


def zipf_shares(models: Sequence[str], exponent: float = 1.0) -> dict[str, float]:
    """Return the share of each model's requests: the k-th gets 1 / k^exponent of the first's."""
    weights = [1.0 / rank**exponent for rank in range(1, len(models) + 1)]
    return {model: weight / sum(weights) for model, weight in zip(models, weights, strict=True)}


def poisson(rate: float, shares: Mapping[str, float], duration_s: float, chance: random.Random) -> list[SimRequest]:
    """Return requests of a constant rate (per second)."""
    return _thinned(lambda _: rate, rate, shares, duration_s, chance)


def diurnal(
    mean_rate: float,
    swing: float,
    period_s: float,
    shares: Mapping[str, float],
    duration_s: float,
    chance: random.Random,
) -> list[SimRequest]:
    """Return requests whose rate goes up and down by `swing` (0 to 1) of its mean, as a sine of the given period."""

    def rate_at(at_s: float) -> float:
        return mean_rate * (1 + swing * math.sin(2 * math.pi * at_s / period_s))

    return _thinned(rate_at, mean_rate * (1 + swing), shares, duration_s, chance)


def bursts(
    size: int, every_s: float, models: Sequence[str], duration_s: float, chance: random.Random, spread_s: float = 1.0
) -> list[SimRequest]:
    """Return bursts of one model each, models in turn: `size` requests within `spread_s`."""
    requests = []
    for number in range(math.ceil(duration_s / every_s)):
        model = models[number % len(models)]
        requests += [SimRequest(number * every_s + chance.uniform(0, spread_s), model) for _ in range(size)]
    return sorted(requests, key=lambda request: request.at_s)


def _thinned(
    rate_at: Callable[[float], float],
    max_rate: float,
    shares: Mapping[str, float],
    duration_s: float,
    chance: random.Random,
) -> list[SimRequest]:
    """Return a Poisson process of a changing rate, by thinning (Lewis and Shedler 1979). Models are drawn by share."""
    models, weights = list(shares), list(shares.values())
    at_s, requests = 0.0, []
    while max_rate > 0 and models:
        at_s += chance.expovariate(max_rate)
        if at_s > duration_s:
            break
        if chance.random() * max_rate <= rate_at(at_s):
            requests.append(SimRequest(at_s, chance.choices(models, weights)[0]))
    return requests
