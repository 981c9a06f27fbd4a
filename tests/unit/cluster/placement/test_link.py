"""Reporters and the controller over a fake of Ray's actor: what each hears, and what dies with a controller."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from kit.clock import Clock
from kit.waiting import until
from ray.exceptions import ActorUnavailableError
from unit.cluster.placement.reporting import POOL, need, versions, worker

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import Demand, PoolPart, ReplicaPart
from cluster.placement import slot_book
from cluster.placement.reports import OrderOutcome, Orders, SlotAnswer, Update, WorkerReport
from cluster.placement.serving import actor as module
from cluster.placement.serving import link as link_module
from cluster.placement.serving.actor import Controller
from cluster.placement.serving.link import ControllerLink, Link, SlotLink, link_queue
from cluster.placement.state import STALE_S
from cluster.placement.switching import THROUGHPUT_FIRST
from cluster.process.ray_calls import NamedActor
from cluster.records.errors import OverrideRefused
from cluster.records.overrides import OverrideChange, Overrides
from cluster.registry.extent_locations import GroupNews
from configs.admission import AdmissionConfig, ControllerConfig
from configs.cluster import ClusterConfig

CONFIG = ClusterConfig.model_validate(
    {"name": "one", "models": [{"id": "a", "path": "/a"}], "controller": {"tick_s": 0.05}}
)

HELD = GroupNews(("e", 1), {"node": frozenset()}, frozenset({"node"}))


class Registry:
    """The registry as far as the controller asks it; `is_away` makes every call fail."""

    def __init__(self) -> None:
        self.saved = Overrides()
        self.controller = CONFIG.controller
        self.is_away = False
        self.revision = ("e", 1)

    async def ready(self) -> None:
        pass

    def __iter__(self) -> Any:
        entries = versions("a", "b").items()
        return iter(
            SimpleNamespace(id=id_, kind=entry.kind, fingerprint=entry.version, serves=True, state="ready")
            for id_, entry in entries
        )

    async def call_registry(self, method: Any, *arguments: Any) -> Any:
        if self.is_away:
            raise ActorUnavailableError("gone", None)
        if method.__name__ == "set_overrides":
            (self.saved,) = arguments
        answers = {"overrides": self.saved, "follow_groups": HELD, "set_overrides": None}
        return (answers | {"controller_config": self.controller})[method.__name__]


class Actors:
    """The one controller under its name, as Ray has it: a new one in the place of one that was killed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.registry = Registry()
        monkeypatch.setattr(module, "RegistrySnapshot", lambda connect: self.registry)
        self.controller: Controller | None = None
        self._calls = set[asyncio.Future[Any]]()

    async def start(self, config: ClusterConfig = CONFIG) -> Controller:
        self.controller = Controller.__new__(Controller)
        self.registry.controller = config.controller
        await self.controller.__init__(config)  # type: ignore[misc]  # as Ray does
        return self.controller

    def kill(self) -> None:
        assert self.controller is not None
        for task in self.controller._tasks:
            task.cancel()
        self.controller._slots.close()
        self.controller = None
        for call in self._calls:
            call.cancel()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self._call(name, arguments))

    async def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        if self.controller is None:
            raise ActorUnavailableError("gone", None)
        call = asyncio.ensure_future(getattr(self.controller, name)(*arguments))
        self._calls.add(call)
        try:
            await asyncio.wait([call])
        finally:
            self._calls.discard(call)
            call.cancel()
        if call.cancelled():  # as Ray does with the calls of an actor that dies
            raise ActorUnavailableError("gone", None)
        return call.result()


class Models:
    """A worker that has at once what it is told to have."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.link: ControllerLink
        self.state: WorkerReport = worker(budget=12, needs={"a": need(x=10), "b": need(y=10)}, fixed_switch_s=1.0)
        self.heard: list[str] = []

    async def report(self) -> WorkerReport:
        return self.state

    def apply(self, orders: Orders) -> None:
        for order in orders.orders:
            if order.id in self.heard:
                continue
            self.heard.append(order.id)
            ready = {"x": 10} if order.model == "a" else {"y": 10}
            outcome = OrderOutcome(order.id, 0.1)
            self.state = worker(
                budget=12,
                needs=self.state.needs,
                ready=ready,
                taken=tuple(self.heard),
                outcomes=(outcome,),
                fixed_switch_s=1.0,
            )
            self.changed.set()


@pytest.fixture
async def actors(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Actors]:
    monkeypatch.setattr(Link, "pause_s", 0.01)
    monkeypatch.setattr(module, "HELD_S", 0.01)
    monkeypatch.setattr(module, "node_addresses", lambda: {"n": "10.0.0.7"})
    found = Actors(monkeypatch)
    await found.start()
    yield found
    if found.controller is not None:
        found.kill()


@pytest.fixture
def late() -> list[float]:
    """Seconds that the queue's clock is ahead: a test adds some."""
    return []


