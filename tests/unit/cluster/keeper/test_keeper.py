"""The keeper of a node: read once, leased to many, never over budget."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import ray
import xxhash
from kit.seeding import seeded_random
from kit.waiting import wait_until
from unit.cluster.keeper.local_keeper import ActorHandle, FakeStore, Ref, User, ray_get

from cluster.keeper import holder_watch
from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.keeper.ray_extents import RayExtents
from cluster.keeper.records import HeldOffer
from cluster.peers.link import RegistryClient
from cluster.peers.protocol import Located, PeerAddress, PeerOffer, Question, ResidencyReport
from cluster.process.processes import ProcessMark
from cluster.records.errors import KeeperFailed
from cluster.registry.extent_locations import ResidencyMap
from cluster.start.node_checks import running_code
from weights.reading.delta_codec import CODEC, Segment, encode_chunk, encode_header
from weights.reading.extents import ExtentReader
from weights.reading.report import StageClock
from weights.records.errors import BudgetExceeded, ExtentCorrupt, WeightsError
from weights.records.manifest import DeltaRef, ExtentRef

WAIT_S = 10

Make = Callable[..., NodeKeeper]


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
        def read_into(self, extent: ExtentRef, place: Any, stages: StageClock) -> None:
            reads.pass_gate(extent.id)
            super().read_into(extent, place, stages)

    monkeypatch.setattr("cluster.keeper.actor.ExtentReader", WatchedReader)
    return reads


@pytest.fixture
def extents(tmp_path: Path) -> dict[str, ExtentRef]:
    """a to f, 100 bytes each, one pack per extent."""
    found = {}
    for id_ in "abcdef":
        data = random.randbytes(100)
        (tmp_path / id_).write_bytes(data)
        found[id_] = ExtentRef(id=id_, pack=id_, offset=0, nbytes=100, checksum=xxhash.xxh3_128_hexdigest(data))
    return found


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def keeper(tmp_path: Path, reads: Reads, store: FakeStore) -> Iterator[Make]:
    """Makes keepers; no wait for leased room, and no audit, unless asked for."""
    keepers: list[NodeKeeper] = []

    def make(budget: int | None = 1000, **options: Any) -> NodeKeeper:
        chosen = {"audit_bytes_per_s": 0, "max_wait_s": 0.0} | options
        others = {name: chosen.pop(name) for name in ("registry", "store", "directory") if name in chosen}
        keepers.append(
            NodeKeeper(str(tmp_path), budget, "node", KeeperSettings(**chosen), **({"store": store} | others))
        )
        return keepers[-1]

    yield make
    for made in keepers:
        made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(32) as pool:
        yield pool


def test_a_node_with_other_code_than_the_registrys_has_no_keeper_and_is_told_what_to_install(keeper: Make) -> None:
    same = running_code()
    assert keeper(code=same).stats().num_holders == 0
    other = ("Atelier 9.9.9 (0123abcd)", same[1])
    with pytest.raises(KeeperFailed) as raised:
        keeper(code=other)
    assert str(raised.value) == (
        f"node 127.0.0.1 has {same[0]}, and this cluster {other[0]}: install the same there, and start Ray of that "
        "node again"
    )


def test_a_folder_that_is_not_the_clusters_store_is_named_with_its_node(
    keeper: Make, extents: dict[str, ExtentRef], tmp_path: Path
) -> None:
    node = keeper()
    (tmp_path / "a").unlink()  # as in another store at the same path
    damage(tmp_path, "b")
    with pytest.raises(ExtentCorrupt) as lost:
        node.acquire([extents["a"]], "w")
    assert str(lost.value).endswith(
        ": node 127.0.0.1 has another folder there than the store, or the store has lost it; where nodes do not share "
        "the store, remove the folder, and other nodes send the weights"
    )
    assert str(tmp_path / "a") in str(lost.value)
    assert lost.value.extent_id == "a"
    with pytest.raises(ExtentCorrupt) as damaged:
        node.acquire([extents["b"]], "w")
    assert "another folder" not in str(damaged.value)


def resident(keeper: NodeKeeper) -> str:
    return "".join(sorted(keeper.holders()))


def damage(tmp_path: Path, id_: str) -> bytes:
    good = (tmp_path / id_).read_bytes()
    (tmp_path / id_).write_bytes(bytes(100))
    return good


def leases_of(keeper: NodeKeeper, id_: str) -> Counter[str]:
    """Return the leases of what is here or being read."""
    entry = keeper.memory.held._table.entries.get(id_)
    return entry.held + entry.recallable if entry else Counter()


def wait_for_leases(keeper: NodeKeeper, id_: str, count: int) -> None:
    """Until that many callers wait for an extent that is being read."""
    wait_until(lambda: leases_of(keeper, id_).total() == count)


def test_acquired_bytes_are_those_of_the_pack(keeper, extents, tmp_path: Path) -> None:
    refs = keeper(1000).acquire([extents["a"], extents["b"]], "w").refs
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
    assert len({id(found.refs["a"].array) for found in refs}) == 1
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


def test_making_room_spares_what_the_same_call_asks_for(keeper, extents, reads: Reads) -> None:
    node = keeper(200)
    for id_ in "ab":
        node.acquire([extents[id_]], "w")
        node.release([id_], "w")
    assert list(node.acquire([extents["c"], extents["a"]], "w").refs) == ["c", "a"]
    assert (resident(node), reads.counts["a"]) == ("ac", 1)


def test_leased_extents_stay_and_too_much_is_refused(keeper, extents, reads: Reads) -> None:
    node = keeper(300)
    node.acquire([extents["a"], extents["b"]], "worker-1")
    with pytest.raises(BudgetExceeded) as caught:
        node.acquire([extents["a"], extents["c"], extents["d"]], "worker-2")
    for word in (
        "3 extents of a, c, d need 200 bytes",
        "100 bytes are missing",
        "store.node_budget_bytes is 300 bytes",
        "worker-1",
    ):
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
    with pytest.raises(BudgetExceeded, match=r"leased by: reader \(100 bytes\)"):
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
    assert node.acquire([extents["b"]], "w").refs["b"].array.tobytes() == good
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


def test_a_store_that_fails_is_an_error_for_who_asked(keeper, extents, store: FakeStore) -> None:
    store.error = MemoryError("out of memory")
    node = keeper(100)
    with pytest.raises(MemoryError, match="out of memory"):
        node.acquire([extents["a"]], "w")
    assert node.stats().resident_bytes == 0
    store.error = None
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
            assert xxhash.xxh3_128_hexdigest(found.refs[id_].array) == extents[id_].checksum
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
    # What is in the page cache is copied to its place from there.
    assert (stats.staging_bytes, stats.pool_hit_rate) == (0, 0.0)


def test_an_extent_larger_than_the_staging_memory_is_read_all_the_same(keeper, tmp_path: Path) -> None:
    data = random.randbytes(3 * 4096)
    (tmp_path / "big").write_bytes(data)
    big = ExtentRef(id="x", pack="big", offset=0, nbytes=len(data), checksum=xxhash.xxh3_128_hexdigest(data))
    node = keeper(10**6, staging_bytes=2 * 4096)
    assert node.acquire([big], "w").refs["x"].array.tobytes() == data
    assert node.stats().staging_bytes == 0


def test_a_malformed_wish_how_to_read_is_refused_at_once(keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATELIER_READ", "fast")
    with pytest.raises(WeightsError, match=r"'fast'.*direct\|buffered:THREADS:BLOCK"):
        keeper()


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
    monkeypatch.setattr("cluster.process.telemetry.Counter", RecordedCounter)
    monkeypatch.setattr("cluster.keeper.actor.ray.is_initialized", lambda: True)
    node = keeper(1000)
    for id_ in "abc":
        node.acquire([extents[id_]], "w")
    for stage in ("read", "verify", "put"):
        assert RecordedCounter.totals["atelier_load_stage_bytes_total", stage, "node"] == 300
        seconds = RecordedCounter.totals["atelier_load_stage_seconds_total", stage, "node"]
        assert seconds == pytest.approx(node.stats().stages[stage].busy_s)


def test_an_acquire_tells_what_it_had_loaded(keeper, extents) -> None:
    node = keeper()
    node.acquire([extents["a"]], "w")
    acquired = node.acquire([extents["a"], extents["b"], extents["c"]], "w")
    report = acquired.report
    assert (report.nbytes, report.sources, report.verified) == (200, {"storage": 200}, True)
    assert {stage: figures.nbytes for stage, figures in report.stages.items()} == {
        "open": 0,
        "read": 200,
        "verify": 200,
        "put": 200,
    }
    assert report.wall_s > 0
    assert node.acquire([extents["c"]], "w").report is None
    assert acquired.generation == node.hello("w").generation
    assert acquired.generation.startswith(node.stats().generation)


def test_leases_end_with_the_process_that_has_them(keeper, extents) -> None:
    node = keeper()
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node.hello("dies", ProcessMark(holder.pid, psutil.Process(holder.pid).create_time()))
    node.hello("lives", ProcessMark.this())
    for name in ("dies", "lives"):
        node.acquire([extents["a"]], name)
    holder.kill()
    wait_until(lambda: set(leases_of(node, "a")) == {"lives"})
    holder.communicate()


def test_replicas_count_with_their_first_sign_of_life_and_until_their_end(keeper) -> None:
    node = keeper()
    assert node.stats().num_holders == 0
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    node.hello("dies", ProcessMark(holder.pid, psutil.Process(holder.pid).create_time()))
    for _ in range(3):
        node.hello("lives", ProcessMark.this())
    assert node.stats().num_holders == 2
    holder.kill()
    wait_until(lambda: node.stats().num_holders == 1)
    holder.communicate()


def test_leases_of_another_life_are_not_given_back(keeper, extents) -> None:
    node = keeper()
    acquired = node.acquire([extents["a"]], "w")
    node.release(["a"], "w", "an epoch before")
    assert node.stats().leased_bytes == 100
    node.release(["a"], "w", acquired.generation)
    assert node.stats().leased_bytes == 0


def test_what_is_prefetched_is_there_without_a_lease(keeper, extents, reads: Reads, tmp_path: Path) -> None:
    node = keeper()
    reads.close("a")
    node.prefetch([extents["a"]])
    assert reads.began["a"].wait(WAIT_S)
    assert node.stats().num_extents == 0
    reads.open("a")
    assert node.acquire([extents["a"]], "w").refs["a"].array.tobytes() == (tmp_path / "a").read_bytes()
    assert reads.counts["a"] == 1
    damage(tmp_path, "b")
    node.prefetch([extents["b"]])  # nobody waits, so nobody hears of it
    with pytest.raises(ExtentCorrupt):
        node.acquire([extents["b"]], "w")


def test_the_default_budget_is_a_share_of_the_nodes_own_store_clear_of_spilling(keeper, store: FakeStore) -> None:
    for store.capacity_bytes in (1000 * 2**20, 50 * 2**30):
        assert keeper(None).stats().budget_bytes == store.capacity_bytes * 7 // 10
    assert keeper(5 * 2**20).stats().budget_bytes == 5 * 2**20


def test_a_budget_is_held_against_the_object_store(keeper, extents, store: FakeStore) -> None:
    store.capacity_bytes = 400
    node = keeper(1000)
    assert node.stats().budget_bytes == 300
    node.set_budget(200)
    for nbytes in (301, -1):
        with pytest.raises(BudgetExceeded, match=r"0 to 300, 75% of its object store of 400"):
            node.set_budget(nbytes)
    assert node.stats().budget_bytes == 200


def test_when_the_store_is_full_what_may_go_makes_way(keeper, extents, store: FakeStore) -> None:
    node = keeper()
    node.acquire([extents["a"]], "w")
    node.acquire([extents["b"]], "idle")
    node.release(["b"], "idle")
    store.num_full = 1
    node.acquire([extents["c"]], "w")
    assert resident(node) == "ac"
    store.num_full = 1
    with pytest.raises(BudgetExceeded, match=r"no room in memory \(leased by: w \(300 bytes\)\)"):
        node.acquire([extents["d"]], "w")
    assert resident(node) == "ac"


def test_an_extent_that_fails_gives_its_room_back_at_once(keeper, extents, store: FakeStore) -> None:
    """Even while somebody still has the error, whose frames know the memory."""
    node = keeper()
    damaged = extents["a"].model_copy(update={"checksum": "0" * 32})
    with pytest.raises(ExtentCorrupt) as failed:
        node.acquire([damaged], "w")
    assert store.written() is None
    assert "extent a" in str(failed.value)
    assert node.acquire([extents["a"]], "w").refs


def test_room_is_counted_from_the_moment_that_it_is_made(
    keeper, extents, store: FakeStore, pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are loaded at once: the second one's room lies beside the first one's."""
    both_made = threading.Barrier(2)
    real = ExtentReader.read_into

    def read_into(self: Any, extent: ExtentRef, place: Any, stages: StageClock) -> None:
        out = place()
        both_made.wait(WAIT_S)
        real(self, extent, lambda: out, stages)

    monkeypatch.setattr(ExtentReader, "read_into", read_into)
    node = keeper()
    node.acquire([extents["a"], extents["b"]], "w")
    assert sorted(store.used_bytes) in ([0, 0], [0, 100])  # at the same moment, or one after the other
    node.acquire([extents["c"], extents["d"]], "w")
    assert max(store.used_bytes) in (200, 300)
    assert node.memory.writer.used_bytes == 400


