"""Fair shares by weight: who gets how much, and who has the most. Pure.

Of what is shared evenly, each gets by its weight, and none more than it has use for. So at any time there is a level:
what each has got by its weight, or all that it wanted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

from cluster.admission.lazy_heap import LazyHeap
from configs.admission import AdmissionConfig

K = TypeVar("K", bound=Hashable)


def fill(amount: float, claims: Mapping[K, tuple[float, float]]) -> dict[K, float]:
    """Divide an amount among claims (weight, most) by weight, none above its most."""
    given: dict[K, float] = {}
    weights = sum([weight for weight, _ in claims.values()])
    for key, (weight, most) in sorted(claims.items(), key=lambda item: item[1][1] / item[1][0]):
        # The rest may be slightly below 0 by rounding.
        given[key] = min(most, max(0.0, amount) * weight / weights) if weights > 0 else 0.0
        amount, weights = amount - given[key], weights - weight
    return given


def given_until(level: float, claims: Iterable[tuple[float, float]]) -> float:
    """Return the amount that brings claims (weight, most) to a level: each has that by its weight, or its most."""
    return sum([min(most, level * weight) for weight, most in claims])


class Crowd:
    """Waiting requests, counted by tenant, whose weights `config` has. Each change costs O(log tenants)."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._counts: Counter[str] = Counter()
        self._longest = LazyHeap[str](self)
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, tenant: str) -> None:
        """Count one more."""
        self._num += 1
        self._counts[tenant] += 1
        self._longest.push(tenant)

    def remove(self, tenant: str) -> None:
        """Count one less."""
        self._num -= 1
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def richer_than(self, tenant: str) -> tuple[float, str] | None:
        """Return the length by weight of the longest line, and its tenant, if it is longer than this tenant's would be.

        `tenant` has one more request then; None where its own line would be the longest.
        """
        other = self._longest.first()
        if other is None or other == tenant or self._length(other) <= self._length(tenant, 1):
            return None
        return self._length(other), other

    def reweigh(self, config: AdmissionConfig) -> None:
        """Use its weights from now on."""
        self._config = config
        self._longest.rebuild()

    def _length(self, tenant: str, num_more: int = 0) -> float:
        """Return the number of the tenant's requests plus `num_more`, divided by its weight."""
        return (self._counts[tenant] + num_more) / self._config.weight_of(tenant)

    def key_of(self, tenant: str) -> float | None:
        """Return the key of a line, for the heap: the longest is the least."""
        return -self._length(tenant) if tenant in self._counts else None
