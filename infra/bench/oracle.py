"""The least cost that anybody who knows the future could reach, on small cases: mean latency, or the part that is late.

`best_over_time` is exact for workers that run one request at a time: branch and bound by dominance over (requests
served of each model, model of each worker), with the times at which workers are free and the cost so far. Requests of
one model are served in their order (they are alike, so exchanging two changes no sum).

`known_only_latencies` knows no future: it plans the requests that have come, exactly, and anew at each moment. Between
it and the optimum lies what is gained by knowing or guessing which requests come.

`best_together` is for one worker of any number of slots and requests that all come at once: models are served one
after the other, each until it is done, because all of a model's requests are alike and a second visit costs another
switch. So every order of the models is tried, with the workers' rule of batches.

`least_mean_s` bounds a case of any size from below: one worker as fast as all of them, each request at its model's best
batch, no switch but the first of each model, and whatever has least left goes first (which is optimal there: Schrage
1968).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Final

from infra.simulator.scenario import Scenario, SimModel, SimWorker

MAX_REQUESTS: Final = 14  # of more than one worker; beyond it the search takes minutes
MAX_STATES: Final = 20_000  # of one worker
MAX_ORDERED: Final = 6  # models
_State = tuple[tuple[int, ...], tuple[int, ...]]  # requests served of each model, model of each worker
# When each worker is free, the cost so far, and each worker with the model that it served first.
_Partial = tuple[tuple[float, ...], float, tuple[tuple[int, int], ...]]
Cost = Callable[[SimModel, float], float]  # of a request, by its model and latency


def latency_cost(model: SimModel, latency_s: float) -> float:
    """Return the latency: the least mean of it is the oracle's."""
    return latency_s


def late_cost(model: SimModel, latency_s: float) -> float:
    """Return 1 for a request that is late: the least mean of it is that of the most requests in time."""
    return float(latency_s > model.slo.target_s)


def oracle_mean_latency_s(scenario: Scenario, ahead: bool) -> float:
    """Return the optimal mean latency in seconds; see `best_over_time`."""
    return best_over_time(scenario, ahead, latency_cost)


def best_over_time(scenario: Scenario, ahead: bool, cost_of: Cost) -> float:
    """Return the least mean cost. Raises ValueError for a case that is not small or not of its kind.

    With `ahead` a switch may begin before the request that it is for has come, which nobody can do who does not know
    the future; without, the oracle knows the future but begins a switch when a request for the model waits.
    All workers must be alike, have one slot and room for one model, and be empty at the start.
    """
    workers, models = scenario.workers, scenario.models
    _check_one_slot(scenario)
    index = {model.id: number for number, model in enumerate(models)}
    arrivals: list[list[float]] = [[] for _ in models]
    for request in sorted(scenario.requests, key=lambda request: request.at_s):
        arrivals[index[request.model]].append(request.at_s)
    num_states = math.prod(len(queue) + 1 for queue in arrivals) * len(models)
    if len(scenario.requests) > MAX_REQUESTS and (len(workers) > 1 or num_states > MAX_STATES):
        raise ValueError(f"the oracle takes 1 to {MAX_REQUESTS} requests; got {len(scenario.requests)}")
    switch_s = switches_s(models, workers[0])
    service_s = [model.service_s / workers[0].speed for model in models]
    start = [(-1, 0.0)] * len(workers)
    costs = [partial(cost_of, model) for model in models]
    return _cheapest(arrivals, start, switch_s, service_s, costs, ahead)[0] / len(scenario.requests)


def known_only_latencies(scenario: Scenario) -> list[tuple[SimModel, float]]:
    """Return each request's model and latency where nobody knows a request before it comes.

    Whenever a worker is free and requests wait, it begins what the best plan of these alone begins with. It expects no
    others, so a rule that does may be quicker. Raises ValueError as `best_over_time` does, but for the size.
    """
    _check_one_slot(scenario)
    models, queues = scenario.models, [list[float]() for _ in scenario.models]
    index = {model.id: number for number, model in enumerate(models)}
    switch_s = switches_s(models, scenario.workers[0])
    service_s = [model.service_s / scenario.workers[0].speed for model in models]
    workers = [(-1, 0.0)] * len(scenario.workers)
    coming = deque(sorted(scenario.requests, key=lambda request: request.at_s))
    moments, found = [request.at_s for request in coming], list[tuple[SimModel, float]]()
    while moments:
        now_s = heapq.heappop(moments)
        while coming and coming[0].at_s <= now_s:
            queues[index[coming[0].model]].append(coming.popleft().at_s)
        if not any(queues) or min(free_s for _, free_s in workers) > now_s:
            continue
        free = [(attached, max(free_s, now_s)) for attached, free_s in workers]
        costs = [float] * len(models)  # of those that wait, the least mean latency has the least sum of latencies
        for place, model in enumerate(_cheapest(queues, free, switch_s, service_s, costs, False)[1]):
            if model >= 0 and free[place][1] <= now_s:
                end_s = now_s + switch_s[free[place][0]][model] + service_s[model]
                found.append((models[model], end_s - queues[model].pop(0)))
                workers[place] = model, end_s
                heapq.heappush(moments, end_s)
    return found


