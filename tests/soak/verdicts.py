"""The verdict on a soak: a cluster has to be at its end as it was after its first sixth. Pure, over figures taken."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

LONG_MINUTES: Final = 30.0
MACHINE: Final = "machine"  # the kind of the sum between requests that no cluster takes part in
MOST_GROWTH: Final = 0.05
# What a figure may grow beside its share: less is one object of whoever counts.
SPARE: Final = {"files": 2.0, "threads": 2.0, "processes": 0.0, "ms": 1.0, "bytes": 2.0**20, "B": 8.0}
# In a short run processes still do things for the first time, and each kill ends one that had grown: their memory goes
# up and down. A calm of seconds has some lines of logs or none. Serve keeps two files of HAProxy's last ten processes.
SHORT_GROWTH: Final = {"private memory, all": 0.25}
SHORT_SPARE: Final = {"log per request": 1024.0, "temporary, files": 20.0}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure after the first sixth and at the end. `is_judged`: growth of it fails the soak.

    slowdown: By which a sum in the soak's own process became slower between the two: that growth is no cluster's.
    """

    name: str
    unit: str
    early: float
    late: float
    is_judged: bool
    is_short: bool = False
    slowdown: float = 1.0

    @property
    def has_grown(self) -> bool:
        growth, spare = MOST_GROWTH, SPARE.get(self.unit, 0.0)
        if self.is_short:
            growth, spare = SHORT_GROWTH.get(self.name, growth), SHORT_SPARE.get(self.name, spare)
        return self.late > self.early * self.slowdown * (1 + growth) + spare

    @property
    def share(self) -> float:
        return self.late / self.early - 1 if self.early else 0.0

    @property
    def word(self) -> str:
        return ("GREW" if self.is_judged else "more") if self.has_grown else "holds"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that was taken at a calm moment."""

    value: float
    unit: str
    is_judged: bool = True


Figures = Mapping[str, Figure]


def middle(samples: Sequence[Figures]) -> dict[str, Figure]:
    """Return the median of each figure over the samples that have it."""
    names = {name: one for sample in samples for name, one in sample.items()}
    values = {name: [sample[name].value for sample in samples if name in sample] for name in names}
    return {name: Figure(statistics.median(values[name]), one.unit, one.is_judged) for name, one in names.items()}


def verdicts(taken: Sequence[Figures], minutes: float = LONG_MINUTES) -> list[Verdict]:
    """Compare the first figures, or those of the middle of a short run, with the last ones.

    What the first lack is judged against nothing.
    """
    is_short = minutes < LONG_MINUTES
    first = (len(taken) - 1) // 2 if is_short else 0
    early, late = (taken[first], taken[-1]) if taken else ({}, {})
    return [
        Verdict(
            name,
            one.unit,
            early[name].value if name in early else 0.0,
            one.value,
            one.is_judged,
            is_short,
            _slowdown(early, late, name.rpartition(" ")[2]) if one.unit == "ms" else 1.0,
        )
        for name, one in late.items()
    ]


def _slowdown(early: Figures, late: Figures, percentile_name: str) -> float:
    """Return the factor by which the machine itself became slower at this percentile, 1 where it did not."""
    name = f"{MACHINE} {percentile_name}"
    return max(1.0, late[name].value / early[name].value) if name in early and name in late else 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of them lies, of those that were measured."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
