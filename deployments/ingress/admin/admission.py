"""The admission queue for operators: what waits and runs, as JSON and as metrics, and its settings."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import AdmissionSnapshot
from cluster.placement.link import QueuesAway, SlotLink
from configs.admission import AdmissionConfig
from deployments.errors import NoReplica
from deployments.ingress.admin.metrics import label
from deployments.ingress.errors import documented
from deployments.ingress.responses import Answer, json_response

_AWAY = "the controller is restarting; try again"
Queues = Dispatcher | SlotLink  # the queue of the only ingress, or those of several together


class AdmissionAnswer(Answer):
    """The settings, and the queue of the cluster: by model, by replica of each pool, waiting by tenant.

    `shares` have what waits, started and was refused of a tenant for a model, those with most of it.
    """

    admission: AdmissionConfig
    models: list[dict[str, Any]]
    replicas: dict[str, list[dict[str, Any]]]
    tenants: dict[str, int]
    shares: list[dict[str, Any]]


class EndedAnswer(Answer):
    """Requests that have ended, oldest first, with the seconds of their arrival, start and end."""

    requests: list[dict[str, Any]]
    next_number: int
    now_s: float


def add_admission_routes(
    router: APIRouter, queue: Queues, retune: Callable[[AdmissionConfig], Awaitable[AdmissionAnswer]]
) -> None:
    """Add the routes. `retune` sets what a PUT says."""

    @router.get("/admin/admission", response_model=AdmissionAnswer, responses=documented(_503=_AWAY))
    async def admission() -> Response:
        """Show the settings of the admission queue, what waits and runs, and what requests took."""
        with _as_unavailable():
            return json_response(await describe_admission(queue))

    @router.get("/admin/requests", response_model=EndedAnswer, responses=documented(400, _503=_AWAY))
    async def ended_requests(after: Annotated[int | None, Query(ge=0, le=2**53)] = None) -> Response:
        """Show the requests that have left their replicas lately, from number `after` on; without it, none.

        `next_number` asks for the following ones. Times are seconds of the queue's clock, which says `now_s` now.
        """
        with _as_unavailable():
            found = await queue.ended_requests(after)
        requests = [asdict(one) for one in found.requests]
        return json_response(EndedAnswer(requests=requests, next_number=found.next_number, now_s=found.now_s))

    @router.put("/admin/admission", response_model=AdmissionAnswer, responses=documented(400, _503=_AWAY))
    async def set_admission(body: AdmissionConfig) -> Response:
        """Set bounds, deadlines, priorities and tenants from now on; who waits already stays.

        Fields as in a cluster config (`admission`); what is left out has its default. Ingress replicas that start later
        begin with it as well, for as long as the registry lives: write it into the config to keep it.
        """
        with _as_unavailable():
            return json_response(await retune(body))


@contextlib.contextmanager
def _as_unavailable() -> Iterator[None]:
    try:
        yield
    except QueuesAway as error:
        raise NoReplica(str(error)) from None


async def describe_admission(queue: Queues) -> AdmissionAnswer:
    """Return the queue as it is. Raises QueuesAway."""
    snapshot = await queue.snapshot()
    return AdmissionAnswer(
        admission=AdmissionConfig(**queue.config.model_dump()),
        models=[asdict(load) for load in snapshot.models],
        replicas={pool: [asdict(load) for load in loads] for pool, loads in snapshot.replicas.items()},
        tenants=dict(snapshot.tenants),
        shares=[asdict(load) for load in snapshot.shares],
    )


def admission_metrics(snapshot: AdmissionSnapshot) -> str:
    """Return the queue as Prometheus text."""
    return "".join(f"{line}\n" for line in _metric_lines(snapshot))


def _metric_lines(snapshot: AdmissionSnapshot) -> Iterator[str]:
    metrics = (
        ("waiting", "gauge", "Requests that wait for a place.", "waiting"),
        ("oldest_age_seconds", "gauge", "Age of the request that waits longest.", "oldest_age_s"),
        ("running", "gauge", "Requests that have a place.", "running"),
        ("arrivals_per_second", "gauge", "Arrivals of late.", "rate_short"),
        ("service_seconds", "gauge", "Replica seconds of a mean request.", "service_s"),
        ("latency_seconds", "gauge", "Time in a replica of a mean request.", "latency_s"),
        ("started_total", "counter", "Requests that got a place.", "started"),
        ("refused_total", "counter", "Requests that were refused.", "refused"),
    )
    for name, kind, text, field in metrics:
        yield f"# HELP atelier_admission_{name} {text}"
        yield f"# TYPE atelier_admission_{name} {kind}"
        for load in snapshot.models:
            labels = f"pool={label(load.pool)},model={label(load.model)}"
            yield f"atelier_admission_{name}{{{labels}}} {getattr(load, field):g}"
