"""Downloads of objects to files, in parts by range, and the journal that lets them resume."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from weights.formats.safetensors import MAX_HEADER_BYTES, read_header
from weights.platform.durable import dead_ranges, punch
from weights.records.errors import FormatError, StoreError
from weights.records.manifest import InsidePath
from weights.sources.remote import RemoteFolder, RemoteObject

_LINES_PER_SYNC = 64
_LINE_BYTES = 100  # of a part in the journal, beside the file's name
_BLOCK_BYTES = 2**20
_HASHES = {"md5": "MD5", "sha256": "SHA-256", "git": "git hash"}
OnArrival = Callable[[int, int], None]  # bytes that are on disk now, those of them that were fetched


class FileRecord(BaseModel):
    """A file's record: its object, and its finished parts (index -> checksum) until it is `done` as a whole."""

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
        """Open for writing. Rewritten before (a crash may tear the last line) and after (done files need no parts)."""
        self._rewrite()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            yield self
        finally:
            os.close(self._descriptor)
        self._rewrite()

    def put_file(self, record: FileRecord) -> None:
        """Begin a file, or say that it is done."""
        with self._lock:
            self.records[record.name] = record
            self._append(record)

    def put_part(self, name: str, part: int, checksum: str) -> None:
        """Note that a part of a file is on disk, with its checksum."""
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
        try:
            with staged.open("wb") as file:
                for record in self.records.values():
                    file.write(record.model_dump_json().encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            staged.replace(self._path)
        finally:
            staged.unlink(missing_ok=True)


class Download:
    """A download in parts: `<file>.part` until every part is there and right, then `<file>`."""

    def __init__(
        self,
        source: RemoteFolder,
        remote: RemoteObject,
        target: Path,
        journal: Journal,
        part_bytes: int,
        arrived: OnArrival,
    ) -> None:
        self._source, self._remote, self._journal, self._arrived = source, remote, journal, arrived
        self._file = target / remote.name
        self._part_file = self._file.with_name(self._file.name + ".part")
        self._record = self._begin(part_bytes)
        self._lock = threading.Lock()
        self._present: set[int] = set()
        # An empty object has one empty part, so that something finishes it.
        self.num_parts = max(1, -(-remote.nbytes // self._record.part_bytes))
        self._num_awaited = self.num_parts

    def check_header(self) -> None:
        """Bring a safetensors header first, so that a bad checkpoint is refused before its tensors are downloaded."""
        if self._file.suffix != ".safetensors":
            return
        self._ensure(0)
        with self._part_file.open("rb") as file:
            header_bytes = 8 + int.from_bytes(file.read(8), "little")
        if header_bytes <= min(self._remote.nbytes, MAX_HEADER_BYTES):
            for part in range(1, -(-header_bytes // self._record.part_bytes)):
                self._ensure(part)
        try:
            read_header(self._part_file)
        except FormatError as error:
            url = f"{self._source.url}/{self._remote.name}"
            raise FormatError(str(error).replace(str(self._part_file), url)) from None

    def missing_bytes(self) -> int:
        """Return the bytes that the disk must still have room for, the journal's lines included."""
        line_bytes = _LINE_BYTES + len(self._remote.name.encode())
        lines_bytes = (self.num_parts - len(self._record.parts)) * line_bytes
        return lines_bytes + max(0, self._remote.nbytes - self._part_file.stat().st_blocks * 512)

    def reserve(self) -> None:
        """Take the disk blocks now, so that a full disk is found before the hours of downloading."""
        if self._remote.nbytes:
            with self._part_file.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, self._remote.nbytes)

    def give_back(self) -> None:
        """Free the blocks of parts that have not come: the disk is full of what may never come."""
        if self._part_file.exists():
            part_bytes = self._record.part_bytes
            here = [(part * part_bytes, (part + 1) * part_bytes) for part in self._record.parts]
            punch(self._part_file, dead_ranges(here, self._remote.nbytes))

    def bring(self, part: int) -> None:
        """Have this part; with the last one, finish the file. Call once for each part."""
        self._ensure(part)
        with self._lock:
            self._num_awaited -= 1
            is_last = self._num_awaited == 0
        if is_last:
            self._finish()

    def _begin(self, part_bytes: int) -> FileRecord:
        """Return the record of an earlier attempt at the same object, or a fresh one and a file of its length."""
        old = self._journal.records.get(self._remote.name)
        is_same = old is not None and (old.etag, old.nbytes) == (self._remote.etag, self._remote.nbytes)
        if old and is_same and self._part_file.is_file() and self._part_file.stat().st_size == old.nbytes:
            return old
        self._part_file.parent.mkdir(parents=True, exist_ok=True)
        with self._part_file.open("wb") as file:
            file.truncate(self._remote.nbytes)
        record = FileRecord(
            name=self._remote.name, etag=self._remote.etag, nbytes=self._remote.nbytes, part_bytes=part_bytes
        )
        self._journal.put_file(record)
        return record

    def _ensure(self, part: int) -> None:
        if part in self._present:
            return
        start = part * self._record.part_bytes
        stop = min(start + self._record.part_bytes, self._remote.nbytes)
        is_kept = part in self._record.parts and self._checksum(start, stop) == self._record.parts[part]
        if not is_kept and start < stop:
            self._journal.put_part(self._remote.name, part, self._fetch(start, stop))
        self._present.add(part)
        self._arrived(stop - start, 0 if is_kept else stop - start)

    def _fetch(self, start: int, stop: int) -> str:
        """Write bytes `start` to `stop` of the object; their checksum."""
        position, digest = start, xxhash.xxh3_128()
        with self._part_file.open("r+b", buffering=0) as file:
            file.seek(start)
            for chunk in self._source.read_range(self._remote, start, stop):
                position += len(chunk)
                if position > stop:
                    break
                digest.update(chunk)
                file.write(chunk)
        if position != stop:
            raise StoreError(
                f"{self._source.url}/{self._remote.name}: bytes {start} to {stop} asked for, the server gave "
                f"{position - start} bytes"
            )
        return digest.hexdigest()

    def _checksum(self, start: int, stop: int) -> str:
        digest = xxhash.xxh3_128()
        with self._part_file.open("rb", buffering=0) as file:
            file.seek(start)
            while start < stop:
                block = file.read(min(_BLOCK_BYTES, stop - start))
                digest.update(block)
                start += len(block) or stop
        return digest.hexdigest()

    def _finish(self) -> None:
        with self._part_file.open("r+b") as file:
            os.fsync(file.fileno())
            if self._remote.digest is not None:
                self._check_digest(file, *self._remote.digest)
        self._part_file.replace(self._file)
        self._journal.put_file(self._record.model_copy(update={"parts": {}, "done": True}))

    def _check_digest(self, file: BufferedRandom, kind: str, expected: str) -> None:
        git_head = b"blob %d\0" % self._remote.nbytes
        digest = hashlib.sha1(git_head, usedforsecurity=False) if kind == "git" else hashlib.new(kind)
        actual = hashlib.file_digest(file, lambda: digest).hexdigest()
        if actual != expected:
            self._part_file.unlink()
            hint = ", or encrypted by SSE-KMS or SSE-C (then set verify_md5: false)" if kind == "md5" else ""
            raise StoreError(
                f"{self._source.url}/{self._remote.name}: the {_HASHES[kind]} of what arrived is {actual}, expected "
                f"{expected}; damaged on the way{hint}"
            )