def test_pages_are_made_beforehand_on_request(keeper, store: FakeStore) -> None:
    keeper()
    assert not store.populated.is_set()
    keeper(populate=True)
    assert store.populated.wait(WAIT_S)


def test_somebody_waiting_for_room_shows_in_the_answer_to_a_sign_of_life(keeper, extents, pool) -> None:
    node = keeper(200, max_wait_s=WAIT_S)
    node.acquire([extents["a"], extents["b"]], "v")
    assert node.hello("v").wanted_bytes == 0
    waiting = pool.submit(node.acquire, [extents["c"]], "w")
    wait_until(lambda: node.hello("v").wanted_bytes > 0)
    assert (node.hello("v").wanted_bytes, node.stats().num_waiting) == (100, 1)
    node.release(["a"], "v")
    assert waiting.result(WAIT_S).refs


def test_offers_of_replicas_are_adopted_once_and_checked(keeper, extents, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("cluster.keeper.shared_memory.ray.get", lambda ref, timeout: ref.array)
    copies = {id_: np.frombuffer((tmp_path / id_).read_bytes(), np.uint8) for id_ in "ab"}
    node = keeper()
    offers = [HeldOffer(extents[id_], Ref(copies[id_]), 2) for id_ in "ab"]
    offers.append(HeldOffer(extents["c"], Ref(np.zeros(100, np.uint8)), 1))
    assert node.adopt("v", offers) == node.hello("v").generation
    node.adopt("w", offers[:1])
    stats = node.stats()
    assert (stats.adopted_bytes, stats.read_bytes, stats.leased_bytes) == (200, 0, 200)
    assert (stats.num_corrupt, stats.corrupt) == (1, ("c",))
    assert {found.id: (found.holders, found.source) for found in node.residents()} == {
        "a": ({"v": 2, "w": 2}, "adopted"),
        "b": ({"v": 2}, "adopted"),
    }
    assert node.acquire([extents["a"]], "x").refs["a"].array is copies["a"]


def test_what_two_replicas_offer_at_once_counts_once(keeper, extents, tmp_path, pool, monkeypatch) -> None:
    both_are_here = threading.Barrier(2)

    def mapped(ref: Ref, timeout: float) -> np.ndarray:
        both_are_here.wait(WAIT_S)
        return ref.array

    monkeypatch.setattr("cluster.keeper.shared_memory.ray.get", mapped)
    copy = np.frombuffer((tmp_path / "a").read_bytes(), np.uint8)
    node = keeper()
    offering = [pool.submit(node.adopt, holder, [HeldOffer(extents["a"], Ref(copy), 1)]) for holder in "vw"]
    for done in offering:
        done.result(WAIT_S)
    assert (node.stats().adopted_bytes, node.stats().holders) == (100, {"v": 100, "w": 100})


def test_an_offer_that_cannot_be_mapped_is_read_again(keeper, extents, reads: Reads, monkeypatch) -> None:
    def lost(ref: Any, timeout: float) -> Any:
        raise ray.exceptions.GetTimeoutError("its owner is gone")

    monkeypatch.setattr("cluster.keeper.shared_memory.ray.get", lost)
    node = keeper()
    node.adopt("v", [HeldOffer(extents["a"], Ref(None), 1)])
    assert node.residents() == []
    node.acquire([extents["a"]], "v")
    assert reads.counts["a"] == 1


def test_a_write_into_shared_bytes_is_noticed_and_replaced(keeper, extents, tmp_path: Path, reads: Reads) -> None:
    node = keeper(audit_bytes_per_s=2**30)
    first = node.acquire([extents["a"], extents["b"]], "w").refs["a"].array
    first[50] ^= 1
    wait_until(lambda: node.stats().num_corrupt > 0)
    assert (node.stats().num_corrupt, node.stats().corrupt, resident(node)) == (1, ("a",), "b")
    assert node.acquire([extents["a"]], "w").refs["a"].array.tobytes() == (tmp_path / "a").read_bytes()
    assert reads.counts == {"a": 2, "b": 1}


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RayExtents]:
    """Real replicas' clients; their hearts beat when they are told to."""
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", ray_get)
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 3600.0)

    def make(node: NodeKeeper, holder: str = "r", **options: Any) -> RayExtents:
        return RayExtents(ActorHandle(node), holder, User(**options))

    return make


