"""The disk of jobs: their book, their result files and clients' files, opened at the first use, in one thread."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from cluster.jobs.book import BOOK_FILE, JobBook, result_name
from cluster.jobs.file_book import MODEL_PURPOSE, OUTPUT
from cluster.jobs.records import ClientFile, DueHook, Job, JobAnswer, JobError, LineResult, NewJob
from cluster.jobs.results import ResultFiles
from cluster.records.errors import FileInUse, JobsUnavailable
from configs.jobs import JobsConfig
from weights.platform.durable import allocated_bytes

FOLDER: Final = "jobs"  # of a store; below it one of each cluster
RESULTS: Final = "results"
FILES: Final = "files"
REGISTRATIONS: Final = "registrations"  # of a store; below it one of each cluster, with a file for each model
_R = TypeVar("_R")


class JobDisk:
    """One folder. A result is written and synced before the book has it.

    `registrations`: the folder with the files of registered models, whose uploads are kept; None for none.
    """

    def __init__(self, folder: Path, registrations: Path | None = None) -> None:
        self._folder = folder
        self._is_needed = partial(is_registered, registrations)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="jobs")
        self._opened: JobBook | None = None
        self._results = ResultFiles(folder / RESULTS)
        self._files = ResultFiles(folder / FILES)

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
            strays = self._files.strays(self._opened.files.names())  # all of them, after a damaged book
            self._files.remove(name for name in strays if not self._is_needed(name))
        return self._opened

    def add(self, new: NewJob, config: JobsConfig, now_s: float) -> Job:
        """Take in a job, and make room for its result. Raises JobConflict, JobsFull."""
        job = self.book.add(new, config, now_s)
        self._results.remove(self.book.sweep(config, now_s))
        self._files.remove(self.book.files.expire(now_s, self._is_needed))
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

    def read(self, key: str, id_: str, offset: int, num_bytes: int, now_s: float) -> bytes | None:
        """Return a part of a job's result; None without one."""
        job = self.book.find(key, id_, now_s)
        if job is None or job.answer is None:
            return None
        return self._results.read(result_name(id_, job.num_starts), offset, num_bytes)

    def forget(self, key: str, id_: str) -> bool:
        """Remove a job and its result, and return whether there was one."""
        growing = self.book.files.growing(id_)
        name = self.book.forget(key, id_)
        self._results.remove([name] if name else [])
        self._files.remove(growing if name else ())
        return name is not None

    # files

    def begin_file(self, key: str, id_: str, now_s: float) -> ClientFile:
        """Begin an upload. Raises JobsFull."""
        self._files.remove(self.book.files.expire(now_s, self._is_needed))
        return self.book.files.begin(key, id_, now_s)

    def begin_model(self, key: str, id_: str, num_bytes: int, config: JobsConfig, now_s: float) -> ClientFile:
        """Begin the upload of a model of so many bytes. Raises JobsFull."""
        self._files.remove(self.book.files.expire(now_s, self._is_needed))
        self.book.files.check_room(key, num_bytes, config, MODEL_PURPOSE)
        return self.book.files.begin(key, id_, now_s, MODEL_PURPOSE)

    def append_file(
        self, key: str, id_: str, offset: int, piece: bytes, config: JobsConfig, now_s: float
    ) -> int | None:
        """Return the size of an upload, with the piece if that begins at its end; None for an unknown one.

        Raises JobsFull. A piece that came before changes nothing.
        """
        if (file := self.book.files.unfinished(key, id_)) is None:
            return None
        if offset != file.num_bytes or not piece:
            return file.num_bytes
        self.book.files.check_room(key, len(piece), config, file.purpose)
        self._files.append(id_, offset, piece)
        self.book.files.grow(id_, offset + len(piece), now_s)
        return offset + len(piece)

    def read_file(self, key: str, id_: str, offset: int, num_bytes: int, now_s: float) -> bytes | None:
        """Return a part of a file; None without one."""
        file = self.book.files.find(key, id_, now_s)
        if file is None:
            return None
        return self._files.read(id_, offset, min(num_bytes, file.num_bytes - offset)) if file.num_bytes else b""

    def forget_file(self, key: str, id_: str) -> bool:
        """Remove a file, and return whether there was one. Raises FileInUse."""
        if self._is_needed(id_):
            raise FileInUse(f"file {id_!r} is that of a registered model; remove that first")
        was_there = self.book.files.forget(key, id_)
        self._files.remove([id_] if was_there else [])
        return was_there

    # batches

    def begin_lines(self, id_: str, start: int, total: int) -> list[int] | None:
        """Note the number of a batch's lines, and return those that have ended; None for an unwanted start."""
        return self.book.files.begin_lines(id_, total) if self.book.is_wanted(id_, start) == "open" else None

    def end_lines(
        self, id_: str, start: int, key: str, results: Sequence[LineResult], config: JobsConfig, now_s: float
    ) -> bool:
        """Keep the results of lines, each once; return whether the start is wanted. Raises JobsFull.

        What is written to a file is behind its end for the book, until that has the lines as well.
        """
        if self.book.is_wanted(id_, start) != "open":
            return False
        books, new = self.book.files, self.book.files.not_ended(id_, results)
        books.check_room(key, sum(len(one.content) for one in new), config)
        sizes: dict[str, tuple[str, int]] = {}
        for fact, (file, size) in books.outputs(id_).items():
            if content := b"".join(one.content for one in new if one.is_good == (fact == OUTPUT)):
                self._files.append(file, size, content)
                sizes[fact] = (file, size + len(content))
        if new:
            books.end_lines(id_, new, sizes, now_s)
        return True

    # webhooks

    def take_hooks(self, count: int, now_s: float) -> list[DueHook]:
        """Begin up to `count` tries of webhooks."""
        return self.book.hooks.take(count, now_s)

    def next_hook_s(self) -> float | None:
        """Return when the next try of a webhook is due, None for never."""
        return self.book.hooks.next_s()

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


