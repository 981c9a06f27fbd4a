"""Leases that are called back: the keeper asks for what replicas only keep, and ends those that do not answer."""

from __future__ import annotations

import gc
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import xxhash
from kit.seeding import seeded_random
from kit.waiting import wait_until
from unit.cluster.keeper.local_keeper import ActorHandle, FakeStore, Ref, User, ray_get

from cluster.keeper.actor import KeeperSettings, NodeKeeper
from cluster.keeper.ray_extents import RayExtents
from cluster.keeper.recalls import ANSWER_WITHIN_S
from cluster.keeper.records import HeldExtent, Recall, RecallAnswer
from cluster.process.processes import ProcessMark
from weights.records.errors import BudgetExceeded
from weights.records.manifest import ExtentRef

WAIT_S = 10.0
EXTENT_BYTES = 100
BUDGET_BYTES = 300


@pytest.fixture
def extents(tmp_path: Path) -> dict[str, ExtentRef]:
    found = {}
    for id_ in "abcdef":
        data = np.random.default_rng(ord(id_)).integers(0, 256, EXTENT_BYTES, np.uint8).tobytes()
        (tmp_path / id_).write_bytes(data)
        checksum = xxhash.xxh3_128_hexdigest(data)
        found[id_] = ExtentRef(id=id_, pack=id_, offset=0, nbytes=EXTENT_BYTES, checksum=checksum)
    return found


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeKeeper]:
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", ray_get)
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.is_initialized", lambda: True)
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 3600.0)
    monkeypatch.setattr("cluster.keeper.actor.RECALL_POLL_S", 0.05)
    node = NodeKeeper(
        str(tmp_path), BUDGET_BYTES, "node", KeeperSettings(audit_bytes_per_s=0, max_wait_s=5.0), store=FakeStore()
    )
    yield node
    node.close()


class Replica:
    """A client that keeps what it releases, and what was made of it: `made` by name, over extents; `busy` is in use."""

    def __init__(self, node: NodeKeeper, extents: dict[str, ExtentRef], holder: str) -> None:
        self.handle = ActorHandle(node)
        self.client = RayExtents(self.handle, holder, User(self.on_damage, self.on_recall))
        self.recalls: list[tuple[tuple[str, ...], bool]] = []
        self.damaged: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self._extents = extents

    def use(self, ids: str) -> dict[str, Any]:
        return dict(self.client.fetch([self._extents[id_] for id_ in ids]))

    def leave(self, ids: str) -> None:
        self.client.release([self._extents[id_] for id_ in ids])

    def on_recall(self, ids: Sequence[str], is_overdue: bool) -> None:
        self.recalls.append((tuple(ids), is_overdue))
        assert self.gate.wait(WAIT_S)

    def on_damage(self, ids: Sequence[str]) -> None:
        self.damaged += ids


@pytest.fixture
def replica(node: NodeKeeper, extents: dict[str, ExtentRef]) -> Iterator[Callable[[str], Replica]]:
    made: list[Replica] = []

    def make(holder: str) -> Replica:
        made.append(Replica(node, extents, holder))
        return made[-1]

    yield make
    for one in made:
        one.client.close()
    for one in made:
        if one.client._ear:
            one.client._ear.join(WAIT_S)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def listening(node: NodeKeeper, *holders: str) -> None:
    wait_until(lambda: all(holder in node.memory.held._book.recalls for holder in holders))


def resident(node: NodeKeeper) -> str:
    return "".join(sorted(extent.id for extent in node.residents()))


def test_what_is_kept_is_used_again_without_asking(node, replica) -> None:
    one = replica("one")
    views = one.use("ab")
    one.leave("ab")
    one.client._keeper = None  # nobody to ask
    assert one.use("ab")["a"] is views["a"]
    one.client._keeper = one.handle
    assert node.stats().holders == {"one": 200}
    listening(node, "one")
    assert (node.stats().leased_bytes, node.stats().callable_bytes) == (200, 200)