def _cheapest(
    queues: list[list[float]],
    workers: list[tuple[int, float]],
    switch_s: list[list[float]],
    service_s: list[float],
    costs: Sequence[Callable[[float], float]],
    ahead: bool,
) -> tuple[float, list[int]]:
    """Return the least sum of costs, and the model that each worker then serves first, -1 for none.

    `queues` are the arrivals for each model, `workers` the model that each has, -1 for none, and when it is free.
    """
    begun = sorted((attached, free_s, (place, -1)) for place, (attached, free_s) in enumerate(workers))
    state = (0,) * len(queues), tuple(row[0] for row in begun)
    fronts: dict[_State, list[_Partial]] = {
        state: [(tuple(row[1] for row in begun), 0.0, tuple(row[2] for row in begun))]
    }
    for _ in range(sum(map(len, queues))):
        grown: dict[_State, list[_Partial]] = {}
        for (done, attached), front in fronts.items():
            for model, queue in enumerate(queues):
                if done[model] == len(queue):
                    continue
                arrival_s = queue[done[model]]
                served = (*done[:model], done[model] + 1, *done[model + 1 :])
                for place in range(len(workers)):
                    way_s = switch_s[attached[place]][model]
                    for free_s, cost, firsts in front:
                        ready_s = free_s[place] + way_s if ahead else max(arrival_s, free_s[place]) + way_s
                        end_s = max(arrival_s, ready_s) + service_s[model]
                        rows = [*zip(attached, free_s, firsts, strict=True)]
                        worker, first = firsts[place]
                        rows[place] = model, end_s, (worker, model if first < 0 else first)
                        rows.sort()  # workers are alike
                        key = served, tuple(row[0] for row in rows)
                        grown_cost = cost + costs[model](end_s - arrival_s)
                        entry = tuple(row[1] for row in rows), grown_cost, tuple(row[2] for row in rows)
                        _keep(grown.setdefault(key, []), entry)
        fronts = grown
    _, cost, firsts = min((one for front in fronts.values() for one in front), key=itemgetter(1))
    return cost, [first for _, first in sorted(firsts)]


def best_together(scenario: Scenario, cost_of: Cost) -> float:
    """Return the least mean cost where one worker has all requests at once. Raises ValueError for other cases."""
    _check(scenario)
    counts = {model.id: sum(one.model == model.id for one in scenario.requests) for model in scenario.models}
    models = [model for model in scenario.models if counts[model.id]]
    begin_s = min(one.at_s for one in scenario.requests)
    if len(scenario.workers) != 1 or scenario.duration_s - begin_s > 1.0 or len(models) > MAX_ORDERED:
        raise ValueError(f"expected one worker, requests that come at once, and at most {MAX_ORDERED} models")
    worker = scenario.workers[0]
    switch_s = switches_s(models, worker)
    latencies = [batch_latencies_s(model, counts[model.id], worker) for model in models]
    best = math.inf
    for order in itertools.permutations(range(len(models))):
        at_s, before, total = 0.0, -1, 0.0
        for place in order:
            at_s += switch_s[before][place]
            total += sum([cost_of(models[place], at_s + one) for one in latencies[place]])
            at_s, before = at_s + latencies[place][-1], place
        best = min(best, total)
    return best / len(scenario.requests)


