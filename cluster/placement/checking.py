"""The check of figures: an impossible one becomes its default, and a sentence names it. Pure.

Reports come from other processes, and the plan divides by their figures and sorts by them. Names need no check here:
a state names only known models, and calls those ready whose components are (`seen_workers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, Final, TypeVar

from cluster.placement.reports import WorkerReport
from cluster.placement.state import ModelState

_HUGE: Final = 1e15  # no figure of a cluster is above it
_INF: Final = float("inf")
# The least and greatest value of each figure.
_BOUNDS: Final[Mapping[type, Mapping[str, tuple[float, float]]]] = {
    ModelState: {
        "waiting": (0, _HUGE),
        "oldest_age_s": (0.0, _HUGE),
        "slack_s": (-_HUGE, _INF),
        "rate_short": (0.0, _HUGE),
        "rate_long": (0.0, _HUGE),
        "service_s": (1e-8, _HUGE),
        "latency_s": (0.0, _HUGE),
        "unstarted_s": (0.0, _HUGE),
    },
    WorkerReport: {
        "budget_bytes": (0, _HUGE),
        "slots": (1, _HUGE),
        "ready_in_s": (0.0, _HUGE),
        "fixed_switch_s": (0.0, _HUGE),
        "attach_bytes_per_s": (1.0, _HUGE),
        "load_bytes_per_s": (1.0, _HUGE),
        "up_s": (0.0, _HUGE),
    },
}
R = TypeVar("R", ModelState, WorkerReport)


def mended(name: str, record: R, notes: dict[str, tuple[str, ...]]) -> R:
    """Return the record with the default for each impossible figure, 0 without one. `notes` has the sentences by name.

    Impossible is what is out of bounds, NaN, or no number.
    """
    bounds = _BOUNDS[type(record)]
    wrong = {
        key: value for key, (low, high) in bounds.items() if not _is_within(value := getattr(record, key), low, high)
    }
    if not wrong:
        notes.pop(name, None)
        return record
    defaults: dict[str, Any] = {each.name: 0 if each.default is MISSING else each.default for each in fields(record)}
    notes[name] = tuple(f"{name}: {key} is {_brief(value)}; taken as {defaults[key]}" for key, value in wrong.items())
    return replace(record, **{key: defaults[key] for key in wrong})


def _is_within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and low <= value <= high


def _brief(value: object) -> str:
    """Return the value cut to fit a line."""
    return repr(value)[:60]