@pytest.fixture
async def queue(actors: Actors, late: list[float]) -> AsyncIterator[Dispatcher]:
    found = Dispatcher(AdmissionConfig(), lambda: time.monotonic() + sum(late))
    found.set_replicas(POOL, ["w"])
    link = link_queue("q", found, NamedActor(lambda: actors), 0.05)
    link.start()
    yield found
    link.close()


@pytest.fixture
async def models(actors: Actors) -> AsyncIterator[Models]:
    found = Models()
    found.link = ControllerLink("w", NamedActor(lambda: actors), found, 0.05)
    found.link.start()
    yield found
    found.link.close()


def ask(model: str) -> Demand:
    return Demand(POOL, model, 1.0, 0.25, 2, "default", math.inf)


async def place_of(queue: Dispatcher, model: str) -> str:
    async with asyncio.timeout(10):
        ticket = queue.submit(ask(model))
        try:
            return await queue.slot(ticket)
        finally:
            queue.leave(ticket, is_answered=True)


async def has_plan(actors: Actors) -> None:
    await until(lambda: actors.controller is not None and actors.controller._decided is not None)


async def test_requests_start_where_the_controller_has_got_their_model_ready(
    actors: Actors, queue: Dispatcher, models: Models
) -> None:
    await has_plan(actors)
    await until(lambda: queue._queue.places.is_unplaced(ask("a")))
    assert await place_of(queue, "a") == "w"
    assert await place_of(queue, "b") == "w"
    assert actors.controller is not None
    found = await actors.controller.describe(10)
    made = [(one["action"], one["model"]) for one in reversed(found["decisions"]) if one["state"] == "done"]
    assert made[0] == ("switch", "a")
    assert ("switch", "b") in made
    assert all(one["reason"] for one in found["decisions"])


async def test_a_controller_that_dies_holds_nobody_up_and_the_next_one_goes_on(
    actors: Actors, queue: Dispatcher, models: Models, late: list[float]
) -> None:
    await has_plan(actors)
    await until(lambda: queue._queue.places.is_unplaced(ask("a")))
    assert await place_of(queue, "a") == "w"
    actors.kill()
    await until(lambda: not models.changed.is_set())
    heard = list(models.heard)
    late.append(module.PLAN_LIVES_S + 1.0)  # its word has ended
    assert await place_of(queue, "b") == "w"  # any worker may have it, and switches by itself
    assert models.heard == heard
    await actors.start()
    await until(lambda: queue._queue.places.is_unplaced(ask("b")) or models.state.ready == {"y": 10})
    assert await place_of(queue, "b") == "w"
    await until(lambda: len(models.heard) > len(heard))


async def test_orders_by_hand_outlive_the_controller_and_need_the_registry_only_to_change(
    actors: Actors, queue: Dispatcher, models: Models
) -> None:
    await has_plan(actors)
    assert actors.controller is not None
    await actors.controller.change(OverrideChange("pin", True, "w", "b"))
    await until(lambda: models.state.ready == {"y": 10})
    with pytest.raises(OverrideRefused, match="no worker 'nobody'"):
        await actors.controller.change(OverrideChange("drain", True, "nobody"))
    actors.registry.is_away = True
    with pytest.raises(ActorUnavailableError):
        await actors.controller.change(OverrideChange("freeze", True))
    assert (await actors.controller.describe(1))["overrides"]["is_frozen"] is False
    assert await place_of(queue, "b") == "w"  # decisions go on without the registry
    actors.registry.is_away = False
    actors.kill()
    controller = await actors.start()
    await has_plan(actors)
    assert (await controller.describe(1))["overrides"]["pins"] == {"w": ["b"]}


