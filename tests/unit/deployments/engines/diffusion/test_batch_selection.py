"""The order of turns, beside naive rules in a simulator with a virtual clock; the policy finds the costs out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from deployments.engines.costs.step_costs import StepCosts
from deployments.engines.diffusion.batch_selection import ArrivingLoad, Candidate, FairOrder, select_batch

Seconds = Callable[[int], float]
CURVES: dict[str, Seconds] = {
    "saturated at one row": lambda rows: 0.002 + 0.1 * rows,
    "fixed cost of one row": lambda rows: 0.05 + 0.05 * rows,
    "fixed cost of eight rows": lambda rows: 0.08 + 0.01 * rows,
    "nearly free until sixteen": lambda rows: 0.1 * max(1, rows / 16) + 0.001 * rows,
    "worse when merged": lambda rows: 0.1 * rows**1.1,
}


@dataclass
class Job:
    arrival_s: float
    num_steps: int
    kind: str = "small"
    rows: int = 1
    deadline_s: float | None = None
    steps_left: int = field(init=False)
    end: float = 0.0  # of the fair order
    ended_s: float | None = None

    def __post_init__(self) -> None:
        self.steps_left = self.num_steps


class Ours:
    """The policy as the engine uses it."""

    def __init__(self) -> None:
        self.costs, self.order, self.load = StepCosts(), FairOrder(), ArrivingLoad()

    def arrive(self, job: Job) -> None:
        work_s = self.costs.seconds_per_row(job.kind) * job.rows * job.steps_left
        job.end = self.order.arrive(work_s)
        self.load.arrive(job.arrival_s, work_s)

    def choose(self, jobs: Sequence[Job], now_s: float) -> list[int]:
        return select_batch(
            [
                Candidate(
                    frozenset([job.kind]),
                    job.kind,
                    job.rows,
                    64,
                    job.end,
                    self.costs.seconds(job.kind, job.rows) * job.steps_left,
                    job.deadline_s,
                )
                for job in jobs
            ],
            self.costs,
            now_s,
            self.load.share(now_s),
        )

    def worked(self, kind: str, rows: int, seconds: float) -> None:
        self.order.work(self.costs.seconds_per_row(kind) * rows)
        self.costs.note_call(kind, rows, seconds)


class Fixed:
    """First come, first served, in batches of at most so many rows of one kind."""

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows

    def arrive(self, job: Job) -> None: ...
    def worked(self, kind: str, rows: int, seconds: float) -> None: ...

    def choose(self, jobs: Sequence[Job], now_s: float) -> list[int]:
        alike = [place for place, job in enumerate(jobs) if job.kind == jobs[0].kind]
        return alike[: max(1, self.max_rows // jobs[0].rows)]


class EvenShares(Fixed):
    """The request that has got the least work is next, alone."""

    def __init__(self) -> None:
        self.got: dict[int, float] = {}

    def choose(self, jobs: Sequence[Job], now_s: float) -> list[int]:
        return [min(range(len(jobs)), key=lambda place: self.got.get(id(jobs[place]), 0.0))]


def simulate(policy, jobs: Sequence[Job], seconds: dict[str, Seconds]) -> list[Job]:
    jobs = [Job(job.arrival_s, job.num_steps, job.kind, job.rows, job.deadline_s) for job in jobs]
    now, here, coming = 0.0, list[Job](), sorted(jobs, key=lambda job: job.arrival_s)
    while here or coming:
        if not here:
            now = max(now, coming[0].arrival_s)
        while coming and coming[0].arrival_s <= now:
            here.append(coming.pop(0))
            policy.arrive(here[-1])
        chosen = [here[place] for place in policy.choose(here, now)]
        assert chosen
        assert len({job.kind for job in chosen}) == 1
        rows = sum(job.rows for job in chosen)
        took = seconds[chosen[0].kind](rows)
        now += took
        policy.worked(chosen[0].kind, rows, took)
        for job in chosen:
            job.steps_left -= 1
            if isinstance(policy, EvenShares):
                policy.got[id(job)] = policy.got.get(id(job), 0.0) + took
            if not job.steps_left:
                job.ended_s = now
        here = [job for job in here if job.ended_s is None]
    return jobs


def mean_latency(jobs: Sequence[Job]) -> float:
    return sum(job.ended_s - job.arrival_s for job in jobs) / len(jobs)


def trained(curve: Seconds, kinds: Sequence[str] = ("small",)) -> Ours:
    """A policy that has met all batch sizes before, as after a warm start."""
    ours = Ours()
    for kind, rows in itertools.product(kinds, (1, 2, 4, 8, 16, 32, 64)):
        ours.costs.note_call(kind, rows, curve(rows))
    return ours


def poisson(chance: random.Random, count: int, mean_gap_s: float, num_steps: int) -> list[Job]:
    now, jobs = 0.0, []
    for _ in range(count):
        now += chance.expovariate(1 / mean_gap_s)
        jobs.append(Job(now, num_steps))
    return jobs


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("load", ["at once", "light", "busy", "overloaded", "bursts"])
def test_mean_latency_is_near_the_best_fixed_batch_size(name: str, load: str) -> None:
    curve, chance = CURVES[name], random.Random(f"{name} {load}")
    most = max(rows / curve(rows) for rows in range(1, 65))  # rows per second
    steps = 20
    if load == "at once":
        jobs = [Job(0.0, steps) for _ in range(100)]
    elif load == "bursts":
        jobs = [Job(40.0 * steps / most * burst, steps) for burst in range(4) for _ in range(chance.randrange(5, 50))]
    else:
        share = {"light": 0.3, "busy": 0.8, "overloaded": 1.3}[load]
        jobs = poisson(chance, 200, steps / most / share, steps)
    best = min(
        mean_latency(simulate(Fixed(rows), jobs, {"small": curve}))
        for rows in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 28, 40, 64)
    )
    assert mean_latency(simulate(trained(curve), jobs, {"small": curve})) <= (1.07 if load == "bursts" else 1.05) * best
    assert mean_latency(simulate(Ours(), jobs, {"small": curve})) <= 1.12 * best, "while it learns"


@pytest.mark.parametrize("name", CURVES)
def test_a_crowd_does_not_end_together(name: str) -> None:
    jobs = simulate(Ours(), [Job(0.0, 20) for _ in range(100)], {"small": CURVES[name]})
    ends = sorted(job.ended_s for job in jobs)
    if name != "nearly free until sixteen":
        assert mean_latency(jobs) < 0.65 * ends[-1]
    assert ends[10] < 0.4 * ends[-1]
    serial = sum(CURVES[name](1) for _ in range(100 * 20))
    assert ends[-1] <= 1.02 * serial


def test_merging_is_never_slower_than_serial() -> None:
    chance = random.Random(3)
    for _ in range(300):
        costs = StepCosts()
        for rows in [*chance.sample(range(1, 65), chance.randrange(1, 12)), 1]:
            costs.note_call("small", rows, chance.uniform(0.01, 0.1) * rows ** chance.uniform(0.2, 1.3))
        candidates = [
            Candidate(
                frozenset(["small"]), "small", chance.choice([1, 2, 4]), chance.choice([4, 16, 64]), chance.random()
            )
            for _ in range(chance.randrange(1, 40))
        ]
        chosen = select_batch(candidates, costs)
        rows = sum(candidates[place].rows for place in chosen)
        first = min(candidates, key=lambda one: one.end)
        assert candidates.index(first) in chosen
        assert costs.seconds("small", rows) / rows <= costs.seconds("small", first.rows) / first.rows + 1e-12
        assert rows <= first.max_rows or len(chosen) == 1
        assert chosen == sorted(set(chosen))


def test_nobody_ends_later_than_with_even_shares() -> None:
    """The curve gains nothing by merging, so that the orders alone are compared; a turn each is granted."""
    chance = random.Random(5)
    seconds = {"small": lambda rows: 0.01 * rows, "large": lambda rows: 0.16 * rows}
    for _ in range(15):
        now, jobs = 0.0, []
        for _ in range(40):
            now += chance.expovariate(1 / 0.3)
            jobs.append(Job(now, chance.choice([1, 4, 20, 50]), chance.choice(["small", "small", "large"])))
        ours = Ours()
        for kind, curve in seconds.items():
            ours.costs.note_call(kind, 1, curve(1))
        fair, even = simulate(ours, jobs, seconds), simulate(EvenShares(), jobs, seconds)
        assert mean_latency(fair) <= mean_latency(even)
        for mine, theirs in zip(fair, even, strict=True):
            assert mine.ended_s <= theirs.ended_s + 0.16 * (1 + sum(job.kind == "large" for job in jobs))


def test_a_long_request_moves_on_under_a_stream_of_short_ones() -> None:
    curve = CURVES["fixed cost of one row"]
    long = Job(0.0, 200)
    stream = [Job(0.06 * number, 1) for number in range(6000)]
    jobs = simulate(Ours(), [long, *stream], {"small": curve})
    assert next(job for job in jobs if job.num_steps == 200).ended_s < 200


def test_a_deadline_that_can_be_kept_goes_first() -> None:
    costs = StepCosts()
    costs.note_call("small", 1, 1.0)
    key = frozenset(["small"])
    crowd = [Candidate(key, "small", 1, 64, float(number), 10.0) for number in range(5)]
    tight = Candidate(key, "small", 1, 64, 99.0, 5.0, deadline_s=20.0)
    hopeless = Candidate(key, "small", 1, 64, 98.0, 30.0, deadline_s=20.0)
    easy = Candidate(key, "small", 1, 64, 97.0, 5.0, deadline_s=500.0)
    for late in (hopeless, easy):
        assert 5 not in select_batch([*crowd, late], costs)[:1]
    assert 5 in select_batch([*crowd, tight, hopeless, easy], costs, now_s=0.0)
    assert 0 in select_batch([*crowd, tight], costs, now_s=16.0), "it is too late for it"


def test_the_fair_order_is_that_of_even_shares() -> None:
    """Beside a simulation in small pieces of time."""
    chance = random.Random(11)
    for _ in range(50):
        order, works, ends = FairOrder(), [], []
        for _ in range(chance.randrange(2, 9)):
            works.append(chance.uniform(0.5, 5.0))
            ends.append(order.arrive(works[-1]))
            done = chance.uniform(0.0, 2.0)
            order.work(done)
            for _ in range(1000):
                sharing = [place for place, work in enumerate(works) if work > 0]
                for place in sharing:
                    works[place] -= done / 1000 / len(sharing)
        left = {place: work for place, work in enumerate(works) if work > 0.05}
        by_work = sorted(left, key=lambda place: left[place])
        close = any(abs(left[a] - left[b]) < 0.1 for a, b in itertools.pairwise(by_work))
        if not close:
            assert sorted(left, key=lambda place: ends[place]) == by_work


def test_who_leaves_weighs_no_more() -> None:
    order = FairOrder()
    first, second = order.arrive(4.0), order.arrive(10.0)
    order.leave(first)
    order.leave(123.0)
    order.work(6.0)
    assert order.arrive(1.0) == pytest.approx(7.0)
    assert second == 10.0
