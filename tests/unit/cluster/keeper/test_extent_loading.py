"""The choice where an extent is taken from; storage has the last word."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from kit.clock import Clock
from kit.panics import Panic

from cluster.keeper.extent_loading import ExtentLoader, Writing
from cluster.peers.client import FetchFailed
from cluster.peers.fetch_queue import GIVE_UP_S, AskRegistry
from cluster.peers.protocol import Located, PeerAddress, Question
from cluster.peers.sources import PATIENCE_S, FetchOutcome, PeerOffer, PeerShare
from weights.memory.host_pool import HostBufferPool
from weights.reading.extents import ExtentReader
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock
from weights.records.errors import BudgetExceeded, ExtentCorrupt
from weights.records.manifest import ExtentRef

NBYTES = 10_000
NO_FOLDER = Path("/nowhere/packs")
HERE = PeerAddress("127.0.0.1", 1)
HAS_IT = Located(offers={"e": [PeerOffer(HERE, "other")]})
READS_IT = Located(reading={"e": "other"})
MINE = Located(claimed=("e",))


@dataclass
class Written:
    """A `Writing` that does as the functions given."""

    place: Callable[[], Any]
    seal: Callable[[], Any]


class PausingClock(Clock):
    def pause(self, _: threading.Condition, seconds: float) -> None:
        self.now_s += seconds


class Stages(StageClock):
    """A clock of stages that notes the sources, too."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.sources: list[str] = []

    def came_from(self, source: str, _: int) -> None:
        self.sources.append(source)


class FakePeers:
    """Another node: gives `data` at `gbps`, or fails. `located` is what the registry says, one answer after another."""

    def __init__(self, clock: PausingClock, data: bytes) -> None:
        self.clock = clock
        self.data = data
        self.gbps = 1.0
        self.errors: list[Exception] = []
        self.fails_late = False  # when it has a slot already
        self.fetched: list[tuple[PeerAddress, ...]] = []
        self.questions: list[Question] = []
        self.located: list[Located | None] = []
        self.known = True
        self.given_back: list[str] = []

    def client(self) -> Any:
        return self if self.known else None

    def locate(self, question: Question) -> Located | None:
        self.questions.append(question)
        if question.insist:
            return Located(claimed=(question.insist,))
        return self.located.pop(0) if len(self.located) > 1 else self.located[0]

    def changed(self, added: Sequence[str], removed: Sequence[str]) -> None:
        self.given_back += removed

    def fetch_extent(
        self, addresses: Sequence[PeerAddress], extent: ExtentRef, place: Any, *, min_gbps: float
    ) -> FetchOutcome:
        self.fetched.append(tuple(addresses))
        if self.errors and not self.fails_late:
            raise self.errors.pop(0)
        out = place()
        if self.errors:
            raise self.errors.pop(0)
        out[:] = memoryview(self.data)
        seconds = extent.nbytes / self.gbps / 1e9
        self.clock.now_s += seconds
        return FetchOutcome([PeerShare(addresses[0], extent.nbytes, seconds)])


class SlowReader(ExtentReader):
    """Takes its time, by the clock given."""

    def __init__(self, packs: Path, pool: HostBufferPool, clock: PausingClock) -> None:
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
    data = random.randbytes(NBYTES)
    (tmp_path / "pack").write_bytes(data)
    return data


@pytest.fixture
def extent(data: bytes) -> ExtentRef:
    return ExtentRef(id="e", pack="pack", offset=0, nbytes=NBYTES, checksum=xxhash.xxh3_128_hexdigest(data))


@pytest.fixture
def clock() -> PausingClock:
    return PausingClock()


@pytest.fixture
def peers(clock: PausingClock, data: bytes) -> FakePeers:
    return FakePeers(clock, data)


@pytest.fixture
def pool() -> HostBufferPool:
    return HostBufferPool(2**20)


@pytest.fixture
def reader(tmp_path: Path, pool: HostBufferPool, clock: PausingClock) -> SlowReader:
    return SlowReader(tmp_path, pool, clock)


@pytest.fixture
def loader(reader: SlowReader, peers: FakePeers, clock: PausingClock) -> ExtentLoader:
    return ExtentLoader(reader, peers, clock=clock, pause=clock.pause, chance=random.Random(1))


@contextlib.contextmanager
def copy(extent: ExtentRef) -> Iterator[Writing]:
    out = np.zeros(extent.nbytes, np.uint8)
    yield Written(lambda: out, lambda: out.tobytes())


