"""The plan of a moment: orders to workers, and the workers of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


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
class FreeStart:
    """A worker that a model may start on without an order: it switches by itself, in `switch_s`.

    `is_beside`: the model fits beside all that is ready there, so nothing goes for it, and nothing has to end first.
    """

    switch_s: float
    is_beside: bool = False


@dataclass(frozen=True, slots=True)
class SwitchPlan:
    """Orders, and the workers that serve each model or get ready for it. `notes` says what could not be planned.

    Models in `free` need no order: they may start on each of the workers named, because a switch takes
    `longest_free_s` at most.
    """

    decisions: tuple[Decision, ...] = ()
    planned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    free: Mapping[str, Mapping[str, FreeStart]] = field(default_factory=dict)
    longest_free_s: float = 0.0
