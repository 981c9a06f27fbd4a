"""Service times and arrival rates, measured online. Pure: time is a parameter."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from weights.residency.recent import Recent

MAX_MODELS: Final = 4096  # that are remembered
SHORT_S: Final = 5.0
LONG_S: Final = 60.0
_NEW: Final = 0.15  # weight of a new measurement in the present level
_NEW_SHAPE: Final = 0.02  # and in the dependence on work, which many measurements have to tell
_FAR: Final = 2  # sizes: the time of a request so much larger than all measured ones is not known
_TRY_TIMES: Final = 10.0  # its latency: so often a request of a refused size is let in, to measure it anew
_TRY_S: Final = 5.0  # and no more often
_FORGOTTEN: Final = 1.02  # factor by which each measurement raises the fastest time seen
_PRIOR: Final = 0.01  # relative variance of work: below it, times count as proportional to work
_TELLING: Final = 0.1  # from this variance on, the last measurements tell how times depend on work
_MOST_FIXED: Final = 0.95  # of a request's time: the rest still tells something
_MAX_FACTOR: Final = 4.0  # of the prediction: a longer request was held up by something else
_NEW_EXCESS: Final = 0.1
_EXCESSES: Final = 5.0  # few requests exceed the prediction by so many times the mean excess
_NEW_SIZE: Final = 0.05
# Batch sizes whose times are remembered. Larger batches count as the last.
BATCH_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_FACTORS: Final = (1.05, 3.0)  # bounds of `ModelTimes.late_s` over the mean
_STALE_S: Final = 2.0
WORK_BOUNDS: Final = (1e-9, 1e18)  # the squares of numbers between these are finite
_LONGEST_S: Final = 1e9


def _size_of(work: float) -> int:
    """Return the class of a size: sizes of a class are less than twice the smallest of it."""
    return math.frexp(work)[1]


@dataclass(slots=True)
class Estimate:
    """Seconds as a function of work: a fixed part, and one that grows with work. The line through the measurements
    moves slowly, and its level, a factor, soon. When all are of about one size, the parts stay those that sizes
    had when they differed, and at first proportional to work.
    """

    _num: int = 0
    _level: float = 1.0
    _work: float = 0.0  # mean
    _seconds: float = 0.0  # mean
    _variance: float = 0.0  # of work
    _covariance: float = 0.0
    _fixed: float = 0.0  # part, as the work that takes as long
    _slope: float = 0.0  # of the line

    def seconds_of(self, work: float) -> float:
        """Return the seconds that a request of that work takes; 0 before the first one."""
        return self._level * self._line(work)

    def mean(self) -> float:
        """Return the seconds that a request of the mean work takes."""
        return self._level * self._seconds

    def note_seconds(self, work: float, seconds: float, new_level: float = _NEW) -> None:
        """Learn from a request, which has the weight `new_level` in the level."""
        if self._num > 1:
            seconds = min(seconds, _MAX_FACTOR * self.seconds_of(work))
        self._num += 1
        new = max(_NEW_SHAPE, 1 / self._num)
        off, off_s = work - self._work, seconds - self._seconds
        self._work += new * off
        self._seconds += new * off_s
        self._variance = (1 - new) * (self._variance + new * off * off)
        self._covariance = (1 - new) * (self._covariance + new * off * off_s)
        if self._is_telling and self._covariance > 0:
            fixed = self._seconds * self._variance / self._covariance - self._work
            self._fixed = min(max(0.0, fixed), WORK_BOUNDS[1])
        self._slope = self._new_slope()
        if (line_s := self._line(work)) > 0:
            self._level += max(new_level, 1 / self._num) * (seconds / line_s - self._level)

    @property
    def _is_telling(self) -> bool:
        return self._variance > _TELLING * self._work * self._work

    def _new_slope(self) -> float:
        """Return the slope of the least squares line, kept between constant and proportional seconds."""
        prior = _PRIOR * self._work * self._work
        known = self._seconds / (self._work + (0.0 if self._is_telling else self._fixed))
        slope = (self._covariance + prior * known) / (self._variance + prior)
        return min(max(slope, 0.0), self._seconds / self._work)

    def _line(self, work: float) -> float:
        return max(0.0, self._seconds + self._slope * (work - self._work)) if self._num else 0.0


@dataclass(frozen=True, slots=True)
class BatchLatency:
    """The seconds from start to end of a request, at each of `BATCH_SIZES`; straight lines lie between them."""

    seconds: tuple[float, ...] = (0.0,) * len(BATCH_SIZES)

    def seconds_at(self, num_sharing: float) -> float:
        """Return the seconds when so many requests share the replica in the mean, the request itself included."""
        return _between(self.seconds, num_sharing)


@dataclass(slots=True)
class BatchSlowdown:
    """The factor by which requests take longer in a batch, by its size.

    Each size ever seen is remembered, however long ago: a line through the last measurements
    would be arbitrary for other sizes. Larger batches count as proportional, which means no gain.
    An error common to all sizes says nothing about size, so the mean error is taken off. Without that a
    size that is seen day in, day out would drift away from the others by the noise of its errors.
    """

    _factors: list[float] = field(default_factory=lambda: [0.0] * len(BATCH_SIZES))
    _nums: list[float] = field(default_factory=lambda: [0.0] * len(BATCH_SIZES))  # of the requests that told them
    _mean_error: float = 0.0  # of the logarithm

    def note_error(self, num_sharing: float, error: float, fixed: float = 0.0) -> None:
        """Learn from a request that took `error` times the expectation. Its part `fixed` is the same at any size."""
        place, part = _place_of(num_sharing)
        own = 1 - fixed  # a request that is nearly all fixed part says little
        own_error = own * (math.log(max((error - fixed) / own, 1 / _MAX_FACTOR)) - self._mean_error)
        self._mean_error += _NEW_SIZE * own_error
        for node, near in ((place, 1 - part), (place + 1, part)):
            if near <= 0:
                continue
            new = max(_NEW_SIZE, 1 / (1 + self._nums[node])) * near if self._nums[node] else 1.0
            self._factors[node] = self._at(node) * math.exp(new * own_error)
            self._nums[node] += near

    def seen(self) -> tuple[int, int]:
        """Return the least and the largest of the seen `BATCH_SIZES`; if only one was seen, it and a larger one."""
        seen = [size for size, num in zip(BATCH_SIZES, self._nums, strict=True) if num] or [BATCH_SIZES[0]]
        return (seen[0], seen[-1]) if len(seen) > 1 else (seen[0], seen[0] + 1)

    def factors(self) -> tuple[float, ...]:
        """Return the factors at each of `BATCH_SIZES`; alone it is 1."""
        found = [self._at(node) for node in range(len(BATCH_SIZES))]
        return tuple(one / found[0] for one in found)

    def _at(self, node: int) -> float:
        """Return the factor at a size: on a line between seen ones, and in proportion beyond them."""
        seen = [other for other, num in enumerate(self._nums) if num]
        if not seen:
            return float(BATCH_SIZES[node])
        nearest = min(max(node, seen[0]), seen[-1])
        if nearest != node or self._nums[node]:
            return self._factors[nearest] * BATCH_SIZES[node] / BATCH_SIZES[nearest]
        after = bisect_right(seen, node)
        below, above = seen[after - 1], seen[after]
        part = (BATCH_SIZES[node] - BATCH_SIZES[below]) / (BATCH_SIZES[above] - BATCH_SIZES[below])
        return self._factors[below] * (1 - part) + self._factors[above] * part


def _between(values: Sequence[float], num_sharing: float) -> float:
    """Return the value for so many, interpolated between those at `BATCH_SIZES`."""
    place, part = _place_of(num_sharing)
    return values[place] * (1 - part) + values[place + 1] * part


def _num_sharing(busy_s: float, latency_s: float) -> float:
    """Return the mean number of requests that shared the replica; at most the last of `BATCH_SIZES`."""
    return min(max(1.0, latency_s / busy_s), float(BATCH_SIZES[-1])) if busy_s else 1.0


def _place_of(num_sharing: float) -> tuple[int, float]:
    """Return the place of the last of `BATCH_SIZES` that is not larger, and the part of the way to the next one."""
    num_sharing = min(max(num_sharing, BATCH_SIZES[0]), BATCH_SIZES[-1])
    place = min(bisect_right(BATCH_SIZES, num_sharing), len(BATCH_SIZES) - 1) - 1
    return place, (num_sharing - BATCH_SIZES[place]) / (BATCH_SIZES[place + 1] - BATCH_SIZES[place])


@dataclass(slots=True)
class ModelTimes:
    """The seconds that requests for one model took.

    `busy` are seconds of a whole replica: a request that ran beside others counts its part of them. `latency`, from
    start to end, is a function of the work times `slowdown`, which grows with the batch.
    `usual_s` is the recent mean latency, `usual_sharing` the recent mean number of requests that shared the replica.
    """

    busy: Estimate = field(default_factory=Estimate)
    latency: Estimate = field(default_factory=Estimate)
    slowdown: BatchSlowdown = field(default_factory=BatchSlowdown)
    excess: float = 0.02  # mean over the expectation at the same size, relative; 0 for faster requests
    usual_s: float = 0.0
    usual_sharing: float = 1.0
    switch_s: float = 0.0
    measured_s: float = -math.inf
    num_measured: int = 0
    _num_fresh: int = 0  # since the times were stale
    _factors: tuple[float, ...] = BATCH_SIZES  # those of `slowdown`
    _fastest: dict[int, tuple[float, float]] = field(default_factory=dict)  # by size: work, and latency alone
    _tried_s: dict[int, float] = field(default_factory=dict)  # by size: when one was measured, or let in to be measured

    def is_stale(self, now_s: float) -> bool:
        """Return whether it is time to measure anew, because the measurements are too old."""
        return now_s - self.measured_s > max(_STALE_S, 2 * self.usual_s)

    def is_known(self, work: float) -> bool:
        """Return whether a request of this size, or not much smaller, was ever measured."""
        return any(size >= _size_of(work) - _FAR for size in self._fastest)

    def least_s(self, work: float) -> float:
        """Return the least seconds of a request: at least the fastest time of a request with no more work."""
        found = [(one, least_s) for size, (one, least_s) in self._fastest.items() if size <= _size_of(work)]
        return max([least_s * min(1.0, work / one) for one, least_s in found], default=0.0)

    def lets_try(self, work: float, now_s: float) -> bool:
        """Return whether to let in a request that would be refused, so that its size is measured anew."""
        again_s = max(_TRY_S, _TRY_TIMES * self.expected_s(work, 1.0))
        if now_s - self._tried_s.get(_size_of(work), -math.inf) < again_s:
            return False
        self._tried_s[_size_of(work)] = now_s
        return True

    def joining_s(self, work: float) -> float:
        """Return the mutual delay per batch-mate of a request of that work, in seconds."""
        least, most = self.slowdown.seen()
        return max(0.0, self.expected_s(work, most) - self.expected_s(work, least)) / (most - least)

    def latency_s(self, work: float) -> BatchLatency:
        """Return the latency of a request of that work, among any number of batch-mates."""
        return BatchLatency(tuple(self.latency.seconds_of(work * factor) for factor in self._factors))

    def late_s(self, work: float, num_sharing: float) -> float:
        """Return the latency that few requests of that work exceed when `num_sharing` share the replica.

        The excess over the mean is bounded as TCP bounds that of round trips (RFC 6298).
        """
        factor = min(max(1 + _EXCESSES * self.excess, _FACTORS[0]), _FACTORS[1])
        return factor * self.expected_s(work, num_sharing)

    def cost_s(self, work: float, share: float) -> float:
        """Return the request's part of the seconds of a full replica, since waiting requests will run on full ones."""
        return share * self.expected_s(work, 1 / share)

    def is_longer(self, work: float, busy_s: float, latency_s: float) -> bool:
        """Return whether a request took longer than expected among its batch-mates."""
        return latency_s > self.expected_s(work, _num_sharing(busy_s, latency_s))

    def note_served(self, now_s: float, work: float, busy_s: float, latency_s: float, num_left: int = 0) -> None:
        """Learn from a request that was answered. `num_left`: those for the model that still run.

        The first after an idle time, when the figures are stale, replaces them only if it ran alone. Of several that
        began together the quickest ends first, so it counts as one of them.
        """
        num_sharing = _num_sharing(busy_s, latency_s)
        expected_s = self.expected_s(work, num_sharing)
        error = min(latency_s / expected_s, _MAX_FACTOR) if expected_s else 1.0
        if self.is_stale(now_s):
            self._num_fresh = num_left if self.num_measured else 0
        self._num_fresh += 1
        new = max(_NEW, 1 / self._num_fresh)
        if self.num_measured > 1:
            self.excess += _NEW_EXCESS * (max(0.0, error - 1) - self.excess)
        self.busy.note_seconds(work, busy_s, new)
        fixed = min(self.latency.seconds_of(0.0) / expected_s, _MOST_FIXED) if expected_s else 0.0
        self.slowdown.note_error(num_sharing, error if new < 1 else 1.0, fixed)  # only the level is measured anew
        self._factors = self.slowdown.factors()
        self.latency.note_seconds(self._weighed(work, num_sharing), latency_s, new)
        self.usual_s += new * (latency_s - self.usual_s)
        self.usual_sharing += new * (num_sharing - self.usual_sharing)
        self._note_fastest(now_s, work, num_sharing, latency_s)
        self.num_measured += 1
        self.measured_s = now_s

    def _note_fastest(self, now_s: float, work: float, num_sharing: float, latency_s: float) -> None:
        there_s = self.expected_s(work, num_sharing)
        alone_s = latency_s * self.expected_s(work, 1.0) / there_s if there_s else latency_s
        before, before_s = self._fastest.get(_size_of(work), (work, math.inf))
        before_s *= _FORGOTTEN
        self._fastest[_size_of(work)] = (work, alone_s) if alone_s < before_s else (before, before_s)
        self._tried_s[_size_of(work)] = now_s

    def _weighed(self, work: float, num_sharing: float) -> float:
        """Return the work that takes as long alone as this work does when so many share the replica."""
        return work * _between(self._factors, num_sharing)

    def expected_s(self, work: float, num_sharing: float) -> float:
        """Return the latency of a request of that work when `num_sharing` share the replica, in the mean."""
        return self.latency.seconds_of(self._weighed(work, num_sharing))


