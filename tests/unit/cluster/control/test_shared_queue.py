"""One queue for several ingresses: no place is handed out twice, none is lost, whoever dies whenever.

The actor's handle is as Ray's: arguments and answers are copies, calls begin in their order, one whose caller has gone
runs on, and those of an actor that died end with RayActorError. Time is the loop's own: it passes when nothing else
can.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError, RayActorError

from cluster.control.dispatcher import NotAdmitted
from cluster.control.lanes import Ask
from cluster.control.shared_queue import SILENT_S, SharedQueue
from cluster.control.shared_queue_client import QueueAway, SharedQueueClient
from cluster.processes import ProcessMark
from configs.admission import AdmissionConfig

POOL = "worker"
REPLICAS = ("a", "b")
SHARE = 0.25
CAPACITY = round(len(REPLICAS) / SHARE)
RESTART_S = 1.0
NO_PROCESS = ProcessMark(0, 0.0)  # which nobody sees


class TimelessLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when nothing else is to be done."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        timers = [timer for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, min(timer.when() for timer in timers))
        super()._run_once()  # type: ignore[misc]


async def in_no_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Stand in for `asyncio.to_thread`: no time passes while a thread works, and a clock that jumps would not wait."""
    return function(*arguments)


def in_no_time(work: Coroutine[Any, Any, Any]) -> Any:
    with patch("asyncio.to_thread", in_no_thread), asyncio.Runner(loop_factory=TimelessLoop) as runner:
        return runner.run(asyncio.wait_for(work, 3600))


class FakeActor:
    """The actor as Ray runs it, with its restarts; `handle` is what `connect` returns."""

    def __init__(self, config: AdmissionConfig, jitter_s: Callable[[], float] = lambda: 0.001) -> None:
        self._config = config
        self._jitter_s = jitter_s
        self._calls: set[asyncio.Task[Any]] = set()
        self.queue: SharedQueue | None = None
        self.settings: AdmissionConfig | None = None
        self.num_calls: Counter[str] = Counter()
        self.loses: Callable[[], bool] = lambda: False  # a call or its answer, on the way

    async def start(self) -> None:
        queue: Any = SharedQueue.__new__(SharedQueue)
        await queue.__init__(self._config, self._fetch_settings, asyncio.get_running_loop().time)
        self.queue = queue

    async def crash(self) -> None:
        """Kill it; Ray starts it anew."""
        self.kill()
        await asyncio.sleep(RESTART_S)
        await self.start()

    def kill(self) -> None:
        if self.queue is not None:
            self.queue._ticking.cancel()
            if self.queue._queue._timer:
                self.queue._queue._timer.cancel()
        self.queue = None
        for call in list(self._calls):
            call.cancel()

    def handle_of(self, is_alive: Callable[[], bool] = lambda: True) -> Any:
        """Return a handle of a process, whose calls begin only as long as it lives."""

        class Handle:
            def __getattr__(_, method: str) -> Any:
                return SimpleNamespace(remote=lambda *arguments: self._remote(method, arguments, is_alive))

        return Handle()

    async def _fetch_settings(self) -> AdmissionConfig | None:
        return self.settings

    def _remote(self, method: str, arguments: tuple[Any, ...], is_alive: Callable[[], bool]) -> Awaitable[Any]:
        self.num_calls[method] += 1
        sent = copy.deepcopy(arguments)
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
        if self.queue is None or self.loses():
            raise ActorUnavailableError("The actor is restarting", None)
        answer = copy.deepcopy(await getattr(self.queue, method)(*sent))
        await asyncio.sleep(self._jitter_s())
        if self.loses():
            raise ActorUnavailableError("The connection is gone", None)
        return answer


def ask(**fields: Any) -> Ask:
    values: dict[str, Any] = {"pool": POOL, "model": "m", "work": 1.0, "share": SHARE, "priority": 2}
    return Ask(**(values | {"tenant": "default", "deadline_s": math.inf} | fields))


