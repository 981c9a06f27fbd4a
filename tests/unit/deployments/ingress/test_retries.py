"""Requests whose replica dies: asked again once, one suspect at a time, so that each takes two replicas at most."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from kit.seeding import seeded_rng
from kit.streams import stream_pieces
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import ReplicaUnavailableError
from unit.deployments.serve_fakes import FakeHandle

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import Demand
from configs.admission import AdmissionConfig
from deployments.ingress.messages.terms import WORKER
from deployments.ingress.service.retries import LONGEST_PAUSE_S, MAX_MISSED, ResumedImages, RetriedCalls, _Retries
from deployments.records import ImageProgress
from deployments.records.errors import CannotLoad, DeadlineExceeded, ReplicaLost
from deployments.records.tasks import Deadline
from deployments.replicas.replica_calls import ReplicaCalls

LONG_S = 30.0


class Workers:
    """`num_workers` processes that hold requests until `full` of them are there or `let_go` was called. A request for
    "poison" kills its process as soon as that happens; all in flight there hear of it, and the next process is fresh.
    """

    def __init__(self, num_workers: int, full: int) -> None:
        self.num_deaths = 0
        self.answers: list[Any] = []
        self._full = full
        self._rng = seeded_rng()
        self._inside: list[set[Any]] = [set() for _ in range(num_workers)]
        self._died = [asyncio.Event() for _ in range(num_workers)]
        self._changed = asyncio.Condition()
        self.is_open = False

    async def on_work(self, name: Any) -> Any:
        place = int(self._rng.integers(len(self._inside)))
        inside, died = self._inside[place], self._died[place]
        inside.add(name)
        try:
            async with self._changed:
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self.is_open or died.is_set() or len(inside) >= self._full)
            await asyncio.sleep(0)
            if name == "poison" and not died.is_set():
                self.num_deaths += 1
                died.set()
                self._inside[place], self._died[place] = set(), asyncio.Event()
                async with self._changed:
                    self._changed.notify_all()
            await asyncio.sleep(0)
            if died.is_set():
                raise ActorDiedError
        finally:
            inside.discard(name)
        self.answers.append(name)
        return name

    async def on_pieces(self, name: Any) -> AsyncIterator[Any]:
        yield await self.on_work(name)


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.service.retries.PAUSE_S", 0.0)


def ask(timeout_s: float = LONG_S) -> Demand:
    return Demand(WORKER, "m", 1.0, 0.01, 1, "default", timeout_s)


def calls_of(workers: Any) -> RetriedCalls:
    queue = Dispatcher(AdmissionConfig())
    queue.set_replicas(WORKER, [""])
    return RetriedCalls(ReplicaCalls(FakeHandle(workers)), queue, LONG_S)


async def whole(calls: RetriedCalls, name: Any, timeout_s: float = LONG_S) -> Any:
    return await calls.call("work", name, demand=ask(timeout_s))


async def streamed(calls: RetriedCalls, name: Any) -> Any:
    async with stream_pieces(calls, "pieces", name, demand=ask()) as pieces:
        (piece,) = [piece async for piece in pieces]
        return piece


class StepWorker:
    """Does steps, with a checkpoint every so many, and dies once after `dies_after` steps. With one it goes on."""

    def __init__(self, dies_after: int, checkpoint_steps: int) -> None:
        self.steps: list[int] = []
        self._dies_after = dies_after
        self._checkpoint_steps = checkpoint_steps

    async def on_images(self, num_steps: int, checkpoint: bytes | None = None) -> AsyncIterator[Any]:
        for step in range(int(checkpoint or b"0") + 1, num_steps + 1):
            self.steps.append(step)
            saved = str(step).encode() if self._checkpoint_steps and step % self._checkpoint_steps == 0 else None
            yield ImageProgress(step, num_steps, checkpoint=saved)
            if len(self.steps) == self._dies_after:
                raise ActorDiedError
        yield "images"


@pytest.mark.parametrize(
    ("dies_after", "checkpoint_steps", "steps"),
    [
        (7, 3, [1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 10]),
        (8, 3, [1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 9, 10]),
        (2, 3, [1, 2, *range(1, 11)]),
        (10, 0, [*range(1, 11), *range(1, 11)]),
        (9, 9, [*range(1, 11)]),
    ],
)
async def test_steps_go_on_after_the_last_checkpoint(dies_after: int, checkpoint_steps: int, steps: list[int]) -> None:
    worker = StepWorker(dies_after, checkpoint_steps)
    queue = Dispatcher(AdmissionConfig())
    queue.set_replicas(WORKER, [""])
    calls = RetriedCalls(ReplicaCalls(FakeHandle(worker)), queue, LONG_S)
    async with stream_pieces(calls, "images", 10, demand=ask(), resumption=ResumedImages()) as pieces:
        found = [piece async for piece in pieces]
    assert [piece.step for piece in found[:-1]] == list(range(1, 11)), "each step is told once"
    assert found[-1] == "images"
    assert worker.steps == steps


async def test_a_replica_that_dies_behind_its_result_has_answered() -> None:
    num_asked = 0

    class Dying:
        async def on_images(self, num_steps: int, checkpoint: bytes | None = None) -> AsyncIterator[Any]:
            nonlocal num_asked
            num_asked += 1
            yield ImageProgress(num_steps, num_steps)
            yield "images"
            raise ActorDiedError

    calls = calls_of(Dying())
    async with stream_pieces(calls, "images", 3, demand=ask(), resumption=ResumedImages()) as pieces:
        found = [piece async for piece in pieces]
    assert (found[-1], len(found), num_asked) == ("images", 2, 1)


async def test_an_image_that_is_handed_over_goes_on_however_often_and_is_no_suspect() -> None:
    given: list[bytes | None] = []

    class Moving:
        async def on_images(self, num_steps: int, checkpoint: bytes | None = None) -> AsyncIterator[Any]:
            given.append(checkpoint)
            step = int(checkpoint or b"0")
            for later in range(step + 1, min(step + 2, num_steps) + 1):
                yield ImageProgress(later, num_steps)
            if step + 2 < num_steps:
                yield ImageProgress(step + 2, num_steps, checkpoint=str(step + 2).encode(), is_moved=True)
            else:
                yield "images"

    calls = calls_of(Moving())
    await calls._suspects.acquire()  # suspects would wait for it
    async with (
        asyncio.timeout(10),
        stream_pieces(calls, "images", 9, demand=ask(), resumption=ResumedImages()) as pieces,
    ):
        found = [piece async for piece in pieces]
    assert [piece.step for piece in found[:-1]] == list(range(1, 10))
    assert not any(piece.is_moved for piece in found[:-1])
    assert found[-1] == "images"
    assert given == [None, b"2", b"4", b"6", b"8"]


@pytest.mark.parametrize("ask", [whole, streamed])
@pytest.mark.parametrize("num_workers", [1, 3])
async def test_a_poison_request_takes_two_workers_and_innocents_are_all_answered(
    ask: Callable[..., Any], num_workers: int
) -> None:
    workers = Workers(num_workers, full=8)
    calls = calls_of(workers)
    names = [*range(30), "poison"]
    workers._rng.shuffle(names)  # type: ignore[arg-type]
    asking = {name: asyncio.create_task(ask(calls, name)) for name in names}

    async def open_when_it_has_struck() -> None:
        while not workers.num_deaths:
            await asyncio.sleep(0)
        workers.is_open = True

    opening = asyncio.create_task(open_when_it_has_struck())
    if num_workers > 1:
        workers.is_open = True  # it may be alone where it is
    async with asyncio.timeout(10):
        outcomes = await asyncio.gather(*asking.values(), return_exceptions=True)
        await opening
    by_name = dict(zip(asking, outcomes, strict=True))
    assert workers.num_deaths == 2
    lost = by_name.pop("poison")
    assert isinstance(lost, ReplicaLost)
    assert str(lost) == "2 replicas were lost while they worked on this request"
    assert by_name == {name: name for name in by_name}


async def test_innocents_do_not_wait_for_suspects() -> None:
    workers = Workers(1, full=2)
    calls = calls_of(workers)
    first = [asyncio.create_task(whole(calls, name)) for name in ("poison", "a")]
    while not workers.num_deaths:
        await asyncio.sleep(0)
    for task in first:
        task.cancel()
    await asyncio.gather(*first, return_exceptions=True)
    workers.is_open = True
    async with asyncio.timeout(5):
        assert await whole(calls, "b") == "b"


async def test_a_suspect_waits_for_its_turn_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it hangs. Their time passes only when both are where they have to wait."""

    class Hanging:
        num_asked = 0
        hangs = asyncio.Event()

        async def on_work(self, name: str) -> None:
            self.num_asked += 1
            if self.num_asked <= 2:
                raise ActorDiedError
            self.hangs.set()
            await asyncio.Event().wait()

    loop, passed_s = asyncio.get_running_loop(), 0.0
    now_s = loop.time
    monkeypatch.setattr(loop, "time", lambda: now_s() + passed_s)
    replica = Hanging()
    calls = calls_of(replica)
    asking = [asyncio.create_task(whole(calls, name, LONG_S / 2)) for name in "ab"]
    await replica.hangs.wait()
    passed_s = LONG_S / 2
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 2
    assert replica.num_asked == 3


