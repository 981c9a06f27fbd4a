"""The owner of results, of clients' files and of what batches' lines gave: a part of the jobs' owner."""

from __future__ import annotations

import time
from collections.abc import Sequence

from cluster.jobs.disk import JobDisk
from cluster.jobs.records import ClientFile, LineResult, Order
from configs.jobs import JobsConfig


class Clocks:
    """The clocks of this machine: the wall clock, and one that is never set."""

    def unix_s(self) -> float:
        """Return the time since 1970."""
        return time.time()

    def steady_s(self) -> float:
        """Return a time whose differences alone have a meaning."""
        return time.monotonic()


class FileOwner:
    """Results and files of one folder. Lives on one event loop. All methods raise JobsUnavailable where it fails."""

    def __init__(self, disk: JobDisk, config: JobsConfig, clocks: Clocks) -> None:
        self.config = config  # a new one counts from the next call on
        self._disk = disk
        self._clocks = clocks

    async def read_result(self, key: str, id_: str, offset: int, num_bytes: int) -> bytes | None:
        """Return a part of a job's result; None where there is none."""
        return await self._disk.run(self._disk.read, key, id_, offset, num_bytes, self._clocks.unix_s())

    async def read_body(self, key: str, id_: str) -> bytes | None:
        """Return the body of an unfinished job's request; None for another job."""
        return await self._disk.run(lambda: self._disk.book.body(key, id_))

    async def begin_file(self, key: str, id_: str) -> ClientFile:
        """Begin an upload, of an id of `new_file_id`. The same again changes nothing. Raises JobsFull."""
        return await self._disk.run(self._disk.begin_file, key, id_, self._clocks.unix_s())

    async def begin_model(self, key: str, id_: str, num_bytes: int) -> ClientFile:
        """Begin the upload of a model of so many bytes; its id has a suffix. As `begin_file` otherwise."""
        now_s = self._clocks.unix_s()
        return await self._disk.run(self._disk.begin_model, key, id_, num_bytes, self.config, now_s)

    async def append_file(self, key: str, id_: str, offset: int, piece: bytes) -> int | None:
        """Return the size of an upload with the piece, or without one that does not begin at its end.

        None for an unknown upload. Raises JobsFull.
        """
        return await self._disk.run(self._disk.append_file, key, id_, offset, piece, self.config, self._clocks.unix_s())

    async def end_file(self, key: str, id_: str, name: str, purpose: str, keep_s: float | None) -> ClientFile | None:
        """End an upload, and return its file; None for an unknown one. The same again changes nothing."""
        now_s = self._clocks.unix_s()
        expires_s = now_s + (self.config.keep_files_s if keep_s is None else keep_s)
        return await self._disk.run(lambda: self._disk.book.files.end(key, id_, name, purpose, expires_s, now_s))

    async def find_file(self, key: str, id_: str) -> ClientFile | None:
        """Return a file of a key; None where there is none."""
        return await self._disk.run(lambda: self._disk.book.files.find(key, id_, self._clocks.unix_s()))

    async def list_files(
        self, key: str, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> list[ClientFile] | None:
        """Return a page of a key's files, None where there is no file `after`."""
        now_s = self._clocks.unix_s()
        return await self._disk.run(lambda: self._disk.book.files.page(key, purpose, after, limit, order, now_s))

    async def forget_file(self, key: str, id_: str) -> bool:
        """Remove a file or an upload, and return whether there was one. Raises FileInUse while a batch reads it."""
        return await self._disk.run(self._disk.forget_file, key, id_)

    async def read_file(self, key: str, id_: str, offset: int, num_bytes: int) -> bytes | None:
        """Return a part of a file; None where there is none."""
        return await self._disk.run(self._disk.read_file, key, id_, offset, num_bytes, self._clocks.unix_s())

    # batches

    async def begin_lines(self, id_: str, start: int, total: int) -> list[int] | None:
        """Note the number of a batch's lines, and return those that have ended; None for an unwanted start."""
        return await self._disk.run(self._disk.begin_lines, id_, start, total)

    async def end_lines(self, id_: str, start: int, key: str, results: Sequence[LineResult]) -> bool:
        """Keep the results of a batch's lines; return whether the start is wanted. The same again changes nothing.

        Raises JobsFull.
        """
        return await self._disk.run(self._disk.end_lines, id_, start, key, results, self.config, self._clocks.unix_s())
