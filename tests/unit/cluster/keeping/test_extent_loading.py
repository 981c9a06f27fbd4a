"""Where an extent is taken from, and that storage has the last word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from cluster.errors import PeerUnavailable
from cluster.keeping.extent_loading import MAX_PEER_WAIT_S, ExtentLoader
from cluster.peers.extent_sources import ComingOffer, PeerOffer
from cluster.peers.peer_client import Fetched, PeerShare
from cluster.peers.peer_protocol import PeerAddress
from weights.errors import BudgetExceeded, ExtentCorrupt
from weights.manifest import ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.reading.extents import ExtentReader
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock

NBYTES = 10_000
HERE = PeerAddress("127.0.0.1", 1)
HAS_IT = PeerOffer(HERE, "other", None)
GETS_IT = ComingOffer(HERE, "other", None, 0.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


class FakePeers:
    """Another node: gives `data` at `gbps`, or fails. `located` is what the registry says, one answer after another."""

    def __init__(self, clock: Clock, data: bytes) -> None:
        self.clock = clock
        self.data = data
        self.gbps = 1.0
        self.error: Exception | None = None
        self.fetched: list[tuple[PeerAddress, ...]] = []
        self.located: list[Sequence[Any]] = []
        self.known = True

    def client(self) -> Any:
        return self if self.known else None

    def locate(self, ids: Sequence[str]) -> dict[str, Sequence[Any]]:
        found = self.located.pop(0) if len(self.located) > 1 else self.located[0]
        return dict.fromkeys(ids, found)

    def fetch(self, addresses: Sequence[PeerAddress], extent: ExtentRef, out: Any, *, min_gbps: float) -> Fetched:
        self.fetched.append(tuple(addresses))
        if self.error:
            raise self.error
        out[:] = memoryview(self.data)
        seconds = extent.nbytes / self.gbps / 1e9
        self.clock.now_s += seconds
        return Fetched([PeerShare(addresses[0], extent.nbytes, seconds)])


class SlowReader(ExtentReader):
    """Takes its time, by the clock given."""

    def __init__(self, packs: Path, pool: HostBufferPool, clock: Clock) -> None:
        super().__init__(packs, pool, ReadPlanner())
        self.ticks = clock
        self.gbps = 1.0
        self.num_reads = 0

    def read_into(self, extent: ExtentRef, place: Any, stages: StageClock) -> None:
        self.num_reads += 1
        self.ticks.now_s += extent.nbytes / self.gbps / 1e9
        super().read_into(extent, place, stages)


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    data = os.urandom(NBYTES)
    (tmp_path / "pack").write_bytes(data)
    return data


@pytest.fixture
def extent(data: bytes) -> ExtentRef:
    return ExtentRef(id="e", pack="pack", offset=0, nbytes=NBYTES, checksum=xxhash.xxh3_128_hexdigest(data))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def peers(clock: Clock, data: bytes) -> FakePeers:
    return FakePeers(clock, data)


@pytest.fixture
def pool() -> HostBufferPool:
    return HostBufferPool(2**20)


@pytest.fixture
def reader(tmp_path: Path, pool: HostBufferPool, clock: Clock) -> SlowReader:
    return SlowReader(tmp_path, pool, clock)


@pytest.fixture
def loader(reader: SlowReader, peers: FakePeers, clock: Clock) -> ExtentLoader:
    return ExtentLoader(reader, peers, clock=clock, pause=clock.pause)


def load(loader: ExtentLoader, extent: ExtentRef, *offers: PeerOffer | ComingOffer) -> tuple[bytes, str]:
    out = np.zeros(extent.nbytes, np.uint8)
    source = loader.load(extent, offers, lambda: out, StageClock())
    return out.tobytes(), source


def test_what_nobody_offers_comes_from_storage(loader, extent, data: bytes, peers: FakePeers) -> None:
    assert load(loader, extent) == (data, "storage")
    assert peers.fetched == []


def test_a_node_that_has_it_is_asked_before_storage_is_touched(loader, extent, data: bytes, reader: SlowReader) -> None:
    assert load(loader, extent, HAS_IT) == (data, "peer")
    assert load(loader, extent, HAS_IT) == (data, "peer")  # storage was never measured, so it is no better
    assert reader.num_reads == 0


@pytest.mark.parametrize("gbps", [1e-3, 0.1, 1 / 3, 0.7, 3.0, 59.669921875])
def test_storage_that_nobody_measured_is_no_better_than_a_slow_peer(
    loader, extent, reader: SlowReader, peers: FakePeers, gbps: float
) -> None:
    peers.gbps = gbps
    assert [load(loader, extent, HAS_IT)[1] for _ in range(4)] == ["peer"] * 4
    assert reader.num_reads == 0


def test_storage_that_was_measured_to_be_faster_is_read(loader, extent, reader: SlowReader, peers: FakePeers) -> None:
    reader.gbps, peers.gbps = 4.0, 2.0
    assert load(loader, extent)[1] == "storage"
    assert load(loader, extent, HAS_IT)[1] == "peer"  # not measured yet, so it is tried
    assert load(loader, extent, HAS_IT)[1] == "storage"
    assert loader.reload_rate("storage") == pytest.approx(1 / 4e9)
    assert loader.reload_rate("peer") == pytest.approx(1 / 4e9)


def test_a_peer_that_was_measured_to_be_faster_is_asked(loader, extent, reader: SlowReader, peers: FakePeers) -> None:
    reader.gbps, peers.gbps = 1.0, 2.0
    sources = [load(loader, extent)[1], *(load(loader, extent, HAS_IT)[1] for _ in range(3))]
    assert sources == ["storage", "peer", "peer", "peer"]
    assert loader.reload_rate("peer") == pytest.approx(1 / 2e9)
    assert loader.reload_rate("adopted") == pytest.approx(1 / 1e9)


def test_making_the_place_does_not_count_against_storage(loader, extent, clock: Clock) -> None:
    def slow_place() -> Any:
        clock.now_s += 10.0
        return np.zeros(extent.nbytes, np.uint8)

    loader.load(extent, (), slow_place, StageClock())
    assert loader.reload_rate("storage") == pytest.approx(1 / 1e9)


@pytest.mark.parametrize("error", [PeerUnavailable("gone"), ExtentCorrupt("other bytes")])
def test_a_peer_that_fails_is_a_detour(loader, extent, data: bytes, peers: FakePeers, error: Exception) -> None:
    peers.error = error
    assert load(loader, extent, HAS_IT) == (data, "storage")
    assert peers.fetched == [(HERE,)]


def test_a_place_that_cannot_be_made_is_no_detour(loader, extent, reader: SlowReader) -> None:
    def full() -> Any:
        raise BudgetExceeded("no room")

    with pytest.raises(BudgetExceeded, match="no room"):
        loader.load(extent, [HAS_IT], full, StageClock())
    assert reader.num_reads == 0


def test_without_the_secret_nobody_is_asked(loader, extent, data: bytes, peers: FakePeers) -> None:
    peers.known = False
    assert load(loader, extent, HAS_IT) == (data, "storage")


def test_who_is_getting_it_is_waited_for(
    loader, extent, data: bytes, reader: SlowReader, peers: FakePeers, clock: Clock
) -> None:
    peers.located = [[GETS_IT], [GETS_IT], [HAS_IT]]
    assert load(loader, extent, GETS_IT) == (data, "peer")
    assert reader.num_reads == 0
    assert 0 < clock.now_s < 1


def test_when_nobody_is_getting_it_any_more_storage_is_read(
    loader, extent, data: bytes, peers: FakePeers, clock: Clock
) -> None:
    peers.located = [[GETS_IT], []]
    assert load(loader, extent, GETS_IT) == (data, "storage")
    assert clock.now_s < 1


def test_the_wait_for_another_node_is_bounded(loader, extent, data: bytes, peers: FakePeers, clock: Clock) -> None:
    peers.located = [[GETS_IT]]
    assert load(loader, extent, GETS_IT) == (data, "storage")
    assert MAX_PEER_WAIT_S <= clock.now_s < MAX_PEER_WAIT_S + 1