def test_room_is_made_of_what_is_only_kept(node, replica) -> None:
    one, two = replica("one"), replica("two")
    one.use("abc")
    one.leave("abc")
    listening(node, "one")
    start_s = time.monotonic()
    two.use("de")
    assert time.monotonic() - start_s < ANSWER_WITHIN_S
    assert len(one.recalls) == 1
    assert node.stats().resident_bytes <= BUDGET_BYTES
    assert set("de") < set(resident(node))
    assert node.stats().num_recalled == 2
    assert node.stats().holders == {"one": 100, "two": 200}
    two.leave("de")
    listening(node, "two")
    one.use("abc")
    assert (resident(node), node.stats().holders) == ("abc", {"one": 300})


def test_a_call_that_cannot_be_sent_ends_no_listening(node, replica, monkeypatch) -> None:
    one, two = replica("one"), replica("two")
    sent, sound = threading.Event(), one.client.wait_for_recall

    def refuse(answer: RecallAnswer | None) -> Any:
        if not sent.is_set():
            sent.set()
            raise RuntimeError("Ray sends nothing just now")
        return sound(answer)

    monkeypatch.setattr(one.client, "wait_for_recall", refuse)
    one.use("abc")
    one.leave("abc")
    assert sent.wait(WAIT_S)
    listening(node, "one")
    two.use("de")
    assert node.stats().num_recalled == 2


def test_the_least_popular_is_called_back_first_and_uses_of_kept_extents_count(node, replica, extents) -> None:
    one, two = replica("one"), replica("two")
    for id_ in "abc":
        one.use(id_)
        one.leave(id_)
    for _ in range(3):
        one.client.note_uses([extents["a"]])
    one.use("b")
    one.leave("b")
    one.client.beat()
    listening(node, "one")
    two.use("d")
    assert [ids for ids, _ in one.recalls] == [("c",)]
    two.use("e")
    assert [ids for ids, _ in one.recalls] == [("c",), ("b",)]
    assert {found.id: found.hits for found in node.residents(["a"])} == {"a": 4}


def test_what_is_in_use_is_not_given_back_until_it_is_released(node, replica, pool) -> None:
    one, two = replica("one"), replica("two")
    one.use("abc")
    listening(node, "one")
    waiting = pool.submit(two.use, "d")
    wait_until(lambda: bool(one.recalls))
    assert not waiting.done()
    (called, _), *_ = one.recalls
    one.leave(called[0])
    waiting.result(1.0)  # at once: the next heartbeat is an hour away
    assert called[0] not in resident(node)
    assert node.stats().resident_bytes == BUDGET_BYTES


def test_after_a_while_the_use_of_what_is_wanted_is_overdue(node, replica, pool) -> None:
    one, two = replica("one"), replica("two")
    one.use("abc")
    listening(node, "one")
    waiting = pool.submit(two.use, "d")
    wait_until(lambda: any(is_overdue for _, is_overdue in one.recalls))
    one.leave("abc")
    waiting.result(WAIT_S)


def test_what_is_called_back_is_not_taken_again_before_who_waits_for_it(node, replica, pool) -> None:
    one, two = replica("one"), replica("two")
    one.use("ab")
    two.use("c")
    listening(node, "one", "two")
    waiting = pool.submit(two.use, "de")  # beside c, which is in use: a or b has to go, then both
    wait_until(lambda: {id_ for ids, _ in one.recalls for id_ in ids} == {"a", "b"})
    again = pool.submit(one.use, "ab")
    time.sleep(0.05)
    assert not again.done()
    one.leave("ab")
    assert set(waiting.result(WAIT_S)) == {"d", "e"}
    two.leave("c")
    assert not again.done()
    two.leave("de")
    assert set(again.result(WAIT_S)) == {"a", "b"}


