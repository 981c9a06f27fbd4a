"""Ranges of one extent, fetched by several threads: each once, hashed in order, and none forgotten."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from kit.drawing import seeds

from cluster.peers.client import ExtentRange, ExtentRanges

WAIT_S = 10


def take_all(ranges: ExtentRanges, count: int) -> list[ExtentRange]:
    parts = [part for part in (ranges.take_range() for _ in range(count)) if part]
    assert len(parts) == count
    return parts


def test_cover_the_extent_once_and_in_order() -> None:
    data = bytearray(random.randbytes(1000))
    parts = take_all(ExtentRanges(memoryview(data), 300), 4)
    assert [(part.offset, part.view.tobytes()) for part in parts] == [
        (offset, bytes(data[offset : offset + 300])) for offset in (0, 300, 600, 900)
    ]


@seeds(50)
def test_the_checksum_does_not_depend_on_the_order_of_arrival(seed: int) -> None:
    data = bytearray(random.randbytes(10_000))
    ranges = ExtentRanges(memoryview(data), 128)
    parts = take_all(ranges, 79)
    random.Random(seed).shuffle(parts)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ranges.mark_arrived, parts))
    assert (ranges.missing_bytes, ranges.num_missing) == (0, 0)
    assert ranges.checksum() == xxhash.xxh3_128_hexdigest(bytes(data))
    assert ranges.take_range() is None


def test_an_idle_thread_waits_for_a_range_that_another_returns() -> None:
    ranges = ExtentRanges(memoryview(bytearray(20)), 10)
    first, last = take_all(ranges, 2)
    with ThreadPoolExecutor(1) as threads:
        taking = threads.submit(ranges.take_range)
        ranges.mark_arrived(first)
        assert not taking.done()
        ranges.return_range(last)
        assert taking.result(WAIT_S) == last
        waiting = threads.submit(ranges.take_range)
        ranges.mark_arrived(last)
        assert waiting.result(WAIT_S) is None


def test_one_hashes_while_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, gate = threading.Event(), threading.Event()
    hashed: list[bytes] = []

    class SlowDigest:
        def update(self, view: memoryview) -> None:
            begun.set()
            assert gate.wait(WAIT_S)
            hashed.append(view.tobytes())

    monkeypatch.setattr("cluster.peers.client.xxhash.xxh3_128", SlowDigest)
    ranges = ExtentRanges(memoryview(bytearray(b"abc")), 1)
    a, b, c = take_all(ranges, 3)
    with ThreadPoolExecutor(2) as threads:
        hashing = threads.submit(ranges.mark_arrived, a)
        assert begun.wait(WAIT_S)
        threads.submit(lambda: (ranges.mark_arrived(c), ranges.mark_arrived(b))).result(WAIT_S)
        assert not hashing.done()
        gate.set()
        hashing.result(WAIT_S)
    assert hashed == [b"a", b"b", b"c"]