def test_replicas_that_have_a_damaged_copy_hear_of_it_once(keeper, extents, replica, tmp_path: Path) -> None:
    node = keeper()
    told: dict[str, list[str]] = {"keeps": [], "gave back": [], "never had it": []}
    replicas = {holder: replica(node, holder, on_damage=heard.extend) for holder, heard in told.items()}
    views = [replicas[holder].fetch([extents["a"], extents["b"]]) for holder in ("keeps", "gave back")]
    replicas["gave back"].release([extents["a"]])  # perhaps it made something of it
    replicas["never had it"].fetch([extents["b"]])
    views[0]["a"][50] ^= 1
    node.memory.audit.round()
    fresh = replicas["never had it"].fetch([extents["a"]])
    for _ in range(2):
        for one in replicas.values():
            one.beat()
    assert told == {"keeps": ["a"], "gave back": ["a"], "never had it": []}
    again = replicas["keeps"].fetch([extents["a"]])
    assert again["a"] is fresh["a"]
    assert again["a"].tobytes() == (tmp_path / "a").read_bytes()
    replicas["keeps"].beat()
    assert told["keeps"] == ["a"]
    assert node.stats().holders["keeps"] == 300  # both copies, and b
    for _ in range(2):
        replicas["keeps"].release([extents["a"]])
    assert node.stats().holders["keeps"] == 100


