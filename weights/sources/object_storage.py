"""Mirrors of checkpoints in object storage: a folder on local disk, by parallel range reads, resumed where it stopped.

    target/model.safetensors        complete: renamed when its length and, where there is one, its MD5 are right
    target/model.safetensors.part   on its way, at its full length
    target/.mirror                  the journal: which object each file is of, which parts are there
    target/.mirror.lock             flock: one mirror, or reader, at a time (weights/sources/mirrors.py)

Integrity: every part comes from the object that was listed (If-Match on its ETag) and has its full length. The ETag of
an object that was put in one piece is its MD5 (not under SSE-KMS or SSE-C: `verify_md5` "false"), and the file is
checked against it; of one that was put in parts only lengths are known. The client library shows no x-amz-checksum-*
headers. From externalizing on, the store's own sha256 and checksums hold.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Final

from weights.records.errors import StoreError
from weights.sources.bucket import OWN_FILES, Bucket
from weights.sources.download import Download, Journal
from weights.sources.hub import SCHEME, HubRepository
from weights.sources.mirrors import locked, mirror_folder
from weights.sources.remote import ObjectChanged, RemoteFolder, RemoteObject

__all__ = ["LocalSource", "MirrorReport", "OnProgress", "localized", "mirror"]

# Pickles (.bin, .pt, .ckpt) are not taken along: most folders that have them have the same weights as safetensors.
# A URL that names one such object gets it.
_CHECKPOINT_SUFFIXES: Final = frozenset(
    {".safetensors", ".gguf", ".onnx", ".onnx_data", ".json", ".txt", ".model", ".jinja", ".tiktoken", ".md"}
)
_MAX_LISTINGS: Final = 4
OnProgress = Callable[[int, int], None]  # bytes that are on disk, bytes in all


@dataclass(frozen=True, slots=True)
class MirrorReport:
    """A mirror's contents. `path` is the folder, or the one file that the URL names.

    `etags` say by name which objects the files are. `fetched_bytes` came from object storage this time, `skipped` are
    names of objects that were left out.
    """

    url: str
    path: Path
    num_files: int
    nbytes: int
    fetched_bytes: int
    skipped: tuple[str, ...]
    etags: Mapping[str, str]


@contextlib.contextmanager
def _mirrored(
    url: str,
    target: Path,
    *,
    options: Mapping[str, str] = MappingProxyType({}),
    num_connections: int = 8,
    part_bytes: int = 8 * 2**20,
    progress: OnProgress | None = None,
) -> Iterator[MirrorReport]:
    """Make `target` the copy of the checkpoint at `url`: s3://bucket/prefix, hf://organization/name, or one file there.

    Waits for other mirrors of the same. Within the block nobody changes or removes the copy. `options` as in `Bucket`.
    Memory stays below num_connections x part_bytes. Files that an earlier mirror brought and that are gone from the URL
    are removed; files of others are left alone.

    Raises StoreError (unreachable, refused, not there, damaged on the way, no room on disk), FormatError for a
    safetensors header that is wrong, before the tensors are downloaded. What has arrived is used by the next attempt.
    """
    source: RemoteFolder = HubRepository(url) if url.startswith(SCHEME) else Bucket(url, options)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locked(target))
            report = _bring(source, target, part_bytes, num_connections, progress)
        except OSError as error:
            raise StoreError(f"{source.url}: {error.filename or target}: {error.strerror or error}") from error
        yield report


def mirror(url: str, target: Path, **settings: Any) -> MirrorReport:
    """Bring the copy as `_mirrored` does, and let go of it."""
    with _mirrored(url, target, **settings) as report:
        return report


def _bring(
    source: RemoteFolder, target: Path, part_bytes: int, num_connections: int, progress: OnProgress | None
) -> MirrorReport:
    changed = ""
    for _ in range(_MAX_LISTINGS):
        try:
            return _Mirror(source, target, part_bytes, progress).bring_files(num_connections)
        except ObjectChanged as change:
            changed = str(change)
    raise StoreError(
        f"{source.url}: {changed!r} changed or vanished during each of {_MAX_LISTINGS} attempts to copy it"
    )


class _Mirror:
    """State of one attempt: what is listed now."""

    def __init__(self, source: RemoteFolder, target: Path, part_bytes: int, progress: OnProgress | None) -> None:
        listed = source.objects()
        self._source, self._target, self._part_bytes, self._progress = source, target, part_bytes, progress
        self._is_single = len(listed) == 1 and listed[0].key == source.prefix
        self._objects = [
            remote for remote in listed if self._is_single or PurePosixPath(remote.name).suffix in _CHECKPOINT_SUFFIXES
        ]
        if own := [remote.name for remote in self._objects if remote.name.startswith(OWN_FILES)]:
            raise StoreError(f"{source.url}: {own[0]!r} has the name of a file that its copy keeps beside it")
        self._skipped = tuple(remote.name for remote in listed if remote not in self._objects)
        if not self._objects:
            raise StoreError(f"{source.url}: none of its {len(listed)} objects is part of a checkpoint")
        self._journal = Journal(target / ".mirror")
        self._lock = threading.Lock()
        self._nbytes = sum(remote.nbytes for remote in self._objects)
        self._present_bytes = 0
        self._fetched_bytes = 0

    def bring_files(self, num_connections: int) -> MirrorReport:
        wanted = [remote for remote in self._objects if not self._is_done(remote)]
        stale = self._journal.records.keys() - {remote.name for remote in self._objects}
        self._arrived(self._nbytes - sum(remote.nbytes for remote in wanted), 0)
        if wanted or stale:
            with self._journal.opened() as journal:
                self._remove(stale)
                downloads = [
                    Download(self._source, remote, self._target, journal, self._part_bytes, self._arrived)
                    for remote in wanted
                ]
                self._check_space(downloads)
                with _given_back(downloads), ThreadPoolExecutor(num_connections, thread_name_prefix="mirror") as pool:
                    _run_all(pool, (download.check_header for download in downloads))
                    for download in downloads:
                        download.reserve()
                    _run_all(pool, (partial(d.bring, part) for d in downloads for part in range(d.num_parts)))
        path = self._target / self._objects[0].name if self._is_single else self._target
        etags = {remote.name: remote.etag for remote in self._objects}
        return MirrorReport(
            self._source.url, path, len(self._objects), self._nbytes, self._fetched_bytes, self._skipped, etags
        )

    def _is_done(self, remote: RemoteObject) -> bool:
        record, file = self._journal.records.get(remote.name), self._target / remote.name
        if record is None or not record.done or record.etag != remote.etag:
            return False
        return file.is_file() and file.stat().st_size == remote.nbytes

    def _remove(self, names: Iterable[str]) -> None:
        """Remove files that are no longer at the URL: a stale one could be taken for part of the checkpoint."""
        for name in names:
            (self._target / name).unlink(missing_ok=True)
            (self._target / f"{name}.part").unlink(missing_ok=True)
            del self._journal.records[name]

    def _check_space(self, downloads: list[Download]) -> None:
        needed = sum(download.missing_bytes() for download in downloads)
        free = shutil.disk_usage(self._target).free
        if needed > free:
            raise StoreError(f"{self._source.url}: needs {needed} more bytes in {self._target}, {free} bytes are free")

    def _arrived(self, nbytes: int, fetched_bytes: int) -> None:
        with self._lock:
            self._present_bytes += nbytes
            self._fetched_bytes += fetched_bytes
            if self._progress:
                self._progress(self._present_bytes, self._nbytes)


@contextlib.contextmanager
def _given_back(downloads: Iterable[Download]) -> Iterator[None]:
    """Give back what was reserved when the disk refuses something within the block: it may be full."""
    try:
        yield
    except OSError:
        for download in downloads:
            with contextlib.suppress(OSError):
                download.give_back()
        raise


def _run_all(pool: ThreadPoolExecutor, jobs: Iterable[Callable[[], None]]) -> None:
    """Run all. After a failure, or Ctrl-C, nothing new begins."""
    over = threading.Event()

    def run(job: Callable[[], None]) -> None:
        if over.is_set():
            return
        try:
            job()
        except BaseException:
            over.set()
            raise

    futures = [pool.submit(run, job) for job in jobs]
    try:
        for future in futures:
            future.result()
    finally:
        over.set()


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder or file on local disk. Of a mirror: the URL, and by name which objects its files are."""

    path: Path
    url: str = ""
    etags: Mapping[str, str] | None = None


@contextlib.contextmanager
def localized(
    source: str | Path | LocalSource,
    sources: Path,
    *,
    options: Mapping[str, str] = MappingProxyType({}),
    progress: OnProgress | None = None,
) -> Iterator[LocalSource]:
    """Have `source` on local disk within the block. URLs are mirrored into `sources`, a folder each.

    Any number of processes may ask for one URL at once: one downloads, the others find everything done. What is local
    already stays as it is. Raises StoreError or FormatError.
    """
    if isinstance(source, LocalSource):
        yield source
        return
    if not (isinstance(source, str) and "://" in source):
        yield LocalSource(Path(source))
        return
    with _mirrored(source, mirror_folder(sources, source), options=options, progress=progress) as report:
        yield LocalSource(report.path, source, report.etags)
