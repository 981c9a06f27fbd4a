"""Who has died is told once; who is only slow to answer lives."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray

from cluster.keeping.holder_watch import ActorPing, HolderWatch


def test_the_dead_are_told_once() -> None:
    dead: list[str] = []
    alive = {"a": True, "b": True}
    watch = HolderWatch(dead.append, interval_s=3600)
    for holder in alive:
        watch.watch(holder, lambda holder=holder: alive[holder])
    watch.check()
    assert dead == []
    alive["b"] = False
    watch.check()
    watch.check()
    assert dead == ["b"]
    watch.close()


def test_who_cannot_be_asked_is_dead_after_a_time_of_silence() -> None:
    now_s, dead = 0.0, list[str]()
    watch = HolderWatch(dead.append, interval_s=3600, silence_s=60, clock=lambda: now_s)
    for holder in ("driver", "gone", "replica"):
        watch.heard(holder)
    watch.watch("replica", lambda: True)
    now_s = 40.0
    watch.heard("driver")
    watch.check()
    assert dead == []
    now_s = 61.0
    watch.check()
    watch.check()
    assert dead == ["gone"]
    watch.heard("replica")  # of one that is watched, silence means nothing
    now_s = 200.0
    watch.check()
    assert dead == ["gone", "driver"]
    watch.close()


def test_the_watch_runs_by_itself_and_survives_a_ping_that_fails() -> None:
    heard = threading.Event()
    watch = HolderWatch(lambda holder: heard.set(), interval_s=0.001)
    answers = iter([RuntimeError("cannot ask"), False])

    def ping() -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch.watch("a", ping)
    assert heard.wait(10)
    watch.close()


class FakeActor:
    """Answers are given when they are put there; an exception is one too."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.__ray_ready__ = self

    def remote(self) -> int:
        self.num_asked += 1
        return self.num_asked


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    found: dict[int, Any] = {}

    def get(ref: int) -> Any:
        if isinstance(found[ref], Exception):
            raise found[ref]
        return found[ref]

    def wait(refs: list[int], timeout: float) -> Any:
        assert timeout == 0
        return [ref for ref in refs if ref in found], [ref for ref in refs if ref not in found]

    monkeypatch.setattr("cluster.keeping.holder_watch.ray.get", get)
    monkeypatch.setattr("cluster.keeping.holder_watch.ray.wait", wait)
    return found


def test_an_actor_lives_until_it_is_known_to_be_dead(answers: dict[int, Any]) -> None:
    actor = FakeActor()
    ping = ActorPing(actor)
    assert ping()
    assert ping()
    assert actor.num_asked == 1  # a busy one is not asked again and again
    answers |= {1: True, 2: ray.exceptions.ActorUnavailableError("a connection was lost", None)}
    assert [ping() for _ in range(4)] == [True, True, True, True]
    answers[actor.num_asked] = ray.exceptions.ActorDiedError()
    assert not ping()