def test_a_damaged_offer_is_told_to_who_made_it_and_counts_until_it_is_given_back(keeper, extents, replica) -> None:
    """A keeper that dies between the write and its finding has nobody else to find it."""
    before, node, told = keeper(), keeper(), []
    handle = ActorHandle(before)
    holder = RayExtents(handle, "r", User(told.extend))
    replica(before)
    holder.fetch([extents["a"], extents["b"]])["a"][50] ^= 1
    handle.actor = node
    holder.beat()
    holder.beat()
    assert told == ["a"]
    assert (resident(node), node.stats().corrupt, node.stats().holders) == ("b", ("a",), {"r": 200})
    holder.fetch([extents["a"]])
    holder.release([extents["a"]])  # the one that it had
    assert {found.id: found.holders for found in node.residents()} == {"a": {"r": 1}, "b": {"r": 1}}


def test_what_is_mapped_beside_a_fresh_copy_is_looked_at_as_well(keeper, extents, replica) -> None:
    """Two replicas map the damaged copy; the first one's offer is refused, and it has read a fresh one by then."""
    before, node = keeper(), keeper()
    handle, told = ActorHandle(before), {"v": [], "w": []}
    replica(before)
    holders = {name: RayExtents(handle, name, User(heard.extend)) for name, heard in told.items()}
    for holder in holders.values():
        view = holder.fetch([extents["a"]])["a"]
    view[50] ^= 1
    handle.actor = node
    holders["v"].beat()
    holders["v"].fetch([extents["a"]])
    holders["w"].beat()
    for holder in holders.values():
        holder.beat()
    assert told == {"v": ["a"], "w": ["a"]}


