"""The plan of a moment: orders to workers, and the workers of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.admission.replica_slots import OnDemandSwitch


@dataclass(frozen=True, slots=True)
class Decision:
    """An order to a worker, and why.

    *switch*: let the models in `evict` go, and get ready for `model`. *drain*: start no more requests of the models in
    `evict`, because `model` comes next. *prefetch*: get the bytes that the node lacks into its memory. *evict*: let
    `model` go. All can be carried out twice. `switch_s` is the estimated duration.
    """

    action: Literal["switch", "drain", "prefetch", "evict"]
    worker: str
    model: str
    reason: str
    evict: tuple[str, ...] = ()
    switch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """Orders, and the workers that serve each model or get ready for it. `notes` says what could not be planned.

    Models in `on_demand` need no order: they may start on each of the workers named, because a switch takes
    `longest_on_demand_s` at most.
    """

    decisions: tuple[Decision, ...] = ()
    planned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    on_demand: Mapping[str, Mapping[str, OnDemandSwitch]] = field(default_factory=dict)
    longest_on_demand_s: float = 0.0