async def test_a_suspect_that_takes_long_holds_the_others_up_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ingress.service.retries.MAX_TURN_WAIT_S", 0.02)

    class Long:
        def __init__(self) -> None:
            self.died: set[str] = set()
            self.gate = asyncio.Event()

        async def on_work(self, name: str) -> str:
            if name not in self.died:
                self.died.add(name)
                raise ActorDiedError
            if name == "long":
                await self.gate.wait()
            return name

    replica = Long()
    calls = calls_of(replica)
    long = asyncio.create_task(whole(calls, "long"))
    others = [asyncio.create_task(whole(calls, name)) for name in "abc"]
    async with asyncio.timeout(5):
        assert await asyncio.gather(*others) == ["a", "b", "c"]
    assert not long.done()
    replica.gate.set()
    assert await long == "long"
    async with asyncio.timeout(5):
        replica.died.clear()
        assert await whole(calls, "d") == "d"  # whose turn it was has given it back


def with_its_node() -> ActorDiedError:
    """As Ray tells of a replica whose node it has found dead."""
    told = "The actor died because its node has died. Node Id: 0x1"
    return ActorDiedError(ActorDiedErrorContext(actor_id=bytes(16), error_message=told))


@pytest.mark.parametrize(
    ("error", "is_evidence"),
    [
        (ActorDiedError(), True),
        (ActorUnavailableError("x", None), True),
        (ReplicaUnavailableError("a"), False),
        (with_its_node(), False),
    ],
    ids=str,
)
def test_only_a_replica_that_died_by_itself_is_evidence_against_a_request(
    error: Exception, is_evidence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.ingress.service.retries.PAUSE_S", 0.1)
    retries = _Retries()
    pauses = [retries.pause_after(error)]
    assert retries.is_suspect == is_evidence
    if is_evidence:
        with pytest.raises(ReplicaLost, match="2 replicas were lost"):
            retries.pause_after(error)
        return
    pauses += [retries.pause_after(error) for _ in range(MAX_MISSED - 1)]
    assert pauses[0] > 0
    assert pauses == sorted(pauses)
    assert pauses[-1] <= LONGEST_PAUSE_S
    with pytest.raises(ReplicaLost, match=f"no replica could be reached in {MAX_MISSED + 1} tries"):
        retries.pause_after(error)


def test_a_suspect_that_reaches_no_replica_stays_one() -> None:
    retries = _Retries()
    for error in (ReplicaUnavailableError("a"), ActorDiedError(), ReplicaUnavailableError("b"), with_its_node()):
        retries.pause_after(error)
    assert retries.is_suspect
    with pytest.raises(ReplicaLost, match="2 replicas were lost"):
        retries.pause_after(ActorDiedError())


@pytest.mark.parametrize("ask", [whole, streamed])
async def test_a_cut_that_heals_costs_no_request(ask: Callable[..., Any]) -> None:
    """All that an ingress has under way is lost, and for a while it reaches nobody: each is answered, none alone."""

    class Cut:
        num_tries = 0

        async def on_work(self, name: int) -> int:
            self.num_tries += 1
            if self.num_tries <= 100:
                raise ReplicaUnavailableError("behind the cut")
            return name

        async def on_pieces(self, name: int) -> AsyncIterator[int]:
            yield await self.on_work(name)

    calls = calls_of(Cut())
    await calls._suspects.acquire()  # suspects would wait for it
    async with asyncio.timeout(10):
        assert await asyncio.gather(*(ask(calls, number) for number in range(10))) == list(range(10))


def test_what_has_gone_out_is_not_begun_anew() -> None:
    with pytest.raises(ReplicaLost, match="died after 3 pieces"):
        _Retries().pause_after(ActorDiedError(), 3)


async def test_a_retry_does_not_begin_after_the_requests_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"deployments.ingress.service.retries.{name}", LONG_S)
    num_tries = 0

    async def send() -> None:
        nonlocal num_tries
        num_tries += 1
        raise ActorDiedError

    with pytest.raises(DeadlineExceeded):
        await calls_of(object()).answered(send, Deadline(0.005))
    assert num_tries == 1