class Ingress:
    """An ingress: its requests run in `running`, by replica, until they are answered or it dies."""

    def __init__(
        self,
        actor: FakeActor,
        running: Counter[str],
        names: tuple[str, ...] = REPLICAS,
        process: ProcessMark = NO_PROCESS,
    ) -> None:
        self.is_alive = True
        self.queue = SharedQueueClient(
            lambda: actor.handle_of(lambda: self.is_alive), actor._config, asyncio.get_running_loop().time, process
        )
        self.queue.set_replicas(POOL, names)
        self.queue.start()
        self.running = running
        self.mine: Counter[str] = Counter()
        self.tasks: set[asyncio.Task[str]] = set()

    def begin(self, service_s: float, **fields: Any) -> asyncio.Task[str]:
        task = asyncio.ensure_future(self._request(service_s, ask(**fields)))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _request(self, service_s: float, asked: Ask) -> str:
        ticket = self.queue.submit(asked)
        is_answered = False
        try:
            async with asyncio.timeout(None if asked.deadline_s == math.inf else asked.deadline_s):
                replica = await self.queue.place(ticket)
            self._count(replica, 1)
            try:
                await asyncio.sleep(service_s)
                is_answered = True
            finally:
                self._count(replica, -1)
            return replica
        finally:
            if self.is_alive:
                self.queue.leave(ticket, is_answered=is_answered)

    def _count(self, replica: str, number: int) -> None:
        self.mine[replica] += number
        self.running[replica] += number
        assert self.running[replica] <= 1 / SHARE, "more requests run than there are places"

    def kill(self) -> None:
        """Die: nothing more is sent, and what runs ends."""
        self.is_alive = False
        self.queue.close()
        for task in list(self.tasks):
            task.cancel()


async def started(config: AdmissionConfig | None = None, num: int = 2) -> tuple[FakeActor, Counter[str], list[Ingress]]:
    actor = FakeActor(config or AdmissionConfig())
    await actor.start()
    running: Counter[str] = Counter()
    ingresses = [Ingress(actor, running) for _ in range(num)]
    await asyncio.sleep(2 * SILENT_S)
    return actor, running, ingresses


async def numbers(actor: FakeActor) -> tuple[int, int]:
    assert actor.queue is not None
    models = (await actor.queue.snapshot()).models
    return sum(load.waiting for load in models), sum(load.running for load in models)


def test_two_ingresses_share_the_places_and_use_all_of_them() -> None:
    async def scenario() -> None:
        actor, running, ingresses = await started()
        tasks = [ingress.begin(1.0) for _ in range(20) for ingress in ingresses]
        most = 0
        begin_s = asyncio.get_running_loop().time()
        while not all(task.done() for task in tasks):
            most = max(most, running.total())
            await asyncio.sleep(0.01)
        assert most == CAPACITY
        assert asyncio.get_running_loop().time() - begin_s < 1.1 * len(tasks) / CAPACITY
        assert {task.result() for task in tasks} == set(REPLICAS)
        assert await numbers(actor) == (0, 0)

    in_no_time(scenario())


def test_a_request_costs_one_round_trip_and_a_burst_few_calls() -> None:
    async def scenario() -> None:
        actor, _, ingresses = await started()
        begin_s = asyncio.get_running_loop().time()
        ticket = ingresses[0].queue.submit(ask())
        await ingresses[0].queue.place(ticket)
        assert asyncio.get_running_loop().time() - begin_s < 0.003  # 0.002 are the way there and back
        ingresses[0].queue.leave(ticket)
        before = actor.num_calls["send"]
        await asyncio.gather(*(ingresses[0].begin(0.0) for _ in range(500)))
        assert actor.num_calls["send"] - before < 500 / 4

    in_no_time(scenario())


