"""The admission queue for operators: what waits and runs, as JSON and as metrics, and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from cluster.control.admission_records import AdmissionSnapshot
from cluster.control.dispatcher import Dispatcher
from configs.admission import AdmissionConfig
from deployments.ingress.errors import documented
from deployments.ingress.responses import Answer, json_response


class AdmissionAnswer(Answer):
    """The settings, and the queue of this ingress replica: by model, by replica of each pool, waiting by tenant."""

    admission: AdmissionConfig
    models: list[dict[str, Any]]
    replicas: dict[str, list[dict[str, Any]]]
    tenants: dict[str, int]


def add_admission_routes(router: APIRouter, queue: Dispatcher) -> None:
    """Add the routes."""

    @router.get("/admin/admission", response_model=AdmissionAnswer)
    async def admission() -> Response:
        """Show the settings of the admission queue, what waits and runs, and what requests took."""
        return json_response(describe_admission(queue))

    @router.put("/admin/admission", response_model=AdmissionAnswer, responses=documented(400))
    async def retune(body: AdmissionConfig) -> Response:
        """Set bounds, deadlines, priorities and tenants from now on; who waits already stays.

        Fields as in a cluster config (`admission`); what is left out has its default. Holds until this ingress replica
        ends: write it into the config to keep it.
        """
        queue.retune(body)
        return json_response(describe_admission(queue))


def describe_admission(queue: Dispatcher) -> AdmissionAnswer:
    """Return the queue as it is."""
    snapshot = queue.snapshot()
    return AdmissionAnswer(
        admission=AdmissionConfig(**queue.config.model_dump()),
        models=[asdict(load) for load in snapshot.models],
        replicas={pool: [asdict(load) for load in loads] for pool, loads in snapshot.replicas.items()},
        tenants=dict(snapshot.tenants),
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
            model = load.model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
            yield f'atelier_admission_{name}{{pool="{load.pool}",model="{model}"}} {getattr(load, field):g}'
