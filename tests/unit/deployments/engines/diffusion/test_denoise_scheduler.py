"""Who steps next: nobody is left out, and short work does not wait for long work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from deployments.engines.diffusion import engine
from deployments.engines.diffusion.engine import _Candidate, _choose_batch

Chooses = Callable[[Sequence[_Candidate], int], list[int]]


@dataclass
class Job:
    """A request in a simulation that counts batches."""

    arrival: int
    num_steps: int
    share: float
    last_batch: int = 0
    ended: int | None = None
    longest_wait: int = 0

    def candidate(self) -> _Candidate:
        return _Candidate(self.share, self.num_steps, self.last_batch)


def simulate(jobs: list[Job], choose: Chooses = _choose_batch, most: int = 100_000) -> None:
    batch, waiting, coming = 0, list[Job](), sorted(jobs, key=lambda job: job.arrival)
    while (waiting or coming) and batch < most:
        while coming and coming[0].arrival <= batch:
            waiting.append(coming.pop(0))
            waiting[-1].last_batch = batch
        batch += 1
        chosen = [waiting[place] for place in choose([job.candidate() for job in waiting], batch)]
        assert len(chosen) == 1 or sum(job.share for job in chosen) <= 1.0001
        assert chosen or not waiting
        for job in chosen:
            job.longest_wait = max(job.longest_wait, batch - job.last_batch)
            job.num_steps, job.last_batch = job.num_steps - 1, batch
            if not job.num_steps:
                job.ended = batch
        waiting = [job for job in waiting if job.ended is None]


def round_robin(candidates: Sequence[_Candidate], batch: int) -> list[int]:
    """Choose eight requests of an eighth each."""
    return sorted(range(len(candidates)), key=lambda place: candidates[place].last_batch)[:8]


def mean_latency(jobs: list[Job]) -> float:
    return sum((job.ended or 10**9) - job.arrival for job in jobs) / len(jobs)


@pytest.mark.parametrize("parts", [1, 3, 7, 10, 49])
def test_all_step_while_they_fit(parts: int) -> None:
    candidates = [_Candidate(1 / parts, steps, 0) for steps in range(1, parts + 1)]
    for batch in range(8):
        assert _choose_batch(candidates, batch) == list(range(parts))
        assert len(_choose_batch([*candidates, _Candidate(1 / parts, 1, 0)], batch)) == parts
    assert _choose_batch([], 1) == []


def test_the_least_work_goes_first() -> None:
    candidates = [_Candidate(0.25, 9, 0), _Candidate(0.5, 1, 0), _Candidate(0.25, 4, 0), _Candidate(0.25, 5, 0)]
    assert _choose_batch(candidates, 1) == [1, 2, 3]


def test_what_is_larger_than_a_batch_runs_by_itself() -> None:
    assert _choose_batch([_Candidate(25.0, 1, 0), _Candidate(25.0, 2, 0)], 1) == [0]
    assert _choose_batch([_Candidate(25.0, 1, 0), _Candidate(0.1, 2, 0)], 1) == [1]
    assert _choose_batch([_Candidate(25.0, 1, 0), _Candidate(0.1, 2, 3)], 4) == [0], "its batch comes"


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
    monkeypatch.setattr(engine, "ROTATION", 10**9)
    assert not ends(), "the rotation is what moves it on"


def test_nobody_waits_for_ever_in_random_traffic() -> None:
    chance = random.Random(7)
    for _ in range(20):
        shares = chance.choice([[0.1, 0.3], [1 / 64, 1 / 4, 1.0], [0.5, 2.0]])
        jobs = [Job(chance.randrange(200), chance.choice([1, 4, 28, 50]), chance.choice(shares)) for _ in range(60)]
        simulate(jobs)
        assert all(job.ended for job in jobs)
        assert max(job.longest_wait for job in jobs) <= 4 * len(jobs) + 4
