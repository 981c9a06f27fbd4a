"""A run of the simulator as the pages show it: JSON-able lists of requests, switches and what workers held. Pure."""

from __future__ import annotations

from typing import Any, Final

from cluster.simulator.running import RunFigures
from cluster.simulator.world import World

MAX_REQUESTS: Final = 100_000  # that a page draws
MAX_MODELS: Final = 2000
MAX_WORKERS: Final = 256


def why_not_recorded(world: World) -> str:
    """Return in a sentence why a run is too large for a page; "" where it is not."""
    sizes = {"requests": len(world.scenario.requests), "models": len(world.models), "workers": len(world.workers)}
    bounds = {"requests": MAX_REQUESTS, "models": MAX_MODELS, "workers": MAX_WORKERS}
    return next(
        (f"{sizes[name]} {name}; a page shows at most {most}" for name, most in bounds.items() if sizes[name] > most),
        "",
    )


def recording_of(world: World, figures: RunFigures) -> dict[str, Any]:
    """Return a run that has ended. Times are seconds from its start, lists in the order of their times.

    Requests are [model, worker, arrived, started, ended]; the last two are None where it was never served.
    """
    served: list[list[Any]] = [
        [one.request.model, one.worker, one.request.at_s, one.started_s, one.ended_s] for one in world.served
    ]
    answered = {id(one.request) for one in world.served}
    others: list[list[Any]] = [
        [one.model, "", one.at_s, None, None] for one in world.scenario.requests if id(one) not in answered
    ]
    spans = sorted(world.spans, key=lambda span: span.start_s)
    return {
        "title": figures.policy,
        "figures": figures.as_record(),
        "end_s": _rounded(world.now_s),
        "models": {model.id: dict(model.components.sizes) for model in world.scenario.models},
        "workers": [[spec.id, spec.node, spec.budget_bytes] for spec in world.scenario.workers],
        "requests": [_rounded_all(one) for one in sorted(served + others, key=lambda one: one[2])],
        "switches": [
            _rounded_all([s.worker, s.model, s.start_s, s.end_s, s.moved_bytes]) for s in spans if s.is_switch
        ],
        "spans": [_rounded_all([s.worker, s.model, s.start_s, s.end_s]) for s in spans if not s.is_switch],
    }


def _rounded_all(values: list[Any]) -> list[Any]:
    return [_rounded(value) if isinstance(value, float) else value for value in values]


def _rounded(time_s: float) -> float:
    return round(time_s, 4)
