"""Models that need no order, because a switch to them takes little longer than a request. Pure.

Waiting for a planned worker would cost such a request more than the switch, so the queue starts it by
itself (`replica_choice.py`), on an idle worker at once, and the worker switches while the text is encoded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Final

from cluster.admission.records import OnDemandSwitch
from cluster.placement.state import ClusterState, ModelState, UsualSwitch, WorkerState

MAX_ON_DEMAND: Final = 128  # models, the most wanted
MAX_STARTS: Final = 512  # pairs of model and worker looked at, beside the ready ones
LEAST_WORKERS: Final = 4
LEAST_RATE: Final = 1e-4  # requests per second; no worker prepares for a rarer model
LEAD_S: Final = 0.1  # requests start on a worker that will be ready this soon: their texts are encoded meanwhile
ON_DEMAND_REQUESTS: Final = 2.0  # a switch no longer than this many usual requests needs no order


def longest_on_demand_s(state: ClusterState) -> float:
    """Return the longest switch in seconds that needs no order: the time of some requests of the usual mix.

    0 when more work waits: then the order in which models are served counts, and that needs a plan.
    """
    rates = latencies = 0.0
    for model in state.models.values():
        rate = model.rate_long
        rates += rate
        latencies += rate * max(model.service_s, model.latency_s)
    if not rates:
        return 0.0
    calm_s = ON_DEMAND_REQUESTS * latencies / rates
    return calm_s if state.queue_s() < calm_s else 0.0


def quickly_switched(state: ClusterState, longest_s: float, usual: UsualSwitch) -> list[str]:
    """Return the most wanted models whose usual switch needs no order, at most `longest_s` (`longest_on_demand_s`)."""
    if state.is_frozen or not longest_s:
        return []
    found = [
        model
        for model in state.models.values()
        if (model.waiting or model.rate_long > LEAST_RATE)
        and not model.retry_in_s
        and usual.seconds(model) < max(model.service_s, longest_s)
    ]
    return [model.id for model in nlargest(MAX_ON_DEMAND, found, key=_how_wanted)]


def on_demand_switches(
    state: ClusterState,
    longest_s: float,
    on_demand: Collection[str],
    serving: Mapping[str, Sequence[str]],
    workers: Sequence[WorkerState],
) -> dict[str, dict[str, OnDemandSwitch]]:
    """Return the workers where each of these models may start, without the models that may start nowhere.

    `serving` are the workers that have each model or get ready for it, `workers` those that may switch to one. A model
    whose bytes must come from storage first needs an order.
    """
    workers = workers[: max(LEAST_WORKERS, MAX_STARTS // max(len(on_demand), 1))]
    found = {}
    for id_ in on_demand:
        model = state.models[id_]
        starts = {}
        for worker in workers:
            if _can_switch_to(state, model, worker, longest_s):
                nbytes = state.bytes_together(worker, (*worker.models, id_))
                starts[worker.id] = OnDemandSwitch(
                    worker.fixed_switch_s + model.components.total_bytes / worker.attach_bytes_per_s
                    if id_ in worker.models
                    else state.switch_s(model, worker),
                    id_ not in worker.models and nbytes <= worker.budget_bytes,
                )
        # All workers that have it or will in a moment share its waiting requests.
        waits_s = waits_there(state, id_, serving.get(id_, ()), longest_s)
        if starts := {name: OnDemandSwitch(wait_s) for name, wait_s in waits_s.items()} | starts:
            found[id_] = starts
    return found


def waits_there(state: ClusterState, id_: str, coming: Iterable[str], lead_s: float = LEAD_S) -> dict[str, float]:
    """Return the workers where requests for a model may start now, with the seconds until each is ready.

    These are ready within `lead_s`. Once there is one, others count too if they get ready before their
    part of the waiting work would be done there: otherwise all of it would go to the first one.
    """
    workers = [state.workers[name] for name in coming]
    waits_s = {worker.id: 0.0 if id_ in worker.models else worker.ready_in_s for worker in workers}
    num_ready, model = sum([wait_s <= lead_s for wait_s in waits_s.values()]), state.models[id_]
    part_s = model.waiting * model.service_s / (num_ready + 1) if num_ready else 0.0
    return {name: wait_s for name, wait_s in waits_s.items() if wait_s <= max(lead_s, part_s)}


def why_on_demand(starts: Mapping[str, OnDemandSwitch], longest_s: float) -> str:
    """Return the reason why a model with these starts needs no order."""
    longest_ms = max([start.switch_s for start in starts.values()]) * 1e3
    bound = f"one of up to {longest_s * 1e3:,.0f} ms is begun by the request that needs it"
    return f"a switch takes {longest_ms:,.0f} ms, and {bound}"


def chances_of(state: ClusterState) -> dict[str, float]:
    """Return for each model in demand the chance that the next request is for it.

    Rounded: all rates decay alike, and equal values need not be sent again.
    """
    total = sum([model.rate_long for model in state.models.values()])
    found = ((id_, model.rate_long) for id_, model in state.models.items() if model.rate_long > LEAST_RATE)
    return {id_: round(rate / total, 3) for id_, rate in found}


def _can_switch_to(state: ClusterState, model: ModelState, worker: WorkerState, longest_s: float) -> bool:
    if model.id in worker.unable:
        return False
    pinned = [id_ for id_ in worker.pinned if id_ in state.models]
    fits = state.bytes_together(worker, (*pinned, model.id)) <= worker.budget_bytes
    return fits and state.switch_s(model, worker) <= max(model.service_s, longest_s)


def _how_wanted(model: ModelState) -> tuple[int, float]:
    return model.waiting, model.rate_long