def load(loader: ExtentLoader, extent: ExtentRef, peers: FakePeers, *located: Located | None) -> tuple[bytes, str]:
    peers.located = list(located)
    stages = Stages(peers.clock)
    loader.expect([extent], stages)
    loaded = loader.load_next(copy)
    assert loaded.error is None
    assert stages.sources == [loaded.source]
    return loaded.result, loaded.source


def test_what_nobody_has_is_read_by_who_gets_the_claim(loader, extent, data: bytes, peers: FakePeers) -> None:
    assert load(loader, extent, peers, MINE) == (data, "storage")
    assert peers.fetched == []


def test_a_node_that_has_it_is_asked_before_storage_is_touched(
    loader, extent, data: bytes, reader: SlowReader, peers: FakePeers
) -> None:
    assert load(loader, extent, peers, HAS_IT) == (data, "peer")
    assert load(loader, extent, peers, HAS_IT) == (data, "peer")  # storage was never measured, so it is no better
    assert reader.num_reads == 0


@pytest.mark.parametrize("gbps", [1e-3, 0.1, 1 / 3, 0.7, 3.0, 59.669921875])
def test_unmeasured_storage_is_no_better_than_a_slow_peer(
    loader, extent, reader: SlowReader, peers: FakePeers, gbps: float
) -> None:
    peers.gbps = gbps
    assert [load(loader, extent, peers, HAS_IT)[1] for _ in range(4)] == ["peer"] * 4
    assert reader.num_reads == 0


def test_storage_that_was_measured_to_be_clearly_faster_is_read_and_nobody_waited_for(
    loader, extent, reader: SlowReader, peers: FakePeers
) -> None:
    reader.gbps, peers.gbps = 4.0, 2.0
    assert load(loader, extent, peers, MINE)[1] == "storage"
    assert load(loader, extent, peers, HAS_IT)[1] == "peer"  # not measured yet, so it is tried
    assert load(loader, extent, peers, HAS_IT)[1] == "storage"
    assert load(loader, extent, peers, READS_IT)[1] == "storage"
    assert loader.reload_rate("storage") == pytest.approx(1 / 4e9)
    assert loader.reload_rate("peer") == pytest.approx(1 / 4e9)


def test_a_peer_that_was_measured_to_be_faster_is_asked(loader, extent, reader: SlowReader, peers: FakePeers) -> None:
    reader.gbps, peers.gbps = 1.0, 2.0
    sources = [load(loader, extent, peers, MINE)[1], *(load(loader, extent, peers, HAS_IT)[1] for _ in range(3))]
    assert sources == ["storage", "peer", "peer", "peer"]
    assert loader.reload_rate("peer") == pytest.approx(1 / 2e9)
    assert loader.reload_rate("adopted") == pytest.approx(1 / 1e9)


def test_making_the_place_does_not_count_against_storage(loader, extent, clock: PausingClock, peers: FakePeers) -> None:
    def slow_place() -> Any:
        clock.now_s += 10.0
        return np.zeros(extent.nbytes, np.uint8)

    peers.located = [MINE]
    loader.expect([extent], Stages(peers.clock))
    assert loader.load_next(lambda _: contextlib.nullcontext(Written(slow_place, bytes))).error is None
    assert loader.reload_rate("storage") == pytest.approx(1 / 1e9)


@pytest.mark.parametrize(
    "error", [FetchFailed("gone", FetchOutcome(failed=[HERE])), ExtentCorrupt("other bytes"), RuntimeError("a mistake")]
)
def test_a_peer_that_fails_is_a_detour(loader, extent, data: bytes, peers: FakePeers, error: Exception) -> None:
    peers.errors = [error]
    assert load(loader, extent, peers, HAS_IT) == (data, "storage")
    assert peers.fetched == [(HERE,)]
    assert [question.insist for question in peers.questions] == [None, None, "e"]


def test_a_peer_that_is_busy_is_asked_again_after_a_pause_and_storage_is_not_read(
    loader, extent, data: bytes, reader: SlowReader, peers: FakePeers, clock: PausingClock
) -> None:
    peers.errors = [FetchFailed("no slot", FetchOutcome(busy=[HERE])) for _ in range(5)]
    assert load(loader, extent, peers, HAS_IT) == (data, "peer")
    assert (reader.num_reads, len(peers.fetched)) == (0, 6)
    assert 0.5 < clock.now_s < 5


def test_a_peer_that_is_always_busy_is_waited_for_a_bounded_time(
    loader, extent, data: bytes, peers: FakePeers, clock: PausingClock
) -> None:
    peers.errors = [FetchFailed("no slot", FetchOutcome(busy=[HERE])) for _ in range(1000)]
    assert load(loader, extent, peers, HAS_IT) == (data, "storage")
    assert PATIENCE_S <= clock.now_s < PATIENCE_S + 2