def test_bounds_hold_for_all_ingresses_together() -> None:
    async def scenario() -> None:
        actor, _, ingresses = await started(AdmissionConfig(max_waiting_per_model=6))
        tasks = [ingress.begin(10.0) for _ in range(20) for ingress in ingresses]
        await asyncio.sleep(1.0)
        refused = [task.exception() for task in tasks if task.done()]
        assert len(refused) == len(tasks) - CAPACITY - 6
        assert all(isinstance(error, NotAdmitted) and error.refusal.reason == "model_full" for error in refused)
        assert await numbers(actor) == (6, CAPACITY)

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


def test_a_dead_ingress_gives_back_what_it_had_within_two_seconds() -> None:
    async def scenario() -> None:
        actor, _, (one, other) = await started()
        for _ in range(CAPACITY + 10):
            one.begin(1e4)
        await asyncio.sleep(0.5)
        assert await numbers(actor) == (10, CAPACITY)
        one.kill()
        begin_s = asyncio.get_running_loop().time()
        await asyncio.gather(*(other.begin(0.0) for _ in range(CAPACITY)))
        assert asyncio.get_running_loop().time() - begin_s < 2.0
        await asyncio.sleep(0.1)
        assert await numbers(actor) == (0, 0)

    in_no_time(scenario())


