"""The owner of files and batches is killed between any two of its writes: each line has its result in a file, once."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
from kit.drawing import seeds
from unit.cluster.jobs.test_killed_owner import Disk, Killed, Still, writes_of

from cluster.jobs.disk import FILES
from cluster.jobs.file_book import COMPLETED, ERRORS, FAILED, INPUT, OUTPUT, new_file_id
from cluster.jobs.owner import JobOwner
from cluster.jobs.records import BATCHES, Job, JobAnswer, LineResult, NewJob, TakenJob
from configs.jobs import JobsConfig

CONFIG = JobsConfig(max_starts=10_000)
NUM_LINES, KEY = 12, "mine"


class Batch:
    """A client that uploads a file and begins a batch, and the ingress that runs it. They outlive the owner."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self.content = draws.randbytes(draws.randrange(1, 50))
        self.file: str | None = None
        self.is_uploaded = False
        self.id: str | None = None
        self.start: TakenJob | None = None
        self.sent: dict[int, list[bytes]] = defaultdict(list)
        self.ended: set[int] = set()  # as the owner has told

    async def work_on(self, owner: JobOwner) -> None:
        while len(self.ended) < NUM_LINES:
            await self.upload(owner)
            await self.begin(owner)
            await self.run(owner)

    async def work_until_it_dies(self, owner: JobOwner) -> None:
        await self.work_on(owner)
        while self.file is not None:
            await owner.files.end_file(KEY, self.file, "x", "batch", None)

    async def upload(self, owner: JobOwner) -> None:
        if self.file is None:
            self.file = (await owner.files.begin_file(KEY, new_file_id())).id
        size = 0 if self.is_uploaded else await owner.files.append_file(KEY, self.file, 0, b"")
        while size is not None and size < len(self.content) and not self.is_uploaded:
            piece = self.content[size : size + self._draws.randrange(1, 20)]
            size = await owner.files.append_file(KEY, self.file, size, piece)
        if not self.is_uploaded:
            assert await owner.files.end_file(KEY, self.file, "x", "batch", None) is not None
            self.is_uploaded = True
        assert await owner.files.read_file(KEY, self.file, 0, 100) == self.content

    async def begin(self, owner: JobOwner) -> None:
        facts = {INPUT: self.file, "endpoint": "/v1/x"}
        job = await owner.add_job(NewJob(KEY, BATCHES, b"{}", (), 9, facts, "k", "batch"))
        assert self.id in (None, job.id)
        self.id = job.id

    async def run(self, owner: JobOwner) -> None:
        for taken in await owner.take_jobs("runner", 2, 2, 0.0, are_batches=True):
            self.start = taken
        if self.start is None:
            return
        ended = await owner.files.begin_lines(self.start.id, self.start.start, NUM_LINES)
        if ended is None:
            self.start = None
            return
        assert len(set(ended)) == len(ended)
        assert self.ended <= set(ended), "what has ended stays so"
        group = self._draws.sample(range(NUM_LINES), self._draws.randrange(1, 4))
        results = [LineResult(n, f"{n} {self._draws.random()}\n".encode(), n % 3 > 0) for n in group]
        for one in results:
            if one.number not in ended:
                self.sent[one.number].append(one.content)
        assert await owner.files.end_lines(self.start.id, self.start.start, KEY, results)
        self.ended |= {*ended, *group}


async def lines_of(owner: JobOwner, job: Job, fact: str) -> list[bytes]:
    content = await owner.files.read_file(KEY, job.facts[fact], 0, 10**6)
    assert content is not None
    return content.splitlines(keepends=True)


@seeds(50)
async def test_each_line_has_its_result_once(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    disk, batch = Disk(tmp_path), Batch(draws)
    with writes_of(disk):
        for _ in range(15):
            disk.writes_left = draws.randrange(40)
            owner = JobOwner(disk.folder, CONFIG, was_restarted=draws.random() < 0.5, clocks=Still())
            if draws.random() < 0.5:  # the ingress died as well
                batch.start = None
            with pytest.raises(Killed):
                await batch.work_until_it_dies(owner)
        disk.writes_left = 10**9
        owner = JobOwner(disk.folder, CONFIG, clocks=Still())
        batch.start = None
        await batch.work_on(owner)
        assert batch.file is not None
        assert batch.id is not None
        if batch.start is None:
            (batch.start,) = await owner.take_jobs("runner", 2, 2, 0.0, are_batches=True)
        assert await owner.end_job(batch.id, batch.start.start, JobAnswer(200), b"")
        job = await owner.find_job(KEY, batch.id)
        assert job is not None
        good, wrong = await lines_of(owner, job, OUTPUT), await lines_of(owner, job, ERRORS)
        late = LineResult(0, b"late\n", is_good=True)
        assert not await owner.files.end_lines(batch.id, batch.start.start, KEY, [late])
        files = await owner.files.list_files(KEY, None, None, 99, "asc")
        owner.close()
    numbers = [int(line.split()[0]) for line in (*good, *wrong)]
    assert sorted(numbers) == list(range(NUM_LINES))
    assert all(line in batch.sent[number] for number, line in zip(numbers, (*good, *wrong), strict=True))
    assert [n % 3 > 0 for n in numbers] == [True] * len(good) + [False] * len(wrong)
    assert (job.facts[COMPLETED], job.facts[FAILED]) == (len(good), len(wrong))
    assert files is not None
    assert {file.id for file in files} == {batch.file, job.facts[OUTPUT], job.facts[ERRORS]}
    kept = {path.name for path in (disk.folder / FILES).iterdir()}
    assert kept - {batch.file} >= {job.facts[OUTPUT], job.facts[ERRORS]}