def least_mean_s(scenario: Scenario) -> float:
    """Return a mean latency that no schedule is below that loads no model before it is asked for.

    Raises ValueError without requests or workers.
    """
    _check_there_is_work(scenario)
    requests, models = sorted(scenario.requests, key=lambda one: one.at_s), {one.id: one for one in scenario.models}
    slots = max(worker.slots for worker in scenario.workers)
    shared_s = _least_left_first_s(
        [(one.at_s, models[one.model].batch_service_s(slots) * one.work) for one in requests],
        sum([worker.speed for worker in scenario.workers]),
    )
    fastest = max(worker.speed for worker in scenario.workers)
    alone_s = sum([models[one.model].service_s * one.work / fastest for one in requests])
    alone_s += sum([_first_load_s(models[id_], scenario) for id_ in {one.model for one in requests}])
    return max(shared_s, alone_s) / len(requests)


def _least_left_first_s(jobs: list[tuple[float, float]], speed: float) -> float:
    """Return the least sum of latencies of jobs (arrival, work) on one worker that can stop and go on with any."""
    left: list[float] = []
    now_s = total_s = 0.0
    for at_s, work_s in [*jobs, (math.inf, 0.0)]:
        while left and now_s < at_s:
            if now_s + left[0] / speed <= at_s:
                now_s += heapq.heappop(left) / speed
                total_s += now_s
            else:
                heapq.heapreplace(left, left[0] - (at_s - now_s) * speed)
                now_s = at_s
        if at_s < math.inf:
            now_s = max(now_s, at_s)
            total_s -= at_s
            heapq.heappush(left, work_s)
    return total_s


def _first_load_s(model: SimModel, scenario: Scenario) -> float:
    """Return the least wait of the first request for a model: for the components that no other model brings."""
    others = {key for other in scenario.models if other is not model for key in other.components.sizes}
    own = sum([size for key, size in model.components.sizes.items() if key not in others])
    return min(worker.fixed_switch_s + own / worker.attach_bytes_per_s for worker in scenario.workers)


def batch_latencies_s(model: SimModel, num: int, worker: SimWorker) -> list[float]:
    """Return when each of so many requests that wait together ends: as many run as there are slots."""
    left: list[float] = []
    ends_s: list[float] = []
    at_s = 0.0
    while len(ends_s) < num:
        left += [1.0] * min(worker.slots - len(left), num - len(ends_s) - len(left))
        rate = worker.speed / (model.service_s * (1 + model.batch_growth * (len(left) - 1)))
        least = min(left)
        at_s += least / rate
        left = [one - least for one in left]
        ended = sum(one <= 1e-9 for one in left)
        left = [one for one in left if one > 1e-9]
        ends_s += [at_s] * ended
    return ends_s


def _check(scenario: Scenario) -> None:
    workers, models = scenario.workers, scenario.models
    _check_there_is_work(scenario)
    first = workers[0]
    costs = {(each.slots, each.speed, each.fixed_switch_s, each.attach_bytes_per_s) for each in workers}
    has_room_for_two = any(
        sum({**a.components.sizes, **b.components.sizes}.values()) <= first.budget_bytes
        for a, b in itertools.combinations(models, 2)
    )
    if len(costs) > 1 or has_room_for_two:
        raise ValueError("the oracle takes workers that are alike, with one slot and room for one model")


def _check_one_slot(scenario: Scenario) -> None:
    _check(scenario)
    if scenario.workers[0].slots != 1:
        raise ValueError("the oracle takes workers that are alike, with one slot and room for one model")


def _check_there_is_work(scenario: Scenario) -> None:
    if not scenario.requests or not scenario.workers:
        raise ValueError(f"the oracle takes 1 to {MAX_REQUESTS} requests; got {len(scenario.requests)}")


def switches_s(models: list[SimModel] | tuple[SimModel, ...], worker: SimWorker) -> list[list[float]]:
    """Return the seconds of a switch from each model to each; the last row is from nothing. Shared parts stay."""

    def way_s(there: set[str], model: SimModel) -> float:
        missing = sum([size for key, size in model.components.sizes.items() if key not in there])
        return worker.fixed_switch_s + missing / worker.attach_bytes_per_s

    rows = [[0.0 if one is other else way_s(set(one.components.sizes), other) for other in models] for one in models]
    return [*rows, [way_s(set(), other) for other in models]]


def _keep(front: list[_Partial], new: _Partial) -> None:
    """Add a schedule unless another is at least as good in everything; drop those that it beats."""
    free_s, cost, _ = new
    for other_free, other_cost, _ in front:
        if other_cost <= cost and all(a <= b for a, b in zip(other_free, free_s, strict=True)):
            return
    front[:] = [
        other
        for other in front
        if not (cost <= other[1] and all(a <= b for a, b in zip(free_s, other[0], strict=True)))
    ]
    front.append(new)
