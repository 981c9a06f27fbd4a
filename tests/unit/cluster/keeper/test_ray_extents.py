"""The replica's side of a keeper that dies: offers what it holds, asks again, never counts a lease twice."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from kit.waiting import wait_until
from unit.cluster.keeper.local_keeper import Ref, User, fail_with, ray_get

from cluster.keeper.ray_extents import RayExtents
from cluster.keeper.records import Greeting, HeldOffer, LeasedRefs, Recall, RecallAnswer
from cluster.process.processes import ProcessMark
from cluster.records.errors import KeeperFailed
from weights.records.errors import BudgetExceeded
from weights.records.manifest import ExtentRef

WAIT_S = 10.0


def extents(ids: str) -> list[ExtentRef]:
    return [ExtentRef(id=id_, pack=id_, offset=0, nbytes=1, checksum="0" * 32) for id_ in ids]


class FakeKeeper:
    """An actor that runs calls at once. `die` is a new life that knows nothing; what it cannot map it does not have."""

    def __init__(self) -> None:
        self.life = 0
        self.leases: Counter[str] = Counter()
        self.adopted: list[dict[str, int]] = []
        self.wanted_bytes = 0
        self.before: list[Callable[[], None]] = []
        self.num_copies = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self, f"on_{name}")

        class Call:
            @staticmethod
            def remote(*arguments: Any) -> Any:
                try:
                    found = method(*arguments)
                except Exception as error:
                    return fail_with(error)
                return lambda: found

        return Call

    def die(self) -> None:
        self.life += 1
        self.leases.clear()

    def on_acquire(self, extents: Sequence[ExtentRef], holder: str) -> LeasedRefs:
        if self.before:
            self.before.pop(0)()
        self.leases.update(extent.id for extent in extents)
        self.num_copies += 1
        refs = {extent.id: Ref(f"{extent.id}{self.num_copies}") for extent in extents}
        return LeasedRefs(refs, None, str(self.life))

    def on_release(self, ids: Sequence[str], holder: str, generation: str) -> None:
        if generation == str(self.life):
            self.leases -= Counter(ids)

    def on_adopt(self, holder: str, offers: Sequence[HeldOffer]) -> str:
        self.adopted.append({offer.extent.id: offer.num_leases for offer in offers})
        self.leases.update(self.adopted[-1])
        return str(self.life)

    def on_hello(self, holder: str, process: ProcessMark, uses: Mapping[str, int]) -> Greeting:
        assert process == ProcessMark.this()
        return Greeting(str(self.life), self.wanted_bytes)


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> FakeKeeper:
    def get(found: Any, timeout: float | None = None) -> Any:
        return ray_get(found)

    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", get)
    monkeypatch.setattr("cluster.keeper.ray_extents.RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 3600.0)
    return FakeKeeper()


def test_leases_are_counted_as_the_keeper_counts_them(keeper: FakeKeeper) -> None:
    replica = RayExtents(keeper, "r")
    assert list(replica.fetch(extents("ab"))) == ["a", "b"]
    replica.fetch(extents("a"))
    assert keeper.leases == {"a": 2, "b": 1}
    assert keeper.adopted == [{}]  # the first meeting
    replica.release(extents("ab"))
    replica.release(extents("a"))
    assert +keeper.leases == Counter()


def test_a_restarted_keeper_is_told_what_is_leased(keeper: FakeKeeper) -> None:
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("ab"))
    replica.fetch(extents("a"))
    replica.beat()
    keeper.die()
    replica.beat()
    replica.beat()
    assert keeper.adopted == [{}, {"a": 2, "b": 1}]
    keeper.die()
    replica.fetch(extents("c"))  # whatever comes first finds out
    assert keeper.adopted[-1] == {"a": 2, "b": 1}
    assert keeper.leases == {"a": 2, "b": 1, "c": 1}
    for ids in ("abc", "a"):
        replica.release(extents(ids))
    assert +keeper.leases == Counter()


def test_a_call_that_died_with_the_keeper_is_made_again(keeper: FakeKeeper) -> None:
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("a"))

    def die() -> None:
        keeper.die()
        raise ray.exceptions.ActorDiedError()

    keeper.before = [die, fail_with(ray.exceptions.ActorUnavailableError("not back yet", None))]
    replica.fetch(extents("b"))
    assert keeper.adopted == [{}, {"a": 1}]
    assert keeper.leases == {"a": 1, "b": 1}


def test_a_keeper_in_place_of_one_that_is_gone_for_good_is_found_and_told(keeper: FakeKeeper) -> None:
    second = FakeKeeper()
    second.life = 7
    found: list[Any] = [KeeperFailed("the keeper of node n cannot start: no disk"), second, second]

    def connect() -> Any:
        taken = found.pop(0)
        if isinstance(taken, Exception):
            raise taken
        return taken

    replica = RayExtents(keeper, "r", User(connect=connect))
    replica.fetch(extents("a"))
    for method in ("hello", "acquire"):
        setattr(keeper, f"on_{method}", lambda *_: fail_with(ray.exceptions.ActorDiedError())())
    with pytest.raises(KeeperFailed, match="no disk"):
        replica.fetch(extents("b"))  # said at once: a minute of trying would not bring it back
    replica.beat()
    replica.beat()
    assert second.adopted == [{"a": 1}]
    replica.fetch(extents("b"))
    assert second.leases == {"a": 1, "b": 1}


def test_bytes_that_went_with_the_keeper_are_asked_for_again(keeper: FakeKeeper, monkeypatch: Any) -> None:
    replica = RayExtents(keeper, "r")
    get, lost = ray.get, [ray.exceptions.OwnerDiedError("0" * 28, None, "")]

    def get_or_lose(found: Any, timeout: float | None = None) -> Any:
        if isinstance(found, list) and lost:
            raise lost.pop()
        return get(found, timeout=timeout)

    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", get_or_lose)
    assert replica.fetch(extents("a")) == {"a": "a2"}
    assert keeper.leases == {"a": 1}


def test_what_is_given_back_while_it_is_offered_is_not_leased_for_ever(keeper: FakeKeeper) -> None:
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("ab"))
    keeper.die()
    adopt = keeper.on_adopt

    def release_meanwhile(holder: str, offers: Sequence[HeldOffer]) -> str:
        with ThreadPoolExecutor(1) as other:
            other.submit(replica.release, extents("a")).result(WAIT_S)
        return adopt(holder, offers)

    keeper.on_adopt = release_meanwhile  # type: ignore[method-assign]
    replica.beat()
    assert +keeper.leases == {"b": 1}


def test_an_answer_of_the_life_before_is_not_recorded_in_the_new_one(keeper: FakeKeeper) -> None:
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("a"))
    acquire = keeper.on_acquire

    def late(found: Sequence[ExtentRef], holder: str) -> LeasedRefs:
        keeper.on_acquire = acquire  # type: ignore[method-assign]
        acquired = acquire(found, holder)
        keeper.die()
        replica.beat()  # the heartbeat finds out before the answer is here
        return acquired

    keeper.on_acquire = late  # type: ignore[method-assign]
    replica.fetch(extents("b"))
    assert keeper.leases == {"a": 1, "b": 1}


def test_the_keepers_own_errors_come_through(keeper: FakeKeeper) -> None:
    keeper.before = [fail_with(BudgetExceeded("does not fit"))]
    with pytest.raises(BudgetExceeded, match="does not fit"):
        RayExtents(keeper, "r").fetch(extents("a"))


def test_the_heart_stops_with_its_replica(keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.keeper.ray_extents.HEARTBEAT_S", 0.001)
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.is_initialized", lambda: True)
    beating = threading.Event()
    hello = keeper.on_hello

    def heard(holder: str, process: ProcessMark, uses: Mapping[str, int]) -> Greeting:
        beating.set()
        return hello(holder, process, uses)

    keeper.on_hello = heard  # type: ignore[method-assign]
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("a"))
    assert beating.wait(WAIT_S)
    heart = replica._heart
    assert heart is not None
    del replica
    heart.join(WAIT_S)
    assert not heart.is_alive()


def lost_answers(keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch, methods: set[str]) -> list[str]:
    """Let the first call of each method have no answer: the keeper dies of it. Return those that were waited for."""
    waited: list[str] = []

    class Lost:
        def __init__(self, method: str) -> None:
            self.method = method

    def get(found: Any, timeout: float | None = None) -> Any:
        if isinstance(found, Lost):
            assert timeout is not None, "an unbounded wait"
            waited.append(found.method)
            raise ray.exceptions.GetTimeoutError
        return ray_get(found)

    real = FakeKeeper.__getattr__

    def call(self: FakeKeeper, name: str) -> Any:
        if name not in methods:
            return real(self, name)
        methods.remove(name)

        class Call:
            @staticmethod
            def remote(*_: Any) -> Any:
                self.die()
                return Lost(name)

        return Call

    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", get)
    monkeypatch.setattr(FakeKeeper, "__getattr__", call)
    return waited


def test_a_call_whose_keeper_was_replaced_is_made_again_though_nobody_says_that_it_died(
    keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("a"))
    waited = lost_answers(keeper, monkeypatch, {"acquire"})
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(replica.fetch, extents("b"))
        wait_until(lambda: len(waited) > 2, "a wait that goes on while nothing is known")
        assert not fetched.done()
        replica.beat()  # the heartbeat finds another keeper
        assert list(fetched.result(WAIT_S)) == ["b"]
    assert keeper.leases == {"a": 1, "b": 1}


def test_recalls_are_heard_of_a_keeper_that_was_replaced_though_nobody_says_that_it_died(
    keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.keeper.ray_extents.ray.is_initialized", lambda: True)
    recalled, has_met = threading.Event(), threading.Event()

    def next_recall(holder: str, answer: RecallAnswer | None) -> Recall:
        if has_met.is_set():
            return Recall(("a",))
        has_met.wait(WAIT_S)
        return Recall()

    keeper.on_next_recall = next_recall  # type: ignore[attr-defined]
    replica = RayExtents(keeper, "r", User(on_recall=lambda *_: recalled.set()))
    replica.fetch(extents("a"))  # begins to listen
    waited = lost_answers(keeper, monkeypatch, {"next_recall"})
    has_met.set()
    wait_until(lambda: len(waited) > 2, "a wait that goes on while nothing is known")
    replica.beat()
    assert recalled.wait(WAIT_S)
    replica.close()


def test_a_meeting_with_a_keeper_that_is_replaced_meanwhile_ends_though_nobody_says_that_it_died(
    keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("a"))
    keeper.die()
    waited = lost_answers(keeper, monkeypatch, {"adopt"})
    replica.beat()
    assert waited == ["adopt"]
    assert keeper.leases == {}
    replica.beat()
    assert keeper.leases == {"a": 1}
    keeper.die()
    lost_answers(keeper, monkeypatch, {"hello"})
    assert list(replica.fetch(extents("b"))) == ["b"]  # it meets the keeper that has answered, and then another one
    assert keeper.leases == {"a": 1, "b": 1}


def test_a_keeper_that_is_slow_to_adopt_is_waited_for_and_adopts_once(
    keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("a"))
    num_late = {str: 3, Greeting: 2}  # so many looks come before the answers to `adopt`, and to `hello` meanwhile
    get = ray.get

    def get_late(found: Any, timeout: float | None = None) -> Any:
        answer = get(found, timeout=timeout)
        if num_late.get(type(answer)) and (isinstance(answer, str) or not replica.generation):
            assert timeout is not None, "an unbounded wait"
            num_late[type(answer)] -= 1
            raise ray.exceptions.GetTimeoutError
        return answer

    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", get_late)
    keeper.die()
    replica.beat()
    assert num_late == {str: 0, Greeting: 0}
    assert keeper.adopted == [{}, {"a": 1}]
    assert keeper.leases == {"a": 1}
    monkeypatch.setattr("cluster.keeper.ray_extents.RETRY_FOR_S", -1.0)
    num_late |= {str: 9, Greeting: 9}
    keeper.die()
    replica.beat()  # one that says nothing is not waited for without end
    assert num_late == {str: 8, Greeting: 8}
    assert replica.generation == ""


def test_leases_of_a_call_that_was_made_again_are_given_back_when_its_answer_comes(
    keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent to the keeper before, waited for the next one, and took long there."""
    replica = RayExtents(keeper, "r")
    replica.fetch(extents("a"))
    keeper.die()
    get, has_come, late = ray.get, False, []

    def get_late(found: Any, timeout: float | None = None) -> Any:
        answer = get(found, timeout=timeout)
        if isinstance(answer, LeasedRefs) and (not late or found in late) and not has_come:
            if not late:
                late.append(found)
                replica.beat()  # the heartbeat finds the keeper that the call is waiting for
            raise ray.exceptions.GetTimeoutError
        return answer

    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", get_late)
    replica.fetch(extents("b"))
    replica.beat()
    assert keeper.leases == {"a": 1, "b": 2}
    has_come = True
    replica.beat()
    replica.beat()
    assert keeper.leases == {"a": 1, "b": 1}


