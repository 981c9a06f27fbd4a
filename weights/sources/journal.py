"""What of a mirror is on disk already: lines of JSON, appended while parts arrive, so that `kill -9` loses nothing.

Each finished part is listed with the xxh3-128 of its bytes. It counts only if the file still has those bytes, so the
journal and the data need not reach the disk in any order.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from weights.manifest import InsidePath

_LINES_PER_SYNC = 64


class FileRecord(BaseModel):
    """One file: which object it is of, and its finished parts (index -> checksum) until it is `done` as a whole."""

    model_config = ConfigDict(extra="forbid")
    name: InsidePath  # stale files are deleted by this name, so a damaged journal must not point elsewhere
    etag: str
    nbytes: int = Field(ge=0)
    part_bytes: int = Field(gt=0)
    parts: dict[int, str] = {}
    done: bool = False


class _PartRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    part: int
    checksum: str


_LINE: TypeAdapter[FileRecord | _PartRecord] = TypeAdapter(FileRecord | _PartRecord)


class Journal:
    """The records of a mirror by file name, and the file that they survive in. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._descriptor = -1
        self._num_unsynced = 0
        self.records: dict[str, FileRecord] = {}
        self._replay()

    @contextlib.contextmanager
    def opened(self) -> Iterator[Self]:
        """For writing. Rewritten before (a crash may tear the last line) and after (done files need no parts)."""
        self._rewrite()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            yield self
        finally:
            os.close(self._descriptor)
        self._rewrite()

    def put(self, record: FileRecord) -> None:
        """Begin a file, or say that it is done."""
        with self._lock:
            self.records[record.name] = record
            self._append(record)

    def put_part(self, name: str, part: int, checksum: str) -> None:
        with self._lock:
            self.records[name].parts[part] = checksum
            self._append(_PartRecord(name=name, part=part, checksum=checksum))

    def _append(self, line: BaseModel) -> None:
        os.write(self._descriptor, line.model_dump_json().encode() + b"\n")
        self._num_unsynced += 1
        if self._num_unsynced >= _LINES_PER_SYNC:
            os.fsync(self._descriptor)
            self._num_unsynced = 0

    def _replay(self) -> None:
        text = self._path.read_bytes() if self._path.exists() else b""
        for line in text.splitlines():
            try:
                entry = _LINE.validate_json(line)
            except ValidationError:
                return  # torn or damaged: what follows is fetched again
            if isinstance(entry, FileRecord):
                self.records[entry.name] = entry
            elif entry.name in self.records:
                self.records[entry.name].parts[entry.part] = entry.checksum

    def _rewrite(self) -> None:
        staged = self._path.with_name(self._path.name + ".new")
        with staged.open("wb") as file:
            for record in self.records.values():
                file.write(record.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        staged.replace(self._path)
