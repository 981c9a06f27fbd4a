"""The keeper of a node: read once, leased to many, never over budget."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import xxhash

from cluster.keeper import NodeKeeper
from weights.errors import BudgetExceeded, ExtentCorrupt, WeightsError
from weights.manifest import ExtentRef
from weights.reading.extents import ExtentReader
from weights.reading.report import StageClock

WAIT_S = 10


@dataclass(frozen=True)
class Ref:
    """Ray's object store, reduced to one object."""

    array: Any


def put(array: Any) -> Ref:
    """A copy, as Ray makes one: the buffer that is given belongs to the keeper's pool."""
    return Ref(array.copy())


class Reads:
    """Counts the reads of each extent; an extent that is closed is not read until it is opened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.began: dict[str, threading.Event] = {}
        self._gates: dict[str, threading.Event] = {}

    def close(self, id_: str) -> None:
        self._gates[id_] = threading.Event()
        self.began[id_] = threading.Event()

    def open(self, id_: str) -> None:
        self._gates[id_].set()

    def pass_gate(self, id_: str) -> None:
        self.counts[id_] += 1
        if id_ in self._gates:
            self.began[id_].set()
            assert self._gates[id_].wait(WAIT_S)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    reads = Reads()

    class WatchedReader(ExtentReader):
        def load(self, extent: ExtentRef, sink: Any, stages: StageClock) -> Any:
            reads.pass_gate(extent.id)
            return super().load(extent, sink, stages)

    monkeypatch.setattr("cluster.keeper.ExtentReader", WatchedReader)
    monkeypatch.setattr("cluster.keeper.ray.put", put)
    monkeypatch.setattr("cluster.keeper.ray.get", lambda ref: ref.array)
    return reads


@pytest.fixture
def extents(tmp_path: Path) -> dict[str, ExtentRef]:
    """a to f, 100 bytes each, one pack per extent."""
    found = {}
    for id_ in "abcdef":
        data = os.urandom(100)
        (tmp_path / id_).write_bytes(data)
        found[id_] = ExtentRef(id=id_, pack=id_, offset=0, nbytes=100, checksum=xxhash.xxh3_128_hexdigest(data))
    return found


@pytest.fixture
def keeper(tmp_path: Path, reads: Reads) -> Callable[[int], NodeKeeper]:
    return lambda budget: NodeKeeper(str(tmp_path), budget, "node")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def resident(keeper: NodeKeeper) -> str:
    return "".join(sorted(keeper.holders()))


def damage(tmp_path: Path, id_: str) -> bytes:
    good = (tmp_path / id_).read_bytes()
    (tmp_path / id_).write_bytes(bytes(100))
    return good


def wait_for_leases(keeper: NodeKeeper, id_: str, count: int) -> None:
    """Until that many callers wait for an extent that is being read."""
    for _ in range(WAIT_S * 1000):
        loading = keeper._loading.get(id_)
        if loading and loading.holders.total() == count:
            return
        threading.Event().wait(0.001)
    raise AssertionError(f"{count} callers never waited for {id_}")


def test_acquired_bytes_are_those_of_the_pack(keeper, extents, tmp_path: Path) -> None:
    refs = keeper(1000).acquire([extents["a"], extents["b"]], "w")
    assert {id_: ref.array.tobytes() for id_, ref in refs.items()} == {
        id_: (tmp_path / id_).read_bytes() for id_ in "ab"
    }


def test_an_extent_is_read_once_however_many_ask(keeper, extents, reads: Reads, pool: ThreadPoolExecutor) -> None:
    node = keeper(1000)
    reads.close("a")
    waiting = [pool.submit(node.acquire, [extents["a"], extents["b"]], f"w{i}") for i in range(32)]
    wait_for_leases(node, "a", 32)
    reads.open("a")
    refs = [future.result(WAIT_S) for future in waiting]
    assert reads.counts == {"a": 1, "b": 1}
    assert len({id(found["a"].array) for found in refs}) == 1
    assert set(node.holders()["a"]) == {f"w{i}" for i in range(32)}
    stats = node.stats()
    assert (stats.num_extents, stats.resident_bytes, stats.leased_bytes, stats.read_bytes) == (2, 200, 200, 200)
    for i in range(32):
        node.release(["a"], f"w{i}")
    assert node.stats().leased_bytes == 100


def test_leases_are_counted_and_releasing_is_idempotent(keeper, extents) -> None:
    node = keeper(200)
    node.acquire([extents["a"]], "v")
    node.acquire([extents["a"]], "w")
    node.acquire([extents["a"]], "w")
    node.release(["a"], "w")
    assert set(node.holders()["a"]) == {"v", "w"}
    for _ in range(3):
        node.release(["a", "unknown"], "w")
        node.release(["a"], "stranger")
    assert node.holders()["a"] == ("v",)
    node.release(["a"], "v")
    assert node.stats().leased_bytes == 0
    node.acquire([extents["a"]], "w")
    assert node.holders()["a"] == ("w",)


def test_the_least_recently_used_extent_goes_first(keeper, extents, reads: Reads) -> None:
    node = keeper(300)
    for id_ in "abc":
        node.acquire([extents[id_]], "w")
    node.release(["a", "b", "c"], "w")
    node.acquire([extents["a"]], "w")
    node.release(["a"], "w")
    node.acquire([extents["d"]], "w")
    assert resident(node) == "acd"
    node.acquire([extents["e"]], "w")
    assert resident(node) == "ade"
    assert node.stats().num_evicted == 2
    node.acquire([extents["b"]], "w")
    assert reads.counts["b"] == 2


def test_making_room_spares_what_the_same_call_asks_for(keeper, extents, reads: Reads) -> None:
    node = keeper(200)
    for id_ in "ab":
        node.acquire([extents[id_]], "w")
        node.release([id_], "w")
    assert list(node.acquire([extents["c"], extents["a"]], "w")) == ["c", "a"]
    assert (resident(node), reads.counts["a"]) == ("ac", 1)


def test_leased_extents_stay_and_too_much_is_refused(keeper, extents, reads: Reads) -> None:
    node = keeper(300)
    node.acquire([extents["a"], extents["b"]], "worker-1")
    with pytest.raises(BudgetExceeded) as caught:
        node.acquire([extents["a"], extents["c"], extents["d"]], "worker-2")
    for word in ("2 extents of c, d need 200 bytes", "100 bytes are missing", "budget of 300", "worker-1"):
        assert word in str(caught.value)
    assert set(node.holders()["a"]) == {"worker-1"}
    assert not set("cd") & set(reads.counts)
    node.release(["a", "b"], "worker-1")
    node.acquire([extents["d"], extents["e"], extents["f"]], "worker-2")
    assert resident(node) == "def"


def test_what_is_being_read_counts_against_the_budget(keeper, extents, reads: Reads, pool: ThreadPoolExecutor) -> None:
    node = keeper(100)
    reads.close("a")
    future = pool.submit(node.acquire, [extents["a"]], "reader")
    wait_for_leases(node, "a", 1)
    with pytest.raises(BudgetExceeded, match="leased by: reader"):
        node.acquire([extents["b"]], "w")
    reads.open("a")
    future.result(WAIT_S)


def test_a_corrupt_extent_raises_for_all_and_leaves_no_lease(
    keeper, extents, reads: Reads, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    good = damage(tmp_path, "b")
    node = keeper(1000)
    reads.close("b")
    waiting = [pool.submit(node.acquire, [extents["a"], extents["b"]], f"w{i}") for i in range(16)]
    wait_for_leases(node, "b", 16)
    reads.open("b")
    errors = [future.exception(WAIT_S) for future in waiting]
    assert {type(error) for error in errors} == {ExtentCorrupt}
    assert all("extent b" in str(error) for error in errors)
    assert node.holders() == {"a": ()}
    assert reads.counts["b"] == 1
    (tmp_path / "b").write_bytes(good)
    assert node.acquire([extents["b"]], "w")["b"].array.tobytes() == good
    assert node.stats().leased_bytes == 100


def test_a_late_failure_does_not_take_a_new_lease_of_the_same_holder(
    keeper, extents, reads: Reads, pool: ThreadPoolExecutor, tmp_path: Path
) -> None:
    good = damage(tmp_path, "b")
    node = keeper(1000)
    reads.close("a")
    late: Future[Any] = pool.submit(node.acquire, [extents["a"], extents["b"]], "w")
    assert reads.began["a"].wait(WAIT_S)
    with pytest.raises(ExtentCorrupt):
        node.acquire([extents["b"]], "other")
    (tmp_path / "b").write_bytes(good)
    node.acquire([extents["b"]], "w")
    reads.open("a")
    assert isinstance(late.exception(WAIT_S), ExtentCorrupt)
    assert node.holders() == {"a": (), "b": ("w",)}


def test_a_full_object_store_is_an_error_for_who_asked(keeper, extents, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise MemoryError("object store is full")

    monkeypatch.setattr("cluster.keeper.ray.put", full)
    node = keeper(100)
    with pytest.raises(MemoryError, match="full"):
        node.acquire([extents["a"]], "w")
    assert node.stats().resident_bytes == 0
    monkeypatch.setattr("cluster.keeper.ray.put", put)
    node.acquire([extents["a"]], "w")


def test_many_threads_stay_under_the_budget(keeper, extents, pool: ThreadPoolExecutor) -> None:
    node = keeper(400)

    def work(number: int) -> int:
        peak = 0
        for turn in range(20):
            id_ = "abcdef"[(number + turn) % 6]
            try:
                found = node.acquire([extents[id_]], f"w{number}")
            except BudgetExceeded:
                continue
            assert xxhash.xxh3_128_hexdigest(found[id_].array) == extents[id_].checksum
            peak = max(peak, node.stats().resident_bytes)
            node.release([id_], f"w{number}")
        return peak

    peaks = list(pool.map(work, range(16)))
    assert 0 < max(peaks) <= 400
    assert node.stats().leased_bytes == 0


def test_what_loading_took_is_told(keeper, extents) -> None:
    node = keeper(1000)
    node.acquire([extents["a"]], "w")
    node.acquire([extents["b"]], "w")
    stats = node.stats()
    assert {stage: figures.nbytes for stage, figures in stats.stages.items()} == {
        "open": 0,
        "read": 200,
        "verify": 200,
        "put": 200,
    }
    assert stats.read_s > 0
    assert stats.read_gbps == pytest.approx(200 / stats.read_s / 1e9)
    # One page of staging, used twice.
    assert (stats.staging_bytes, stats.pool_hit_rate) == (4096, 0.5)


def test_an_extent_larger_than_the_staging_memory_is_read_all_the_same(reads, tmp_path: Path) -> None:
    data = os.urandom(3 * 4096)
    (tmp_path / "big").write_bytes(data)
    big = ExtentRef(id="x", pack="big", offset=0, nbytes=len(data), checksum=xxhash.xxh3_128_hexdigest(data))
    node = NodeKeeper(str(tmp_path), 10**6, "node", staging_bytes=2 * 4096)
    assert node.acquire([big], "w")["x"].array.tobytes() == data
    assert node.stats().staging_bytes == 0


def test_a_malformed_wish_how_to_read_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_READ", "fast")
    with pytest.raises(WeightsError, match=r"'fast'.*direct\|buffered:THREADS:BLOCK"):
        NodeKeeper(str(tmp_path), 100, "node")


class RecordedCounter:
    """ray.util.metrics.Counter, reduced to what was counted."""

    totals: ClassVar[Counter[tuple[str, str, str]]] = Counter()

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        assert tag_keys == ("stage", "node")
        self.name = name

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0
        self.totals[self.name, tags["stage"], tags["node"]] += value


def test_inside_an_actor_the_stages_are_counted(keeper, extents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedCounter, "totals", Counter())
    monkeypatch.setattr("cluster.telemetry.Counter", RecordedCounter)
    monkeypatch.setattr("cluster.keeper.ray.is_initialized", lambda: True)
    node = keeper(1000)
    for id_ in "abc":
        node.acquire([extents[id_]], "w")
    for stage in ("read", "verify", "put"):
        assert RecordedCounter.totals["atelier_load_stage_bytes_total", stage, "node"] == 300
        seconds = RecordedCounter.totals["atelier_load_stage_seconds_total", stage, "node"]
        assert seconds == pytest.approx(node.stats().stages[stage].busy_s)