def files_folder(store: Path, cluster: str) -> Path:
    """Return the folder in which a cluster has the files of its clients, by their ids."""
    return store.expanduser() / FOLDER / cluster / FILES


def is_registered(registrations: Path | None, name: str) -> bool:
    """Return whether a registered model has the uploaded file of that name. Models' names alone have a suffix."""
    if registrations is None or "." not in name:
        return False
    for file in sorted(registrations.glob("*.json")):
        with contextlib.suppress(FileNotFoundError):  # that model is just being removed
            if name.encode() in file.read_bytes():
                return True
    return False


def collect_results(store: Path, now_s: float, *, dry_run: bool = False) -> tuple[list[Path], int]:
    """Remove the expired results and files of a store's clusters; return them, and their bytes.

    The jobs of a running cluster are left to their owner.
    """
    removed: list[Path] = []
    num_bytes = 0
    for file in sorted(store.glob(f"{FOLDER}/*/{BOOK_FILE}")):
        try:
            book = JobBook(file.parent, busy_s=0.0)
        except sqlite3.OperationalError:  # it is open
            continue
        is_needed = partial(is_registered, store / REGISTRATIONS / file.parent.name)
        with contextlib.closing(book):
            over = [name for name in book.files.expired(now_s) if not is_needed(name)]
            expire_files: Callable[[float], list[str]] = partial(book.files.expire, is_needed=is_needed)
            for folder, expired, known, expire in (
                (file.parent / RESULTS, book.expired(now_s), book.result_names(), book.expire),
                (file.parent / FILES, over, book.files.names(), expire_files),
            ):
                files = ResultFiles(folder)
                gone = [*expired, *(name for name in files.strays(known) if not is_needed(name))]
                paths = [path for name in gone if (path := folder / name).exists()]
                removed += paths
                num_bytes += sum(map(allocated_bytes, paths))
                if not dry_run:
                    expire(now_s)
                    files.remove(gone)
    return removed, num_bytes
