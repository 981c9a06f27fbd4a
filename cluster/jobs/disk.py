"""The disk of jobs: their book and their result files, opened at the first use, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.jobs.book import BOOK_FILE, JobBook, result_name
from cluster.jobs.records import Content, Job, JobAnswer, JobError, NewJob
from cluster.jobs.results import ResultFiles
from cluster.records.errors import JobsUnavailable
from configs.jobs import JobsConfig
from weights.platform.durable import allocated_bytes

FOLDER: Final = "jobs"  # of a store; below it one of each cluster
RESULTS: Final = "results"
_R = TypeVar("_R")


class JobDisk:
    """One folder. A result is written and synced before the book has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._opened: JobBook | None = None
        self._results = ResultFiles(folder / RESULTS)

    async def run(self, work: Callable[..., _R], *arguments: Any) -> _R:
        """Return the result of `work`, a method that blocks, for these arguments. Raises JobsUnavailable."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._run_or_raise_unavailable, work, *arguments
        )

    @property
    def book(self) -> JobBook:
        """The book, for calls in `run`."""
        if self._opened is None:
            self._opened = JobBook(self._folder)
            self._results.remove(self._results.strays(self._opened.result_names()))
        return self._opened

    def add(self, new: NewJob, config: JobsConfig, now_s: float) -> Job:
        """Take in a job, and make room for its result. Raises JobConflict, JobsFull."""
        job = self.book.add(new, config, now_s)
        self._results.remove(self.book.sweep(config, now_s))
        return job

    def end(
        self, id_: str, start: int, end: JobAnswer | JobError, body: bytes, config: JobsConfig, now_s: float
    ) -> bool:
        """Keep the end of a start, and return whether it was wanted. A repeated call changes nothing."""
        if (state := self.book.is_wanted(id_, start)) != "open":
            return state == "done"
        name = result_name(id_, start)
        if isinstance(end, JobAnswer):
            self._results.write(name, body)
        if not self.book.end(id_, start, end, len(body), config.keep_s, now_s):
            self._results.remove([name])
            return False
        self._results.remove(self.book.sweep(config, now_s))
        return True

    def read(self, key: str, id_: str, offset: int, num_bytes: int, of: Content, now_s: float) -> bytes | None:
        """Return a part of a job's result, or of the request of an unfinished one; None without one."""
        if of == "request":
            body = self.book.body(key, id_)
            return None if body is None else body[offset : offset + num_bytes]
        job = self.book.find(key, id_, now_s)
        if job is None or job.answer is None:
            return None
        return self._results.read(result_name(id_, job.num_starts), offset, num_bytes)

    def forget(self, key: str, id_: str) -> bool:
        """Remove a job and its result, and return whether there was one."""
        name = self.book.forget(key, id_)
        self._results.remove([name] if name else [])
        return name is not None

    def close(self) -> None:
        """Let another process have the folder. Blocks."""
        self._thread.shutdown(wait=True)
        if self._opened is not None:
            self._opened.close()

    def _run_or_raise_unavailable(self, work: Callable[..., _R], *arguments: Any) -> _R:
        try:
            return work(*arguments)
        except (OSError, sqlite3.Error) as error:
            raise JobsUnavailable(f"the folder of jobs {self._folder} cannot be used now: {error}") from None


def collect_results(store: Path, now_s: float, *, dry_run: bool = False) -> tuple[list[Path], int]:
    """Remove the expired results of a store's clusters; return their files, and the bytes of those.

    The jobs of a running cluster are left to their owner.
    """
    removed: list[Path] = []
    num_bytes = 0
    for file in sorted(store.glob(f"{FOLDER}/*/{BOOK_FILE}")):
        results = ResultFiles(file.parent / RESULTS)
        try:
            book = JobBook(file.parent, busy_s=0.0)
        except sqlite3.OperationalError:  # it is open
            continue
        with contextlib.closing(book):
            expired = book.expired(now_s)
            gone = [*expired, *results.strays(book.result_names())]
            paths = [path for name in gone if (path := file.parent / RESULTS / name).exists()]
            removed += paths
            num_bytes += sum(map(allocated_bytes, paths))
            if not dry_run:
                book.expire(now_s)
                results.remove(gone)
    return removed, num_bytes
