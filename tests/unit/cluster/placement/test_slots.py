"""The slots of several ingresses: none is used twice, none is lost, whoever dies whenever.

The controller's handle is as Ray's: arguments and answers are copies, calls begin in their order, one whose caller has
gone runs on, and those of an actor that died end with RayActorError. Time is the loop's own: it passes when nothing
else can.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import pickle
import random
import selectors
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError, RayActorError

from cluster.admission.dispatcher import Dispatcher, NotAdmitted
from cluster.admission.records import Demand
from cluster.placement import slot_book
from cluster.placement.reports import SlotReport
from cluster.placement.serving.link import SLOT_REPORT_S, QueuesAway, SlotLink
from cluster.placement.serving.slot_desk import SlotDesk
from cluster.placement.slot_book import SILENT_S, SLOT_REST_S
from cluster.process.processes import ProcessMark
from cluster.process.ray_calls import NamedActor
from configs.admission import AdmissionConfig

POOL = "worker"
REPLICAS = ("a", "b")
SHARE = 0.25
CAPACITY = round(len(REPLICAS) / SHARE)
RESTART_S = 1.0
NO_PROCESS = ProcessMark(0, 0.0)  # which nobody sees


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(_TimelessSelector(self))

    def time(self) -> float:
        return self.now_s


class _TimelessSelector(selectors.DefaultSelector):
    def __init__(self, loop: TimelessLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            assert timeout is not None, "nothing will ever happen"
            self._loop.now_s += timeout
        return events


async def in_no_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Stand in for `asyncio.to_thread`: no time passes while a thread works, and a clock that jumps would not wait."""
    return function(*arguments)


def in_no_time(work: Coroutine[Any, Any, Any]) -> Any:
    with patch("asyncio.to_thread", in_no_thread), asyncio.Runner(loop_factory=TimelessLoop) as runner:
        return runner.run(asyncio.wait_for(work, 3600))


class FakeActor:
    """The controller's slots as Ray runs them, with restarts; `handle_of` returns what `connect` returns."""

    def __init__(self, jitter_s: Callable[[], float] = lambda: 0.001) -> None:
        self._jitter_s = jitter_s
        self._calls: set[asyncio.Task[Any]] = set()
        self.desk: SlotDesk | None = None
        self.num_calls: Counter[str] = Counter()
        self.loses: Callable[[], bool] = lambda: False  # a call or its answer, on the way

    async def start(self) -> None:
        self.desk = SlotDesk()

    async def crash(self) -> None:
        """Kill it; Ray starts it anew."""
        self.kill()
        await asyncio.sleep(RESTART_S)
        await self.start()

    def kill(self) -> None:
        if self.desk is not None:
            self.desk.close()
        self.desk = None
        for call in list(self._calls):
            call.cancel()

    def handle_of(self, is_alive: Callable[[], bool] = lambda: True) -> Any:
        """Return a handle of a process, whose calls begin only as long as it lives."""

        class Handle:
            def __getattr__(_, method: str) -> Any:
                return SimpleNamespace(remote=lambda *arguments: self._remote(method, arguments, is_alive))

        return Handle()

    def _remote(self, method: str, arguments: tuple[Any, ...], is_alive: Callable[[], bool]) -> Awaitable[Any]:
        self.num_calls[method] += 1
        sent = pickle.loads(pickle.dumps(arguments))
        task = asyncio.ensure_future(self._run(method, sent, is_alive))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(task: asyncio.Task[Any]) -> None:
            if answer.done():
                task.cancelled() or task.exception()
            elif task.cancelled():
                answer.set_exception(RayActorError())
            elif error := task.exception():
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        task.add_done_callback(done)
        return answer

    async def _run(self, method: str, sent: tuple[Any, ...], is_alive: Callable[[], bool]) -> Any:
        if not is_alive():
            raise asyncio.CancelledError
        await asyncio.sleep(0.001)  # the way there keeps the order
        if self.desk is None or self.loses():
            raise ActorUnavailableError("The actor is restarting", None)
        named = {"retune_queues": self.desk.retune}.get(method) or getattr(self.desk, method)
        answer = pickle.loads(pickle.dumps(await named(*sent)))
        await asyncio.sleep(self._jitter_s())
        if self.loses():
            raise ActorUnavailableError("The connection is gone", None)
        return answer


