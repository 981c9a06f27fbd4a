"""The controller's routes over a fake of its actor: what is shown, what is ordered, and how its errors are told."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from ray.exceptions import ActorUnavailableError, RayTaskError

from cluster.placement.autoscaling import Scaling
from cluster.process.ray_calls import NamedActor
from cluster.records.errors import NotKept, OverrideRefused
from cluster.records.overrides import OverrideChange, Overrides, changed
from configs.admission import ScalingConfig
from deployments.ingress.admin.routes import ControllerCalls, DecisionsAnswer, create_controller_router
from deployments.ingress.error_forms import install_error_handlers


class Actor:
    """The controller of a cluster with two workers and a model, as a handle answers for it."""

    def __init__(self) -> None:
        self.overrides = Overrides()
        self.problem: Exception | None = None
        self.scaling: Scaling | None = None
        self.asked: list[Any] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda argument: self._answer(method, argument))

    async def _answer(self, method: str, argument: Any) -> Any:
        self.asked.append(argument)
        if self.problem:
            raise self.problem
        if method == "describe":
            told = DecisionsAnswer(enabled=True, policy="latency-first").model_dump(exclude={"enabled"})
            return told | {"scaling": self.scaling.describe() if self.scaling else None}
        assert isinstance(argument, OverrideChange)
        try:
            self.overrides = changed(self.overrides, argument, {"w-one", "w-two"}, {"m"})
        except OverrideRefused as error:
            raise RayTaskError("change", "Traceback of the actor", error).as_instanceof_cause() from None
        return self.overrides


def client(connect: Callable[[], Any] | None) -> httpx.AsyncClient:
    app = FastAPI()
    app.include_router(create_controller_router(ControllerCalls(NamedActor(connect) if connect else None)))
    install_error_handlers(app)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_orders_by_hand_begin_and_end() -> None:
    actor = Actor()
    async with client(lambda: actor) as http:
        for path, expected in (
            ("freeze", {"is_frozen": True}),
            ("workers/w-o/freeze", {"frozen": ["w-one"]}),
            ("workers/w-two/drain", {"draining": ["w-two"]}),
            ("workers/w-one/models/m/pin", {"pins": {"w-one": ["m"]}}),
        ):
            nothing: dict[str, Any] = {"is_frozen": False, "frozen": [], "draining": [], "pins": {}}
            begun = await http.post(f"/admin/{path}")
            assert (begun.status_code, begun.json()) == (200, nothing | expected)
            assert (await http.delete(f"/admin/{path}")).json() == nothing


async def test_decisions_are_shown_as_the_controller_tells_them() -> None:
    actor = Actor()
    async with client(lambda: actor) as http:
        answer = await http.get("/admin/decisions", params={"max_decisions": 7})
        assert (answer.json()["enabled"], answer.json()["policy"], actor.asked) == (True, "latency-first", [7])
        assert (await http.get("/admin/decisions", params={"max_decisions": 501})).status_code == 400


async def test_workers_that_come_and_go_are_shown_with_the_spares() -> None:
    actor = Actor()
    actor.scaling = Scaling(ScalingConfig(min_workers=1, max_workers=3, spare_workers=1), 3)
    actor.scaling.assign(["a", "b", "c"])
    actor.scaling.released["gone"] = 0.0
    async with client(lambda: actor) as http:
        shown = (await http.get("/admin/decisions")).json()["scaling"]
    assert shown == {"target": 3, "leaving": ["gone"], "spares": ["c"], "reason": ""}


async def test_a_worker_that_nobody_knows_is_the_callers_mistake() -> None:
    actor = Actor()
    async with client(lambda: actor) as http:
        wrong = await http.post("/admin/workers/ghost/drain")
        error = wrong.json()["error"]
        assert (wrong.status_code, error["param"]) == (400, "worker")
        assert error["message"] == "no worker 'ghost' (workers: w-one, w-two)"
        assert (await http.post("/admin/workers/w-one/models/ghost/pin")).json()["error"]["param"] == "model"


async def test_an_order_that_the_disk_does_not_take_is_not_the_callers_mistake() -> None:
    actor = Actor()
    actor.problem = NotKept("/store/overrides/one.json: cannot be written: No space left on device")
    async with client(lambda: actor) as http:
        refused = await http.post("/admin/freeze")
    assert refused.status_code == 503
    assert "No space left on device" in refused.json()["error"]["message"]


@pytest.mark.parametrize("problem", [ActorUnavailableError("gone", None), TimeoutError()])
async def test_a_controller_that_is_away_is_said(problem: Exception) -> None:
    actor = Actor()
    actor.problem = problem
    async with client(lambda: actor) as http:
        for answer in (await http.get("/admin/decisions"), await http.post("/admin/freeze")):
            assert answer.status_code == 503
            assert "the controller is restarting" in answer.json()["error"]["message"]


async def test_without_a_controller_nothing_is_decided_and_nothing_can_be_ordered() -> None:
    async with client(None) as http:
        answer = await http.get("/admin/decisions")
        assert (answer.status_code, answer.json()["enabled"]) == (200, False)
        refused = await http.post("/admin/freeze")
        assert refused.status_code == 409
        assert "controller.enabled" in refused.json()["error"]["message"]