async def test_who_is_at_rest_reports_no_more_than_changes_and_lives_by_listening(
    actors: Actors, queue: Dispatcher, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    await has_plan(actors)
    assert await place_of(queue, "a") == "w"
    controller = actors.controller
    assert controller is not None
    reports = list[WorkerReport]()
    noted = controller._observations.workers.note

    def note_worker(name: str, report: WorkerReport, now_s: float) -> None:
        reports.append(report)
        noted(name, report, now_s)

    monkeypatch.setattr(Link, "rest_s", 1e9)
    # The worker gets the model that was asked for when it is worth it, a second later.
    await until(lambda: models.heard and controller._is_at_rest() and models.link._reported == models.state.lasting)
    monkeypatch.setattr(controller._observations.workers, "note", note_worker)
    seen = controller._observations.workers._seen_s, controller._observations.queues._seen_s
    began = {name: seen_s for found in seen for name, seen_s in found.items()}
    await until(lambda: all(seen_s > began[name] + STALE_S for found in seen for name, seen_s in found.items()))
    assert reports == []
    monkeypatch.setattr(models, "apply", lambda orders: None)  # nothing changes the state but this test
    models.state = replace(models.state, budget_bytes=13)
    await until(lambda: reports)
    assert [one.budget_bytes for one in reports] == [13]
    models.state = replace(models.state, leased=frozenset({"y"}))
    await until(lambda: len(reports) > 3)  # at work, it reports all the time
    assert not controller._is_at_rest()


async def test_a_controller_that_was_replaced_hears_at_once_of_those_at_rest(
    actors: Actors, queue: Dispatcher, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    await has_plan(actors)
    assert actors.controller is not None
    await until(actors.controller._is_at_rest)
    monkeypatch.setattr(Link, "rest_s", 1e9)
    actors.kill()
    controller = await actors.start()
    await until(lambda: controller._observations.workers.reports and controller._observations.queues.names)


async def test_a_report_under_way_while_its_controller_ends_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CALL_S", 1e9)
    monkeypatch.setattr(Link, "rest_s", 1e9)
    monkeypatch.setattr(Link, "pause_s", 0.01)
    ends, answers, calls = asyncio.Event(), asyncio.Event(), Counter[str]()

    async def report(*_: object) -> None:
        calls["report"] += 1
        await answers.wait()

    async def receive(*_: object) -> Update:
        calls["receive"] += 1
        await (ends if calls["receive"] == 1 else asyncio.Event()).wait()
        raise ActorUnavailableError("gone", None)

    actor = SimpleNamespace(report=SimpleNamespace(remote=report), receive=SimpleNamespace(remote=receive))
    models = Models()
    link = ControllerLink("w", NamedActor(lambda: actor), models, 0.01)
    link.start()
    try:
        await until(lambda: calls["report"] == calls["receive"] == 1)
        ends.set()
        await until(lambda: calls["receive"] == 2)
        answers.set()  # that of the controller before
        await until(lambda: calls["report"] == 2)
    finally:
        link.close()


async def test_a_controller_that_was_replaced_between_two_calls_hears_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "CALL_S", 1e9)
    monkeypatch.setattr(Link, "rest_s", 1e9)
    replaced, calls = asyncio.Event(), Counter[str]()

    async def report(*_: object) -> None:
        calls["report"] += 1

    async def receive(name: str, revision: str, wait_s: float) -> Update:
        calls["receive"] += 1
        if calls["receive"] == 2:
            await replaced.wait()
        await asyncio.sleep(0)
        return Update("" if replaced.is_set() else "first", None, 0.01)

    actor = SimpleNamespace(report=SimpleNamespace(remote=report), receive=SimpleNamespace(remote=receive))
    models = Models()
    link = ControllerLink("w", NamedActor(lambda: actor), models, 0.01)
    link.start()
    try:
        await until(lambda: calls["report"] == 1 and calls["receive"] == 2)
        replaced.set()
        await until(lambda: calls["report"] == 2)
    finally:
        link.close()


class Serve:
    """Serve as the controller asks it: how many workers there are to be, in the order in which it was told."""

    def __init__(self) -> None:
        self.told = [2]

    async def target(self) -> int:
        return self.told[-1]

    async def set_target(self, num_replicas: int) -> None:
        self.told.append(num_replicas)


async def test_a_changed_config_is_what_the_controller_and_its_reporters_go_by_while_all_of_them_stay(
    actors: Actors, queue: Dispatcher, models: Models
) -> None:
    await has_plan(actors)
    controller = actors.controller
    assert controller is not None
    assert (await controller.describe(0))["policy"] == "latency-first"
    classes = {"gold": {"target_s": 3.0, "weight": 7.0}}
    fields = {"policy": "throughput-first", "tick_s": 0.02, "slo_classes": classes, "models": {"a": "gold"}}
    actors.registry.controller = ControllerConfig.model_validate(fields)
    await until(lambda: controller._deciding.policy is THROUGHPUT_FIRST)
    assert (await controller.describe(0))["policy"] == "throughput-first"
    await until(lambda: (found := controller._decided) is not None and found.observed.state.models["a"].slo.weight == 7)
    update = await controller.receive("w", "", 0.0)
    assert update.tick_s == 0.02
    await until(lambda: models.link._tick_s == 0.02)
    assert await place_of(queue, "b") == "w"


async def test_a_controller_scales_by_other_numbers_from_no_scaling_on_and_back(
    actors: Actors, queue: Dispatcher, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve = Serve()
    monkeypatch.setattr(module, "ServeReplicas", lambda app, deployment: serve)
    actors.kill()
    controller = await actors.start()

    def follow(**scaling: Any) -> None:
        fields = CONFIG.controller.model_dump() | {"scaling": scaling or None}
        actors.registry.controller = ControllerConfig.model_validate(fields)

    await has_plan(actors)
    assert (await controller.describe(0))["scaling"] is None
    follow(min_workers=4, max_workers=9, spare_workers=0)
    await until(lambda: serve.told == [2, 4])
    follow(min_workers=6, max_workers=9, spare_workers=0)
    await until(lambda: serve.told == [2, 4, 6])
    follow()
    await until(lambda: controller._scaling is None)
    assert (await controller.describe(0))["scaling"] is None


async def test_a_plan_that_fails_is_said_and_the_next_one_is_made(
    actors: Actors, queue: Dispatcher, models: Models, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await has_plan(actors)
    assert actors.controller is not None
    with monkeypatch.context() as broken:
        broken.setattr(actors.controller._deciding, "decide", lambda *_: 1 / 0)
        await until(lambda: "no decision" in caplog.text)
    assert await place_of(queue, "a") == "w"


async def test_a_controller_that_places_nothing_splits_slots_and_joins_the_queues(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_book, "_NUM_TICKS", 1)
    actors.kill()
    controller = await actors.start(CONFIG.model_copy(update={"controller": ControllerConfig(enabled=False)}))
    queues = [Dispatcher(AdmissionConfig(), num_sharing=2) for _ in range(2)]
    links: list[Link] = []
    for number, queue in enumerate(queues):
        queue.set_replicas(POOL, ["w"])
        links += [
            link_queue(f"q{number}", queue, NamedActor(lambda: actors), 0.05),
            SlotLink(f"q{number}", queue, NamedActor(lambda: actors)),
        ]
    for link in links:
        link.start()
    tickets = [(queue, queue.submit(ask("a"))) for queue in queues for _ in range(3)]
    await until(lambda: sum(queue.slot(ticket).done() for queue, ticket in tickets) == 4)
    await until(lambda: _counts(controller) == (2, 4))
    joined = await links[1].snapshot()  # type: ignore[attr-defined]
    assert [(load.name, load.used, load.running) for load in joined.replicas[POOL]] == [("w", 1.0, {"a": 4})]
    assert joined.tenants == {"default": 2}
    assert [(load.model, load.tenant, load.waiting, load.started) for load in joined.shares] == [("a", "default", 2, 4)]
    for queue, ticket in tickets:
        queue.leave(ticket, is_answered=True)
    await until(lambda: len(controller._slots.ended.after(0, 0.0).requests) >= 4)
    assert (await controller.describe(1))["num_ticks"] == 0
    for link in links:
        link.close()


async def test_an_ingress_goes_by_its_last_slots_after_two_failures_in_a_row() -> None:
    answers, now = [None, SlotAnswer("one", keeps=True), None, None], Clock(1000.0)

    async def report_slots(*_: object) -> SlotAnswer:
        if answer := answers.pop(0):
            return answer
        raise ActorUnavailableError("gone", None)

    actor = SimpleNamespace(report_slots=SimpleNamespace(remote=report_slots))
    queue = Dispatcher(AdmissionConfig(), now, num_sharing=2)
    queue.set_replicas(POOL, ["w"])
    queue.parts.set_parts({POOL: PoolPart({"w": ReplicaPart(1.0)}, 1.0)}, 0.5, now())
    queue.parts.hold(now())
    link = SlotLink("q", queue, NamedActor(lambda: actor))
    for starts in (False, True, False, True):
        now.now_s += 1000.0  # what an answer allowed has ended
        ticket = queue.submit(ask("a"))
        with contextlib.nullcontext() if answers[0] else pytest.raises(ActorUnavailableError):
            await link._send(await link._report())
        assert queue.slot(ticket).done() is starts
        queue.leave(ticket, is_answered=starts)


def _counts(controller: Controller) -> tuple[int, int]:
    loads = controller._observations.queues.joined().models
    return sum(load.waiting for load in loads), sum(load.running for load in loads)