def test_who_lives_and_does_not_answer_keeps_its_memory(node, replica, pool) -> None:
    """It is not scheduled, perhaps: what it has mapped is in memory whatever the keeper counts."""
    silent, other = replica("silent"), replica("other")
    silent.use("abc")
    silent.leave("abc")
    listening(node, "silent")
    silent.gate.clear()
    waiting = pool.submit(other.use, "de")
    wait_until(lambda: node.memory.held._book.recalls._lines["silent"].is_timed_out)
    assert not waiting.done()
    assert node.stats().holders == {"silent": 300}
    silent.gate.set()
    assert set(waiting.result(WAIT_S)) == {"d", "e"}
    assert node.memory.held.residents.used_bytes == BUDGET_BYTES
    silent.use("a")
    listening(node, "silent", "other")
    assert node.stats().holders == {"silent": 100, "other": 200}


def test_room_is_made_of_what_others_keep_when_one_does_not_answer(node, replica) -> None:
    silent, quick, other = replica("silent"), replica("quick"), replica("other")
    silent.use("ab")
    silent.leave("ab")
    for _ in range(9):
        quick.use("c")
        quick.leave("c")
    listening(node, "silent", "quick")
    silent.gate.clear()
    start_s = time.monotonic()
    other.use("d")  # a or b is worth less
    assert time.monotonic() - start_s >= ANSWER_WITHIN_S
    assert (resident(node), node.stats().holders) == ("abd", {"silent": 200, "other": 100})
    silent.gate.set()


def test_who_has_died_does_not_answer_and_keeps_nothing(node, replica) -> None:
    dead, other = replica("dead"), replica("other")
    with subprocess.Popen(["sleep", "60"]) as process:
        dead.client._process = ProcessMark(process.pid, psutil.Process(process.pid).create_time())
        dead.use("abc")
        dead.leave("abc")
        listening(node, "dead")
        dead.gate.clear()
        process.kill()
    other.use("de")
    assert "dead" not in node.stats().holders
    assert node.memory.held.residents.used_bytes <= BUDGET_BYTES
    dead.gate.set()


def test_no_room_is_made_in_a_full_store_of_what_a_silent_replica_has(node, replica) -> None:
    silent, other = replica("silent"), replica("other")
    silent.use("ab")
    silent.leave("ab")
    listening(node, "silent")
    silent.gate.clear()
    node.memory.store.num_full = 10**9
    node.memory.held._max_wait_s = 0.6  # longer than an answer may take
    with pytest.raises(BudgetExceeded, match=r"leased by: .*silent \(200 bytes\)"):
        other.use("c")
    assert node.stats().holders == {"silent": 200}
    silent.gate.set()


def test_what_a_replica_is_still_getting_is_not_called_back(node, replica, pool, monkeypatch) -> None:
    one, two = replica("one"), replica("two")
    read_into, gate, polls = node.reading.loader._reader.read_into, threading.Event(), []

    def read_late(extent: ExtentRef, *rest: Any) -> None:
        assert extent.id != "b" or gate.wait(WAIT_S)
        read_into(extent, *rest)

    monkeypatch.setattr(node.reading.loader._reader, "read_into", read_late)
    take_recall = node.memory.held._book.recalls.take_recall
    monkeypatch.setattr(
        node.memory.held._book.recalls, "take_recall", lambda *poll: polls.append(take_recall(*poll)) or polls[-1]
    )
    one.use("c")
    one.leave("c")
    listening(node, "one")
    getting = pool.submit(one.use, "ab")
    wait_until(lambda: "a" in resident(node))
    waiting = pool.submit(two.use, "de")
    wait_until(lambda: node.stats().num_waiting == 1)
    num_polls = len(polls)
    wait_until(lambda: len(polls) > num_polls + 5)
    assert set(polls) == {Recall()}
    assert not waiting.done()
    gate.set()
    getting.result(WAIT_S)
    one.leave("ab")
    assert set(waiting.result(WAIT_S)) == {"d", "e"}


