"""The beginnings of results: they grow for those who follow them, end with their start, and have a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.waiting import until

from cluster.jobs import parts
from cluster.jobs.owner import JobOwner
from cluster.jobs.records import Job, JobAnswer, NewJob, TakenJob
from configs.jobs import JobsConfig

LONG_S = 30.0


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[JobOwner]:
    owner = JobOwner(tmp_path, JobsConfig())
    yield owner
    owner.close()


async def taken(owner: JobOwner, runner: str = "one") -> TakenJob:
    (job,) = await owner.take_jobs(runner, 1, 1, LONG_S)
    return job


async def read(owner: JobOwner, id_: str, start: int | None, offset: int, wait_s: float = LONG_S) -> tuple[Job, bytes]:
    found = await owner.parts.follow_result("mine", id_, start, offset, wait_s)
    assert found is not None
    return found


async def test_followers_get_what_comes_and_hear_of_the_end(owner: JobOwner) -> None:
    id_ = (await owner.add_job(NewJob("mine", "/v1/x", b"{}"))).id
    early = asyncio.ensure_future(read(owner, id_, None, 0))
    job = await taken(owner)
    assert await owner.parts.add_part(id_, 1, 0, b"abc") == 3
    assert (await early)[1] == b"abc"
    assert await owner.parts.add_part(id_, 1, 0, b"abc") == 3, "the same again changes nothing"
    assert await owner.parts.add_part(id_, 1, 9, b"far") == 3
    assert (await read(owner, id_, 1, 3, 0.0))[1] == b""
    late = asyncio.ensure_future(read(owner, id_, 1, 3))
    assert await owner.parts.add_part(id_, 1, 3, b"de") == 5
    assert (await late)[1] == b"de"
    assert (await read(owner, id_, 1, 1))[1] == b"bcde"
    assert await owner.parts.follow_result("yours", id_, None, 0, LONG_S) is None
    last = asyncio.ensure_future(read(owner, id_, 1, 5))
    assert await owner.end_job(id_, job.start, JobAnswer(200), b"abcde")
    ended, more = await last
    assert (ended.status, more) == ("done", b"")
    assert await owner.parts.add_part(id_, 1, 5, b"f") is None


async def test_another_start_has_a_result_of_its_own(owner: JobOwner) -> None:
    id_ = (await owner.add_job(NewJob("mine", "/v1/x", b"{}"))).id
    await taken(owner)
    await owner.parts.add_part(id_, 1, 0, b"old")
    following = asyncio.ensure_future(read(owner, id_, 1, 3))
    await owner.release_jobs("one")
    assert (await taken(owner, "two")).start == 2
    job, more = await following
    assert (job.num_starts, more) == (2, b"")
    assert await owner.parts.add_part(id_, 2, 0, b"new") == 3
    assert await owner.parts.add_part(id_, 1, 3, b"late") is None
    assert (await read(owner, id_, 2, 0))[1] == b"new"


async def test_who_runs_a_job_tells_a_new_owner_all_of_it(owner: JobOwner, tmp_path: Path) -> None:
    id_ = (await owner.add_job(NewJob("mine", "/v1/x", b"{}"))).id
    await taken(owner)
    await owner.parts.add_part(id_, 1, 0, b"abc")
    owner.close()
    again = JobOwner(tmp_path, JobsConfig(), was_restarted=True)
    try:
        assert await again.parts.add_part(id_, 1, 3, b"d") == 0, "it has nothing, and says so"
        assert await again.parts.add_part(id_, 1, 0, b"abcd") == 4
        assert (await read(again, id_, 1, 0))[1] == b"abcd"
    finally:
        again.close()


async def test_all_beginnings_have_a_bound(owner: JobOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_BYTES", 10)
    ids = [(await owner.add_job(NewJob("mine", "/v1/x", b"{}"))).id for _ in range(2)]
    await until(lambda: owner.take_jobs("one", 2, 2, 0.0))
    assert await owner.parts.add_part(ids[0], 1, 0, bytes(6)) == 6
    assert await owner.parts.add_part(ids[1], 1, 0, bytes(6)) is None
    await owner.cancel_job("mine", ids[0])
    assert await owner.parts.add_part(ids[1], 1, 0, bytes(6)) == 6
