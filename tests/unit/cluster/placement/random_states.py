"""Random states of clusters, sound ones and broken ones, and a naive check of plans."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable, Mapping

from cluster.placement.state import (
    BATCH,
    INTERACTIVE,
    STALE_S,
    STANDARD,
    ClusterState,
    Components,
    ModelState,
    SwitchPlan,
    WorkerState,
)

GB = 10**9


def random_records(seed: int) -> tuple[list[ModelState], list[WorkerState], dict[str, set[str]]]:
    """Return models and workers that fit together: what is ready is resident, and nothing is above its budget."""
    chance = random.Random(seed)
    models = []
    for number in range(chance.randrange(1, 12)):
        sizes = {f"own{number}": chance.randrange(1, 20) * GB}
        if chance.random() < 0.6:
            sizes[f"family{number % 3}"] = (5 + number % 3) * GB
        waiting = chance.randrange(1, 30) if chance.random() < 0.5 else 0
        models.append(
            ModelState(
                f"m{number}",
                Components(sizes),
                waiting,
                oldest_age_s=chance.expovariate(0.1) if waiting else 0.0,
                slack_s=chance.choice([math.inf, chance.uniform(-5, 60)]),
                rate_short=chance.choice([0.0, chance.random() * 3]),
                rate_long=chance.choice([0.0, chance.random()]),
                service_s=chance.uniform(0.1, 3),
                retry_in_s=5.0 if chance.random() < 0.1 else 0.0,
                slo=chance.choice([INTERACTIVE, STANDARD, BATCH]),
            )
        )
    workers = []
    for number in range(chance.randrange(0, 8)):
        budget = chance.choice([10, 25, 40, 80]) * GB
        sizes, ready = {}, []
        for model in chance.sample(models, min(len(models), 4)):
            together = {**sizes, **model.components.sizes}
            if sum(together.values()) <= budget:
                sizes, ready = together, [*ready, model.id]
        is_switching = chance.random() < 0.15
        others = [model.id for model in models if model.id not in ready]
        workers.append(
            WorkerState(
                f"w{number}",
                f"n{number % 2}",
                budget,
                Components(sizes),
                tuple(ready),
                {id_: chance.randrange(0, 4) for id_ in ready if chance.random() < 0.5},
                slots=4,
                leased=frozenset(key for key in sizes if chance.random() < 0.1),
                switching_to=chance.choice(others) if is_switching and others else None,
                ready_in_s=chance.random() * 3 if is_switching else 0.0,
                reserved_for=chance.choice(models).id if chance.random() < 0.2 else None,
                pinned=frozenset(id_ for id_ in ready if chance.random() < 0.1),
                is_draining=chance.random() < 0.1,
                is_frozen=chance.random() < 0.1,
                idle_s=chance.random() * 30,
                age_s=chance.choice([0.0, 0.2, 3.0]),
                attach_bytes_per_s=chance.choice([1e9, 10e9]),
            )
        )
    held = {f"n{number}": {f"own{each}" for each in range(12) if chance.random() < 0.5} for number in range(2)}
    return models, workers, held


def cluster(
    models: Iterable[ModelState],
    workers: Iterable[WorkerState] = (),
    held: Mapping[str, Collection[str]] | None = None,
    is_frozen: bool = False,
) -> ClusterState:
    return ClusterState({one.id: one for one in models}, {one.id: one for one in workers}, held or {}, is_frozen)


def mistakes(state: ClusterState, plan: SwitchPlan) -> list[str]:
    """Return the faults of a plan, found without anything that made it."""
    found, ordered = [], set()
    for order in plan.decisions:
        worker, model = state.workers.get(order.worker), state.models.get(order.model)
        if worker is None or model is None or not order.reason:
            found.append(f"{order} names what is not there, or no reason")
            continue
        if state.is_frozen or worker.is_frozen or worker.is_draining or worker.age_s > STALE_S or worker.switching_to:
            found.append(f"{order}: the worker takes no orders")
        if order.action != "prefetch":
            if worker.id in ordered:
                found.append(f"{order}: a second order")
            ordered.add(worker.id)
        if any(id_ not in worker.models or id_ in worker.pinned for id_ in order.evict):
            found.append(f"{order}: evicts what is not there or pinned")
        if order.action in ("switch", "evict"):
            found += [f"{order}: evicts {id_}, which runs" for id_ in order.evict if worker.running.get(id_)]
        if order.action in ("switch", "drain"):
            if model.retry_in_s > 0:
                found.append(f"{order}: loads what is backed off")
            stay = [id_ for id_ in worker.models if id_ not in order.evict]
            keys = set(worker.leased) & set(worker.resident.sizes)
            sizes = {key: worker.resident.sizes[key] for key in keys} | dict(model.components.sizes)
            for id_ in stay:
                sizes |= state.models[id_].components.sizes
            if sum(sizes.values()) > worker.budget_bytes:
                found.append(f"{order}: does not fit")
            is_sole = {
                id_
                for id_ in order.evict
                if state.models[id_].waiting
                and not any(
                    id_ in other.models and not other.is_draining
                    for other in state.workers.values()
                    if other.id != worker.id
                )
            }
            by_hand = worker.reserved_for == model.id or model.id in worker.pinned
            per_s = model.slo.weight * model.waiting / max(order.switch_s + model.waiting * model.service_s, 1e-9)
            others = [state.models[id_] for id_ in is_sole]
            is_more = all(per_s > each.slo.weight / each.service_s for each in others)
            if is_sole and not (by_hand or is_more or order.reason.startswith("due")):
                found.append(f"{order}: leaves the queue of {is_sole}")
    for id_, workers in plan.planned.items():
        if id_ not in state.models or any(worker not in state.workers for worker in workers):
            found.append(f"planned {id_}: {workers} names what is not there")
        if len(set(workers)) != len(workers):
            found.append(f"planned {id_}: {workers} names a worker twice")
    return found
