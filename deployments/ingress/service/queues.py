"""The admission queue as an answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cluster.admission.dispatcher import Dispatcher
from cluster.placement.serving.link import SlotLink
from configs.admission import AdmissionConfig
from deployments.ingress.messages.responses import Answer

Queues = Dispatcher | SlotLink  # the queue of the only ingress, or those of several together


class AdmissionAnswer(Answer):
    """The settings, and the queue of the cluster: by model, by replica of each pool, waiting by tenant.

    `shares` count waiting, started and refused requests of a tenant for a model, the greatest ones.
    """

    admission: AdmissionConfig
    models: list[dict[str, Any]]
    replicas: dict[str, list[dict[str, Any]]]
    tenants: dict[str, int]
    shares: list[dict[str, Any]]


async def describe_admission(queue: Queues) -> AdmissionAnswer:
    """Return the present queue. Raises QueuesAway."""
    snapshot = await queue.snapshot()
    return AdmissionAnswer(
        admission=AdmissionConfig(**queue.config.model_dump()),
        models=[asdict(load) for load in snapshot.models],
        replicas={pool: [asdict(load) for load in loads] for pool, loads in snapshot.replicas.items()},
        tenants=dict(snapshot.tenants),
        shares=[asdict(load) for load in snapshot.shares],
    )
