"""Orders by hand, over the controller's head: pins, frozen and drained workers. Pure.

The registry keeps it in a file (`cluster/registry/registrations.py`), and the controller asks for it when it starts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field

from cluster.records.errors import OverrideRefused
from configs.model import StrictModel
from weights.records.errors import listed

MAX_PINS: Final = 10_000


class Overrides(StrictModel):
    """The overrides. `pins` are models by worker. What is about a worker that is gone has no effect."""

    is_frozen: bool = False
    frozen: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    pins: dict[str, frozenset[str]] = Field({})


@dataclass(frozen=True, slots=True)
class OverrideChange:
    """A change of the overrides, or its end. `worker` "" is all of them, which only a freeze can mean.

    A worker's name may be shortened as long as it is the only one that begins so.
    """

    kind: Literal["freeze", "drain", "pin"]
    is_on: bool
    worker: str = ""
    model: str = ""


def changed(
    overrides: Overrides, change: OverrideChange, workers: Collection[str], models: Collection[str]
) -> Overrides:
    """Return the overrides after a change. `workers` and `models` are the known ones.

    Raises OverrideRefused for a worker or a model that nobody knows.
    """
    if change.kind == "freeze" and not change.worker:
        return overrides.model_copy(update={"is_frozen": change.is_on})
    named = {*overrides.frozen, *overrides.draining, *overrides.pins} if not change.is_on else set()
    worker = _full_name(change.worker, {*workers, *named})
    if change.kind == "freeze":
        return overrides.model_copy(update={"frozen": _with_or_without(overrides.frozen, worker, change.is_on)})
    if change.kind == "drain":
        return overrides.model_copy(update={"draining": _with_or_without(overrides.draining, worker, change.is_on)})
    if change.is_on and change.model not in models:
        raise OverrideRefused(f"model: no worker serves {change.model!r} (models: {listed(sorted(models))})")
    pinned = _with_or_without(overrides.pins.get(worker, frozenset()), change.model, change.is_on)
    pins = {name: of_worker for name, of_worker in overrides.pins.items() if name != worker}
    if pinned:
        pins[worker] = pinned
    if sum(map(len, pins.values())) > MAX_PINS:
        raise OverrideRefused(f"model: {MAX_PINS} pins are the most")
    return overrides.model_copy(update={"pins": pins})


def _full_name(given: str, workers: Collection[str]) -> str:
    found = [name for name in workers if name.startswith(given)] if given else []
    if given in workers:
        return given
    if len(found) != 1:
        problem = f"{len(found)} workers begin with" if found else "no worker"
        raise OverrideRefused(f"worker: {problem} {given!r} (workers: {listed(sorted(workers))})")
    return found[0]


def _with_or_without(names: frozenset[str], name: str, is_in: bool) -> frozenset[str]:
    return names | {name} if is_in else names - {name}
