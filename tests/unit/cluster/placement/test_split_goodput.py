"""Two ingresses with unequal load beside one queue, on a clock of its own: answers in time, and whose they are.

`pytest -rP` prints the figures.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.seeding import seeded_random
from unit.cluster.placement.test_slots import POOL, REPLICAS, FakeActor, Ingress, ask, in_no_time

from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.placement.slot_book import SILENT_S
from configs.admission import AdmissionConfig

NUM_SERVED = 200  # about, of a load at capacity
PATIENCE_S = 2.0
UNEQUAL = 0.85  # of the requests come to one of the two


class OneQueue(Ingress):
    """The only ingress."""

    def __init__(self, running: Counter[str]) -> None:
        self.is_alive = True
        self.queue = Dispatcher(AdmissionConfig(), asyncio.get_running_loop().time)
        self.queue.set_replicas(POOL, REPLICAS)
        self.running = running
        self.tasks = set()


@dataclass
class Outcome:
    """The outcome of a load: requests by ingress, those answered in time, and those answered too late."""

    sent: Counter[int] = field(default_factory=Counter)
    good: Counter[int] = field(default_factory=Counter)
    num_late: int = 0

    @property
    def in_time(self) -> float:
        return self.good.total() / max(1, self.good.total() + self.num_late)


async def served(ingresses: list[Ingress], load: list[tuple[float, int, float]], share: float) -> Outcome:
    """Send a load: when each comes, whether to the first or the second ingress, and what it takes."""
    outcome, loop, tasks = Outcome(), asyncio.get_running_loop(), set[asyncio.Task[None]]()
    begin_s = loop.time()

    async def request(place: int, service_s: float) -> None:
        arrived_s = loop.time()
        outcome.sent[place] += 1
        try:
            fields: dict[str, Any] = {"work": service_s, "share": share, "deadline_s": PATIENCE_S}
            await ingresses[place % len(ingresses)]._request(service_s, ask(**fields))
        except NotAdmitted:
            return
        if loop.time() - arrived_s <= PATIENCE_S:
            outcome.good[place] += 1
        else:
            outcome.num_late += 1

    for at_s, place, service_s in load:
        await asyncio.sleep(max(0.0, begin_s + at_s - loop.time()))
        tasks.add(asyncio.ensure_future(request(place, service_s)))
    await asyncio.gather(*tasks)
    return outcome


def drawn(rng: random.Random, factor: float, capacity_per_s: float, mean_s: float) -> list[tuple[float, int, float]]:
    load, at_s = [], 0.0
    while (at_s := at_s + rng.expovariate(factor * capacity_per_s)) < NUM_SERVED / capacity_per_s:
        load.append((at_s, 0 if rng.random() < UNEQUAL else 1, rng.uniform(0.5, 1.5) * mean_s))
    return load


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("share", "mean_s", "factor"),
    [(1 / 4, 0.2, 3.0), (1.0, 0.1, 3.0), (1.0, 0.4, 3.0), (1.0, 0.4, 0.8)],
    ids=["batches", "whole replicas", "long ones", "no overload"],
)
def test_two_ingresses_with_unequal_load_answer_as_many_as_one_queue(
    share: float, mean_s: float, factor: float
) -> None:
    load = drawn(seeded_random(), factor, len(REPLICAS) / share / mean_s, mean_s)

    async def together() -> Outcome:
        return await served([OneQueue(Counter())], load, share)

    async def apart() -> Outcome:
        actor, running = FakeActor(), Counter[str]()
        await actor.start()
        ingresses = [Ingress(actor, running) for _ in range(2)]
        await asyncio.sleep(2 * SILENT_S)
        return await served(ingresses, load, share)

    one, two = in_no_time(together()), in_no_time(apart())
    ratio = two.good.total() / one.good.total()
    kept = [two.good[place] / two.sent[place] for place in (0, 1)]
    print(
        f"{factor} x capacity, share {share:g}, {mean_s:g} s: {two.good.total()} of {len(load)} in time, "
        f"{ratio:.1%} of one queue's; {two.in_time:.1%} of the admitted (one queue: {one.in_time:.1%}); "
        f"by ingress {kept[0]:.0%} and {kept[1]:.0%}"
    )
    assert ratio >= 0.87  # the target is 0.95: 0.90 to 1.00 in ten draws, since of so few answers chance has a part
    assert two.in_time >= 0.95