def test_who_was_taken_for_dead_gets_its_leases_back(keeper, extents, replica, reads: Reads, monkeypatch) -> None:
    now_s, node = [0.0], keeper()
    watch = holder_watch.HolderWatch(node.memory.held.holders, 3600.0, 60.0, lambda: now_s[0])
    node.memory.held.holders.watch.close()
    node.memory.held.holders.watch = watch
    # In a container of its own: its process cannot be seen.
    monkeypatch.setattr(ProcessMark, "seen", lambda _: None)
    paused, other = replica(node, "paused"), replica(node, "other")
    paused.fetch([extents["a"], extents["b"]])
    paused.fetch([extents["a"]])
    now_s[0] += 61.0
    other.beat()
    watch.check()
    assert node.stats().holders == {}
    late = node.acquire([extents["c"]], "paused")  # a call of before that comes now
    assert node.stats().holders == {}
    paused.beat()
    assert {found.id: found.holders for found in node.residents("ab")} == {"a": {"paused": 2}, "b": {"paused": 1}}
    node.release(["a"], "paused", late.generation)  # of the epoch before
    assert node.stats().holders == {"paused": 200}
    paused.fetch([extents["c"]])
    for ids in ("abc", "a"):
        paused.release([extents[id_] for id_ in ids])
    assert node.stats().holders == {}
    assert reads.counts == dict.fromkeys("abc", 1)