@pytest.mark.parametrize("fails", ["place", "seal"])
def test_a_place_that_cannot_be_made_is_no_detour(
    loader, extent, reader: SlowReader, peers: FakePeers, fails: str
) -> None:
    def full() -> Any:
        raise BudgetExceeded("no room")

    out = np.zeros(extent.nbytes, np.uint8)
    writing = Written(full, bytes) if fails == "place" else Written(lambda: out, full)
    for located, num_reads in ((HAS_IT, 0), (MINE, 1)):
        peers.located = [located]
        loader.expect([extent], Stages(peers.clock))
        loaded = loader.load_next(lambda _: contextlib.nullcontext(writing))
        assert (loaded.extent, str(loaded.error), reader.num_reads) == (extent, "no room", num_reads)
    assert loader.reload_rate("storage") is None


@pytest.mark.parametrize(("fails_late", "num_places"), [(False, 1), (True, 4)])
def test_a_place_is_made_for_a_peer_with_a_slot_and_given_back_when_it_is_not_filled(
    loader, extent, data: bytes, peers: FakePeers, fails_late: bool, num_places: int
) -> None:
    held: list[int] = []
    places: list[Any] = []

    @contextlib.contextmanager
    def counted(extent: ExtentRef) -> Iterator[Writing]:
        held.append(len(held))
        with copy(extent) as writing:
            yield Written(lambda: places.append(writing.place()) or places[-1], writing.seal)
        held.pop()

    peers.errors = [FetchFailed("no slot", FetchOutcome(busy=[HERE])) for _ in range(3)]
    peers.fails_late = fails_late
    peers.located = [HAS_IT]
    stages = Stages(peers.clock)
    loader.expect([extent], stages)
    loaded = loader.load_next(counted)
    assert (loaded.result, loaded.source, len(peers.fetched), held) == (data, "peer", 4, [])
    assert len(places) == num_places
    figures = stages.figures()
    assert (figures["put"].nbytes, figures["read"].nbytes) == (num_places * NBYTES, NBYTES)


def test_what_storage_does_not_have_is_said_and_may_be_wanted_again(
    loader, extent, tmp_path: Path, data: bytes, peers: FakePeers
) -> None:
    (tmp_path / "pack").write_bytes(bytes(NBYTES))
    peers.located = [MINE]
    loader.expect([extent], Stages(peers.clock))
    assert isinstance(loader.load_next(copy).error, ExtentCorrupt)
    (tmp_path / "pack").write_bytes(data)
    assert load(loader, extent, peers, MINE) == (data, "storage")


def test_without_the_secret_or_an_answer_nobody_is_asked(loader, extent, data: bytes, peers: FakePeers) -> None:
    assert load(loader, extent, peers, None) == (data, "storage")
    peers.known = False
    assert load(loader, extent, peers, HAS_IT) == (data, "storage")
    assert peers.fetched == []


def test_who_is_reading_it_is_waited_for(
    loader, extent, data: bytes, reader: SlowReader, peers: FakePeers, clock: PausingClock
) -> None:
    assert load(loader, extent, peers, READS_IT, READS_IT, HAS_IT) == (data, "peer")
    assert reader.num_reads == 0
    assert 0 < clock.now_s < 1


def test_when_nobody_is_reading_it_any_more_this_node_does(
    loader, extent, data: bytes, peers: FakePeers, clock: PausingClock
) -> None:
    assert load(loader, extent, peers, READS_IT, MINE) == (data, "storage")
    assert clock.now_s < 1


def test_threads_that_wait_for_one_extent_load_the_others(reader: SlowReader, peers: FakePeers, extent) -> None:
    """Read with real threads and a real clock: fewer threads than extents that somebody else is reading."""
    has_it = threading.Event()

    def locate(question: Question) -> Located:
        offers = {"e": [PeerOffer(HERE, "other")]} if has_it.is_set() else {}
        waiting = {id_: "other" for id_ in question.ids if id_[0] == "e" and id_ not in offers}
        return Located(offers, waiting, tuple(id_ for id_ in question.ids if id_[0] == "f"))

    peers.locate = locate  # type: ignore[method-assign]
    loader = ExtentLoader(reader, peers, chance=random.Random(1))
    free = [extent.model_copy(update={"id": f"f{index}"}) for index in range(10)]
    loader.expect([extent], Stages(peers.clock))
    loader.expect(free, Stages(peers.clock))
    with ThreadPoolExecutor(2) as threads:
        loading = [threads.submit(loader.load_next, copy) for _ in range(11)]
        done = [future.result(10).extent.id for future in islice(as_completed(loading, 10), 10)]
        assert sorted(done) == [f"f{index}" for index in range(10)]
        has_it.set()
    assert {future.result().source for future in loading if future.result().extent == extent} == {"peer"}


