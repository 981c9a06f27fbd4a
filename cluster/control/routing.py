"""The choice of the worker where a request starts, and of the request that starts next. Pure.

A request stays in the ingress's queue until a worker can start it (late binding), so `choose_worker` may answer "none
yet". The order of preference: a worker that the plan names for the model, then any that has the model ready, and
only without a current plan the one that is ready soonest, switch included.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

STALE_PLAN_S: Final = 3.0  # a plan that is older is not waited for


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """The load of a worker as a router knows it: the models that are ready, free slots, seconds of work that it runs.

    `busy_s` is at the worker's own speed, which is 1 for a usual one. `evicting` are the models that it drains or lets
    go. `switch_s` is what getting ready for a model costs it, where that is known. `is_usable` is False
    for a worker that is stale, leaves or is gone.
    """

    id: str
    models: Collection[str] = ()
    free_slots: int = 0
    busy_s: float = 0.0
    speed: float = 1.0
    evicting: Collection[str] = ()
    switch_s: Mapping[str, float] = field(default_factory=dict)
    is_usable: bool = True


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """The head of a model's queue. `priority` 1 is the most urgent; `slack_s` is the time until its deadline."""

    model: str
    age_s: float = 0.0
    priority: int = 1
    slack_s: float = math.inf
    service_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker, or None for "stay in the queue", and why."""

    worker: str | None
    rank: Literal["planned", "resident", "cost", "wait"]
    reason: str


def choose_worker(
    request: WaitingRequest,
    loads: Mapping[str, WorkerLoad],
    planned: Mapping[str, Collection[str]],
    plan_age_s: float,
) -> Choice:
    """Return where the request starts now.

    With a current plan a request starts on a planned worker that has the model ready and a free slot, the one that
    ends it first. If all are full, it waits, unless its deadline is near: then it also starts on a worker that has
    the model ready and is about to switch away. With a plan older than `STALE_PLAN_S` (or an age that is no number)
    it starts wherever the model is ready, else where it is ready soonest.
    """
    is_current = 0.0 <= plan_age_s <= STALE_PLAN_S
    named = planned.get(request.model, ()) if is_current else ()
    ready = [load for id_ in named if (load := loads.get(id_)) is not None and _can_start(load, request.model)]
    if ready:
        best = _soonest(ready, request)
        return Choice(best.id, "planned", f"planned for {request.model}, {best.free_slots} free slots")
    is_pressing = request.slack_s < 2 * request.service_s
    if is_current and not is_pressing and named:
        return Choice(None, "wait", f"{len(named)} planned workers are full or getting ready")
    going_too = is_pressing or not is_current
    resident = [load for load in loads.values() if _can_start(load, request.model, going_too)]
    if resident:
        best = _soonest(resident, request)
        why = "its deadline is near" if is_pressing else "no planned worker" if is_current else "the plan is stale"
        return Choice(best.id, "resident", f"has {request.model} ready; {why}")
    if is_current:
        return Choice(None, "wait", f"no worker has {request.model} ready; the controller decides which will")
    able = [load for load in loads.values() if load.is_usable and load.free_slots > 0]
    if not able:
        return Choice(None, "wait", "the plan is stale, and no worker has a free slot")
    unknown = max((cost for load in able for cost in load.switch_s.values()), default=0.0)
    best = min(able, key=lambda load: load.busy_s + load.switch_s.get(request.model, unknown))
    return Choice(best.id, "cost", f"the plan is stale; ready soonest for {request.model}")


def start_order(request: WaitingRequest) -> tuple[bool, int, float, float]:
    """Return the sort key by which the heads of queues start on a worker that has several models ready.

    Requests that would end after their deadline anyway come last; then by priority, deadline and age.
    """
    is_doomed = not request.slack_s >= request.service_s
    return is_doomed, request.priority, request.slack_s, -request.age_s


def _can_start(load: WorkerLoad, model: str, going_too: bool = False) -> bool:
    return load.is_usable and load.free_slots > 0 and model in load.models and (going_too or model not in load.evicting)


def _soonest(loads: list[WorkerLoad], request: WaitingRequest) -> WorkerLoad:
    """Return the worker that ends the request first if its work shares the worker with what runs there."""
    return min(loads, key=lambda load: (load.busy_s + request.service_s / load.speed, -load.free_slots))
