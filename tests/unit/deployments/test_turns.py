"""Who steps next: nobody is left out, and short work does not wait for long work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from deployments import turns
from deployments.turns import Runner, TurnBounds, choose

Chooses = Callable[[Sequence[Runner], TurnBounds, int], list[int]]


@dataclass
class Job:
    """A request in a simulation that counts turns."""

    arrival: int
    num_steps: int
    num_rows: int = 1
    last_turn: int = 0
    ended: int | None = None
    longest_wait: int = 0

    def runner(self) -> Runner:
        return Runner(self.num_rows, self.num_rows * 100, self.num_steps, self.last_turn)


def simulate(jobs: list[Job], bounds: TurnBounds, choose: Chooses = choose, most: int = 100_000) -> None:
    turn, waiting, coming = 0, list[Job](), sorted(jobs, key=lambda job: job.arrival)
    while (waiting or coming) and turn < most:
        while coming and coming[0].arrival <= turn:
            waiting.append(coming.pop(0))
            waiting[-1].last_turn = turn
        turn += 1
        chosen = [waiting[place] for place in choose([job.runner() for job in waiting], bounds, turn)]
        assert len(chosen) == 1 or sum(job.num_rows for job in chosen) <= bounds.max_rows
        assert chosen or not waiting
        for job in chosen:
            job.longest_wait = max(job.longest_wait, turn - job.last_turn)
            job.num_steps, job.last_turn = job.num_steps - 1, turn
            if not job.num_steps:
                job.ended = turn
        waiting = [job for job in waiting if job.ended is None]


def round_robin(runners: Sequence[Runner], bounds: TurnBounds, turn: int) -> list[int]:
    return sorted(range(len(runners)), key=lambda place: runners[place].last_turn)[: bounds.max_rows]


def mean_latency(jobs: list[Job]) -> float:
    return sum((job.ended or 10**9) - job.arrival for job in jobs) / len(jobs)


def test_all_step_while_they_fit() -> None:
    runners = [Runner(2, 200, steps, 0) for steps in (9, 1, 5)]
    for turn in range(8):
        assert choose(runners, TurnBounds(6, 600), turn) == [0, 1, 2]
    assert choose([], TurnBounds(), 1) == []


@pytest.mark.parametrize("bounds", [TurnBounds(max_rows=3), TurnBounds(max_pixels=300)])
def test_the_least_work_goes_first_within_the_bounds(bounds: TurnBounds) -> None:
    runners = [Runner(1, 100, 9, 0), Runner(2, 200, 1, 0), Runner(1, 100, 4, 0), Runner(1, 100, 5, 0)]
    assert choose(runners, bounds, 1) == [1, 2]


def test_what_is_larger_than_the_bounds_runs_by_itself() -> None:
    runners = [Runner(100, 10_000, 1, 0), Runner(100, 10_000, 2, 0)]
    assert choose(runners, TurnBounds(4, 400), 1) == [0]


def test_equal_requests_end_sooner_than_side_by_side() -> None:
    ours, theirs = ([Job(0, 20) for _ in range(64)] for _ in range(2))
    simulate(ours, TurnBounds(max_rows=8))
    simulate(theirs, TurnBounds(max_rows=8), round_robin)
    assert max(job.ended or 0 for job in ours) <= 1.1 * max(job.ended or 0 for job in theirs)
    assert mean_latency(ours) < 0.65 * mean_latency(theirs)


def test_a_long_request_moves_on_under_a_stream_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> bool:
        long = Job(0, 50, num_rows=2)
        short = [Job(arrival, 2) for arrival in range(5_000) for _ in range(2)]  # as much as there is room for
        simulate([long, *short], TurnBounds(max_rows=4), most=5_000)
        return long.ended is not None

    assert ends()
    monkeypatch.setattr(turns, "ROTATION", 10**9)
    assert not ends(), "the rotation is what moves it on"


def test_nobody_waits_for_ever_in_random_traffic() -> None:
    chance = random.Random(7)
    for _ in range(20):
        jobs = [Job(chance.randrange(200), chance.choice([1, 4, 28, 50]), chance.choice([1, 2, 8])) for _ in range(60)]
        simulate(jobs, TurnBounds(max_rows=chance.choice([1, 4, 16])))
        assert all(job.ended for job in jobs)
        assert max(job.longest_wait for job in jobs) <= 4 * len(jobs) + 4