@pytest.mark.parametrize("epoch", ["its own", "another"])
def test_what_a_replica_says_nothing_of_is_not_asked_for_again_at_once(node, extents, pool, epoch: str) -> None:
    """The answer that gave it the lease is on its way, or the offer that makes the lease one of this epoch."""
    acquired = node.acquire([extents[id_] for id_ in "abc"], "late")
    answer = RecallAnswer((), acquired.generation if epoch == "its own" else "another-1")
    recalls: list[Recall] = []
    node.memory.held._max_wait_s = 1.0
    node.next_recall("late")
    waiting = pool.submit(node.acquire, [extents["d"]], "other")
    while not waiting.done():
        recalls.append(node.next_recall("late", answer))
    with pytest.raises(BudgetExceeded, match=r"leased by: late \(300 bytes\)"):
        waiting.result()
    assert 1 <= sum(bool(recall.ids) for recall in recalls) < 8
    assert node.stats().num_recalled == 0


def test_a_dead_holder_ends_its_poll(node, replica) -> None:
    node.memory.held.holders.end("never heard of")
    polling: Future[Recall] = Future()
    threading.Thread(
        target=lambda: polling.set_result(node.memory.held.holders.next_recall("dies", None, None, WAIT_S)), daemon=True
    ).start()
    listening(node, "dies")
    node.memory.held.holders.end("dies")
    assert polling.result(WAIT_S) == Recall()
    assert "dies" not in node.memory.held._book.recalls


def test_a_newer_poll_ends_the_one_before(node) -> None:
    polls: list[Recall] = []
    first = threading.Thread(target=lambda: polls.append(node.memory.held.holders.next_recall("r", None, None, WAIT_S)))
    first.start()
    listening(node, "r")
    node.memory.held.holders.next_recall("r", None, None, 0.01)
    first.join(WAIT_S)
    assert polls == [Recall()]


def test_an_answer_of_another_life_changes_nothing(node, replica, extents) -> None:
    one = replica("one")
    one.use("ab")
    answer = RecallAnswer(("a", "b"), "another-1")
    epoch = node._epoch(answer.generation)
    assert epoch is None
    node.memory.held.holders.next_recall("one", answer, epoch, 0.0)
    assert node.stats().holders == {"one": 200}


def test_kept_extents_are_adopted_by_the_next_keeper_and_called_back_by_it(node, replica, tmp_path: Path) -> None:
    one, two = replica("one"), replica("two")
    one.use("ab")
    one.leave("ab")
    after = NodeKeeper(str(tmp_path), BUDGET_BYTES, "node", KeeperSettings(audit_bytes_per_s=0), store=FakeStore())
    for client in (one, two):
        client.handle.actor = after
    one.client.beat()
    assert after.stats().holders == {"one": 200}
    listening(after, "one")
    two.use("cd")
    assert after.stats().resident_bytes == BUDGET_BYTES
    assert after.stats().holders == {"one": 100, "two": 200}
    assert after.stats().adopted_bytes == 200
    after.close()


def test_what_is_dropped_is_called_back(node, replica) -> None:
    one = replica("one")
    one.use("abc")
    one.leave("ab")
    listening(node, "one")
    node.drop(["a", "c"])
    wait_until(lambda: resident(node) == "bc" or node.drop(["a"]) == ["a"])
    assert node.stats().holders == {"one": 200}


def test_a_damaged_copy_is_not_used_again_and_not_kept(node, replica) -> None:
    one = replica("one")
    views = one.use("ab")
    one.leave("a")
    views["a"][50] ^= 1
    node.memory.audit.round()
    one.client.beat()
    assert one.damaged == ["a"]
    assert node.stats().holders == {"one": 100}  # the damaged copy, which nobody used, was given back
    fresh = one.use("a")
    assert fresh["a"] is not views["a"]
    assert node.stats().holders == {"one": 200}