def test_the_first_call_of_who_was_taken_for_dead_is_leased_too(keeper, extents, replica) -> None:
    node = keeper()
    holder = replica(node)
    holder.fetch([extents["a"]])
    node.memory.held.holders.end("r")
    holder.fetch([extents["b"]])
    assert {found.id: found.holders for found in node.residents()} == {"a": {"r": 1}, "b": {"r": 1}}


def test_pins_are_what_was_told_last(keeper, extents) -> None:
    node = keeper(200)
    node.acquire([extents["a"], extents["b"]], "w")
    node.release(["a", "b"], "w")
    for pins, pinned in (({"m": ["a"], "n": ["a", "b"]}, "ab"), ({"m": ["a"]}, "a"), ({"m": ["a"]}, "a"), ({}, "")):
        node.set_pins(pins)
        assert "".join(sorted(found.id for found in node.residents() if found.pinned)) == pinned
        assert (node.pins(), node.stats().pinned_bytes) == (pins, 100 * len(pinned))
    node.set_pins({"m": ["b", "c"]})
    node.acquire([extents["d"]], "w")
    assert resident(node) == "bd"


class SharedRegistry(RegistryClient):
    """The registry, shared by keepers of one process."""

    def __init__(self) -> None:
        self.held = ResidencyMap(time.monotonic, seeded_random())
        self._lock = threading.Lock()
        self._secret = random.randbytes(32)
        self.may_answer = threading.Event()  # to who asks for the secret
        self.may_answer.set()

    def peer_secret(self) -> bytes:
        assert self.may_answer.wait(WAIT_S)
        return self._secret

    def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        with self._lock:
            return self.held.locate(node_id, question, load)

    def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        with self._lock:
            self.held.report_residency(node_id, report)

    def holders(self, id_: str) -> list[str]:
        found = self.locate("nobody", Question((id_,), 0), 0).offers.get(id_, ())
        return sorted(offer.node for offer in found)


