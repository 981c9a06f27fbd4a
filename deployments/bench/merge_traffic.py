"""Patterns of arrivals and batch times that dynamic batching is measured on. Pure, times in seconds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

BURST_GAP: Final = 0.03  # between requests of one burst, of a batch's time

ARRIVALS: Final = ("even", "poisson", "bursts of 3", "bursts of 8", "on and off")
LOADS: Final = (0.3, 0.9, 1.67, 3.0)  # requests per time of a batch of one
LINEAR_LOADS: Final = (0.3, 0.7)  # where batching gains next to nothing, more would be overload


@dataclass(frozen=True, slots=True)
class Service:
    """A model whose batch of n items takes first_s + further_s * (n - 1)."""

    name: str
    first_s: float
    further_s: float

    def duration_s(self, num_items: int) -> float:
        return self.first_s + self.further_s * (num_items - 1)


@dataclass(frozen=True, slots=True)
class Pattern:
    """Requests by their arrivals in seconds from the start; the first `num_warm` are served and not measured."""

    name: str
    service: Service
    max_batch_size: int
    arrivals_s: tuple[float, ...]
    num_warm: int = 0


def scenario() -> Pattern:
    """Return 24 requests at 10 per second, 0.5 s for one and 0.01 s for each further item, at most 8 together."""
    return Pattern("scenario", Service("scenario", 0.5, 0.01), 8, tuple(0.1 * index for index in range(24)))


def grid(unit_s: float, num_requests: int, num_warm: int, seed: int) -> list[Pattern]:
    """Return 50 patterns; a batch of one takes `unit_s`."""
    services = {
        Service("flat", unit_s, 0.02 * unit_s): LOADS,
        Service("steep", unit_s, 0.2 * unit_s): LOADS,
        Service("linear", unit_s, 0.95 * unit_s): LINEAR_LOADS,
    }
    rng = random.Random(seed)
    return [
        Pattern(
            f"{arrivals}, load {load}, {service.name}",
            service,
            8,
            tuple(accumulate(_gaps_s(arrivals, unit_s / load, unit_s, num_warm + num_requests, rng))),
            num_warm,
        )
        for service, loads in services.items()
        for load in loads
        for arrivals in ARRIVALS
    ]


def _gaps_s(arrivals: str, mean_s: float, unit_s: float, number: int, rng: random.Random) -> Sequence[float]:
    if arrivals == "even":
        return [mean_s] * number
    if arrivals == "poisson":
        return [rng.expovariate(1 / mean_s) for _ in range(number)]
    if arrivals == "on and off":
        return [mean_s * (0.25 if index // 20 % 2 else 1.75) for index in range(number)]
    size, within_s = int(arrivals.split()[-1]), BURST_GAP * unit_s
    between_s = max(mean_s * size - within_s * (size - 1), within_s)
    return [within_s if index % size else between_s for index in range(number)]