class ServiceTimes:
    """Measured times, by model."""

    def __init__(self) -> None:
        self._models: Recent[str, ModelTimes] = Recent(MAX_MODELS)

    def times(self, model: str) -> ModelTimes | None:
        """Return the measured times of a model; None before its first request has ended."""
        found = self._models.get(model)
        return found if found and found.num_measured else None

    def note_served(
        self, model: str, now_s: float, work: float, busy_s: float, latency_s: float, num_left: int = 0
    ) -> None:
        """Learn from a request that was answered. `num_left`: those for the model that still run.

        Meaningless figures, such as no work at all, are left out: they would spoil the others.
        """
        is_telling = WORK_BOUNDS[0] <= work <= WORK_BOUNDS[1] and 0 <= busy_s <= _LONGEST_S
        if is_telling and 0 <= latency_s <= _LONGEST_S:
            self._models.used(model, ModelTimes).note_served(now_s, work, busy_s, latency_s, num_left)

    def note_switch(self, model: str, switch_s: float) -> None:
        """Learn how long a replica took to switch to the model, when it had to."""
        times = self._models.used(model, ModelTimes)
        times.switch_s += (_NEW if times.switch_s else 1.0) * (switch_s - times.switch_s)

    def switch_s(self, model: str) -> float:
        """Return the seconds of a switch to the model; 0 when none was measured."""
        found = self._models.get(model)
        return found.switch_s if found else 0.0