class Loading:
    """The replicas by name, of which some cannot load "m". `asked` are those that were."""

    def __init__(self, *unable: str) -> None:
        self.unable = set(unable)
        self.asked: list[str] = []

    def options(self, *, stream: bool, session_id: str = "") -> FakeHandle:
        return FakeHandle(LoadingReplica(self, session_id), _stream=stream)


class LoadingReplica:
    """One of them."""

    def __init__(self, all_: Loading, name: str) -> None:
        self._all = all_
        self._name = name

    async def on_work(self, model: str) -> str:
        self._all.asked.append(self._name)
        if model == "m" and self._name in self._all.unable:
            raise CannotLoad(f"{self._name} cannot read it", "model")
        return self._name

    async def on_pieces(self, model: str, num_before: int = 0) -> AsyncIterator[str]:
        for _ in range(num_before):
            yield "piece"
        yield await self.on_work(model)


def loading_calls(loading: Loading) -> RetriedCalls:
    queue = Dispatcher(AdmissionConfig())
    queue.set_replicas(WORKER, ["a", "b", "c"])
    return RetriedCalls(ReplicaCalls(loading), queue, LONG_S)


@pytest.mark.parametrize("kind", ["call", "stream"])
async def test_what_one_replica_cannot_load_is_asked_of_another_and_other_models_still_come(kind: str) -> None:
    loading = Loading("a")
    calls, ask_it = loading_calls(loading), whole if kind == "call" else streamed
    assert await ask_it(calls, "m") == "b"
    assert loading.asked == ["a", "b"]
    assert await ask_it(calls, "m") in ("b", "c")  # it is not tried there again at once
    assert await calls.call("work", "n", demand=replace(ask(), model="n")) == "a"


async def test_a_request_moves_once_and_every_failure_is_remembered() -> None:
    loading = Loading("a", "b")
    calls = loading_calls(loading)
    with pytest.raises(CannotLoad, match="b cannot read it"):
        await whole(calls, "m")
    assert await whole(calls, "m") == "c"
    assert loading.asked == ["a", "b", "c"]


async def test_where_no_replica_is_left_the_reason_is_told() -> None:
    loading = Loading("a", "b", "c")
    calls = loading_calls(loading)
    for _ in range(2):
        with pytest.raises(CannotLoad, match="cannot read it"):
            await whole(calls, "m")
    assert set(loading.asked) == {"a", "b", "c"}


async def test_a_stream_that_has_begun_does_not_move() -> None:
    loading = Loading("a")
    with pytest.raises(CannotLoad):
        async with stream_pieces(loading_calls(loading), "pieces", "m", 1, demand=ask()) as pieces:
            assert [piece async for piece in pieces] == ["piece"]
    assert loading.asked == ["a"]