def test_other_nodes_find_a_keeper_at_the_address_that_ray_says_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config need not say how Ray was started: rendered ones do not, and announced 127.0.0.1 to all."""
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.7")
    node = NodeKeeper(str(tmp_path), 1000, "first", store=FakeStore(), directory=SharedRegistry())
    try:
        wait_until(lambda: bool(node.stats().address))
        assert str(node.stats().address).rpartition(":")[0] == "127.0.0.7"
    finally:
        node.close()


def test_a_second_node_takes_extents_from_the_first(tmp_path: Path, extents, reads: Reads) -> None:
    directory = SharedRegistry()
    nodes = [
        NodeKeeper(
            str(tmp_path), 1000, name, KeeperSettings(audit_bytes_per_s=0), store=FakeStore(), directory=directory
        )
        for name in ("first", "second")
    ]
    try:
        wait_until(lambda: all(node.stats().address for node in nodes))
        wanted = [extents[id_] for id_ in "abc"]
        nodes[0].acquire(wanted, "w")
        wait_until(lambda: all(directory.holders(id_) == ["first"] for id_ in "abc"))
        acquired = nodes[1].acquire(wanted, "w")
        assert {id_: ref.array.tobytes() for id_, ref in acquired.refs.items()} == {
            id_: (tmp_path / id_).read_bytes() for id_ in "abc"
        }
        assert acquired.report.sources == {"peer": 300}
        assert reads.counts == dict.fromkeys("abc", 1)
        assert (nodes[1].stats().peer_bytes, nodes[1].stats().read_bytes) == (300, 0)
        wait_until(lambda: nodes[0].stats().served_bytes == 300)
        # What the first one gives up, the second one is not sent there for.
        nodes[0].release(list("abc"), "w")
        assert nodes[0].drop(["a"]) == ["a"]
        wait_until(lambda: directory.holders("a") == ["second"])
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize("is_early", [False, True], ids=["known to each other", "before they know each other"])
def test_nodes_that_load_together_read_storage_once(
    tmp_path: Path, extents, reads: Reads, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    # Of 100 bytes, times say nothing of bandwidth: storage that happens to look faster is not read by all.
    monkeypatch.setattr("cluster.peers.sources.STORAGE_MARGIN", math.inf)
    monkeypatch.setattr("cluster.peers.link.OPEN_WITHIN_S", WAIT_S)
    directory = SharedRegistry()
    if is_early:
        directory.may_answer.clear()
    nodes = [
        NodeKeeper(
            str(tmp_path),
            1000,
            f"n{index}",
            KeeperSettings(audit_bytes_per_s=0),
            store=FakeStore(),
            directory=directory,
        )
        for index in range(8)
    ]
    try:
        if not is_early:
            wait_until(lambda: all(node.stats().address for node in nodes))
        wanted = list(extents.values())[:5]
        with ThreadPoolExecutor(len(nodes)) as threads:
            acquiring = [threads.submit(node.acquire, wanted, "w") for node in nodes]
            if is_early:
                wait_until(lambda: all(leases_of(node, extent.id) for node in nodes for extent in wanted))
                directory.may_answer.set()
            acquired = [found.result(WAIT_S) for found in acquiring]
        for found in acquired:
            assert {id_: ref.array.tobytes() for id_, ref in found.refs.items()} == {
                extent.id: (tmp_path / extent.pack).read_bytes() for extent in wanted
            }
        assert sum(node.stats().read_bytes for node in nodes) == sum(extent.nbytes for extent in wanted)
        assert reads.counts == {extent.id: 1 for extent in wanted}
    finally:
        for node in nodes:
            node.close()


def siblings_in(tmp_path: Path) -> tuple[ExtentRef, ExtentRef, bytes]:
    """Return a base, a sibling that is stored as its delta alone, and the sibling's plain bytes."""
    base = np.random.randint(0, 256, 50_000, dtype=np.uint8)
    tuned = np.where(np.random.rand(50_000) < 0.05, 7, base).astype(np.uint8)
    segment = Segment(50_000, 2, 0)
    delta = encode_header([segment]) + encode_chunk(tuned, 2, base)
    refs = {}
    for name, data in (("base", base.tobytes()), ("deltas", delta)):
        (tmp_path / name).write_bytes(data)
        checksum = xxhash.xxh3_128_hexdigest(data)
        refs[name] = ExtentRef(id=name, pack=name, offset=0, nbytes=len(data), checksum=checksum)
    place = refs["deltas"].model_dump(exclude={"id"})
    checksum = xxhash.xxh3_128_hexdigest(tuned.tobytes())
    found = DeltaRef(**place, codec=CODEC, bases=(refs["base"],))
    sibling = ExtentRef(id="sibling", pack="deltas", offset=0, nbytes=50_000, checksum=checksum, delta=found)
    return refs["base"], sibling, tuned.tobytes()


def test_a_sibling_comes_from_its_delta_and_the_base_that_is_here(
    tmp_path: Path, keeper: Make, store: FakeStore
) -> None:
    """The base of a delta that nobody has in memory is read as well; what is evicted under a reader stays readable."""
    base, sibling, tuned = siblings_in(tmp_path)
    assert sibling.delta
    made = keeper(200_000)
    leased = made.acquire([sibling], "me")
    assert leased.refs["sibling"].array.tobytes() == tuned
    assert leased.report is not None
    assert leased.report.stages["read"].nbytes == sibling.delta.nbytes + 50_000
    made.release(["sibling"], "me")
    made.drop(["sibling"])
    del leased
    with pytest.raises(ExtentCorrupt) as failed:
        made.acquire([sibling.model_copy(update={"checksum": "0" * 32})], "me")
    assert store.written() is None  # nor does the error keep its memory
    assert "delta of extent sibling" in str(failed.value)
    made.acquire([base], "me")
    (tmp_path / "base").unlink()  # nothing of it is read
    leased = made.acquire([sibling], "me")
    assert leased.refs["sibling"].array.tobytes() == tuned
    assert leased.report is not None
    assert leased.report.stages["read"].nbytes == sibling.delta.nbytes