def test_threads_that_beat_at_once_give_the_leases_of_lost_calls_back_once(
    keeper: FakeKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch beats, too: while it looks at the first lost call, the heart takes the second one."""
    replica = RayExtents(keeper, "r")
    replica.beat()
    get, asked, has_come, hearts = ray.get, list[Any](), False, list[threading.Thread]()

    def get_lost(found: Any, timeout: float | None = None) -> Any:
        answer = get(found, timeout=timeout)
        if isinstance(answer, LeasedRefs) and found not in asked:
            asked.append(found)
            if len(asked) % 2:  # the first try of each fetch
                raise ray.exceptions.ActorUnavailableError("not reached", None)
        elif isinstance(answer, LeasedRefs) and not has_come:
            raise ray.exceptions.GetTimeoutError
        elif isinstance(answer, LeasedRefs) and not hearts:
            hearts.append(threading.Thread(target=replica.beat))
            hearts[0].start()
            hearts[0].join(WAIT_S)
        return answer

    monkeypatch.setattr("cluster.keeper.ray_extents.ray.get", get_lost)
    for id_ in "ab":
        replica.fetch(extents(id_))
    replica.beat()
    assert keeper.leases == {"a": 2, "b": 2}
    has_come = True
    replica.beat()
    assert keeper.leases == {"a": 1, "b": 1}
    replica.beat()
    assert keeper.leases == {"a": 1, "b": 1}
