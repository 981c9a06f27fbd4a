"""A bounded number of extents are sent at once, and a silent transfer loses its slot."""

from __future__ import annotations

import random

from kit.clock import Clock
from kit.drawing import seeds

from cluster.peers.server import TransferSlots


def test_a_transfer_keeps_its_slot_over_many_ranges_until_all_bytes_are_sent() -> None:
    slots = TransferSlots(1, clock=Clock(100.0))
    assert slots.begin_range(1, 100)
    assert slots.begin_range(1, 100)
    slots.end_range(1, 60)
    assert not slots.begin_range(2, 100)
    slots.end_range(1, 40)
    assert slots.num_active == 0
    assert slots.begin_range(2, 100)


def test_a_silent_transfer_loses_its_slot_and_a_slow_reader_does_not() -> None:
    clock = Clock(100.0)
    slots = TransferSlots(2, linger_s=0.5, clock=clock)
    assert slots.begin_range(1, 100)
    assert slots.begin_range(2, 100)
    slots.end_range(1, 0)
    clock.now_s += 0.6
    assert slots.num_active == 1  # the range of the second is still on its way
    assert slots.begin_range(3, 100)
    assert not slots.begin_range(1, 100)


@seeds(50)
def test_never_more_than_allowed_and_none_left_in_the_end(seed: int) -> None:
    chance, clock = random.Random(seed), Clock(100.0)
    slots = TransferSlots(3, linger_s=1.0, clock=clock)
    running: list[int] = []
    for _ in range(300):
        if running and chance.random() < 0.5:
            slots.end_range(running.pop(chance.randrange(len(running))), chance.choice([0, 10]))
        else:
            transfer = chance.randrange(8)
            if slots.begin_range(transfer, 50):
                running.append(transfer)
            else:
                assert transfer not in running
                assert slots.num_active == 3
        assert len(set(running)) <= slots.num_active <= 3
        clock.now_s += chance.random()
    for transfer in running:
        slots.end_range(transfer, 10)
    clock.now_s += 1.1
    assert slots.num_active == 0
