"""Who steps next: nobody is left out, and short work does not wait for long work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from deployments.services import turns
from deployments.services.turns import Runner, choose

Chooses = Callable[[Sequence[Runner], int], list[int]]


@dataclass
class Job:
    """A request in a simulation that counts turns."""

    arrival: int
    num_steps: int
    share: float
    last_turn: int = 0
    ended: int | None = None
    longest_wait: int = 0

    def runner(self) -> Runner:
        return Runner(self.share, self.num_steps, self.last_turn)


def simulate(jobs: list[Job], choose: Chooses = choose, most: int = 100_000) -> None:
    turn, waiting, coming = 0, list[Job](), sorted(jobs, key=lambda job: job.arrival)
    while (waiting or coming) and turn < most:
        while coming and coming[0].arrival <= turn:
            waiting.append(coming.pop(0))
            waiting[-1].last_turn = turn
        turn += 1
        chosen = [waiting[place] for place in choose([job.runner() for job in waiting], turn)]
        assert len(chosen) == 1 or sum(job.share for job in chosen) <= 1.0001
        assert chosen or not waiting
        for job in chosen:
            job.longest_wait = max(job.longest_wait, turn - job.last_turn)
            job.num_steps, job.last_turn = job.num_steps - 1, turn
            if not job.num_steps:
                job.ended = turn
        waiting = [job for job in waiting if job.ended is None]


def round_robin(runners: Sequence[Runner], turn: int) -> list[int]:
    """Of eighths."""
    return sorted(range(len(runners)), key=lambda place: runners[place].last_turn)[:8]


def mean_latency(jobs: list[Job]) -> float:
    return sum((job.ended or 10**9) - job.arrival for job in jobs) / len(jobs)


@pytest.mark.parametrize("parts", [1, 3, 7, 10, 49])
def test_all_step_while_they_fit(parts: int) -> None:
    runners = [Runner(1 / parts, steps, 0) for steps in range(1, parts + 1)]
    for turn in range(8):
        assert choose(runners, turn) == list(range(parts))
        assert len(choose([*runners, Runner(1 / parts, 1, 0)], turn)) == parts
    assert choose([], 1) == []


def test_the_least_work_goes_first() -> None:
    runners = [Runner(0.25, 9, 0), Runner(0.5, 1, 0), Runner(0.25, 4, 0), Runner(0.25, 5, 0)]
    assert choose(runners, 1) == [1, 2, 3]


def test_what_is_larger_than_a_turn_runs_by_itself() -> None:
    assert choose([Runner(25.0, 1, 0), Runner(25.0, 2, 0)], 1) == [0]
    assert choose([Runner(25.0, 1, 0), Runner(0.1, 2, 0)], 1) == [1]
    assert choose([Runner(25.0, 1, 0), Runner(0.1, 2, 3)], 4) == [0], "its turn comes"


def test_equal_requests_end_sooner_than_side_by_side() -> None:
    ours, theirs = ([Job(0, 20, 1 / 8) for _ in range(64)] for _ in range(2))
    simulate(ours)
    simulate(theirs, round_robin)
    assert max(job.ended or 0 for job in ours) <= 1.1 * max(job.ended or 0 for job in theirs)
    assert mean_latency(ours) < 0.65 * mean_latency(theirs)


def test_a_long_request_moves_on_under_a_stream_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> bool:
        long = Job(0, 50, 1 / 2)
        short = [Job(arrival, 2, 1 / 4) for arrival in range(5_000) for _ in range(2)]  # as much as there is room for
        simulate([long, *short], most=5_000)
        return long.ended is not None

    assert ends()
    monkeypatch.setattr(turns, "ROTATION", 10**9)
    assert not ends(), "the rotation is what moves it on"


def test_nobody_waits_for_ever_in_random_traffic() -> None:
    chance = random.Random(7)
    for _ in range(20):
        shares = chance.choice([[0.1, 0.3], [1 / 64, 1 / 4, 1.0], [0.5, 2.0]])
        jobs = [Job(chance.randrange(200), chance.choice([1, 4, 28, 50]), chance.choice(shares)) for _ in range(60)]
        simulate(jobs)
        assert all(job.ended for job in jobs)
        assert max(job.longest_wait for job in jobs) <= 4 * len(jobs) + 4
