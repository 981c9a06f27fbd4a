"""Figures of `infra.bench door` from outcomes, and what the targets say to them. Pure."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from infra.bench.command.figures import percentile
from infra.bench.door_load import CANCELLED, REFUSED, Outcome

NUM_PROBLEMS: Final = 8  # that are named
RETRY_RESOLUTION_S: Final = 1.0  # Retry-After is in whole seconds (RFC 9110, section 10.2.3)


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of the issue, and the figure that is held to it. `figure` None: it could not be measured."""

    what: str
    figure: float | None
    limit: float
    is_floor: bool = False
    unit: str = ""

    @property
    def verdict(self) -> str:
        """Verdict in words: met, missed or not measured."""
        if self.figure is None:
            return "not measured"
        met = self.figure >= self.limit if self.is_floor else self.figure <= self.limit
        return "met" if met else "missed"

    def as_dict(self) -> dict[str, Any]:
        """Return the target and its verdict, JSON-able."""
        bound = {"at_least" if self.is_floor else "at_most": self.limit}
        return {"what": self.what, "figure": self.figure, **bound, "unit": self.unit, "verdict": self.verdict}


def draw_arrivals_s(requests_per_s: float, length_s: float, rng: random.Random) -> list[float]:
    """Return the times of a Poisson process."""
    times, now_s = list[float](), rng.expovariate(requests_per_s)
    while now_s < length_s:
        times.append(now_s)
        now_s += rng.expovariate(requests_per_s)
    return times


def latency_figures(rounds: Sequence[Sequence[Outcome]]) -> dict[str, Any]:
    """Return requests per second, the median of the rounds, and latencies of all rounds together.

    Raises RuntimeError when a request was not answered with 200: there is no figure of an error.
    """
    outcomes = [outcome for one in rounds for outcome in one]
    bad = [outcome for outcome in outcomes if outcome.status != 200]
    if bad:
        raise RuntimeError(f"{len(bad)} of {len(outcomes)} requests failed, the first: {bad[0]}")
    latencies_ms = [outcome.latency_s * 1e3 for outcome in outcomes]
    return {
        "requests_per_s": statistics.median(requests_per_s(one) for one in rounds),
        "p50_ms": statistics.median(latencies_ms),
        "p99_ms": percentile(latencies_ms, 0.99),
        "first_p50_ms": statistics.median((outcome.first_s - outcome.sent_s) * 1e3 for outcome in outcomes),
        "gap_p50_ms": _median([gap_s * 1e3 for outcome in outcomes for gap_s in outcome.gaps_s]),
        "n": len(outcomes),
    }


def requests_per_s(outcomes: Sequence[Outcome]) -> float:
    """Return all requests over the time from the first one's start to the last one's end."""
    return len(outcomes) / (max(one.done_s for one in outcomes) - min(one.sent_s for one in outcomes))


def work_rate(outcomes: Sequence[Outcome], costs_s: Mapping[str, float], start_s: float, end_s: float) -> float:
    """Return the work that good answers between two times stand for, in seconds per second.

    A request counts as much as its kind costs (`costs_s`): who refuses the dear ones and answers the cheap ones has
    more answers, and no more goodput.
    """
    done = [one for one in outcomes if one.is_good and start_s <= one.done_s <= end_s]
    return sum(costs_s[one.kind] for one in done) / (end_s - start_s)


def overload_figures(
    outcomes: Sequence[Outcome],
    costs_s: Mapping[str, float],
    peak: float,
    start_s: float | None = None,
    end_s: float | None = None,
) -> dict[str, Any]:
    """Return goodput between two times as a share of `peak`, and what became of all requests.

    `start_s` None: the first request, which of thousands at once a client sends after seconds of its own work. `end_s`
    None: the last good answer. Requests that were not refused count as admitted, whatever became of them.
    """
    good = [one for one in outcomes if one.is_good]
    start_s = min(one.sent_s for one in outcomes) if start_s is None else start_s
    admitted = [one for one in outcomes if one.status != REFUSED]
    end_s = end_s or max((one.done_s for one in good), default=0.0)
    refusals_ms = [one.latency_s * 1e3 for one in outcomes if one.status == REFUSED]
    return {
        "num_requests": len(outcomes),
        "num_good": len(good),
        "num_refused": len(refusals_ms),
        "statuses": {str(status): count for status, count in sorted(Counter(one.status for one in outcomes).items())},
        "goodput_share": work_rate(outcomes, costs_s, start_s, end_s) / peak if end_s > start_s else 0.0,
        "in_time_share": len(good) / len(admitted) if admitted else None,
        "good_by_kind": dict(Counter(one.kind for one in good)),
        "p50_ms": _median([one.latency_s * 1e3 for one in good]),
        "last_done_s": max(one.done_s for one in outcomes),
        "problems": dict(Counter(one.problem for one in outcomes if one.problem).most_common(NUM_PROBLEMS)),
        "refused_p50_ms": _median(refusals_ms),
        "refused_p99_ms": percentile(refusals_ms, 0.99) if refusals_ms else None,
        "without_retry_after": sum(one.status == REFUSED and one.retry_after_s is None for one in outcomes),
        "retry_after": _retry_figures(outcomes),
    }


def _retry_figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how far Retry-After was from the first admission of those who asked again and again.

    The error is a share of the time that it really took; what is below the header's resolution is none.
    """
    probes = [one for one in outcomes if one.retry_after_s is not None and one.admitted_after_s is not None]
    errors = [_retry_error(one.retry_after_s or 0.0, one.admitted_after_s or 0.0) for one in probes]
    return {
        "probes": [[one.retry_after_s, one.admitted_after_s] for one in probes],
        "median_error": _median(errors),
        "within_quarter": sum(error <= 0.25 for error in errors) / len(errors) if errors else None,
    }


def _retry_error(told_s: float, true_s: float) -> float:
    off_s = abs(told_s - true_s)
    return 0.0 if off_s <= RETRY_RESOLUTION_S else off_s / true_s if true_s > 0 else float(off_s > 0)


def lost(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return how many requests got no answer, or an error, when a replica was killed under load."""
    bad = [one for one in outcomes if one.status != 200]
    seen = Counter(one.problem or f"status {one.status}" for one in bad)
    return {"num_requests": len(outcomes), "num_lost": len(bad), "problems": dict(seen)}


def cancel_figures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many requests were cancelled, answered before that, refused, and ended otherwise."""
    counts = Counter(one.status for one in outcomes)
    named = {"cancelled": counts.pop(CANCELLED, 0), "answered": counts.pop(200, 0), "refused": counts.pop(REFUSED, 0)}
    return named | {"other": sum(counts.values())}


def _median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None
