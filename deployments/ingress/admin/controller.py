"""The controller for operators: its last decisions with their reasons, and orders by hand over its head."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeVar

from fastapi import APIRouter, Query
from pydantic import Field
from ray.exceptions import RayActorError, RayTaskError
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from cluster.errors import OverrideRefused
from cluster.placement.actor import Controller
from cluster.placement.overrides import OverrideChange, Overrides
from cluster.ray_calls import call_actor
from configs.model import ModelId
from deployments.errors import Conflict, InvalidRequest, NoReplica
from deployments.ingress.errors import documented
from deployments.ingress.responses import Answer, json_response

MAX_DECISIONS: Final = 500
_CALL_S: Final = 10.0
_AWAY = "the controller is restarting; try again"
_OFF = "the controller is off in the cluster config (`controller.enabled`)"

P = ParamSpec("P")
R = TypeVar("R")
_ORDERED: Final = documented(400, _409=_OFF, _503=_AWAY)


class DecisionStatus(TypedDict):
    """A decision of the controller: what, where, why, and what became of it. `at_s` is Unix time."""

    at_s: float
    action: str
    worker: str
    model: str
    evict: list[str]
    reason: str
    expected_s: float
    took_s: float | None
    state: str


class WorkerStatus(TypedDict):
    """A worker as the controller sees it. `address` is its node's. Bytes are of its budget."""

    name: str
    node: str
    address: str
    models: list[str]
    running: dict[str, int]
    switching_to: str | None
    resident_bytes: int
    budget_bytes: int
    attach_bytes_per_s: float
    load_bytes_per_s: float
    fixed_switch_s: float


class OverridesAnswer(Answer):
    """The orders by hand. `pins` are models by worker."""

    is_frozen: bool = False
    frozen: list[str] = Field([])
    draining: list[str] = Field([])
    pins: dict[str, list[str]] = Field({})


class BackoffStatus(TypedDict):
    """A model whose load failed: why, and when it is tried again."""

    retry_in_s: float
    error: str


class ScalingStatus(TypedDict):
    """The workers that Serve was asked for, those that are about to leave or idle, and why there are so many."""

    target: int
    leaving: list[str]
    spares: list[str]
    reason: str


class DecisionsAnswer(Answer):
    """The last decisions, newest first, and what the next one is made of. `planned` has the workers of each model.

    Models in `free` are switched to without an order, for the reason that is told.
    `notes` are what could not be planned or believed. `age_s` is how old the newest plan is, null before the first one.
    """

    enabled: bool
    policy: str = ""
    age_s: float | None = None
    num_ticks: int = 0
    longest_tick_s: float = 0.0
    overrides: OverridesAnswer = OverridesAnswer()
    decisions: list[DecisionStatus] = Field([])
    notes: list[str] = Field([])
    backoffs: dict[str, BackoffStatus] = Field({})
    workers: list[WorkerStatus] = Field([])
    planned: dict[str, list[str]] = Field({})
    free: dict[str, str] = Field({})
    scaling: ScalingStatus | None = None


class ControllerCalls:
    """Calls of the controller. `connect` returns its handle and may block; None where it is off."""

    def __init__(self, connect: Callable[[], Any] | None) -> None:
        self._connect = connect

    @property
    def is_off(self) -> bool:
        return self._connect is None

    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call a method of the actor. Raises Conflict when it is off, InvalidRequest, NoReplica while it is away."""
        if self._connect is None:
            raise Conflict(_OFF)
        try:
            async with asyncio.timeout(_CALL_S):
                return await call_actor(await asyncio.to_thread(self._connect), method, *args, **kwargs)
        except (RayActorError, TimeoutError):
            raise NoReplica(_AWAY) from None
        except (OverrideRefused, RayTaskError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, OverrideRefused):
                raise NoReplica(_AWAY) from error
            field, _, text = str(cause).partition(": ")
            raise InvalidRequest(text or field, field if text else None) from None

    async def decisions(self, max_decisions: int) -> dict[str, Any]:
        """Return the fields of a DecisionsAnswer, but for `enabled`; none where the controller is off."""
        return {} if self.is_off else await self.call(Controller.describe, max_decisions)

    async def change(self, change: OverrideChange) -> Response:
        """Change the orders by hand and answer with all of them."""
        return json_response(_overrides(await self.call(Controller.change, change)))


def create_controller_router(controller: ControllerCalls) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["operations"])

    @router.get("/admin/decisions", response_model=DecisionsAnswer, responses=documented(400, _503=_AWAY))
    async def decisions(max_decisions: Annotated[int, Query(ge=0, le=MAX_DECISIONS)] = 50) -> Response:
        """Show which model was ordered to which worker lately, and why; what is planned, frozen, pinned and backed off.

        Workers have the names of their replicas, which change when a replica is replaced.
        """
        found = await controller.decisions(max_decisions)
        return json_response(DecisionsAnswer(enabled=not controller.is_off, **found))

    @router.post("/admin/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def freeze() -> Response:
        """Order no switch any more. Models that no worker has ready are refused until the end of it."""
        return await controller.change(OverrideChange("freeze", is_on=True))

    @router.delete("/admin/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def thaw() -> Response:
        """Order switches again."""
        return await controller.change(OverrideChange("freeze", is_on=False))

    _add_worker_routes(router, controller)
    return router


def _add_worker_routes(router: APIRouter, controller: ControllerCalls) -> None:
    @router.post("/admin/workers/{worker}/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def freeze_worker(worker: str) -> Response:
        """Let a worker keep the models that it has. Its name may be shortened."""
        return await controller.change(OverrideChange("freeze", is_on=True, worker=worker))

    @router.delete("/admin/workers/{worker}/freeze", response_model=OverridesAnswer, responses=_ORDERED)
    async def thaw_worker(worker: str) -> Response:
        """Let a worker switch again."""
        return await controller.change(OverrideChange("freeze", is_on=False, worker=worker))

    @router.post("/admin/workers/{worker}/drain", response_model=OverridesAnswer, responses=_ORDERED)
    async def drain_worker(worker: str) -> Response:
        """Let a worker finish what it runs, and start nothing there that another worker can have: it hands over first.

        `running` in `/admin/decisions` tells when it has nothing left.
        """
        return await controller.change(OverrideChange("drain", is_on=True, worker=worker))

    @router.delete("/admin/workers/{worker}/drain", response_model=OverridesAnswer, responses=_ORDERED)
    async def undrain_worker(worker: str) -> Response:
        """Let a worker that drains have work again."""
        return await controller.change(OverrideChange("drain", is_on=False, worker=worker))

    @router.post("/admin/workers/{worker}/models/{model}/pin", response_model=OverridesAnswer, responses=_ORDERED)
    async def pin_to_worker(worker: str, model: ModelId) -> Response:
        """Bring a model to a worker as soon as what runs there lets it, and keep it there."""
        return await controller.change(OverrideChange("pin", is_on=True, worker=worker, model=model))

    @router.delete("/admin/workers/{worker}/models/{model}/pin", response_model=OverridesAnswer, responses=_ORDERED)
    async def unpin_from_worker(worker: str, model: ModelId) -> Response:
        """Let the worker switch away from the model again."""
        return await controller.change(OverrideChange("pin", is_on=False, worker=worker, model=model))


def _overrides(overrides: Overrides) -> OverridesAnswer:
    return OverridesAnswer(**overrides.model_dump(mode="json"))
