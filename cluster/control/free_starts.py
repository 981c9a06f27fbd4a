"""Models that need no order: a switch to them takes less than one of their requests. Pure.

To wait for a worker that is planned would cost such a request more than the switch does, so the queue starts it at once
on any worker, which switches by itself while the text is encoded. The queue gets the price of each worker, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Final

from cluster.control.state import ClusterState, ModelState, WorkerState

MAX_FREE: Final = 128  # models, the most wanted
LEAST_RATE: Final = 1e-4  # requests per second; a model that is asked for less often is not prepared for
LOSS_SWITCHES: Final = 3.0  # a model that was taken away for nothing costs so many switches: there, back, and the queue


def free_models(
    state: ClusterState, usual_fixed_s: float, usual_attach_bytes_per_s: float, workers: Sequence[WorkerState]
) -> frozenset[str]:
    """Return the models that may start without an order: by what a switch usually takes, and on one of `workers` too.

    A model whose bytes must come from storage first is not among them, and needs an order.
    """
    if state.is_frozen:
        return frozenset()
    found = [
        model
        for model in state.models.values()
        if (model.waiting or model.rate_long > LEAST_RATE)
        and not model.retry_in_s
        and usual_fixed_s + model.components.total_bytes / usual_attach_bytes_per_s < model.service_s
    ]
    wanted = nlargest(MAX_FREE, found, key=_how_wanted)
    return frozenset([model.id for model in wanted if any(_is_free_on(state, model, worker) for worker in workers)])


def prices_of_free(
    state: ClusterState, free: Iterable[str], serving: Mapping[str, Sequence[str]], workers: Sequence[WorkerState]
) -> dict[str, dict[str, float]]:
    """Return what each free model costs on each worker where it may start.

    `serving` are the workers of each model, `workers` those that may switch to one.
    """
    total_rate = sum([model.rate_long for model in state.models.values()]) or 1.0
    found = {}
    for id_ in free:
        model = state.models[id_]
        prices = {name: 0.0 for name in serving.get(id_, ()) if id_ in state.workers[name].models}
        for worker in workers:
            if worker.id not in prices and (price_s := _price_s(state, model, worker, serving, total_rate)) is not None:
                prices[worker.id] = price_s
        found[id_] = prices
    return found


def _price_s(
    state: ClusterState,
    model: ModelState,
    worker: WorkerState,
    serving: Mapping[str, Sequence[str]],
    total_rate: float,
) -> float | None:
    """Return the switch and what is lost with the model that goes; None where it takes longer or cannot be.

    The model that goes is missed if it is asked for next and no other worker has it.
    """
    if not _is_free_on(state, model, worker):
        return None
    switch_s = state.switch_s(model, worker)
    if state.bytes_together(worker, (*worker.models, model.id)) <= worker.budget_bytes:
        return switch_s
    chances = [
        0.0 if len(serving.get(each, ())) > 1 else state.models[each].rate_long / total_rate
        for each in worker.models
        if each not in worker.pinned
    ]
    return switch_s * (1 + LOSS_SWITCHES * min(chances, default=0.0))


def _is_free_on(state: ClusterState, model: ModelState, worker: WorkerState) -> bool:
    pinned = [id_ for id_ in worker.pinned if id_ in state.models]
    fits = state.bytes_together(worker, (*pinned, model.id)) <= worker.budget_bytes
    return fits and state.switch_s(model, worker) <= model.service_s


def _how_wanted(model: ModelState) -> tuple[int, float]:
    return model.waiting, model.rate_long
