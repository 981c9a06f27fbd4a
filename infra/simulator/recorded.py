"""A scenario from what a running cluster tells: its requests, what they cost, and what its workers hold. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cluster.placement.state import Components
from infra.simulator.scenario import Scenario, SimModel, SimRequest, SimWorker

POOL: Final = "worker"
_ENOUGH_S: Final = 1e-3  # a shorter switch was none
_MOSTLY: Final = 0.1  # of its time: a request that waited longer for a switch says little of what one costs
_STEPS: Final = 20  # between no growth and that of requests one after the other
Record = Mapping[str, Any]


def recorded_scenario(
    requests: Sequence[Record],
    loads: Sequence[Record],
    workers: Sequence[Record],
    began_s: float,
    sizes: Mapping[str, Mapping[str, int]],
    switch_s: float | None = None,
) -> Scenario:
    """Return the scenario of the requests that came after `began_s`.

    `requests` are records of `/admin/requests`, `loads` the models and `workers` the workers of `/admin/cluster`.
    `sizes` are those of `note_sizes`. What requests cost is fitted to how long they ran among how many; of a model
    without such a request, the queue's mean counts. `switch_s` is a measured switch; otherwise the mean of those that
    requests waited for.
    """
    kept = [one for one in requests if one["pool"] == POOL and one["arrived_s"] >= began_s]
    kept.sort(key=lambda one: (one["arrived_s"], one["started_s"]))
    work: dict[str, list[float]] = {}
    for one in kept:
        work.setdefault(one["model"], []).append(one["work"])
    usual = {model: statistics.mean(values) for model, values in work.items()}
    known = {load["model"]: load["service_s"] for load in loads if load["pool"] == POOL and load["service_s"] > 0}
    measured = {model: (service_s, 1.0) for model, service_s in known.items()} | _fitted_costs(kept, usual)
    models = tuple(
        SimModel(model, Components(sizes.get(model) or {f"own-{model}": 1}), *measured.get(model, (1.0, 1.0)))
        for model in sorted(usual)
    )
    slots = max(1, round(1 / min((one["share"] for one in kept), default=1.0)))
    switches = [one["switch_s"] for one in kept if one["switch_s"] > _ENOUGH_S]
    fixed_s = switch_s if switch_s is not None else statistics.mean(switches) if switches else 0.0
    described = [each for each in workers if "budget_bytes" in each]
    ids = {worker["name"]: _id(number) for number, worker in enumerate(described) if "name" in worker}
    return Scenario(
        models,
        tuple(_worker(number, worker, slots, fixed_s) for number, worker in enumerate(described)),
        tuple(_request(one, began_s, usual[one["model"]], ids.get(one["replica"])) for one in kept),
    )


def _id(number: int) -> str:
    return f"w{number:03d}"


def _worker(number: int, worker: Record, slots: int, fixed_s: float) -> SimWorker:
    return SimWorker(
        _id(number),
        str(worker.get("node", "node")),
        worker["budget_bytes"],
        slots,
        fixed_switch_s=fixed_s,
        attach_bytes_per_s=1e15,  # what it takes is in the mean of all switches
    )


def _request(one: Record, began_s: float, usual: float, worker: str | None) -> SimRequest:
    return SimRequest(
        one["arrived_s"] - began_s,
        one["model"],
        one["priority"],
        one["work"] / usual,
        one["started_s"] - began_s,
        one["ended_s"] - began_s if one["is_answered"] else None,
        worker,
        one["switch_s"] if one["switch_s"] > _ENOUGH_S else None,
    )


def _fitted_costs(requests: Sequence[Record], usual: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Return the seconds of a request alone, and what each further one of its batch adds as a share of it, by model.

    With the right growth, the time of each request divided by how much slower its batch-mates of each moment made it is
    the same for all of a model. One growth for all models is sought. Who waited for a switch says nothing.
    """
    seconds: dict[int, dict[int, float]] = {}  # by request: how long it ran in a batch of each size
    beside: dict[tuple[str, str], list[int]] = {}
    for number, one in enumerate(requests):
        if one["ended_s"] > one["started_s"]:
            beside.setdefault((one["replica"], one["model"]), []).append(number)
    for numbers in beside.values():
        _note_batch_sizes(requests, numbers, seconds)
    samples: dict[str, list[tuple[float, dict[int, float]]]] = {}
    for number, one in enumerate(requests):
        took_s = one["ended_s"] - one["started_s"]
        if one["is_answered"] and took_s > 0 and one["switch_s"] <= max(_ENOUGH_S, _MOSTLY * took_s):
            samples.setdefault(one["model"], []).append((usual[one["model"]] / one["work"], seconds[number]))

    def alone_s(growth: float) -> dict[str, list[float]]:
        return {
            model: [share * sum(s / (1 + growth * (size - 1)) for size, s in parts.items()) for share, parts in found]
            for model, found in samples.items()
        }

    def spread(growth: float) -> float:
        found = [values for values in alone_s(growth).values() if len(values) > 1]
        return sum(len(values) * statistics.pvariance(values) / statistics.mean(values) ** 2 for values in found)

    growth = min((step / _STEPS for step in range(_STEPS + 1)), key=spread)
    return {model: (statistics.mean(values), growth) for model, values in alone_s(growth).items()}


def _note_batch_sizes(requests: Sequence[Record], numbers: Sequence[int], seconds: dict[int, dict[int, float]]) -> None:
    """Note how long each of these requests, all of one model on one replica, ran beside how many of the others."""
    starts = [(requests[number]["started_s"], 1, number) for number in numbers]
    ends = [(requests[number]["ended_s"], 0, number) for number in numbers]
    running: set[int] = set()
    last_s = 0.0
    for at_s, is_start, number in sorted(starts + ends):
        for each in running:
            parts = seconds.setdefault(each, {})
            parts[len(running)] = parts.get(len(running), 0.0) + at_s - last_s
        last_s = at_s
        (running.add if is_start else running.discard)(number)


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
