"""A scenario from what a running cluster tells: its requests, what they cost, and what its workers hold. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cluster.control.state import Components
from cluster.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker

POOL: Final = "worker"
_ENOUGH_S: Final = 1e-3  # a shorter switch was none
Record = Mapping[str, Any]


def recorded_scenario(
    requests: Sequence[Record],
    loads: Sequence[Record],
    workers: Sequence[Record],
    began_s: float,
    sizes: Mapping[str, Mapping[str, int]],
    costs: Mapping[str, tuple[float, float]] | None = None,
    switch_s: float | None = None,
) -> Scenario:
    """Return the scenario of the requests that came after `began_s`.

    `requests` are records of `/admin/requests`, `loads` the models and `workers` the workers of `/admin/cluster`.
    `sizes` are those of `note_sizes`. `costs` are measured seconds of a request alone and batch growth, by model;
    otherwise the queue's mean counts, which was measured at the batch sizes that there were. `switch_s` is a measured
    switch; otherwise the mean of those that requests waited for.
    """
    kept = [one for one in requests if one["pool"] == POOL and one["arrived_s"] >= began_s]
    kept.sort(key=lambda one: (one["arrived_s"], one["started_s"]))
    work: dict[str, list[float]] = {}
    for one in kept:
        work.setdefault(one["model"], []).append(one["work"])
    usual = {model: statistics.mean(values) for model, values in work.items()}
    known = {load["model"]: load["service_s"] for load in loads if load["pool"] == POOL and load["service_s"] > 0}
    measured = {model: (service_s, 1.0) for model, service_s in known.items()} | dict(costs or {})
    models = tuple(
        SimModel(model, Components(sizes.get(model) or {f"own-{model}": 1}), *measured.get(model, (1.0, 1.0)))
        for model in sorted(usual)
    )
    slots = max(1, round(1 / min((one["share"] for one in kept), default=1.0)))
    switches = [one["switch_s"] for one in kept if one["switch_s"] > _ENOUGH_S]
    fixed_s = switch_s if switch_s is not None else statistics.mean(switches) if switches else 0.0
    described = [each for each in workers if "budget_bytes" in each]
    return Scenario(
        models,
        tuple(
            SimWorker(
                f"w{number:03d}",
                str(worker.get("node", "node")),
                worker["budget_bytes"],
                slots,
                fixed_switch_s=fixed_s,
                attach_bytes_per_s=1e15,  # what it takes is in the mean of all switches
            )
            for number, worker in enumerate(described)
        ),
        tuple(
            SimRequest(
                one["arrived_s"] - began_s,
                one["model"],
                one["priority"],
                one["work"] / usual[one["model"]],
                one["started_s"] - began_s,
                one["ended_s"] - began_s if one["is_answered"] else None,
            )
            for one in kept
        ),
    )


def note_sizes(found: dict[str, dict[str, int]], workers: Sequence[Record]) -> None:
    """Take the components of models from descriptions of workers into `found`: bytes by model and component key.

    A model that goes loses its parts one by one, so the largest that was ever seen of it counts. Of a model that was
    never seen there, the bytes of its last switch do.
    """
    for worker in workers:
        built: dict[str, dict[str, int]] = {}
        for module in worker.get("modules", ()):
            for model in module["models"]:
                built.setdefault(model, {})[module["key"]] = module["bytes"]
        for model, switch in worker.get("last_switches", {}).items():
            found.setdefault(model, {f"own-{model}": switch["attached_bytes"]})
        for model, parts in built.items():
            if sum(parts.values()) >= sum(found.get(model, {}).values()):
                found[model] = parts
