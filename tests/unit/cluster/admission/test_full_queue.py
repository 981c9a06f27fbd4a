"""A full queue: who leaves it for a newcomer, by what tenants have of it, and never for somebody else's urgency."""

from __future__ import annotations

from collections import Counter

import pytest
from unit.cluster.admission.simulated_replicas import ask

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Refused
from configs.admission import AdmissionConfig

LIMIT = 12


class Full:
    """A queue without replicas that holds `LIMIT` requests; `waiting` has its tickets."""

    def __init__(self, bound: str, weights: dict[str, float] | None = None) -> None:
        tenants = {name: {"weight": weight} for name, weight in (weights or {}).items()}
        self.queue = AdmissionQueue(AdmissionConfig.model_validate({bound: LIMIT, "tenants": tenants}))
        self.waiting: dict[int, Demand] = {}
        self.number = 0

    def come(self, *asks: Demand) -> list[int]:
        """Let requests come; return the tickets of those that are refused."""
        refused = []
        for each in asks:
            self.waiting[self.number] = each
            self.queue.submit(self.number, each, 0.0)
            self.number += 1
            found = [event.ticket for event in self.queue.pump(0.0) if isinstance(event, Refused)]
            refused += found
            for ticket in found:
                del self.waiting[ticket]
        return refused

    def counts(self) -> Counter[str]:
        return Counter(each.tenant for each in self.waiting.values())


BOUNDS = pytest.mark.parametrize("bound", ["max_waiting", "max_waiting_per_model"])


@BOUNDS
def test_a_flood_of_priority_one_displaces_no_more_than_its_share_of_others(bound: str) -> None:
    full = Full(bound)
    assert full.come(*[ask("calm", 3) for _ in range(LIMIT // 2)], *[ask("usual") for _ in range(LIMIT // 2)]) == []
    full.come(*[ask("flood", 1) for _ in range(200)])
    assert full.counts() == {"calm": LIMIT // 3, "usual": LIMIT // 3, "flood": LIMIT // 3}


@BOUNDS
def test_the_urgent_displace_what_is_less_urgent_of_their_own(bound: str) -> None:
    full = Full(bound)
    full.come(*[ask("a", 3) for _ in range(3)], *[ask("a", 2) for _ in range(3)], *[ask("b") for _ in range(6)])
    assert full.come(ask("a", 1), ask("a", 1)) == [2, 1]  # the newest of the least urgent
    assert full.come(ask("a", 2), ask("a", 2)) == [0, 15]
    assert full.come(ask("a", 3)) == [16]


@BOUNDS
def test_shares_of_a_full_queue_go_by_weight_whatever_the_priorities(bound: str) -> None:
    full = Full(bound, {"large": 2.0, "small": 1.0})
    full.come(*[ask("small", 1) for _ in range(LIMIT)])
    full.come(*[ask("large", 3) for _ in range(50)])
    assert full.counts() == {"large": 8, "small": 4}


def test_parts_of_what_was_admitted_are_displaced_by_nobody() -> None:
    full = Full("max_waiting")
    full.come(*[ask("a", 3, is_inner=True) for _ in range(LIMIT)])
    assert full.come(ask("b", 1)) == [LIMIT]