def faded(per_s: float, passed_s: float, window_s: float = SHORT_S) -> float:
    """Return an arrival rate over a window, decayed by `passed_s` seconds without arrivals."""
    return per_s * math.exp(-passed_s / window_s)


class ArrivalRate:
    """Arrivals per second, over a short and a long window that fade exponentially."""

    __slots__ = ("_last_s", "_long", "_short")

    def __init__(self) -> None:
        self._short = self._long = 0.0
        self._last_s = -math.inf

    def note_arrival(self, now_s: float, amount: float = 1.0) -> None:
        """Count an arrival, or an amount of them."""
        self._short, self._long = self.per_s(now_s)
        self._short += amount / SHORT_S
        self._long += amount / LONG_S
        self._last_s = now_s

    def per_s(self, now_s: float) -> tuple[float, float]:
        """Return the rates over the short and the long window."""
        passed_s = max(0.0, now_s - self._last_s)
        return faded(self._short, passed_s), faded(self._long, passed_s, LONG_S)

    def steady_per_s(self, now_s: float) -> float:
        """Return the lesser of both rates: a burst that has ended tells little of what comes."""
        return min(self.per_s(now_s))


@dataclass(slots=True)
class RequestCounts:
    """The requests for one model since it was first asked for, or forgotten. `pool` is where they run."""

    pool: str
    arrivals: ArrivalRate = field(default_factory=ArrivalRate)
    started: int = 0
    started_s: float = -math.inf  # the last one
    refused: int = 0
