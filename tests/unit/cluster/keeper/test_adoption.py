"""A restarted keeper waits for what replicas offer, for as long as offers keep coming."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import ray
import xxhash
from kit.clock import Clock
from kit.seeding import seeded_random

from cluster.keeper import shared_memory
from cluster.keeper.extent_book import ExtentBook
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.records import HeldOffer
from cluster.keeper.shared_memory import Adoption, DamageLog
from weights.records.manifest import ExtentRef

WAIT_S = 3.0


class Waiting:
    """HeldExtents that is never told anything while somebody waits: the clock goes on by what it was asked for."""

    def __init__(self, clock: Clock, on_wait: list[Any]) -> None:
        self._clock = clock
        self._on_wait = on_wait
        self.holders = self
        self.waited_s = 0.0

    def wait_until_known(self, ids: Any, timeout_s: float) -> bool:
        if self._on_wait:
            self._clock.now_s += 1.0
            self._on_wait.pop(0)()
            return False
        self.waited_s += timeout_s
        self._clock.now_s += timeout_s
        return False

    def lease_same(self, *_: Any) -> bool:
        return True


def offer(id_: str, data: bytes) -> HeldOffer:
    extent = ExtentRef(id=id_, pack="p", offset=0, nbytes=len(data), checksum=xxhash.xxh3_128_hexdigest(data))
    return HeldOffer(extent, data, 1)


def adopting(held: Any, clock: Clock, wait_s: float = WAIT_S) -> Adoption:
    return Adoption(held, DamageLog(), verify=True, wait_s=wait_s, clock=clock)


def test_each_offer_gives_the_next_one_more_time() -> None:
    clock, later = Clock(100.0), []
    held = Waiting(clock, later)
    taking = adopting(held, clock)
    later += [lambda: taking.take_offers("v", [offer("a", b"1")]), lambda: taking.take_offers("w", [offer("b", b"2")])]
    taking.wait_for(["c"])
    assert clock.now_s == pytest.approx(100 + 1 + 1 + WAIT_S)
    assert held.waited_s == pytest.approx(WAIT_S)


def test_an_offer_that_comes_too_late_keeps_nobody_waiting() -> None:
    clock = Clock(100.0)
    held = Waiting(clock, [])
    taking = adopting(held, clock)
    clock.now_s += WAIT_S
    taking.take_offers("v", [offer("a", b"1")])
    taking.wait_for(["c"])
    assert held.waited_s == 0


def test_who_wants_what_is_offered_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = seeded_random().randbytes(64)
    monkeypatch.setattr(ray, "get", lambda ref, timeout: np.frombuffer(ref, np.uint8))
    held = HeldExtents(ExtentBook(1000))
    taking = Adoption(held, DamageLog(), verify=True, wait_s=60.0)
    waiting = threading.Thread(target=taking.wait_for, args=(["a"],))
    waiting.start()
    taking.take_offers("v", [offer("a", data)])
    assert taking.adopted_bytes == len(data)
    waiting.join(10)
    assert not waiting.is_alive()
    assert shared_memory.ADOPTION_S < 60.0
