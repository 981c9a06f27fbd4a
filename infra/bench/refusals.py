"""`infra.bench refusals`: was what the queue refused impossible, and what it let in possible? Judged by replay.

A case is drawn: workers, slots, models, tenants, and requests of 1 to 1,000 units of work that come at a multiple of
what the workers can do. The real queue decides. Then each refused request is played again in a copy of everything,
where it is let in: of those, hardly any should be done in time. Of those that were let in, nearly all should be.

Beside the queue stands one who foresees: it knows what each request here really takes, and plays all of them forward by
the queue's own order. What it misses, only those who come later would tell.
"""

from __future__ import annotations

import json
import math
import pickle  # noqa: TID251  a copy of the play, made and read in this process
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from multiprocessing import get_context
from typing import Final

from cluster.admission.outcomes import EndedLog
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
FORESEEN: Final = "foreseen"
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
    foresees: bool
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


class Play:
    """A play of a case: `found` has outcomes by ticket, in time, late, or the reason of the refusal.

    By the queue's own rule; or else, if it `foresees`, a request is let in where it would be in time if no other came,
    which it plays first. `before` has the play at the moment when each request came.
    """

    def __init__(self, case: Case, foresees: bool = False) -> None:
        self.found: dict[int, str] = {}
        self.before: dict[int, bytes] = {}
        self._case, self._foresees = case, foresees
        self._queue, self._workers, self._now_s = AdmissionQueue(case.config), _Workers(case), 0.0
        self._queue.set_replicas(POOL, self._workers.names, 0.0)
        self._coming, self._here = 0, dict[int, float]()  # deadlines of those that are not done

    def run(self, let_in: int | None = None, most: int | None = None) -> None:
        """Play on, at `most` so many requests. The play ends with `let_in`, which nothing refuses."""
        calls = self._case.calls[:most]
        while (self._coming < len(calls) or self._here) and let_in not in self.found:
            next_s = calls[self._coming].at_s if self._coming < len(calls) else math.inf
            next_s = min(next_s, self._now_s + self._workers.next_s(), self._queue.look_again_s())
            next_s, before_s = max(self._now_s, min([next_s, *self._here.values()])), self._now_s
            self._now_s = next_s
            for ticket in self._workers.advance(self._now_s - before_s):
                self._end(ticket, IN_TIME)
            for ticket in [each for each, deadline_s in self._here.items() if deadline_s <= self._now_s]:
                self._end(ticket, LATE)  # it is given up
            while self._coming < len(calls) and calls[self._coming].at_s <= self._now_s:
                self._come(calls[self._coming].demand, let_in)
            for event in self._queue.pump(self._now_s):
                if isinstance(event, Refused):
                    del self._here[event.ticket]
                    is_new = self._case.calls[event.ticket].at_s == self._now_s
                    self.found[event.ticket] = f"{event.refusal.reason}{'' if is_new else ' after a wait'}"
                else:
                    self._workers.start(event.ticket, event.replica, self._case.calls[event.ticket])

    def again(self, ticket: int, most: int | None = None) -> str:
        """Return the outcome of a request that is let in, where at `most` so many come."""
        other = Play.__new__(Play)
        vars(other).update(pickle.loads(self.before[ticket]), _case=self._case, before={}, found={})
        other.run(ticket, most)
        return other.found[ticket]

    def _come(self, demand: Demand, let_in: int | None) -> None:
        ticket = self._coming
        if demand.deadline_s < math.inf and ticket != let_in and (self._foresees or let_in is None):
            self._queue.ended = EndedLog()  # nobody reads it here
            kept = {name: value for name, value in vars(self).items() if name not in ("_case", "before", "found")}
            self.before[ticket] = pickle.dumps(kept)
        self._coming += 1
        if self._foresees and ticket in self.before and self.again(ticket, ticket + 1) == LATE:
            self.found[ticket] = FORESEEN
            return
        self._here[ticket] = demand.deadline_s
        is_free = self._foresees or ticket == let_in
        self._queue.submit(ticket, replace(demand, deadline_s=math.inf) if is_free else demand, self._now_s)

    def _end(self, ticket: int, outcome: str) -> None:
        self._workers.end(ticket)
        self._queue.leave(ticket, self._now_s, is_answered=outcome == IN_TIME)
        del self._here[ticket]
        self.found[ticket] = outcome


def judge(seed: int, load: float, foresees: bool = False, number: int = 300, replayed: int = REPLAYED) -> Verdict:
    """Return the verdict on a drawn case. So many of its refused requests are played again."""
    play = Play(draw_case(seed, load, number), foresees)
    play.run()
    found = {ticket: outcome for ticket, outcome in play.found.items() if ticket >= NUM_WARM}
    verdict = Verdict(seed, load, foresees, Counter(found.values()))
    refused = sorted(ticket for ticket, outcome in found.items() if outcome not in (IN_TIME, LATE))
    for ticket in random.Random(seed).sample(refused, min(replayed, len(refused))):
        verdict.replayed[found[ticket]] += 1
        verdict.wrong[found[ticket]] += play.again(ticket) == IN_TIME
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


def measure_refusals(
    cases: int, first_seed: int, loads: Sequence[float] = LOADS, rules: Sequence[bool] = (False,)
) -> list[Verdict]:
    """Return the verdicts on so many cases at each of the loads, on all cores; a rule is whether it foresees."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        drawn = list(product(range(first_seed, first_seed + cases), loads, rules))
        return list(pool.map(judge, *zip(*drawn, strict=True), chunksize=4))


def print_refusal_figures(verdicts: Sequence[Verdict], as_json: bool) -> None:
    """Show the shares by rule and load, and the reasons of the refusals that were wrong."""
    kinds = sorted({(one.foresees, one.load) for one in verdicts})
    groups = [[one for one in verdicts if (one.foresees, one.load) == kind] for kind in kinds]
    lines = [(*kind, shares(those), _reasons(those)) for kind, those in zip(kinds, groups, strict=True)]
    if as_json:
        figures = [
            {"load": load, "foresees": foresees, **asdict(one), "reasons": dict(reasons)}
            for foresees, load, one, reasons in lines
        ]
        print(json.dumps({"loads": figures, "most_wrong": MOST_WRONG, "least_right": LEAST_RIGHT}, indent=2))
        return
    names = ("rule", "load", "refused", "in time if let in", "in time of those let in", "reasons")
    rows = [
        (
            "foresees" if foresees else "queue",
            *(f"{load:g}", f"{one.refused:.1%}", f"{one.wrong:.2%}", f"{one.right:.2%}"),
            _listed_reasons(reasons),
        )
        for foresees, load, one, reasons in lines
    ]
    print_table([Column(name) for name in names], rows)
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
