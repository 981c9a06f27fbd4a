"""Jobs and their owner: turns, bounds, keys, leases, and results that are kept for a while."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kit.clock import Clock
from kit.waiting import until

from cluster.jobs.book import BOOK_FILE, JobBook
from cluster.jobs.disk import RESULTS, collect_results
from cluster.jobs.files import Clocks
from cluster.jobs.leases import LOST_S
from cluster.jobs.owner import JobOwner
from cluster.jobs.records import JobAnswer, JobError, JobFilter, JobState, NewJob
from cluster.records.errors import JobConflict, JobsFull, JobsUnavailable
from configs.jobs import JobsConfig

OpenOwner = Callable[..., JobOwner]


class SetClocks(Clocks):
    def __init__(self, unix: Clock, steady: Clock) -> None:
        self.unix_s = unix  # type: ignore[method-assign]
        self.steady_s = steady  # type: ignore[method-assign]


MOST = 10**6


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def monotonic() -> Clock:
    return Clock(50.0)


@pytest.fixture
def open_owner(tmp_path: Path, clock: Clock, monotonic: Clock) -> Iterator[OpenOwner]:
    """Return a function that opens the folder; the one before has let go of it."""
    opened: list[JobOwner] = []

    def open_(was_restarted: bool = False, **config: float) -> JobOwner:
        for before in opened:
            before.close()
        settings = JobsConfig.model_validate(config)
        opened.append(JobOwner(tmp_path, settings, was_restarted=was_restarted, clocks=SetClocks(clock, monotonic)))
        return opened[-1]

    yield open_
    for owner in opened:
        owner.close()


def new(body: str = "x", key: str = "mine", **more: object) -> NewJob:
    return NewJob(key, "/v1/x", body.encode(), **more)  # type: ignore[arg-type]


async def bodies(owner: JobOwner, count: int = MOST, max_of_key: int = MOST) -> list[str]:
    return [job.body.decode() for job in await owner.take_jobs("runner", count, max_of_key, 0.0)]


async def finished(owner: JobOwner, result: bytes, key: str = "mine") -> str:
    added = await owner.add_job(new(key=key))
    (job,) = await owner.take_jobs("runner", 1, MOST, 0.0)
    assert await owner.end_job(job.id, job.start, JobAnswer(200), result)
    return added.id


async def test_urgent_jobs_begin_first_then_keys_in_turns_then_the_oldest(open_owner: OpenOwner) -> None:
    owner = open_owner()
    for number, (key, priority) in enumerate([("a", 2), ("a", 2), ("a", 2), ("b", 2), ("c", 3), ("c", 1), ("b", 2)]):
        await owner.add_job(new(f"{key}{number}", key, priority=priority))
    assert await bodies(owner, 1) == ["c5"]
    assert await bodies(owner, 3) == ["a0", "b3", "a1"]
    assert await bodies(owner) == ["b6", "a2", "c4"]
    assert await bodies(owner) == []


async def test_one_key_has_a_bounded_number_of_an_ingress(open_owner: OpenOwner) -> None:
    owner = open_owner()
    for number in range(4):
        await owner.add_job(new(f"a{number}", "a"))
    await owner.add_job(new("b", "b"))
    assert await bodies(owner, 9, max_of_key=2) == ["a0", "b", "a1"]
    assert await bodies(owner, 9, max_of_key=2) == []
    taken = await owner.take_jobs("another", 9, 1, 0.0)
    assert [job.body for job in taken] == [b"a2"]


async def test_a_job_waits_runs_and_is_done(open_owner: OpenOwner, clock: Clock) -> None:
    owner = open_owner(keep_s=100.0)
    waiting = asyncio.ensure_future(owner.take_jobs("runner", 3, MOST, 1e9))
    added = await owner.add_job(new("body", headers=(("content-type", "text/plain"),), facts={"size": 3}))
    assert (added.status, added.num_starts, added.facts, added.num_bytes) == ("queued", 0, {"size": 3}, 4)
    (job,) = await waiting
    assert (job.id, job.start, job.endpoint, job.body) == (added.id, 1, "/v1/x", b"body")
    assert job.headers == (("content-type", "text/plain"),)
    assert await owner.beat_jobs("runner", {job.id: (1, 40)}) == []
    found = await owner.find_job("mine", job.id)
    assert found is not None
    assert (found.status, found.progress, found.started_s) == ("running", 40, 1000.0)
    clock.now_s += 5
    assert await owner.end_job(job.id, 1, JobAnswer(200, (("x", "é"),)), b"result")
    done = await owner.find_job("mine", job.id)
    assert done is not None
    assert (done.status, done.ended_s, done.expires_s, done.num_bytes) == ("done", 1005.0, 1105.0, 6)
    assert done.answer == JobAnswer(200, (("x", "é"),))
    assert await owner.files.read_result("mine", job.id, 0, 4) == b"resu"
    assert await owner.files.read_result("mine", job.id, 4, 4) == b"lt"
    assert await owner.end_job(job.id, 1, JobAnswer(200), b"other"), "the same again is no news"
    assert await owner.files.read_result("mine", job.id, 0, 9) == b"result"


@pytest.mark.parametrize("end", [JobAnswer(400, (), JobError("bad", "no such field")), JobError("lost", "it is")])
async def test_a_job_that_fails_says_why(open_owner: OpenOwner, end: JobAnswer | JobError) -> None:
    owner = open_owner()
    await owner.add_job(new())
    (job,) = await owner.take_jobs("runner", 1, MOST, 0.0)
    assert await owner.end_job(job.id, job.start, end, b"why")
    found = await owner.find_job("mine", job.id)
    assert found is not None
    assert (found.status, found.error) == ("failed", end.error if isinstance(end, JobAnswer) else end)
    has_result = isinstance(end, JobAnswer)
    assert await owner.files.read_result("mine", job.id, 0, 9) == (b"why" if has_result else None)


async def test_a_key_sees_its_own_jobs_alone(open_owner: OpenOwner) -> None:
    owner = open_owner()
    id_ = await finished(owner, b"secret")
    assert await owner.find_job("yours", id_) is None
    assert await owner.files.read_result("yours", id_, 0, 9) is None
    assert await owner.cancel_job("yours", id_) is None
    assert not await owner.forget_job("yours", id_)
    assert await owner.list_jobs("yours", JobFilter(), None, 9, "asc") == []
    assert await owner.list_jobs("yours", JobFilter(), id_, 9, "asc") is None
    assert await owner.files.read_result("mine", id_, 0, 9) == b"secret"


async def test_pages_have_a_filter_and_an_order(open_owner: OpenOwner) -> None:
    owner = open_owner()
    ids = [await finished(owner, b"") for _ in range(3)]
    ids += [(await owner.add_job(NewJob("mine", "/v1/y", b""))).id for _ in range(2)]

    async def page(wanted: JobFilter, after: str | None, limit: int, order: str = "asc") -> list[str]:
        jobs = await owner.list_jobs("mine", wanted, after, limit, order)  # type: ignore[arg-type]
        assert jobs is not None
        return [job.id for job in jobs]

    assert await page(JobFilter(), None, 9) == ids
    assert await page(JobFilter(), ids[1], 2) == ids[2:4]
    assert await page(JobFilter(), ids[3], 2, "desc") == [ids[2], ids[1]]
    assert await page(JobFilter("done"), None, 9) == ids[:3]
    assert await page(JobFilter("queued", "/v1/y"), None, 9, "desc") == ids[:2:-1]
    assert await page(JobFilter("done", "/v1/y"), None, 9) == []


async def test_a_job_is_found_by_its_idempotency_key_and_numbered(open_owner: OpenOwner) -> None:
    owner = open_owner()
    first, second = [await owner.add_job(new(name, idempotency_key=name)) for name in "ab"]
    other = await owner.add_job(new("a", "yours", idempotency_key="a"))
    for key, name, expected in (("mine", "a", [first]), ("mine", "c", []), ("yours", "a", [other]), ("yours", "b", [])):
        assert await owner.list_jobs(key, JobFilter(idempotency_key=name), None, 9, "desc") == expected
    assert first.number < second.number < other.number


async def test_the_body_of_a_job_is_there_until_it_ends(open_owner: OpenOwner) -> None:
    owner = open_owner()
    job = await owner.add_job(new("what is asked"))
    assert await owner.files.read_body("mine", job.id) == b"what is asked"
    assert await owner.files.read_body("yours", job.id) is None
    (taken,) = await owner.take_jobs("runner", 1, MOST, 0.0)
    assert await owner.files.read_body("mine", job.id) == b"what is asked"
    await owner.end_job(job.id, taken.start, JobAnswer(200), b"result")
    assert await owner.files.read_body("mine", job.id) is None


async def test_the_same_idempotency_key_is_the_same_job_of_a_key(open_owner: OpenOwner) -> None:
    owner = open_owner()
    first = await owner.add_job(new("a", idempotency_key="k"))
    assert (await owner.add_job(new("a", idempotency_key="k"))).id == first.id
    assert (await owner.add_job(new("a", "yours", idempotency_key="k"))).id != first.id
    assert (await owner.add_job(new("a"))).id != first.id
    with pytest.raises(JobConflict, match=f"'k' is that of another request, {first.id}"):
        await owner.add_job(new("b", idempotency_key="k"))
    form = new("one boundary", headers=(("content-type", "multipart/form-data; boundary=1"),), idempotency_key="f")
    again = new("another one", headers=(("content-type", "multipart/form-data; boundary=2"),), idempotency_key="f")
    assert (await owner.add_job(form)).id == (await owner.add_job(again)).id
    await owner.forget_job("mine", first.id)
    assert (await owner.add_job(new("b", idempotency_key="k"))).id != first.id


async def test_a_key_has_no_more_unfinished_jobs_than_it_may(open_owner: OpenOwner) -> None:
    owner = open_owner(max_unfinished=2)
    one = await owner.add_job(new())
    await owner.add_job(new())
    with pytest.raises(JobsFull, match="2 jobs of this key are not finished, the maximum"):
        await owner.add_job(new())
    await owner.add_job(new(key="yours"))
    await owner.cancel_job("mine", one.id)
    await owner.add_job(new())


async def test_bodies_of_unfinished_jobs_are_bounded(open_owner: OpenOwner) -> None:
    owner = open_owner(max_bytes=2**20, max_result_bytes=2**20)
    await owner.add_job(new("x" * (2**20 - 10)))
    await owner.add_job(new("x" * 10))
    with pytest.raises(JobsFull, match="bytes"):
        await owner.add_job(new("x"))


async def test_results_end_by_age_number_and_bytes(open_owner: OpenOwner, clock: Clock, tmp_path: Path) -> None:
    def files() -> set[str]:
        return {path.name.partition(".")[0] for path in (tmp_path / RESULTS).iterdir()}

    owner = open_owner(keep_s=100.0, max_bytes=2**20, max_result_bytes=2**20, max_jobs=6)
    big = 400_000
    ids = [await finished(owner, bytes(big), "a") for _ in range(3)]
    assert files() == set(ids[1:]), "the oldest of who has the most goes"
    small = await finished(owner, bytes(2**20 - 2 * big), "b")
    assert files() == {*ids[1:], small}
    more = await finished(owner, bytes(10), "b")
    assert files() == {ids[2], small, more}
    many = [await finished(owner, b"", "b") for _ in range(5)]
    assert files() == {ids[2], *many}, "the oldest of who has the most"
    clock.now_s += 101
    assert await owner.find_job("a", ids[2]) is None
    last = await finished(owner, b"1", "c")
    assert files() == {last}


async def test_a_cancelled_job_ends_and_its_result_is_nobody_s(open_owner: OpenOwner, tmp_path: Path) -> None:
    owner = open_owner()
    queued, begun = await owner.add_job(new("q", priority=2)), await owner.add_job(new("r", priority=1))
    (job,) = await owner.take_jobs("runner", 1, MOST, 0.0)
    assert job.id == begun.id
    for id_ in (queued.id, begun.id):
        cancelled = await owner.cancel_job("mine", id_)
        assert cancelled is not None
        assert cancelled.status == "cancelled"
    assert await bodies(owner) == []
    assert await owner.beat_jobs("runner", {job.id: (job.start, None)}) == [job.id]
    assert not await owner.end_job(job.id, job.start, JobAnswer(200), b"late")
    assert not list((tmp_path / RESULTS).glob("*"))
    done = await finished(owner, b"1")
    kept = await owner.cancel_job("mine", done)
    assert kept is not None
    assert kept.status == "done"
    assert await owner.forget_job("mine", done)
    assert not list((tmp_path / RESULTS).glob("*"))
    assert await owner.cancel_job("mine", done) is None


async def test_the_jobs_of_a_silent_ingress_begin_again(open_owner: OpenOwner, monotonic: Clock) -> None:
    owner = open_owner()
    lost, alive = [await owner.add_job(new(body)) for body in ("lost", "alive")]
    assert len(await owner.take_jobs("one", 2, MOST, 0.0)) == 2
    monotonic.now_s += LOST_S - 1
    assert await owner.beat_jobs("one", {alive.id: (1, 50)}) == []
    monotonic.now_s += 2
    (again,) = await owner.take_jobs("two", 2, MOST, 0.0)
    assert (again.id, again.start) == (lost.id, 2)
    assert await owner.beat_jobs("one", {alive.id: (1, 60), lost.id: (1, 90)}) == [lost.id]
    assert not await owner.end_job(lost.id, 1, JobAnswer(200), b"late")
    assert await owner.end_job(lost.id, 2, JobAnswer(200), b"right")
    assert await owner.files.read_result("mine", lost.id, 0, 9) == b"right"


async def test_the_jobs_of_an_ingress_that_ends_begin_again_at_once(open_owner: OpenOwner) -> None:
    owner = open_owner(max_starts=1)
    job = await owner.add_job(new())
    await owner.take_jobs("one", 1, MOST, 0.0)
    asking = asyncio.ensure_future(owner.take_jobs("one", 9, MOST, 1e9))
    waiting = asyncio.ensure_future(owner.take_jobs("two", 9, MOST, 1e9))
    await owner.release_jobs("another")
    await owner.release_jobs("one")
    (again,) = await waiting
    assert (again.id, again.start) == (job.id, 2)
    assert not asking.done(), "who has ended gets no more"
    asking.cancel()
    assert await owner.beat_jobs("one", {job.id: (1, 50)}) == [job.id]
    assert await owner.end_job(job.id, 2, JobAnswer(200), b"right")


async def test_what_was_lost_and_not_begun_again_may_still_end(open_owner: OpenOwner, monotonic: Clock) -> None:
    owner = open_owner()
    job = await owner.add_job(new())
    await owner.take_jobs("one", 1, MOST, 0.0)
    monotonic.now_s += LOST_S + 1
    found = await owner.find_job("mine", job.id)
    assert found is not None
    assert found.status == "queued"
    assert await owner.end_job(job.id, 1, JobAnswer(200), b"late, and right")
    assert await bodies(owner) == []


async def test_a_job_that_ends_every_ingress_fails(open_owner: OpenOwner, monotonic: Clock) -> None:
    owner = open_owner(max_starts=3)
    job = await owner.add_job(new())
    for start in (1, 2, 3):
        (taken,) = await owner.take_jobs("one", 1, MOST, 0.0)
        assert taken.start == start
        monotonic.now_s += LOST_S + 1
    assert await bodies(owner) == []
    found = await owner.find_job("mine", job.id)
    assert found is not None
    assert found.error is not None
    assert (found.status, found.error.code) == ("failed", "replica_unavailable")
    assert "each of the 3 processes" in found.error.message


@pytest.mark.parametrize("was_restarted", [True, False])
async def test_another_owner_knows_all_of_it(open_owner: OpenOwner, monotonic: Clock, was_restarted: bool) -> None:
    owner = open_owner()
    done = await finished(owner, b"result")
    queued, begun = await owner.add_job(new("queued", priority=3)), await owner.add_job(new("begun", priority=1))
    await owner.take_jobs("one", 1, MOST, 0.0)
    owner = open_owner(was_restarted)
    if was_restarted:  # its ingress may run on
        assert await bodies(owner) == ["queued"]
        assert await owner.beat_jobs("one", {begun.id: (1, 50)}) == []
        monotonic.now_s += LOST_S - 1
        assert await owner.end_job(begun.id, 1, JobAnswer(200), b"1")
    else:
        assert await bodies(owner) == ["begun", "queued"]
        assert await owner.beat_jobs("one", {begun.id: (1, 50)}) == [begun.id]
    assert await owner.files.read_result("mine", done, 0, 9) == b"result"
    assert queued.id


async def test_who_watches_a_job_sees_each_change(open_owner: OpenOwner) -> None:
    owner = open_owner()
    job = await owner.add_job(new())
    seen: list[tuple[str, int | None]] = []

    async def watch() -> None:
        last: JobState | None = None
        while last is None or last.status != "done":
            found = await owner.watch_job("mine", job.id, last, 1e9)
            assert found is not None
            last = JobState(found.status, found.progress, found.num_starts)
            seen.append((found.status, found.progress))

    watching = asyncio.ensure_future(watch())
    await until(lambda: len(seen) == 1)
    await owner.take_jobs("runner", 1, MOST, 0.0)
    await until(lambda: len(seen) == 2)
    await owner.beat_jobs("runner", {job.id: (1, 50)})
    await until(lambda: len(seen) == 3)
    await owner.end_job(job.id, 1, JobAnswer(200), b"")
    await watching
    assert seen == [("queued", None), ("running", None), ("running", 50), ("done", None)]
    assert await owner.watch_job("mine", "job_no", None, 1e9) is None


async def test_one_process_has_the_book(open_owner: OpenOwner, tmp_path: Path) -> None:
    owner = open_owner()
    await owner.add_job(new())
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        JobBook(tmp_path, busy_s=0.0)
    owner.close()
    JobBook(tmp_path, busy_s=0.0).close()


async def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("a file, where a folder is expected")
    owner = JobOwner(tmp_path / "jobs", JobsConfig())
    with pytest.raises(JobsUnavailable, match=r"the folder of jobs .* cannot be used now"):
        await owner.add_job(new())
    (tmp_path / "jobs").unlink()
    assert (await owner.add_job(new())).status == "queued"
    owner.close()


async def test_a_damaged_book_is_set_aside(tmp_path: Path) -> None:
    (tmp_path / BOOK_FILE).write_bytes(random.randbytes(4096))
    owner = JobOwner(tmp_path, JobsConfig())
    assert (await owner.add_job(new())).status == "queued"
    assert len(list(tmp_path.glob(f"{BOOK_FILE}.damaged-*"))) == 1
    owner.close()


async def test_gc_removes_results_whose_time_is_over_unless_their_owner_does(
    tmp_path: Path, clock: Clock, monotonic: Clock
) -> None:
    store, clocks = tmp_path / "store", SetClocks(clock, monotonic)
    owner = JobOwner(store / "jobs" / "c", JobsConfig(keep_s=100.0), clocks=clocks)
    old = await finished(owner, b"old")
    clock.now_s += 50
    young = await finished(owner, b"young")
    assert collect_results(store, 2000.0) == ([], 0), "its owner has it open"
    owner.close()
    results = store / "jobs" / "c" / RESULTS
    (results / "job_of_a_crash.1").write_bytes(b"x")
    for dry_run in (True, False):
        removed, num_bytes = collect_results(store, 1120.0, dry_run=dry_run)
        assert {path.name for path in removed} == {f"{old}.1", "job_of_a_crash.1"}
        assert num_bytes > 0
        assert len(list(results.iterdir())) == (3 if dry_run else 1)
    owner = JobOwner(store / "jobs" / "c", JobsConfig(), clocks=clocks)
    assert await owner.files.read_result("mine", young, 0, 9) == b"young"
    assert await owner.find_job("mine", old) is None
    owner.close()


def test_a_result_has_room_in_all() -> None:
    with pytest.raises(ValueError, match="max_result_bytes is 4194304, more than max_bytes, 2097152"):
        JobsConfig.model_validate({"max_bytes": "2 MiB", "max_result_bytes": "4 MiB"})
