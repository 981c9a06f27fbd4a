"""`infra.bench refusals`: was what the queue refused impossible, and what it let in possible? Judged by replay.

A case is drawn: workers, slots, models, tenants, and requests of 1 to 1,000 units of work that come at a multiple of
what the workers can do. The real queue decides. Then each refused request is played again in a copy of everything,
where it is let in: of those, hardly any should be done in time. Of those that were let in, nearly all should be.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from typing import Final

from cluster.admission.queue import AdmissionQueue
from cluster.admission.records import Demand, Refused
from configs.admission import AdmissionConfig
from deployments.console.output import Column, print_line, print_table

POOL: Final = "worker"
LOADS: Final = (0.5, 0.9, 1.5, 3.0, 10.0)
WORKS: Final = (1.0, 1000.0)
NUM_WARM: Final = 60  # requests without a deadline that come before, so that times are known
WARM_LOAD: Final = 0.7
REPLAYED: Final = 16  # refused requests of a case, drawn
MOST_WRONG: Final = 0.01  # of those refused
LEAST_RIGHT: Final = 0.98  # of those let in
IN_TIME, LATE = "in time", "too late"
_DONE: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Call:
    """A request that comes at `at_s`. What it really takes, which the queue learns: `before_s` whoever else is there,
    then `alone_s`, were it alone.
    """

    at_s: float
    demand: Demand
    before_s: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """Workers, and the requests that come. Each of those that share a worker slows the others by `slowdown`."""

    num_workers: int
    slowdown: float
    config: AdmissionConfig
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcomes of a case's requests, without those before it, and of refused ones that were played again."""

    seed: int
    load: float
    outcomes: Counter[str]
    replayed: Counter[str] = field(default_factory=Counter)  # by the reason of the refusal
    wrong: Counter[str] = field(default_factory=Counter)  # of those: would have been in time


def draw_case(seed: int, load: float, number: int = 300) -> Case:
    """Return a case whose requests come at `load` times of what its workers can do."""
    rng = random.Random(f"{seed} {load}")
    num_workers, slots = rng.randint(1, 3), rng.choice([1, 2, 4, 8])
    slowdown = rng.uniform(0.2, 1.0)
    laws = [(rng.uniform(0.0, 0.5), _log_uniform(rng, 0.001, 0.03)) for _ in range(rng.randint(1, 3))]
    is_before = rng.random() < 0.5  # the fixed part: a text is encoded elsewhere; or else mates slow that, too
    tenants = {f"t{each}": {"weight": rng.choice([1.0, 2.0, 4.0])} for each in range(rng.randint(1, 3))}
    full = 1 + slowdown * (slots - 1)  # times as long as alone
    longest_s = max(fixed_s + each_s * WORKS[1] for fixed_s, each_s in laws) * full
    usual_s = longest_s * rng.uniform(1.5, 5.0)  # where all have the same time
    is_same = rng.random() < 0.5
    models = [rng.randrange(len(laws)) for _ in range(NUM_WARM + number)]
    works = [_log_uniform(rng, *WORKS) for _ in models]
    befores_s, alone_s = list[float](), list[float]()
    for model, work in zip(models, works, strict=True):
        noise = rng.lognormvariate(0.0, 0.03)
        befores_s.append(laws[model][0] * noise * is_before)
        alone_s.append((laws[model][0] * (not is_before) + laws[model][1] * work) * noise)
    mean_s = statistics.mean(map(float.__add__, befores_s, [one_s * full for one_s in alone_s]))
    capacity_per_s = num_workers * slots / mean_s
    calls, now_s = list[Call](), 0.0
    for place, (model, work) in enumerate(zip(models, works, strict=True)):
        is_warm = place < NUM_WARM
        now_s += rng.expovariate(capacity_per_s * (WARM_LOAD if is_warm else load))
        least_s = befores_s[place] + alone_s[place] * full
        own_s = usual_s if is_same else max(1.0, least_s * _log_uniform(rng, 1.5, 30.0))
        ends_s = math.inf if is_warm else now_s + own_s
        demand = Demand(POOL, f"m{model}", work, 1 / slots, 2, rng.choice(sorted(tenants)), ends_s)
        calls.append(Call(now_s, demand, befores_s[place], alone_s[place]))
    config = AdmissionConfig.model_validate({"tenants": tenants, "max_waiting": 10**6, "max_waiting_per_model": 10**6})
    return Case(num_workers, slowdown, config, tuple(calls))