def test_leases_that_are_never_called_back_are_waited_for_and_named(node, replica, extents, pool) -> None:
    node.acquire([extents["a"], extents["b"], extents["c"]], "held")
    one = replica("one")
    node.memory.held._max_wait_s = 0.2
    with pytest.raises(BudgetExceeded, match="leased by: held"):
        one.use("d")


def test_what_was_called_back_is_free_without_a_collection(node, replica) -> None:
    one, two = replica("one"), replica("two")
    one.use("abc")
    one.leave("abc")
    listening(node, "one")
    gc.collect()
    gc.disable()
    try:
        gone = [weakref.ref(node.memory.held.residents.held(id_).ref.array) for id_ in "abc"]  # type: ignore[union-attr]
        two.use("def")
        wait_until(lambda: not any(ref() is not None for ref in gone))
    finally:
        gc.enable()


def test_many_switches_of_two_replicas_never_exceed_the_budget_and_end(node, replica, pool) -> None:
    one, two = replica("one"), replica("two")
    longest_s = [0.0]
    over: list[int] = []

    def switch(client: Replica, models: Sequence[str]) -> None:
        for number in range(60):
            ids = models[number % len(models)]
            start_s = time.monotonic()
            client.use(ids)
            longest_s[0] = max(longest_s[0], time.monotonic() - start_s)
            used = node.memory.held.residents.used_bytes
            if used > BUDGET_BYTES:
                over.append(used)
            client.leave(ids)

    for done in [pool.submit(switch, one, ["abc", "cd"]), pool.submit(switch, two, ["def", "ab"])]:
        done.result(60.0)
    assert over == []
    assert longest_s[0] < 1.0
    assert node.stats().num_recalled > 0


def test_a_keeper_is_after_many_switches_what_it_was_after_some(
    node: NodeKeeper, replica: Callable[[str], Replica]
) -> None:
    """All that it notes of requests, leases, recalls and evictions ends with them: it runs for months."""
    replicas, chosen = [replica("one"), replica("two")], seeded_random()

    def num_objects_after(num_switches: int) -> int:
        for _ in range(num_switches):
            one, ids = chosen.choice(replicas), "".join(chosen.sample("abcdef", 2))
            one.use(ids)
            one.leave(ids)
            one.client.beat()
            one.recalls.clear()
        node.memory.store.used_bytes.clear()  # type: ignore[attr-defined]  # the fake's own notes
        gc.collect()
        return len(gc.get_objects())

    before = num_objects_after(60)
    num_evicted, num_recalled = node.stats().num_evicted, node.stats().num_recalled
    after = num_objects_after(240)
    assert node.stats().num_evicted > num_evicted + 120
    assert node.stats().num_recalled > num_recalled + 60
    assert after - before < 120  # one object for every other switch; outdated places in a heap are fewer


def test_an_empty_extent_is_held_called_back_and_gone_like_any_other(node, replica, tmp_path: Path, extents) -> None:
    (tmp_path / "0").touch()
    extents["0"] = ExtentRef(id="0", pack="0", offset=0, nbytes=0, checksum=xxhash.xxh3_128_hexdigest(b""))
    one, two = replica("one"), replica("two")
    assert one.use("0")["0"].nbytes == 0
    one.leave("0")
    for id_ in "abc":  # nothing else is from storage
        data = np.fromfile(tmp_path / id_, np.uint8)
        node.memory.held.holders.adopt(HeldExtent(extents[id_], Ref(data), data, "adopted"), "one", 1)
    node.release(["a", "b", "c"], "one")
    listening(node, "one")
    two.use("de0")
    two.leave("de0")
    assert node.stats().resident_bytes <= BUDGET_BYTES
    wait_until(lambda: node.drop(["0"]) == ["0"] or "0" not in resident(node))
    node.set_budget(0)
    wait_until(lambda: node.stats().resident_bytes == 0)