@pytest.mark.parametrize(
    ("has_base", "has_pack", "gbps"),
    [(True, True, 0.01), (True, True, 100.0), (True, False, 0.01), (False, True, 0.01)],
)
def test_a_node_sends_the_delta_of_what_it_has_to_one_that_has_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_base: bool, has_pack: bool, gbps: float
) -> None:
    """A delta is sent where that is sooner, and otherwise the plain bytes. The second node lacks the store's folder."""
    monkeypatch.setattr("cluster.peers.known_sources.KnownSources.peer_gbps", lambda self, address: gbps)
    base, sibling, tuned = siblings_in(tmp_path)
    assert sibling.delta
    directory, settings = SharedRegistry(), KeeperSettings(audit_bytes_per_s=0)
    nodes = [
        NodeKeeper(str(folder), 200_000, str(folder), settings, store=FakeStore(), directory=directory)
        for folder in (tmp_path, tmp_path / "not here")
    ]
    try:
        wait_until(lambda: all(node.stats().address for node in nodes))
        nodes[0].acquire([base, sibling], "w")
        wait_until(lambda: all(directory.holders(extent.id) for extent in (base, sibling)))
        if has_base:
            nodes[1].acquire([base], "w")
            wait_until(lambda: nodes[0].stats().served_bytes == 50_000)
        if not has_pack:
            (tmp_path / "deltas").unlink()
        acquired = nodes[1].acquire([sibling], "w")
        assert acquired.refs["sibling"].array.tobytes() == tuned
        assert acquired.report is not None
        assert acquired.report.sources == {"peer": 50_000}
        is_sent = has_base and has_pack and gbps < 1
        sent_bytes = sibling.delta.nbytes if is_sent else 50_000
        wait_until(lambda: nodes[0].stats().served_bytes == 50_000 * has_base + sent_bytes)
        assert ("decode" in acquired.report.stages) == is_sent
    finally:
        for node in nodes:
            node.close()


def test_a_damaged_copy_is_a_detour_to_the_next_peer_and_its_node_reads_it_again(
    keeper: Make, extents: dict[str, ExtentRef], tmp_path: Path
) -> None:
    """One node of three has written to its shared memory, and one has no way to storage."""
    asked: list[str] = []

    class Directory:
        """All that the first two nodes hold is offered, the damaged one first."""

        def peer_secret(self) -> bytes:
            return b"s" * 32

        def report_residency(self, *report: Any) -> None: ...

        def locate(self, node: str, question: Question, load: int) -> Located:
            asked.append(node)
            offered = [PeerOffer(PeerAddress.parse(str(one.stats().address)), "n") for one in (damaged, sound)]
            return Located(offers=dict.fromkeys(question.ids, offered) if node == "third" else {}, claimed=question.ids)

    directory: Any = Directory()
    damaged, sound = (keeper(directory=directory, store=FakeStore(), audit_bytes_per_s=1e12) for _ in range(2))
    wait_until(lambda: damaged.stats().address and sound.stats().address)
    for one in (damaged, sound):
        one.acquire([extents["a"], extents["b"]], "w")
        one.release(["a", "b"], "w")
    given = damaged.acquire([extents["a"]], "w").refs["a"]
    given.array[3] ^= 1
    third = NodeKeeper(
        str(tmp_path / "absent"), 1000, "third", KeeperSettings(), store=FakeStore(), directory=directory
    )
    try:
        found = third.acquire([extents["a"], extents["b"]], "w").refs
        assert {id_: ref.array.tobytes() for id_, ref in found.items()} == {
            id_: (tmp_path / id_).read_bytes() for id_ in "ab"
        }
        assert asked.count("third") < 5  # nobody was avoided for so long that it had to ask again and again
        wait_until(lambda: damaged.stats().corrupt == ("a",))
        assert damaged.acquire([extents["a"]], "x").refs["a"].array.tobytes() == (tmp_path / "a").read_bytes()
        assert sound.stats().num_corrupt == 0
    finally:
        third.close()


def test_a_mistake_in_a_loading_thread_is_told_to_who_waits_and_the_next_load_goes_on(
    keeper: Make, extents: dict[str, ExtentRef], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = keeper()
    with monkeypatch.context() as broken:
        broken.setattr(node.reading.loader._queue, "next_step", lambda now_s: {}["ghost"])
        with pytest.raises(KeyError, match="ghost"):
            node.acquire([extents["a"]], "w")
    assert "an extent could not be loaded" in caplog.text
    assert xxhash.xxh3_128_hexdigest(node.acquire([extents["a"]], "w").refs["a"].array) == extents["a"].checksum
