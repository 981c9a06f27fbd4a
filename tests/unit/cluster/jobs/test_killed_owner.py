"""The owner of jobs is killed between any two of its writes: nothing is lost, and nothing is given twice."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.drawing import seeds

from cluster.jobs.disk import FOLDER, RESULTS
from cluster.jobs.files import Clocks
from cluster.jobs.owner import JobOwner
from cluster.jobs.records import JobAnswer, JobFilter, NewJob, TakenJob
from configs.jobs import JobsConfig

CONFIG = JobsConfig(max_starts=10_000)
KEYS = ("mine", "yours")


class Killed(BaseException):
    """No code of a process that was killed runs on."""


class Still(Clocks):
    """No ingress is silent for long."""

    def steady_s(self) -> float:
        return 0.0


class Disk:
    """The folder of the owner. After `writes_left` further writes the process is dead: what was there then stays."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._life = 0
        self.writes_left = 10**9
        self.folder = root / "0" / FOLDER
        self.folder.mkdir(parents=True)

    def before_write(self, path: Any = None) -> None:
        if path is not None and not str(path).startswith(str(self._root)):
            return
        self.writes_left -= 1
        if self.writes_left == -1:
            self._life += 1
            dead, self.folder = self.folder, self._root / str(self._life) / FOLDER
            shutil.copytree(dead, self.folder)
        if self.writes_left < 0:
            raise Killed


@contextmanager
def writes_of(disk: Disk) -> Iterator[None]:
    """Let the disk know of all writes to files and books."""

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if not sql.lstrip().startswith("SELECT"):
                disk.before_write()
            return super().execute(sql.replace("synchronous = FULL", "synchronous = OFF"), *parameters)

    def told(method: Any) -> Any:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            disk.before_write(path)
            return method(path, *arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        connect = sqlite3.connect
        patch.setattr(sqlite3, "connect", lambda *a, **k: connect(*a, **k | {"factory": Connection}))
        for name in ("write_bytes", "replace", "unlink"):
            patch.setattr(Path, name, told(getattr(Path, name)))
        patch.setattr(os, "fsync", lambda _: disk.before_write())
        yield


def result_of(job: TakenJob) -> bytes:
    return f"{job.body.decode()}, start {job.start}".encode()


class Clients:
    """Clients and ingresses that outlive the owner. They ask again until they have an answer, and check all of them."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._number = 0
        self.asked: dict[str, str] = {}  # by idempotency key: the API key
        self.known: dict[str, str] = {}  # by idempotency key: the id
        self.held: dict[str, TakenJob] = {}
        self.unsure: TakenJob | None = None  # its end was told, and no answer came
        self.given: dict[str, bytes] = {}
        self.cancelled: set[str] = set()

    async def work_on(self, owner: JobOwner) -> None:
        ways = [self.add, self.add, self.take, self.end, self.end, self.cancel, self.read]
        while True:
            await self._draws.choice(ways)(owner)

    async def add(self, owner: JobOwner) -> None:
        missing = [one for one in self.asked if one not in self.known]
        if not missing:
            self._number += 1
            missing = [f"job {self._number}"]
            self.asked[missing[0]] = self._draws.choice(KEYS)
        await self.add_again(owner, missing[0])

    async def add_again(self, owner: JobOwner, name: str) -> None:
        new = NewJob(self.asked[name], "/v1/x", name.encode(), idempotency_key=name)
        job = await owner.add_job(new)
        assert self.known.setdefault(name, job.id) == job.id

    async def take(self, owner: JobOwner) -> None:
        for job in await owner.take_jobs("runner", 2, 10**6, 0.0):
            self.held[job.id] = job

    async def end(self, owner: JobOwner) -> None:
        if not self.held and self.unsure is None:
            return
        if self.unsure is None:
            self.unsure = self.held.pop(self._draws.choice(sorted(self.held)))
        job = self.unsure
        is_kept = await owner.end_job(job.id, job.start, JobAnswer(200), result_of(job))
        self.unsure = None
        if is_kept:
            assert job.id not in self.cancelled
            assert self.given.setdefault(job.id, result_of(job)) == result_of(job)

    async def cancel(self, owner: JobOwner) -> None:
        if self.known and self._draws.random() < 0.2:
            name = self._draws.choice(sorted(self.known))
            job = await owner.cancel_job(self.asked[name], self.known[name])
            assert job is not None
            if job.status == "cancelled":
                assert job.id not in self.given
                self.cancelled.add(job.id)

    async def read(self, owner: JobOwner) -> None:
        for name, id_ in self.known.items():
            job = await owner.find_job(self.asked[name], id_)
            assert job is not None, "a job that was taken in is there"
            found = await owner.files.read_result(job.key, id_, 0, 10**6)
            assert (found is not None) == (job.status == "done")
            if found is not None:
                assert len(found) == job.num_bytes
                assert self.given.setdefault(id_, found) == found, "a result is given once"
            assert (job.status == "cancelled") or id_ not in self.cancelled


@seeds(50)
async def test_nothing_is_lost_and_nothing_is_given_twice(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    disk, clients = Disk(tmp_path), Clients(draws)
    with writes_of(disk):
        for _ in range(12):
            disk.writes_left = draws.randrange(60)
            owner = JobOwner(disk.folder, CONFIG, was_restarted=draws.random() < 0.5, clocks=Still())
            clients.held = {} if draws.random() < 0.5 else clients.held  # ingresses died as well, or ran on
            with pytest.raises(Killed):
                await clients.work_on(owner)
        disk.writes_left = 10**9
        owner = JobOwner(disk.folder, CONFIG, clocks=Still())
        for name in clients.asked:
            await clients.add_again(owner, name)
        while clients.held or clients.unsure or await owner.list_jobs(KEYS[0], JobFilter("queued"), None, 1, "asc"):
            await clients.take(owner)
            await clients.end(owner)
        while taken := await owner.take_jobs("runner", 9, 10**6, 0.0):
            for job in taken:
                assert await owner.end_job(job.id, job.start, JobAnswer(200), result_of(job))
        await clients.read(owner)
        jobs = [job for key in KEYS for job in await owner.list_jobs(key, JobFilter(), None, 10**6, "asc") or ()]
        owner.close()
    assert sorted(job.id for job in jobs) == sorted(clients.known.values())
    assert len(jobs) == len(clients.asked) > 3
    assert {job.status for job in jobs} <= {"done", "cancelled"}
    assert clients.given.keys() == {job.id for job in jobs if job.status == "done"}
    files = {path.name for path in (disk.folder / RESULTS).glob("*")}
    assert files == {f"{job.id}.{job.num_starts}" for job in jobs if job.status == "done"}