def _log_uniform(rng: random.Random, least: float, most: float) -> float:
    return math.exp(rng.uniform(math.log(least), math.log(most)))


class _Workers:
    """Running work by worker: the seconds left to each, those before its work, and those of it alone."""

    def __init__(self, case: Case) -> None:
        self._slowdown = case.slowdown
        self._left_s: dict[str, dict[int, tuple[float, float]]] = {f"w{each}": {} for each in range(case.num_workers)}
        self._worker_of: dict[int, str] = {}

    @property
    def names(self) -> Sequence[str]:
        return list(self._left_s)

    def start(self, ticket: int, worker: str, call: Call) -> None:
        self._left_s[worker][ticket] = call.before_s, call.alone_s
        self._worker_of[ticket] = worker

    def end(self, ticket: int) -> None:
        """Take a request out, if it runs."""
        if (worker := self._worker_of.pop(ticket, None)) is not None:
            del self._left_s[worker][ticket]

    def next_s(self) -> float:
        """Return in how many seconds the next one is done."""
        return min(
            [
                before_s + alone_s * self._slow(each)
                for each in self._left_s.values()
                for before_s, alone_s in each.values()
            ],
            default=math.inf,
        )

    def advance(self, passed_s: float) -> list[int]:
        """Let time pass; return those that are done."""
        done = []
        for running in self._left_s.values():
            slow = self._slow(running)
            for ticket, (before_s, alone_s) in running.items():
                waited_s = min(passed_s, before_s)
                running[ticket] = before_s - waited_s, alone_s - (passed_s - waited_s) / slow
                if sum(running[ticket]) <= _DONE:
                    done.append(ticket)
        return done

    def _slow(self, running: Mapping[int, tuple[float, float]]) -> float:
        return 1 + self._slowdown * (len(running) - 1)


def play(case: Case, let_in: int | None = None) -> dict[int, str]:
    """Return each request's outcome, by place: in time, late, or the reason of its refusal.

    With `let_in` that request is not refused, whatever the queue says of it, and the play ends with it.
    """
    queue, workers, now_s = AdmissionQueue(case.config), _Workers(case), 0.0
    queue.set_replicas(POOL, workers.names, now_s)
    found: dict[int, str] = {}
    coming, here = 0, dict[int, float]()  # deadlines of those that are not done
    while coming < len(case.calls) or here:
        next_s = case.calls[coming].at_s if coming < len(case.calls) else math.inf
        next_s = min(next_s, now_s + workers.next_s(), queue.look_again_s(), min(here.values(), default=math.inf))
        next_s, before_s = max(now_s, next_s), now_s
        now_s = next_s
        for ticket in workers.advance(now_s - before_s):
            workers.end(ticket)
            queue.leave(ticket, now_s, is_answered=True)
            del here[ticket]
            found[ticket] = IN_TIME
        for ticket in [each for each, deadline_s in here.items() if deadline_s <= now_s]:  # it is given up
            workers.end(ticket)
            queue.leave(ticket, now_s)
            del here[ticket]
            found[ticket] = LATE
        while coming < len(case.calls) and case.calls[coming].at_s <= now_s:
            demand = case.calls[coming].demand
            here[coming] = demand.deadline_s
            queue.submit(coming, replace(demand, deadline_s=math.inf) if coming == let_in else demand, now_s)
            coming += 1
        for event in queue.pump(now_s):
            if isinstance(event, Refused):
                del here[event.ticket]
                is_new = case.calls[event.ticket].at_s == now_s
                found[event.ticket] = f"{event.refusal.reason}{'' if is_new else ' after a wait'}"
            else:
                workers.start(event.ticket, event.replica, case.calls[event.ticket])
        if let_in in found:
            break
    return found


