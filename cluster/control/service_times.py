"""Service times and arrival rates, measured online. Pure: time is a parameter."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

MAX_MODELS: Final = 4096  # that are remembered
SHORT_S: Final = 5.0
LONG_S: Final = 60.0
_NEW: Final = 0.15  # weight of a new measurement in the present level
_NEW_SHAPE: Final = 0.02  # and in how times depend on work, which takes many to tell
_PRIOR: Final = 0.01  # relative variance of work: below it, times count as proportional to work
_MAX_FACTOR: Final = 4.0  # of the prediction: what takes longer was held up by something else
_NEW_EXCESS: Final = 0.1
_EXCESSES: Final = 5.0  # few requests exceed the prediction by so many times the mean excess
_FACTORS: Final = (1.05, 3.0)  # bounds of `ModelTimes.late_s` over the mean
_STALE_S: Final = 2.0


@dataclass(slots=True)
class Seconds:
    """Seconds as a function of work: a fixed part, and one that grows with work. The line through what was measured
    moves slowly, and its level, a factor, soon.
    """

    _num: int = 0
    _level: float = 1.0
    _work: float = 0.0  # mean
    _seconds: float = 0.0  # mean
    _variance: float = 0.0  # of work
    _covariance: float = 0.0

    def of(self, work: float) -> float:
        """Return the seconds that a request of that work takes; 0 before the first one."""
        return self._level * self._line(work)

    def mean(self) -> float:
        """Return the seconds that a request of the mean work takes."""
        return self._level * self._seconds

    def note(self, work: float, seconds: float, new_level: float = _NEW) -> None:
        """Learn from a request, which has the weight `new_level` in the level."""
        if self._num > 1:
            seconds = min(seconds, _MAX_FACTOR * self.of(work))
        self._num += 1
        new = max(_NEW_SHAPE, 1 / self._num)
        off, off_s = work - self._work, seconds - self._seconds
        self._work += new * off
        self._seconds += new * off_s
        self._variance = (1 - new) * (self._variance + new * off * off)
        self._covariance = (1 - new) * (self._covariance + new * off * off_s)
        if (line_s := self._line(work)) > 0:
            self._level += max(new_level, 1 / self._num) * (seconds / line_s - self._level)

    def _line(self, work: float) -> float:
        """Return the least squares line, kept between one of constant and one of proportional seconds."""
        if not self._num:
            return 0.0
        proportional = self._seconds / self._work
        prior = _PRIOR * self._work * self._work
        slope = (self._covariance + prior * proportional) / (self._variance + prior)
        return self._seconds + min(max(slope, 0.0), proportional) * (work - self._work)


@dataclass(slots=True)
class ModelTimes:
    """The seconds that requests for one model took.

    `busy` are seconds of a whole replica: a request that ran beside others has its part of them. `latency` passed from
    start to end. `merged` is latency by unit of work, as a function of how many shared the replica: what a batch of
    any size takes. `fastest_s` is the shortest latency of late, by unit of work.
    """

    busy: Seconds = field(default_factory=Seconds)
    latency: Seconds = field(default_factory=Seconds)
    merged: Seconds = field(default_factory=Seconds)
    excess: float = 0.02  # mean, relative to the prediction; those that are faster have none
    fastest_s: float = 0.0
    switch_s: float = 0.0
    measured_s: float = -math.inf
    num_measured: int = 0

    @property
    def _late_factor(self) -> float:
        """The factor by which few requests take longer than predicted, as TCP bounds round trips (RFC 6298)."""
        return min(max(1 + _EXCESSES * self.excess, _FACTORS[0]), _FACTORS[1])

    def is_stale(self, now_s: float) -> bool:
        """Return whether it is time to measure anew: then what was measured says little about now."""
        return now_s - self.measured_s > max(_STALE_S, 2 * self.latency.mean())

    def joining_s(self, work: float) -> float:
        """Return by how much a request of that work delays those whose batch it joins, and each of them it."""
        return (self.merged.of(2.0) - self.merged.of(1.0)) * work

    def late_s(self, work: float) -> float:
        """Return the latency that few requests of that work exceed."""
        return self._late_factor * self.latency.of(work)


class ServiceTimes:
    """Measured times, by model."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelTimes] = OrderedDict()

    def times(self, model: str) -> ModelTimes | None:
        """Return what is known of a model; None before its first request has ended."""
        found = self._models.get(model)
        return found if found and found.num_measured else None

    def note_served(
        self, model: str, now_s: float, work: float, busy_s: float, latency_s: float, expected_s: float = 0.0
    ) -> None:
        """Learn from a request that was answered. `expected_s`: the latency that was predicted when it started."""
        times = self._remembered(model)
        if expected_s > 0:
            excess = min(max(0.0, latency_s / expected_s - 1), _MAX_FACTOR)
            times.excess += _NEW_EXCESS * (excess - times.excess)
        new = 1.0 if times.is_stale(now_s) else _NEW
        times.busy.note(work, busy_s, new)
        times.latency.note(work, latency_s, new)
        times.merged.note(max(1.0, latency_s / busy_s) if busy_s else 1.0, latency_s / work, new)
        fastest = times.fastest_s * 1.02 if times.num_measured else math.inf  # forgets what was once possible
        times.fastest_s = min(fastest, latency_s / work)
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


@dataclass(slots=True)
class RequestCounts:
    """The requests for one model since it was first asked for. `pool` is where they run."""

    pool: str
    arrivals: ArrivalRate = field(default_factory=ArrivalRate)
    started: int = 0
    refused: int = 0


class ModelCounts:
    """Requests that came, started and were refused, by model. Models that nobody asks for any more are forgotten."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, RequestCounts] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[str, RequestCounts]]:
        return iter(self._models.items())

    def of(self, model: str, pool: str) -> RequestCounts:
        """Return the counts of a model that a request came for."""
        counts = self._models.setdefault(model, RequestCounts(pool))
        self._models.move_to_end(model)
        if len(self._models) > MAX_MODELS:
            self._models.popitem(last=False)
        return counts
