"""Files of workflows: what clients upload, and what workflows save, in folders of each API key.

A file's modification time is when it ends, so that whoever looks at the folder alone knows which files are over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from configs.cluster import WorkflowFilesConfig
from deployments.records.errors import InvalidRequest, Overloaded
from deployments.workflows.backend import SavedFile
from weights.platform.durable import replaced
from weights.platform.private_folder import private_folder

FileType = Literal["output", "temp", "input"]

FOLDER: Final = "workflows"  # of a store; below it one of each cluster, and below that one of each key
TYPES: Final = get_args(FileType)
_PART: Final = re.compile(r"(?![.\s])[^\x00-\x1f\x7f/\\:*?\"<>|]{1,160}(?<![\s.])")
_MAX_DEPTH: Final = 4  # folders below that of a type
_MAX_SAME: Final = 1000  # uploads of one name
_NUMBER: Final = re.compile(r"([0-9]{5,12})_(?:\..*)?")  # behind a prefix
_SWEEPS: Final = 16  # while as much is written as may be kept
_EVERY_S: Final = 60.0


class _Kept(NamedTuple):
    """A kept file."""

    ends_s: float
    path: Path
    owner: str
    num_bytes: int


class WorkflowFiles:
    """The files of one folder, by API key. Thread-safe; calls block. HAZARD: other ingress replicas write there too.

    Methods raise InvalidRequest for a name that is none, Overloaded where the folder cannot be used.
    """

    def __init__(self, config: WorkflowFilesConfig, store: Path, cluster: str) -> None:
        self._config = config
        self._is_own = config.folder is None
        self._folder = config.folder or store.expanduser() / FOLDER / cluster
        self._lock = threading.Lock()
        self._num_unswept, self._unswept_bytes, self._next_sweep_s = config.max_files, 0, 0.0

    def upload(self, key: str, wanted: SavedFile, data: bytes, *, overwrite: bool) -> SavedFile:
        """Keep a file by its name; by another one where that is taken by other content."""
        folder = self._folder_of(key, wanted.type, wanted.subfolder)
        name = _checked_part(wanted.filename)
        with self._writing(folder, len(data)):
            if overwrite:
                with replaced(folder / name) as staged:
                    self._write(staged, data)
                return wanted
            for candidate in _names_like(name):
                path = folder / candidate
                with contextlib.suppress(FileExistsError):
                    self._write(path, data)
                    return SavedFile(candidate, wanted.subfolder, wanted.type)
                if _has(path, data):
                    self._renew(path)
                    return SavedFile(candidate, wanted.subfolder, wanted.type)
        raise InvalidRequest(f"image: {_MAX_SAME} files are called {name!r} or alike, the maximum", "image")

    def save(
        self, key: str, prefix: str, type_: FileType, files: Sequence[bytes], ending: str = "png"
    ) -> list[SavedFile]:
        """Keep files of one ending by a prefix, which may name folders, and the next numbers."""
        subfolder, _, stem = prefix.replace("\\", "/").rpartition("/")
        folder, stem = self._folder_of(key, type_, subfolder), _checked_part(stem or "ComfyUI")
        found = []
        with self._writing(folder, sum(map(len, files))):
            number = max((known for name in os.listdir(folder) if (known := _number_of(name, stem))), default=0)
            for data in files:
                while True:
                    number += 1
                    name = f"{stem}_{number:05}_.{ending}"
                    with contextlib.suppress(FileExistsError):
                        self._write(folder / name, data)
                        break
                found.append(SavedFile(name, subfolder, type_))
        return found

    def read(self, key: str, file: SavedFile) -> bytes | None:
        """Return a file; None where there is none of this key."""
        path = self._folder_of(key, file.type, file.subfolder) / _checked_part(file.filename)
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):
            data = path.read_bytes()
            return data if path.stat().st_mtime > time.time() else None
        return None

    def names(self, key: str, type_: FileType) -> list[str]:
        """Return the names of the files of a type, with their subfolders, in order."""
        folder = self._folder_of(key, type_, "")
        return sorted(str(one.path.relative_to(folder)) for one in _kept(folder, "") if one.ends_s > time.time())

    def _folder_of(self, key: str, type_: str, subfolder: str) -> Path:
        if type_ not in TYPES:
            raise InvalidRequest(f"type: no files of type {type_[:40]!r} (known: {', '.join(TYPES)})", "type")
        parts = [part for part in subfolder.replace("\\", "/").split("/") if part]
        if len(parts) > _MAX_DEPTH:
            raise InvalidRequest(f"subfolder: {len(parts)} folders deep, at most {_MAX_DEPTH} are allowed", "subfolder")
        owner = hashlib.sha256(key.encode()).hexdigest()[:32] if key else "all"
        return self._folder.joinpath(owner, type_, *(_checked_part(part, "subfolder") for part in parts))

    @contextlib.contextmanager
    def _writing(self, folder: Path, num_bytes: int) -> Iterator[None]:
        if num_bytes > self._config.max_bytes:
            raise InvalidRequest(f"a file of {num_bytes} bytes, at most {self._config.max_bytes} are kept")
        try:
            if self._is_own:
                self._folder.parent.mkdir(0o700, parents=True, exist_ok=True)
                private_folder(self._folder)
            for one in reversed([folder, *folder.parents]):  # `parents=True` would make those between for all to read
                if one.is_relative_to(self._folder):
                    one.mkdir(0o700, parents=True, exist_ok=True)
            yield
            with self._lock:
                self._num_unswept += 1
                self._unswept_bytes += num_bytes
                is_much = self._unswept_bytes * _SWEEPS >= self._config.max_bytes
                if is_much or self._num_unswept * _SWEEPS >= self._config.max_files or time.time() > self._next_sweep_s:
                    self._num_unswept, self._unswept_bytes, self._next_sweep_s = 0, 0, time.time() + _EVERY_S
                    self._sweep()
        except OSError as error:
            raise Overloaded(f"files of workflows cannot be kept now: {error.strerror or error}") from None

    def _write(self, path: Path, data: bytes) -> None:
        """Write a new file. Raises FileExistsError."""
        with path.open("xb") as opened:
            opened.write(data)
        self._renew(path)

    def _renew(self, path: Path) -> None:
        ends_s = time.time() + self._config.keep_s
        os.utime(path, (ends_s, ends_s))

    def _sweep(self) -> None:
        files = list(_kept(self._folder))
        for path in _surplus(files, self._config.max_bytes, self._config.max_files, time.time()):
            path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it has others
                path.parent.rmdir()


def collect_files(store: Path, now_s: float, *, dry_run: bool = False) -> tuple[list[Path], int]:
    """Remove the files of a store's workflows whose time is over; return them and their bytes."""
    over = [one for one in _kept(store / FOLDER) if one.ends_s <= now_s]
    for one in () if dry_run else over:
        one.path.unlink(missing_ok=True)
    return [one.path for one in over], sum(one.num_bytes for one in over)


