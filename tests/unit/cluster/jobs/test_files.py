"""Clients' files and their owner: growth by pieces, bounds, what batches need of them, and when they go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.clock import Clock

from cluster.jobs.book import BOOK_FILE
from cluster.jobs.disk import FILES, collect_results
from cluster.jobs.file_book import INPUT, MODEL_PURPOSE, SILENT_S, new_file_id
from cluster.jobs.files import Clocks, FileOwner
from cluster.jobs.owner import JobOwner
from cluster.jobs.records import BATCHES, JobAnswer, LineResult, NewJob
from cluster.records.errors import FileInUse, JobsFull
from configs.jobs import JobsConfig

CONFIG = JobsConfig.model_validate({"keep_s": 50.0, "keep_files_s": 100.0, "max_files_bytes": 2**20})


class SetClocks(Clocks):
    def __init__(self, unix: Clock) -> None:
        self.unix_s = unix  # type: ignore[method-assign]


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def owner(tmp_path: Path, clock: Clock) -> Iterator[JobOwner]:
    owner = JobOwner(tmp_path / "jobs" / "c", CONFIG, clocks=SetClocks(clock))
    yield owner
    owner.close()


async def uploaded(files: FileOwner, content: bytes, key: str = "mine") -> str:
    begun = await files.begin_file(key, new_file_id())
    assert await files.append_file(key, begun.id, 0, content) == len(content)
    assert await files.end_file(key, begun.id, "x", "batch", None) is not None
    return begun.id


async def test_each_piece_is_on_the_disk_before_it_is_acknowledged(
    owner: JobOwner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, synced = await owner.files.begin_file("mine", new_file_id()), dict[int, int]()

    def note(descriptor: int) -> None:
        found = os.fstat(descriptor)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fsync", note)
    for offset, piece in ((0, b"abc"), (3, b"de")):
        num_bytes = await owner.files.append_file("mine", begun.id, offset, piece)
        (file,) = (tmp_path / "jobs" / "c" / FILES).iterdir()
        assert synced[file.stat().st_ino] == num_bytes == offset + len(piece)


async def test_a_file_grows_by_pieces_and_is_read_when_it_is_whole(owner: JobOwner) -> None:
    files = owner.files
    begun = await files.begin_file("mine", new_file_id())
    assert await files.append_file("mine", begun.id, 0, b"abc") == 3
    assert await files.append_file("mine", begun.id, 0, b"abc") == 3, "the same again changes nothing"
    assert await files.append_file("mine", begun.id, 9, b"far") == 3
    assert await files.append_file("yours", begun.id, 3, b"d") is None
    assert await files.read_file("mine", begun.id, 0, 9) is None
    assert await files.append_file("mine", begun.id, 3, b"de") == 5
    for _ in range(2):
        ended = await files.end_file("mine", begun.id, "name", "batch", 10.0)
        assert ended is not None
        assert (ended.num_bytes, ended.name, ended.expires_s) == (5, "name", 1010.0)
    assert await files.append_file("mine", begun.id, 5, b"f") is None
    assert await files.read_file("mine", begun.id, 1, 3) == b"bcd"
    assert await files.read_file("mine", begun.id, 1, 99) == b"bcde"
    assert await files.read_file("mine", begun.id, 5, 99) == b""
    assert await files.read_file("yours", begun.id, 0, 9) is None


async def test_one_of_several_keys_has_half_of_the_room(owner: JobOwner) -> None:
    half = 2**19
    await uploaded(owner.files, bytes(half))
    begun = await owner.files.begin_file("mine", new_file_id())
    with pytest.raises(JobsFull, match="the files of this key have 524288 of 524288 bytes"):
        await owner.files.append_file("mine", begun.id, 0, b"x")
    await uploaded(owner.files, bytes(half), "yours")
    other = await owner.files.begin_file("theirs", new_file_id())
    with pytest.raises(JobsFull, match="all files have 1048576 of 1048576 bytes"):
        await owner.files.append_file("theirs", other.id, 0, b"x")


async def test_a_key_has_a_bounded_number_of_uploads(owner: JobOwner) -> None:
    for _ in range(64):
        await owner.files.begin_file("mine", new_file_id())
    with pytest.raises(JobsFull, match="64 files of this key are being uploaded"):
        await owner.files.begin_file("mine", new_file_id())
    await owner.files.begin_file("yours", new_file_id())


async def test_what_is_silent_or_old_goes_but_not_what_a_batch_reads(
    owner: JobOwner, clock: Clock, tmp_path: Path
) -> None:
    def kept() -> set[str]:
        return {path.name for path in (tmp_path / "jobs" / "c" / FILES).iterdir()}

    old, read = await uploaded(owner.files, b"old"), await uploaded(owner.files, b"read")
    silent = await owner.files.begin_file("mine", new_file_id())
    await owner.files.append_file("mine", silent.id, 0, b"silent")
    batch = await owner.add_job(NewJob("mine", BATCHES, b"{}", (), 9, {INPUT: read}, None, "batch"))
    with pytest.raises(FileInUse, match="is read by a batch that has not ended"):
        await owner.files.forget_file("mine", read)
    clock.now_s += 101
    await owner.files.begin_file("mine", new_file_id())
    assert kept() == {read, silent.id}
    clock.now_s += SILENT_S
    await owner.files.begin_file("mine", new_file_id())
    assert kept() == {read}
    await owner.cancel_job("mine", batch.id)
    await owner.files.begin_file("mine", new_file_id())
    assert kept() == set()
    assert await owner.files.find_file("mine", old) is None


async def test_gc_removes_files_whose_time_is_over_and_strays(owner: JobOwner, clock: Clock, tmp_path: Path) -> None:
    old = await uploaded(owner.files, b"old")
    clock.now_s += 60
    young = await uploaded(owner.files, b"young")
    owner.close()
    folder = tmp_path / "jobs" / "c" / FILES
    (folder / "file-of-a-crash").write_bytes(b"x")
    for dry_run in (True, False):
        removed, num_bytes = collect_results(tmp_path, 1110.0, dry_run=dry_run)
        assert {path.name for path in removed} == {old, "file-of-a-crash"}
        assert num_bytes > 0
    assert {path.name for path in folder.iterdir()} == {young}


async def test_a_batch_that_is_deleted_leaves_nothing(owner: JobOwner, tmp_path: Path) -> None:
    batch = await owner.add_job(NewJob("mine", BATCHES, b"{}", (), 9, {INPUT: "file-x"}, None, "batch"))
    (taken,) = await owner.take_jobs("one", 1, 1, 0.0, are_batches=True)
    assert await owner.files.begin_lines(batch.id, taken.start, 2) == []
    lines = [LineResult(number, b"{}\n", is_good=number == 0) for number in range(2)]
    assert await owner.files.end_lines(batch.id, taken.start, "mine", lines)
    assert await owner.files.list_files("mine", None, None, 9, "asc") == [], "they are nobody's to read yet"
    assert await owner.forget_job("mine", batch.id)
    assert list((tmp_path / "jobs" / "c" / FILES).iterdir()) == []
    assert not await owner.files.end_lines(batch.id, taken.start, "mine", lines)
    assert await owner.files.begin_lines(batch.id, taken.start, 2) is None


async def test_a_job_goes_without_a_look_at_all_files(owner: JobOwner, tmp_path: Path) -> None:
    await uploaded(owner.files, b"x")
    other = tmp_path / "jobs" / "c" / FILES / "file-of-a-crash"
    other.write_bytes(b"x")
    job = await owner.add_job(NewJob("mine", "/v1/x", b"{}"))
    assert await owner.forget_job("mine", job.id)
    assert other.exists(), "strays go when the folder is opened"


async def test_the_file_of_a_registered_model_stays_until_the_model_goes(tmp_path: Path, clock: Clock) -> None:
    registrations, folder = tmp_path / "registrations" / "c", tmp_path / "jobs" / "c"
    registrations.mkdir(parents=True)

    def opened() -> JobOwner:
        return JobOwner(folder, CONFIG, clocks=SetClocks(clock), registrations=registrations)

    def kept() -> set[str]:
        return {path.name for path in (folder / FILES).iterdir()}

    owner = opened()
    ids = []
    for _ in range(2):
        begun = await owner.files.begin_model("mine", new_file_id(".gguf"), 4)
        assert begun.id.endswith(".gguf")
        await owner.files.append_file("mine", begun.id, 0, b"GGUF")
        await owner.files.end_file("mine", begun.id, "x", MODEL_PURPOSE, SILENT_S)
        ids.append(begun.id)
    used, unused = ids
    (registrations / "ink.json").write_text(json.dumps({"entry": {"id": "ink", "path": str(folder / FILES / used)}}))
    with pytest.raises(FileInUse, match="is that of a registered model"):
        await owner.files.forget_file("mine", used)
    for _ in range(2):
        clock.now_s += SILENT_S + 1
        await owner.files.begin_file("mine", new_file_id())
        assert kept() == {used}
    owner.close()
    (folder / BOOK_FILE).write_bytes(b"damaged" * 1000)
    owner = opened()
    await owner.files.begin_file("mine", new_file_id())
    assert kept() == {used}, "the file of a model outlives the book"
    owner.close()
    assert collect_results(tmp_path, clock.now_s + SILENT_S + 1) == ([], 0)
    assert kept() == {used}
    (registrations / "ink.json").unlink()
    removed, _ = collect_results(tmp_path, clock.now_s + 3 * SILENT_S)
    assert [path.name for path in removed] == [used]
    assert kept() == set()
    assert unused != used


async def test_models_have_a_room_of_their_own(tmp_path: Path) -> None:
    config = JobsConfig.model_validate({"max_files_bytes": 2**20, "max_models_bytes": 10})
    owner = JobOwner(tmp_path, config)
    with pytest.raises(JobsFull, match=r"have 0 of 10 bytes \(jobs.max_models_bytes\), and this one takes 11"):
        await owner.files.begin_model("mine", new_file_id(".gguf"), 11)
    begun = await owner.files.begin_model("mine", new_file_id(".gguf"), 10)
    assert await owner.files.append_file("mine", begun.id, 0, bytes(10)) == 10
    with pytest.raises(JobsFull):
        await owner.files.append_file("mine", begun.id, 10, b"x")
    await uploaded(owner.files, bytes(2**19))
    owner.close()


async def test_files_of_a_batch_are_kept_as_long_as_it_says(owner: JobOwner) -> None:
    for facts, expires_s in (({}, 1050.0), ({"keep_output_s": 7.0}, 1007.0)):
        await owner.add_job(NewJob("mine", BATCHES, b"{}", (), 9, facts, None, "batch"))
        (taken,) = await owner.take_jobs("one", 1, 9, 0.0, are_batches=True)
        await owner.files.begin_lines(taken.id, taken.start, 1)
        await owner.files.end_lines(taken.id, taken.start, "mine", [LineResult(0, b"{}\n", is_good=True)])
        await owner.end_job(taken.id, taken.start, JobAnswer(200), b"")
        (file,) = await owner.files.list_files("mine", None, None, 1, "desc") or ()
        assert (file.expires_s, file.purpose, file.num_bytes) == (expires_s, "batch_output", 3)
