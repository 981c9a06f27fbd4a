"""The choice of a replica: where a request would end first, of those with room. Pure.

Requests of a model on one replica share its batches, so a joining request costs the delay that it adds to its batch,
and the batch to it. A switch on demand (`cluster/placement/on_demand.py`) takes the replica with the least work, switch
and loss together. An idle replica takes it at once. A replica with running models, which must end first, takes only a
request that has waited for some time, so fewer switches are needed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from cluster.admission.records import Demand, OnDemandSwitch, Waiting
from cluster.admission.replicas import Replica, Replicas

LOSS_SWITCHES: Final = 0.5  # for evicting a model that is wanted next; half of them would be gone by then anyway
HOLD_TIMES: Final = 4.0  # times a request's switch and run: the longest that it waits for others' batches to end


@dataclass(frozen=True, slots=True)
class Options:
    """The places where a request may start, and its costs there beside the work.

    `among` are the replicas on which its model may start, None for all. `switch_s` is the time of a switch to the model
    where it is not at hand, unless `on_demand` has one. `joining_s` is the mutual delay between a request that joins a
    batch and each of the others. `chances` are the models' chances to be asked for next. Until `held_until_s` the
    request starts nowhere that other models have to end first.
    """

    among: Collection[str] | None = None
    switch_s: float = 0.0
    joining_s: float = 0.0
    on_demand: Mapping[str, OnDemandSwitch] = field(default_factory=dict)
    chances: Mapping[str, float] = field(default_factory=dict)
    held_until_s: float = -math.inf


@dataclass(frozen=True, slots=True)
class Assignment:
    """The replica for a request, and the seconds of a switch to its model there. `is_alone`: other models go for it."""

    replica: str
    switch_s: float = 0.0
    is_alone: bool = False


def best_replica(replicas: Replicas, demand: Demand, options: Options, now_s: float) -> Assignment | None:
    """Return the replica with room where the wait is shortest; None when the request has to wait.

    The wait is the mutual delay of it and the requests there, the rest of a switch, and one to a model that the replica
    is not believed to have at hand.
    """
    best: tuple[float, float, str] | None = None
    for name, replica in replicas.among(options.among):
        if not replica.has_room(demand.share):
            continue
        if (missing_s := _missing_s(replicas, name, demand.model, options, now_s)) is None:
            continue
        switching_s = max(0.0, replica.ready_at_s - now_s)
        wait_s = switching_s + replica.delay_s(demand.model, options.joining_s) + missing_s
        if best is None or (wait_s, replica.all_used, name) < best:
            best = wait_s, replica.all_used, name
    if best is None:
        return None
    start = options.on_demand.get(best[2])
    return Assignment(best[2], start.switch_s, not start.is_beside) if start else Assignment(best[2], options.switch_s)


def possible_replicas(replicas: Replicas, model: str, options: Options, now_s: float) -> tuple[str, ...]:
    """Return the replicas on which a request would start if it had room there."""
    return tuple(
        name
        for name, replica in replicas.among(options.among)
        if not replica.is_gone and _missing_s(replicas, name, model, options, now_s) is not None
    )


def _missing_s(replicas: Replicas, name: str, model: str, options: Options, now_s: float) -> float | None:
    """Return the seconds to get the model ready, with the expected loss of evictions; None if it has to wait."""
    replica = replicas[name]
    if model in replica.recent:
        return 0.0
    if (start := options.on_demand.get(name)) is None:
        return options.switch_s
    if start.is_beside:
        return start.switch_s * (1 + replica.num_running)
    if replica.num_running and now_s < options.held_until_s:
        return None
    return start.switch_s * (1 + LOSS_SWITCHES * _loss(replicas, replica, options.chances))


def _loss(replicas: Replicas, replica: Replica, chances: Mapping[str, float]) -> float:
    """Return the chance that the next request is for a model that would be evicted and is on no other replica."""
    lost = 1.0 if replica.recent else 0.0
    for model in replica.recent:
        lost = min(lost, chances.get(model, 0.0) if replicas.has_only_one(model) else 0.0)
    return lost


def held_until_s(
    starts: Mapping[str, OnDemandSwitch] | None, waiting: Waiting, latency_s: float, now_s: float
) -> float:
    """Return the time until which a request waits only for an idle worker or one with its model.

    It does not wait if its time is not known yet, or if its deadline is near.
    """
    if not starts or not latency_s:
        return waiting.arrived_s
    once_s = max([start.switch_s for start in starts.values()]) + latency_s
    is_near = waiting.demand.deadline_s - now_s <= (HOLD_TIMES + 1) * once_s
    return waiting.arrived_s + (0.0 if is_near else HOLD_TIMES * once_s)