def _kept(folder: Path, owner: str | None = None) -> Iterator[_Kept]:
    """Yield the files below a folder whose own folders are those of the owners, unless all are of one."""
    for root, _, names in os.walk(folder):
        whose = owner if owner is not None else Path(root).relative_to(folder).parts[:1]
        for name in names:
            path = Path(root, name)
            with contextlib.suppress(FileNotFoundError):
                status = path.lstat()
                if not name.startswith("."):  # of a file that is not yet whole
                    yield _Kept(status.st_mtime, path, str(whose), status.st_size)


def _surplus(files: Iterable[_Kept], max_bytes: int, max_files: int, now_s: float) -> Iterator[Path]:
    """Yield the files that are over, then the oldest of the owner with the most bytes, or files."""
    by_owner: dict[str, deque[_Kept]] = defaultdict(deque)
    for one in sorted(files):
        if one.ends_s <= now_s:
            yield one.path
        else:
            by_owner[one.owner].append(one)
    sizes = {owner: sum(one.num_bytes for one in kept) for owner, kept in by_owner.items()}
    while (total := sum(sizes.values())) > max_bytes or sum(map(len, by_owner.values())) > max_files:
        amounts = sizes if total > max_bytes else {owner: len(kept) for owner, kept in by_owner.items()}
        owner = max(amounts, key=amounts.__getitem__)
        oldest = by_owner[owner].popleft()
        sizes[owner] -= oldest.num_bytes
        yield oldest.path


def _checked_part(name: str, field: str = "filename") -> str:
    """Return a name of a file or folder. Raises InvalidRequest for what could be another path."""
    if not _PART.fullmatch(name):
        raise InvalidRequest(f"{field}: {name[:80]!r} is no name that a file may have here", field)
    return name


def _names_like(name: str) -> Iterator[str]:
    """Yield a name, and those that ComfyUI gives to files whose own one is taken."""
    yield name
    stem, dot, ending = name.rpartition(".")
    for number in range(1, _MAX_SAME):
        yield f"{stem} ({number}){dot}{ending}" if dot else f"{name} ({number})"


def _number_of(name: str, stem: str) -> int:
    """Return the number of a file saved by that prefix, 0 for another file."""
    found = _NUMBER.fullmatch(name.removeprefix(f"{stem}_")) if name.startswith(f"{stem}_") else None
    return int(found[1]) if found else 0


def _has(path: Path, data: bytes) -> bool:
    """Return whether a file has that content."""
    with contextlib.suppress(OSError):
        return path.stat().st_size == len(data) and path.read_bytes() == data
    return False
