"""Fair slots: no slot is lost or given twice, whoever leaves when."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from kit.drawing import seeds

from cluster.admission.fair_slots import FairSlots, SlotsFull


@seeds(50)
async def test_no_slot_is_lost_whoever_is_cancelled_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    slots, held, most = FairSlots(3, 10), 0, 0
    outcomes = Counter[str]()

    async def work(tenant: str) -> None:
        nonlocal held, most
        await slots.acquire(tenant)
        held += 1
        most = max(most, held)
        try:
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
        finally:
            held -= 1
            slots.release()

    tasks: list[asyncio.Task[None]] = []
    for _ in range(2000):
        tasks.append(asyncio.create_task(work(rng.choice("aaab"))))
        if rng.random() < 0.4:
            rng.choice(tasks[-10:]).cancel()
        if rng.random() < 0.3:
            await asyncio.sleep(0)
    for found in await asyncio.gather(*tasks, return_exceptions=True):
        outcomes[type(found).__name__] += 1
    assert most == 3
    assert outcomes.keys() <= {"NoneType", "CancelledError", "SlotsFull"}, outcomes
    assert all(outcomes[name] for name in ("NoneType", "CancelledError", "SlotsFull")), outcomes
    assert (slots.num_waiting, slots._num_free, slots._lines) == (0, 3, {})


async def test_where_nobody_may_wait_a_newcomer_is_refused() -> None:
    slots = FairSlots(1, 0)
    await slots.acquire("a")
    with pytest.raises(SlotsFull):
        await slots.acquire("b")
    slots.release()
    await slots.acquire("b")
    assert slots.are_taken


@seeds(50)
async def test_a_newcomer_is_told_how_many_go_before_it_give_or_take_the_turn_of_each_other_tenant(seed: int) -> None:
    rng = random.Random(seed)
    slots, order = FairSlots(1, 1000), list[int]()
    await slots.acquire("first")

    async def wait(tenant: str, number: int) -> None:
        await slots.acquire(tenant)
        order.append(number)

    tenants = [rng.choice("aaabcd") for _ in range(rng.randint(0, 40))]
    tasks = [asyncio.create_task(wait(tenant, number)) for number, tenant in enumerate(tenants)]
    await asyncio.sleep(0)
    newcomer = rng.choice("abcde")
    told = slots.num_ahead(newcomer)
    tasks.append(asyncio.create_task(wait(newcomer, len(tenants))))
    for _ in tasks:
        await asyncio.sleep(0)
        slots.release()
    await asyncio.gather(*tasks)
    assert told - len({*tenants} - {newcomer}) <= order.index(len(tenants)) <= told