def test_a_restarted_actor_knows_what_runs_and_requests_wait_for_it() -> None:
    async def scenario() -> None:
        actor, _, ingresses = await started()
        long = [ingress.begin(20.0) for _ in range(CAPACITY // 2 - 1) for ingress in ingresses]
        await asyncio.sleep(0.5)
        crash = asyncio.ensure_future(actor.crash())
        await asyncio.sleep(0.5)
        with pytest.raises(QueueAway):
            await ingresses[0].queue.snapshot()
        impatient = ingresses[0].begin(0.0, deadline_s=0.2)
        new = [ingress.begin(1.0) for _ in range(5) for ingress in ingresses]
        with pytest.raises(TimeoutError):
            await impatient
        await crash
        begin_s = asyncio.get_running_loop().time()
        await asyncio.gather(*new)  # two places are free: five rounds
        assert asyncio.get_running_loop().time() - begin_s < SILENT_S + 0.5 + 5 * 1.05
        await asyncio.gather(*long)
        await asyncio.sleep(0.1)
        assert await numbers(actor) == (0, 0)

    in_no_time(scenario())


def test_a_paused_ingress_is_forgotten_and_joins_anew_with_what_it_runs() -> None:
    async def scenario() -> None:
        actor, _, (one, _) = await started()
        runs = [one.begin(30.0) for _ in range(3)]
        await asyncio.sleep(0.5)
        one.queue.close()
        await asyncio.sleep(2.0)
        assert await numbers(actor) == (0, 0)
        one.queue.start()
        await asyncio.sleep(0.5)
        assert await numbers(actor) == (0, 3)
        await asyncio.gather(*runs)
        await asyncio.sleep(0.1)
        assert await numbers(actor) == (0, 0)

    in_no_time(scenario())


def test_an_ingress_that_stalls_keeps_its_places_for_as_long_as_its_process_is_seen_to_run() -> None:
    """On one machine, that is: elsewhere nobody can tell a process that is busy from one that is gone."""

    async def scenario(process: ProcessMark) -> tuple[int, int]:
        actor, running, _ = await started(num=1)
        stalled = Ingress(actor, running, process=process)
        await asyncio.sleep(2 * SILENT_S)
        for _ in range(3):
            stalled.begin(100.0)
        await asyncio.sleep(0.5)
        stalled.queue.close()
        await asyncio.sleep(5.0)
        _, kept = await numbers(actor)
        stalled.queue.start()
        await asyncio.sleep(0.5)
        assert await numbers(actor) == (0, 3)
        stalled.queue.close()
        await asyncio.sleep(15.0)  # as good as gone
        return kept, (await numbers(actor))[1]

    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as other:
        process = psutil.Process(other.pid)
        running = ProcessMark(process.pid, process.create_time())
        assert in_no_time(scenario(running)) == (3, 0)
        assert in_no_time(scenario(ProcessMark.this())) == (3, 0)
        earlier = running._replace(started_s=running.started_s - 100)  # had the number before
        assert in_no_time(scenario(earlier)) == (0, 0)
        other.kill()
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert in_no_time(scenario(running)) == (0, 0)
    assert in_no_time(scenario(running)) == (0, 0)


def test_who_is_cancelled_while_waiting_leaves_the_actors_queue() -> None:
    async def scenario() -> None:
        actor, _, (one, other) = await started()
        for _ in range(CAPACITY):
            one.begin(100.0)
        waiting = [other.begin(1.0) for _ in range(50)]
        await asyncio.sleep(0.5)
        for task in waiting:
            task.cancel()
        await asyncio.sleep(0.01)
        assert await numbers(actor) == (0, CAPACITY)

    in_no_time(scenario())


def test_settings_hold_everywhere_and_after_a_restart() -> None:
    async def scenario() -> None:
        actor, running, ingresses = await started()
        changed = AdmissionConfig(max_waiting_per_model=3, default_priority=1)
        actor.settings = changed  # as the registry has them
        await ingresses[0].queue.retune(changed)
        await asyncio.sleep(0.05)
        assert [ingress.queue.config for ingress in ingresses] == [changed, changed]
        await actor.crash()
        ingresses.append(Ingress(actor, running))
        await asyncio.sleep(2 * SILENT_S)
        assert [ingress.queue.config for ingress in ingresses] == [changed] * 3
        assert actor.queue is not None
        assert actor.queue._queue.config == changed

    in_no_time(scenario())


def test_a_replica_gets_work_once_all_ingresses_know_it_and_no_more_when_one_misses_it() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        one.queue.set_replicas(POOL, ("a", "b", "c"))
        other.queue.set_replicas(POOL, ("b", "c"))
        await asyncio.sleep(0.1)
        tasks = [ingress.begin(1.0) for _ in range(10) for ingress in (one, other)]
        assert {await task for task in tasks} == {"b", "c"}

    in_no_time(scenario())


def test_who_loses_its_replica_goes_before_all_others_and_elsewhere() -> None:
    async def scenario() -> None:
        _, _, (one, other) = await started()
        ticket = one.queue.submit(ask())
        lost = await one.queue.place(ticket)
        busy = [other.begin(1.0) for _ in range(40)]
        await asyncio.sleep(0.1)
        again = one.queue.place_again(ticket)
        assert await again != lost
        assert sum(task.done() for task in busy) <= CAPACITY
        one.queue.leave(ticket)

    in_no_time(scenario())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_places_are_never_handed_out_twice_and_none_is_lost_at_random(seed: int) -> None:
    """Ingresses and the actor die, and messages and answers are lost, at any time.

    Requests of a dead ingress end with it, as a worker's do with a call that is cancelled: places that are counted are
    those of the living.
    """

    async def scenario() -> None:
        rng = random.Random(seed)
        actor = FakeActor(AdmissionConfig(), lambda: rng.choice((0.0, 0.001, 0.01, 0.05)))
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
                task = rng.choice(ingresses).begin(rng.expovariate(2), priority=rng.randint(1, 3))
                tasks.append(task)
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
        assert await numbers(actor) == (0, 0)
        assert actor.queue is not None
        assert not actor.queue._owners
        assert not any(ingress.queue._requests for ingress in ingresses)
        full = [rng.choice(ingresses).begin(5.0) for _ in range(CAPACITY)]
        await asyncio.sleep(0.5)
        assert running == Counter({name: round(1 / SHARE) for name in REPLICAS})  # all places are still there
        await asyncio.gather(*full)

    in_no_time(scenario())
