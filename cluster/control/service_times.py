"""Service times and arrival rates, measured online. Pure: time is a parameter."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

MAX_MODELS: Final = 4096  # that are remembered
SHORT_S: Final = 5.0
LONG_S: Final = 60.0
_NEW: Final = 0.15  # weight of a new measurement


@dataclass(slots=True)
class ModelTimes:
    """The seconds that requests for one model took, by unit of work; zeros until one was measured.

    `busy_s` are seconds of a whole replica: a request that ran beside others has its part of them. `latency_s` passed
    from start to end, and `fastest_s` is the shortest such time of late.
    """

    busy_s: float = 0.0
    latency_s: float = 0.0
    fastest_s: float = 0.0
    switch_s: float = 0.0
    measured_s: float = -math.inf
    num_measured: int = 0
    work: float = 0.0


class ServiceTimes:
    """Moving averages by model."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelTimes] = OrderedDict()

    def times(self, model: str) -> ModelTimes | None:
        """Return the averages of a model; None before its first request has ended."""
        found = self._models.get(model)
        return found if found and found.num_measured else None

    def note_served(self, model: str, now_s: float, work: float, busy_s: float, latency_s: float) -> None:
        """Learn from a request that was answered."""
        times = self._remembered(model)
        new = _NEW if times.num_measured else 1.0
        busy, latency = busy_s / work, latency_s / work
        times.busy_s += new * (busy - times.busy_s)
        times.latency_s += new * (latency - times.latency_s)
        times.work += new * (work - times.work)
        fastest = times.fastest_s * 1.02 if times.num_measured else latency  # forgets what was once possible
        times.fastest_s = min(fastest, latency)
        times.num_measured += 1
        times.measured_s = now_s

    def note_switch(self, model: str, switch_s: float) -> None:
        """Learn how long a replica took to switch to the model, when it had to."""
        times = self._remembered(model)
        times.switch_s += (_NEW if times.switch_s else 1.0) * (switch_s - times.switch_s)

    def switch_s(self, model: str) -> float:
        """Return how long a switch to the model takes; 0 when none was seen."""
        found = self._models.get(model)
        return found.switch_s if found else 0.0

    def _remembered(self, model: str) -> ModelTimes:
        times = self._models.setdefault(model, ModelTimes())
        self._models.move_to_end(model)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return times


class ArrivalRate:
    """Arrivals per second, over a short and a long window that fade exponentially."""

    __slots__ = ("_last_s", "_long", "_short")

    def __init__(self) -> None:
        self._short = self._long = 0.0
        self._last_s = -math.inf

    def note_arrival(self, now_s: float) -> None:
        """Count one."""
        self._short, self._long = self.per_s(now_s)
        self._short += 1 / SHORT_S
        self._long += 1 / LONG_S
        self._last_s = now_s

    def per_s(self, now_s: float) -> tuple[float, float]:
        """Return the rates over the short and the long window."""
        passed_s = max(0.0, now_s - self._last_s)
        return self._short * math.exp(-passed_s / SHORT_S), self._long * math.exp(-passed_s / LONG_S)