def test_a_node_without_the_stores_folder_asks_others_to_read(extent, reader, clock, data: bytes, peers) -> None:
    loader = ExtentLoader(reader, peers, clock=clock, pause=clock.pause, chance=random.Random(1), packs=NO_FOLDER)
    offer = Located(offers={extent.id: [PeerOffer(PeerAddress("other", 1), "other")]})
    assert load(loader, extent, peers, Located(), None, Located(reading={extent.id: "other"}), offer) == (data, "peer")
    assert [(asked.unreadable, asked.max_claims) for asked in peers.questions] == [((extent,), 0)] * 4
    assert reader.num_reads == 0


def test_what_nobody_reads_for_it_ends_with_the_reason(extent, reader, clock, peers: FakePeers) -> None:
    loader = ExtentLoader(
        reader,
        peers,
        clock=clock,
        pause=clock.pause,
        chance=random.Random(1),
        packs=NO_FOLDER,
        node="10.0.0.3",
    )
    peers.located = [Located()]
    loader.expect([extent], Stages(peers.clock))
    loaded = loader.load_next(copy)
    assert str(loaded.error) == (
        "pack: node 10.0.0.3 has not the store's folder, and for 120 s no other node has given it any weights: is "
        "there a node that has the folder, and can this one reach it?"
    )
    assert (reader.num_reads, clock.now_s) == (0, pytest.approx(GIVE_UP_S, abs=2.0))
    assert loader.load_next(copy) is None


def test_what_was_given_up_while_a_thread_was_about_to_ask_for_it_stops_no_other_question(
    extent, reader, clock, data: bytes, peers: FakePeers
) -> None:
    loader = ExtentLoader(reader, peers, clock=clock, pause=clock.pause, chance=random.Random(1), packs=NO_FOLDER)
    loader.expect([extent], Stages(peers.clock))
    step = loader._next()
    assert isinstance(step, AskRegistry)
    assert loader.withdraw() == extent
    peers.located = [Located()]
    loader._ask(step.question)
    offer = Located(offers={extent.id: [PeerOffer(PeerAddress("other", 1), "other")]})
    assert load(loader, extent, peers, offer) == (data, "peer")


def test_a_claim_on_what_was_withdrawn_meanwhile_is_given_back(loader, extent, peers: FakePeers) -> None:
    loader.expect([extent], Stages(peers.clock))
    step = loader._next()
    assert isinstance(step, AskRegistry)
    assert loader.withdraw() == extent
    peers.located = [MINE]
    loader._ask(step.question)
    assert peers.given_back == ["e"]


@pytest.mark.parametrize("where", ["locate", "fetch", "read", "place"])
def test_a_panic_anywhere_leaves_nobody_waiting(
    loader, extent, data: bytes, reader: SlowReader, peers: FakePeers, monkeypatch, where: str
) -> None:
    def panic(*arguments: Any, **options: Any) -> Any:
        raise Panic("index out of range")

    with monkeypatch.context() as broken:
        peers.located = [HAS_IT if where == "fetch" else MINE]
        if where != "place":
            on, name = {"locate": (peers, "locate"), "fetch": (peers, "fetch_extent"), "read": (reader, "read_into")}[
                where
            ]
            broken.setattr(on, name, panic)
        loader.expect([extent], Stages(peers.clock))
        try:
            loaded = loader.load_next(panic if where == "place" else copy)
        except Panic:
            assert where == "locate"
        else:
            assert str(loaded.error) == "Panic: index out of range"
    if where == "locate":
        assert loader.load_next(copy).result == data
    assert load(loader, extent, peers, MINE) == (data, "storage")


def test_what_has_no_thread_is_withdrawn_and_a_thread_too_many_ends(loader, extent, peers: FakePeers) -> None:
    other = extent.model_copy(update={"id": "other"})
    loader.expect([extent, other], Stages(peers.clock))
    peers.located = [Located(claimed=("e", "other"))]
    withdrawn = loader.withdraw()
    assert withdrawn in (extent, other)
    loaded = loader.load_next(copy)
    assert {withdrawn.id, loaded.extent.id} == {"e", "other"}
    assert (loader.load_next(copy), loader.withdraw()) == (None, None)