def ask(**fields: Any) -> Demand:
    values: dict[str, Any] = {"pool": POOL, "model": "m", "work": 1.0, "share": SHARE, "priority": 2}
    return Demand(**(values | {"tenant": "default", "deadline_s": math.inf} | fields))


class Ingress:
    """An ingress: its requests run in `running`, by replica, until they are answered or it dies."""

    def __init__(
        self,
        actor: FakeActor,
        running: Counter[str],
        process: ProcessMark = NO_PROCESS,
        config: AdmissionConfig | None = None,
    ) -> None:
        self.is_alive = True
        clock = asyncio.get_running_loop().time
        self.queue = Dispatcher(config or AdmissionConfig(), clock, num_sharing=2)
        self.queue.set_replicas(POOL, REPLICAS)
        self.link = SlotLink(
            uuid.uuid4().hex, self.queue, NamedActor(lambda: actor.handle_of(lambda: self.is_alive)), process
        )
        self.link.start()
        self.running = running
        self.tasks: set[asyncio.Task[str]] = set()

    def begin(self, service_s: float, **fields: Any) -> asyncio.Task[str]:
        task = asyncio.ensure_future(self._request(service_s, ask(**fields)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _request(self, service_s: float, asked: Demand) -> str:
        ticket = self.queue.submit(asked)
        is_answered = False
        try:
            replica = await self.queue.slot(ticket)
            self.running[replica] += asked.share
            assert self.running[replica] < 1 + 1e-6, "more requests run than there are slots"
            try:
                await asyncio.sleep(service_s)
                is_answered = True
            finally:
                self.running[replica] -= asked.share
            return replica
        finally:
            if self.is_alive:
                self.queue.leave(ticket, is_answered=is_answered)

    def owned(self) -> dict[str, float]:
        """Return the slots that it owns, in shares by replica."""
        return {name: use.limit for name, use in self.queue.parts.claims(self.queue.now_s())[POOL].replicas.items()}

    def kill(self) -> None:
        """Die: nothing more is sent, and what runs ends."""
        self.is_alive = False
        self.link.close()
        for task in list(self.tasks):
            task.cancel()


async def started(config: AdmissionConfig | None = None, num: int = 2) -> tuple[FakeActor, Counter[str], list[Ingress]]:
    actor = FakeActor()
    await actor.start()
    running: Counter[str] = Counter()
    ingresses = [Ingress(actor, running, config=config) for _ in range(num)]
    await asyncio.sleep(2 * SILENT_S)
    return actor, running, ingresses


async def numbers(*ingresses: Ingress) -> tuple[int, int]:
    """Return how many requests wait and run."""
    models = [load for ingress in ingresses for load in (await ingress.queue.snapshot()).models]
    return sum(load.waiting for load in models), sum(load.running for load in models)


def test_two_ingresses_share_the_slots_and_use_all_of_them() -> None:
    async def scenario() -> None:
        _, running, ingresses = await started()
        tasks = [ingress.begin(1.0) for _ in range(20) for ingress in ingresses]
        most = 0.0
        begin_s = asyncio.get_running_loop().time()
        while not all(task.done() for task in tasks):
            most = max(most, running.total())
            await asyncio.sleep(0.01)
        assert most == pytest.approx(len(REPLICAS))
        assert asyncio.get_running_loop().time() - begin_s < 1.1 * len(tasks) / CAPACITY
        assert {task.result() for task in tasks} == set(REPLICAS)
        assert await numbers(*ingresses) == (0, 0)

    in_no_time(scenario())


def test_an_ingress_with_slots_starts_at_once_and_a_burst_costs_few_calls() -> None:
    async def scenario() -> None:
        actor, _, (one, _) = await started()
        begin_s = asyncio.get_running_loop().time()
        ticket = one.queue.submit(ask())
        await one.queue.slot(ticket)
        assert asyncio.get_running_loop().time() == begin_s
        one.queue.leave(ticket)
        before = actor.num_calls.total()
        await asyncio.gather(*(one.begin(0.0) for _ in range(500)))
        assert actor.num_calls.total() - before < 50

    in_no_time(scenario())


def test_slots_that_another_one_does_not_need_come_within_two_round_trips() -> None:
    async def scenario() -> None:
        _, running, (one, other) = await started()
        begin_s = asyncio.get_running_loop().time()
        for _ in range(CAPACITY):
            one.begin(100.0)
        while running.total() < len(REPLICAS):
            await asyncio.sleep(0.001)
        # 0.004 are two round trips; some wait for the gap between two reports or splits
        assert asyncio.get_running_loop().time() - begin_s < 0.02
        late = other.begin(0.0)
        await asyncio.sleep(1.0)
        assert not late.done()

    in_no_time(scenario())


def test_one_slot_goes_back_and_forth_between_ingresses_by_who_waits_longest() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        many = [one.begin(0.5, share=1.0) for _ in range(20)]
        await asyncio.sleep(0.6)
        few = [other.begin(0.5, share=1.0) for _ in range(3)]
        begin_s = asyncio.get_running_loop().time()
        await asyncio.gather(*few)
        # One queue would end those that came before, 18 on two replicas, and then these.
        took_s = asyncio.get_running_loop().time() - begin_s
        assert took_s < 0.5 * (18 / 2 + 2) + 0.5
        await asyncio.gather(*many)
        assert asyncio.get_running_loop().time() - begin_s < 0.5 * 22 / 2 + 1.0

    in_no_time(scenario())


def test_bounds_hold_for_all_ingresses_together() -> None:
    async def scenario() -> None:
        _, _, ingresses = await started(AdmissionConfig(max_waiting_per_model=6))
        tasks = [ingress.begin(10.0) for _ in range(20) for ingress in ingresses]
        await asyncio.sleep(1.0)
        refused = [task.exception() for task in tasks if task.done()]
        assert len(refused) == len(tasks) - CAPACITY - 6
        assert all(isinstance(error, NotAdmitted) and error.refusal.reason == "model_full" for error in refused)
        assert await numbers(*ingresses) == (6, CAPACITY)

    in_no_time(scenario())


def test_bounds_follow_those_who_ask() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started(AdmissionConfig(max_waiting_per_model=40))
        for _ in range(100):
            one.begin(100.0)
        await asyncio.sleep(0.5)
        tasks = [one.begin(100.0) for _ in range(100)]
        await asyncio.sleep(0.5)
        waiting, _ = await numbers(one)
        assert 30 <= waiting <= 36  # half of a quarter stays for the other one
        assert any(task.done() for task in tasks)
        for _ in range(10):
            other.begin(100.0)
        await asyncio.sleep(0)
        assert (await numbers(other))[0] == 5

    in_no_time(scenario())


def test_tenants_of_different_ingresses_share_by_weight() -> None:
    async def scenario() -> None:
        config = AdmissionConfig.model_validate({"tenants": {"x": {"weight": 3}, "y": {}}, "max_overtakes": 10_000})
        _, _, (one, other) = await started(config)
        xs = [one.begin(1.0, tenant="x") for _ in range(100)]
        ys = [other.begin(1.0, tenant="y") for _ in range(100)]
        await asyncio.sleep(10.5)
        num_x, num_y = sum(task.done() for task in xs), sum(task.done() for task in ys)
        assert 2.2 < num_x / num_y < 4

    in_no_time(scenario())


def test_the_more_urgent_of_two_ingresses_goes_first_and_the_other_one_is_not_overtaken_for_ever() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started(AdmissionConfig(max_overtakes=16))
        urgent = [one.begin(1.0, priority=1) for _ in range(200)]
        await asyncio.sleep(0.5)
        late = [other.begin(1.0, priority=3) for _ in range(2)]
        await late[0]
        num_before = sum(task.done() for task in urgent)
        assert 16 <= num_before < 16 + 4 * CAPACITY
        await late[1]
        assert sum(task.done() for task in urgent) < 2 * (16 + 4 * CAPACITY)

    in_no_time(scenario())


def test_a_request_for_a_whole_replica_gets_one() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        small = [one.begin(1.0) for _ in range(80)]
        await asyncio.sleep(0.5)
        begin_s = asyncio.get_running_loop().time()
        await other.begin(0.5, share=1.0)
        assert asyncio.get_running_loop().time() - begin_s < 80 / CAPACITY + 1.0
        await asyncio.gather(*small)

    in_no_time(scenario())


def test_a_dead_ingress_gives_back_what_it_had_within_two_seconds() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        for _ in range(CAPACITY + 10):
            one.begin(1e4)
        await asyncio.sleep(0.5)
        assert await numbers(one) == (10, CAPACITY)
        one.kill()
        begin_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(other.begin(0.0) for _ in range(CAPACITY)))
        assert asyncio.get_running_loop().time() - begin_s < 2.0
        await asyncio.sleep(0.5)
        assert other.owned() == dict.fromkeys(REPLICAS, 1.0)

    in_no_time(scenario())


def test_at_rest_nothing_is_split_or_sent_and_the_first_request_starts_at_once() -> None:
    async def scenario() -> None:
        actor, _, ingresses = await started(num=3)
        few, many, _ = ingresses
        for ingress, num in ((few, 10), (many, 60)):
            await asyncio.gather(*(ingress.begin(0.1) for _ in range(num)))
        await asyncio.sleep(60.0)  # what came of late has faded
        owned = [ingress.owned() for ingress in ingresses]
        before = Counter(actor.num_calls)
        with patch.object(slot_book, "split_pool", wraps=slot_book.split_pool) as split, no_news(actor):
            await asyncio.sleep(30.0)
        calls = actor.num_calls - before
        # One report and one question of each in the time of rest; a report is looked at when it comes, and at a tick.
        num_reports = 3 * 30.0 / SLOT_REST_S
        assert 0.8 * num_reports < calls["report_slots"] <= num_reports
        assert calls["receive_slots"] <= num_reports
        assert split.call_count <= 2 * num_reports
        assert [ingress.owned() for ingress in ingresses] == owned
        begin_s = asyncio.get_running_loop().time()
        held = [ingress.begin(100.0) for ingress in ingresses if sum(ingress.owned().values()) >= SHARE]
        await asyncio.sleep(0)
        assert (await numbers(*ingresses)) == (0, len(held))
        for _ in range(CAPACITY - len(held)):  # what others have at rest comes as quickly as ever
            few.begin(100.0)
        while (await numbers(*ingresses))[1] < CAPACITY:
            await asyncio.sleep(0.001)
        assert asyncio.get_running_loop().time() - begin_s < 0.02

    in_no_time(scenario())


@contextlib.contextmanager
def no_news(actor: FakeActor) -> Iterator[None]:
    """Fail unless every ingress has the same split after the block as before."""
    assert actor.desk is not None
    book = actor.desk._book
    before = {name: book.split_of(name) for name in book.names}
    yield
    assert {name: book.split_of(name) for name in book.names} == before


def test_an_ingress_that_dies_at_rest_gives_back_what_it_had() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        await asyncio.sleep(10 * SLOT_REST_S)
        assert sum(one.owned().values()) > 0
        one.kill()
        begin_s = asyncio.get_running_loop().time()
        for _ in range(CAPACITY):
            other.begin(100.0)
        await asyncio.sleep(0)
        assert (await numbers(other))[1] > 0  # its own are at hand meanwhile
        while (await numbers(other))[1] < CAPACITY:
            await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - begin_s < SILENT_S + SLOT_REST_S + 0.5

    in_no_time(scenario())


def test_a_controller_that_was_replaced_hears_at_once_of_ingresses_at_rest() -> None:
    async def scenario() -> None:
        actor, _, ingresses = await started()
        await asyncio.sleep(10 * SLOT_REST_S)
        owned = [ingress.owned() for ingress in ingresses]
        with patch.object(SlotLink, "rest_s", math.inf):  # it is not that they tell again
            await actor.crash()
            await asyncio.sleep(2 * SLOT_REPORT_S)
        assert actor.desk is not None
        assert sorted(actor.desk._book.names) == sorted(ingress.link.name for ingress in ingresses)
        await asyncio.sleep(2 * SILENT_S)
        assert [ingress.owned() for ingress in ingresses] == owned

    in_no_time(scenario())


def test_slots_stay_where_they_are_while_the_controller_is_away() -> None:
    async def scenario() -> None:
        actor, _, ingresses = await started()
        long = [ingress.begin(20.0) for _ in range(CAPACITY // 2 - 1) for ingress in ingresses]
        await asyncio.sleep(0.5)
        before = [ingress.owned() for ingress in ingresses]
        actor.kill()
        await asyncio.sleep(0.5)
        with pytest.raises(QueuesAway):
            await ingresses[0].link.snapshot()
        begin_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(ingress.begin(1.0) for _ in range(5) for ingress in ingresses))
        assert asyncio.get_running_loop().time() - begin_s < 5 * 1.05  # one slot each was free: five rounds
        assert [ingress.owned() for ingress in ingresses] == before
        await actor.start()
        await asyncio.sleep(1.0)
        assert [ingress.owned() for ingress in ingresses] == before  # it does not know enough yet
        hungry = [ingresses[0].begin(0.1) for _ in range(10)]
        await asyncio.sleep(1.5)
        assert all(task.done() for task in hungry)
        await asyncio.gather(*long)

    in_no_time(scenario())


def test_an_ingress_that_stood_still_starts_nothing_before_it_knows_what_is_still_its_own() -> None:
    async def scenario() -> None:
        _, running, (one, other) = await started()
        one.link.close()
        await asyncio.sleep(SILENT_S + SLOT_REST_S + 0.5)  # the other one has all slots now
        taken = [other.begin(5.0) for _ in range(CAPACITY)]
        await asyncio.sleep(0.1)
        assert running.total() == len(REPLICAS)
        late = one.begin(0.0)
        await asyncio.sleep(0.1)
        assert sum(one.owned().values()) > 0  # as far as it knows
        assert not late.done()
        one.link.start()
        await asyncio.gather(*taken)
        await late

    in_no_time(scenario())


def test_an_ingress_that_stalls_keeps_its_slots_for_as_long_as_its_process_is_seen_to_run() -> None:
    """On one machine, that is: elsewhere nobody can tell a process that is busy from one that is gone."""

    async def scenario(process: ProcessMark) -> tuple[float, float]:
        actor, running, (other,) = await started(num=1)
        stalled = Ingress(actor, running, process=process)
        await asyncio.sleep(2 * SILENT_S)
        for _ in range(3):
            stalled.begin(100.0)
        await asyncio.sleep(0.5)
        stalled.link.close()
        await asyncio.sleep(5.0)
        kept = len(REPLICAS) - sum(other.owned().values())
        await asyncio.sleep(10.0)  # as good as gone
        return kept > 0, len(REPLICAS) - sum(other.owned().values())

    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process_of:
        process = psutil.Process(process_of.pid)
        running = ProcessMark(process.pid, process.create_time())
        assert in_no_time(scenario(running)) == (True, 0)
        assert in_no_time(scenario(ProcessMark.this())) == (True, 0)
        earlier = running._replace(started_s=running.started_s - 100)  # had the number before
        assert in_no_time(scenario(earlier)) == (False, 0)
        process_of.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert in_no_time(scenario(running)) == (False, 0)
    assert in_no_time(scenario(running)) == (False, 0)


def test_settings_hold_everywhere() -> None:
    async def scenario() -> None:
        actor, running, ingresses = await started()
        changed = AdmissionConfig(max_waiting_per_model=3, default_priority=1)
        await ingresses[0].link.retune(changed)
        assert [ingress.queue.config for ingress in ingresses] == [changed, changed]
        ingresses.append(Ingress(actor, running))
        await asyncio.sleep(0.5)
        assert ingresses[2].queue.config == changed
        await actor.crash()
        await asyncio.sleep(2 * SILENT_S)
        assert [ingress.queue.config for ingress in ingresses] == [changed] * 3

    in_no_time(scenario())


def test_requests_that_ended_anywhere_are_told_once_by_one_clock() -> None:
    async def scenario() -> None:
        actor, _, (one, other) = await started()
        assert actor.desk is not None
        now_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(ingress.begin(0.1, model=model) for ingress, model in ((one, "x"), (other, "y"))))
        await asyncio.sleep(0.5)
        found = actor.desk.ended.after(0, 0.0)
        assert sorted(each.model for each in found.requests) == ["x", "y"]
        assert all(each.ended_s - now_s == pytest.approx(0.1, abs=0.05) for each in found.requests)
        await one.begin(0.0)
        await asyncio.sleep(0.5)
        assert len(actor.desk.ended.after(found.next_number, 0.0).requests) == 1

    in_no_time(scenario())


def test_a_replica_that_only_one_knows_is_its_own() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        one.queue.set_replicas(POOL, ("a", "b", "c"))
        other.queue.set_replicas(POOL, ("b",))
        await asyncio.sleep(0.5)
        assert one.owned()["c"] == one.owned()["a"] == 1.0
        tasks = [other.begin(1.0) for _ in range(10)]
        assert {await task for task in tasks} == {"b"}

    in_no_time(scenario())


def test_who_loses_its_replica_goes_before_all_others_and_elsewhere() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        ticket = one.queue.submit(ask())
        lost = await one.queue.slot(ticket)
        busy = [other.begin(1.0) for _ in range(40)]
        await asyncio.sleep(0.1)
        again = one.queue.reassign(ticket)
        assert await again != lost
        assert sum(task.done() for task in busy) <= 2 * CAPACITY
        one.queue.leave(ticket)

    in_no_time(scenario())


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32))
def test_slots_are_never_used_twice_and_none_is_lost_at_random(seed: int) -> None:
    """Ingresses and the controller die, and messages and answers are lost, at any time.

    Requests of a dead ingress end with it, as a worker's do with a call that is cancelled: slots that are counted are
    those of the living.
    """

    async def scenario() -> None:
        rng = random.Random(seed)
        actor = FakeActor(lambda: rng.choice((0.0, 0.001, 0.01, 0.05)))
        await actor.start()
        loss = rng.choice((0.0, 0.02, 0.2))
        actor.loses = lambda: rng.random() < loss
        running: Counter[str] = Counter()
        ingresses = [Ingress(actor, running) for _ in range(3)]
        tasks: list[asyncio.Task[str]] = []
        crash: asyncio.Task[None] | None = None
        for _ in range(rng.randint(20, 200)):
            what = rng.random()
            if what < 0.7:
                fields = {"priority": rng.randint(1, 3), "share": rng.choice((SHARE, SHARE, 0.5, 1.0))}
                tasks.append(rng.choice(ingresses).begin(rng.expovariate(2), **fields))
            elif what < 0.8 and tasks:
                rng.choice(tasks[-20:]).cancel()
            elif what < 0.83:
                ingresses.pop(rng.randrange(len(ingresses))).kill()
                ingresses.append(Ingress(actor, running))
            elif what < 0.86 and (crash is None or crash.done()):
                crash = asyncio.ensure_future(actor.crash())
            else:
                await asyncio.sleep(rng.choice((0.0, 0.001, 0.05, 0.5, 2.0)))
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, str | asyncio.CancelledError), outcome
        if crash:
            await crash
        actor.loses = lambda: False
        await asyncio.sleep(3 * SILENT_S)
        assert await numbers(*ingresses) == (0, 0)
        full = [rng.choice(ingresses).begin(5.0) for _ in range(CAPACITY)]
        await asyncio.sleep(1.0)
        assert running == pytest.approx(dict.fromkeys(REPLICAS, 1.0))  # all slots are still there
        await asyncio.gather(*full)

    in_no_time(scenario())


def test_a_look_at_processes_that_fails_ends_no_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress that is gone keeps its slots no longer because the process table could not be read once."""
    looked: list[ProcessMark] = []

    def is_running(mark: ProcessMark) -> bool:
        looked.append(mark)
        if len(looked) == 1:
            raise psutil.Error("the process table cannot be read")
        return False

    monkeypatch.setattr("cluster.placement.serving.slot_desk._is_running", is_running)

    async def work() -> None:
        desk = SlotDesk()
        try:
            await desk.report_slots("gone", SlotReport(1, "", 0, NO_PROCESS, {}))
            await asyncio.sleep(10 * SILENT_S)
            assert len(looked) == 2
            assert "gone" not in desk._book.names
        finally:
            desk.close()

    in_no_time(work())
