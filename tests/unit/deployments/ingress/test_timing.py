"""Times of an answer, and how far a job is."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.ingress.messages.running_job import RunningJob
from deployments.ingress.service.timing import account, timed_call


def test_time_outside_of_the_replica_is_time_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 12.5)
    times = {"queue": 300.0, "total": 2000.0}
    account(times, 10.0)
    assert times == {"queue": 800.0, "total": 2500.0}
    longer = {"total": 3000.0}  # by a clock of the replica
    account(longer, 10.0)
    assert longer == {"queue": 0.0, "total": 2500.0}
    untold: dict[str, float] = {}
    account(untold, 10.0)
    assert untold == {"queue": 0.0, "total": 2500.0}


async def test_a_timed_call_has_the_whole_time() -> None:
    class Calls:
        async def call(self, *args: Any, **kwargs: Any) -> Any:
            assert (args, kwargs) == (("m", "request"), {"demand": None, "route": "r"})
            return SimpleNamespace(timings_ms={"total": 0.0})

    calls: Any = Calls()
    nobody: Any = None
    result = await timed_call(calls, "m", "request", nobody, "r")
    assert 0 < result.timings_ms["queue"] <= result.timings_ms["total"] < 60_000


@pytest.mark.parametrize(("step", "num_steps", "percent"), [(0, 4, 0), (1, 4, 25), (2, 3, 66), (4, 4, 99), (0, 0, 0)])
async def test_a_job_is_done_only_with_its_answer(step: int, num_steps: int, percent: int) -> None:
    job = RunningJob("id", 0, 1.0, asyncio.Event())
    progress: Any = SimpleNamespace(step=step, num_steps=num_steps)
    await job.note_progress(progress)
    assert (job.progress, job.changed.is_set()) == (percent, True)