def judge(seed: int, load: float, number: int = 300, replayed: int = REPLAYED) -> Verdict:
    """Return the verdict on a drawn case. So many of its refused requests are played again."""
    case = draw_case(seed, load, number)
    found = {ticket: outcome for ticket, outcome in play(case).items() if ticket >= NUM_WARM}
    verdict = Verdict(seed, load, Counter(found.values()))
    refused = sorted(ticket for ticket, outcome in found.items() if outcome not in (IN_TIME, LATE))
    for ticket in random.Random(seed).sample(refused, min(replayed, len(refused))):
        verdict.replayed[found[ticket]] += 1
        verdict.wrong[found[ticket]] += play(case, let_in=ticket)[ticket] == IN_TIME
    return verdict


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares of several cases: `refused` of all, `wrong` of those, `right` of those that were let in."""

    refused: float
    wrong: float
    right: float


def shares(verdicts: Iterable[Verdict]) -> Shares:
    """Return the shares of cases together. A refusal after a wait counts for both: it was let in, and then refused."""
    outcomes, played, wrong = Counter[str](), 0, 0
    for one in verdicts:
        outcomes += one.outcomes
        played += one.replayed.total()
        wrong += one.wrong.total()
    refused = sum(count for outcome, count in outcomes.items() if outcome not in (IN_TIME, LATE))
    waited = sum(count for outcome, count in outcomes.items() if outcome.endswith(" after a wait"))
    let_in = outcomes[IN_TIME] + outcomes[LATE] + waited
    return Shares(refused / outcomes.total(), wrong / max(played, 1), outcomes[IN_TIME] / max(let_in, 1))


def measure_refusals(cases: int, first_seed: int, loads: Sequence[float] = LOADS) -> list[Verdict]:
    """Return the verdicts on so many cases at each of the loads, on all cores."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        drawn = list(product(range(first_seed, first_seed + cases), loads))
        return list(pool.map(judge, *zip(*drawn, strict=True), chunksize=4))


def print_refusal_figures(verdicts: Sequence[Verdict], as_json: bool) -> None:
    """Show the shares by load, and the reasons of the refusals that were wrong."""
    by_load = {load: [one for one in verdicts if one.load == load] for load in sorted({one.load for one in verdicts})}
    lines = [(load, shares(those), _reasons(those)) for load, those in by_load.items()]
    if as_json:
        figures = [
            {"load": load, "refused": one.refused, "wrong": one.wrong, "right": one.right, "reasons": dict(reasons)}
            for load, one, reasons in lines
        ]
        print(json.dumps({"loads": figures, "most_wrong": MOST_WRONG, "least_right": LEAST_RIGHT}, indent=2))
        return
    columns = [Column(name) for name in ("load", "refused", "in time if let in", "in time of those let in", "reasons")]
    rows = [
        (f"{load:g}", f"{one.refused:.1%}", f"{one.wrong:.2%}", f"{one.right:.2%}", _listed_reasons(reasons))
        for load, one, reasons in lines
    ]
    print_table(columns, rows)
    print_line(f"at most {MOST_WRONG:.0%} and at least {LEAST_RIGHT:.0%} are wanted")


def _reasons(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, str]]:
    verdicts = list(verdicts)
    replayed, wrong = Counter[str](), Counter[str]()
    for one in verdicts:
        replayed += one.replayed
        wrong += one.wrong
    for reason, count in replayed.most_common():
        yield reason, f"{wrong[reason]} of {count}"


def _listed_reasons(reasons: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{reason}: {counts}" for reason, counts in reasons)
