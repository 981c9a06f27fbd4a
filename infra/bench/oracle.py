"""The least mean latency that anybody who knows the future could reach, on small cases.

Exact for workers that run one request at a time: branch and bound by dominance over (requests served of each model,
model of each worker), with the times at which workers are free and the latency so far. Requests of one model are
served in their order (they are alike, so exchanging two changes no sum).
"""

from __future__ import annotations

from cluster.simulator.scenario import Scenario

MAX_REQUESTS = 14  # beyond it the search takes minutes
_State = tuple[tuple[int, ...], tuple[int, ...]]


def oracle_mean_latency_s(scenario: Scenario, ahead: bool) -> float:
    """Return the optimal mean latency in seconds. Raises ValueError for a case that is not small or not of its kind.

    With `ahead` a switch may begin before the request that it is for has come, which nobody can do who does not know
    the future; without, the oracle knows the future but begins a switch when a request for the model waits.
    All workers must be alike, have one slot and room for one model, and be empty at the start.
    """
    workers, models = scenario.workers, scenario.models
    if len(scenario.requests) > MAX_REQUESTS or not scenario.requests or not workers:
        raise ValueError(f"the oracle takes 1 to {MAX_REQUESTS} requests; got {len(scenario.requests)}")
    first = workers[0]
    costs = {(each.slots, each.speed, each.fixed_switch_s, each.attach_bytes_per_s) for each in workers}
    least = min(model.components.total_bytes for model in models)
    keys = [set(model.components.sizes) for model in models]
    shares = any(a & b for index, a in enumerate(keys) for b in keys[:index])
    if len(costs) > 1 or first.slots != 1 or 2 * least <= max(each.budget_bytes for each in workers) or shares:
        raise ValueError("the oracle takes workers that are alike, with one slot and room for one model")
    index = {model.id: number for number, model in enumerate(models)}
    arrivals: list[list[float]] = [[] for _ in models]
    for request in sorted(scenario.requests, key=lambda request: request.at_s):
        arrivals[index[request.model]].append(request.at_s)
    switch_s = [first.fixed_switch_s + model.components.total_bytes / first.attach_bytes_per_s for model in models]
    service_s = [model.service_s / first.speed for model in models]
    start: _State = ((0,) * len(models), (-1,) * len(workers))
    fronts: dict[_State, list[tuple[tuple[float, ...], float]]] = {start: [((0.0,) * len(workers), 0.0)]}
    for _ in scenario.requests:
        grown: dict[_State, list[tuple[tuple[float, ...], float]]] = {}
        for (done, attached), front in fronts.items():
            for free_s, cost in front:
                for model, queue in enumerate(arrivals):
                    if done[model] == len(queue):
                        continue
                    arrival_s = queue[done[model]]
                    served = (*done[:model], done[model] + 1, *done[model + 1 :])
                    for place in range(len(workers)):
                        if attached[place] == model:
                            start_s = max(arrival_s, free_s[place])
                        elif ahead:
                            start_s = max(arrival_s, free_s[place] + switch_s[model])
                        else:
                            start_s = max(arrival_s, free_s[place]) + switch_s[model]
                        end_s = start_s + service_s[model]
                        pairs = [*zip(attached, free_s, strict=True)]
                        pairs[place] = (model, end_s)
                        pairs.sort()  # workers are alike
                        key = (served, tuple(pair[0] for pair in pairs))
                        _keep(grown.setdefault(key, []), tuple(pair[1] for pair in pairs), cost + end_s - arrival_s)
        fronts = grown
    best = min(cost for front in fronts.values() for _, cost in front)
    return best / len(scenario.requests)


def _keep(front: list[tuple[tuple[float, ...], float]], free_s: tuple[float, ...], cost: float) -> None:
    """Add a schedule unless another is at least as good in everything; drop those that it beats."""
    for other_free, other_cost in front:
        if other_cost <= cost and all(a <= b for a, b in zip(other_free, free_s, strict=True)):
            return
    front[:] = [
        other
        for other in front
        if not (cost <= other[1] and all(a <= b for a, b in zip(free_s, other[0], strict=True)))
    ]
    front.append((free_s, cost))
