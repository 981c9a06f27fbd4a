"""Fair shares by weight: who gets how much, and who has the most. Pure.

Of what is shared evenly, each gets by its weight, and none more than it has use for. So at any time there is a level:
what each has got by its weight, or all that it wanted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Final, Protocol, TypeVar

_MOST_STALE: Final = 64  # entries of a crowd's heap, beside a few for each tenant

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


class TenantWeights(Protocol):
    """The tenants' weights; those of a queue's config, say."""

    def weight_of(self, tenant: str) -> float:
        """Return the weight of a tenant."""


class Crowd:
    """Waiting requests, counted by tenant.

    Each tenant has a heap entry at least as long as its line; a longer one is corrected when it comes up. So each
    change costs O(log tenants).
    """

    def __init__(self, weights: TenantWeights) -> None:
        self._weights = weights
        self._counts: Counter[str] = Counter()
        self._longest: list[tuple[float, str]] = []  # a heap: lengths below 0

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, tenant: str) -> None:
        """Count one more."""
        self._counts[tenant] += 1
        heapq.heappush(self._longest, (-self._length(tenant), tenant))
        if len(self._longest) > 4 * len(self._counts) + _MOST_STALE:
            self.reweigh(self._weights)

    def remove(self, tenant: str) -> None:
        """Count one less."""
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def richer_than(self, tenant: str) -> tuple[float, str] | None:
        """Return the length by weight of the longest line, and its tenant, if it is longer than this tenant's would be.

        `tenant` has one more request then; None where its own line would be the longest.
        """
        while self._longest:
            length, other = -self._longest[0][0], self._longest[0][1]
            if other not in self._counts:
                heapq.heappop(self._longest)
            elif length > self._length(other):
                heapq.heapreplace(self._longest, (-self._length(other), other))
            else:
                return (length, other) if other != tenant and length > self._length(tenant, 1) else None
        return None

    def reweigh(self, weights: TenantWeights) -> None:
        """Use these weights from now on."""
        self._weights = weights
        self._longest = [(-self._length(tenant), tenant) for tenant in self._counts]
        heapq.heapify(self._longest)

    def _length(self, tenant: str, num_more: int = 0) -> float:
        """Return the number of the tenant's requests plus `num_more`, divided by its weight."""
        return (self._counts[tenant] + num_more) / self._weights.weight_of(tenant)
