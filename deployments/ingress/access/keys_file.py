"""The keys file on disk: read again when it changes, written whole and atomically under a lock.

HAZARD: `keys` looks at the file on every request, on the event loop: keep it on a local disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from configs.errors import Problem
from deployments.ingress.access.keys import KeyEntry, KeyStore
from weights.storage.durable import move

_logger = logging.getLogger("atelier.ingress")

_MAX_BYTES: Final = 2**24
_HEAD: Final = b"# Keys of an Atelier cluster, one JSON object per line, written by `atelier keys`: only their hashes."


class KeysFileError(Exception):
    """A keys file that cannot be used, or a change that it does not allow; the message is one line."""


class KeysFile:
    """The keys of a file as they are now. Changes hold from the next look on.

    While the file cannot be used, the last good keys hold; before there was one, no key does.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = KeyStore({})
        self._seen: object = None
        self.revision = 0  # of the keys: another number, other keys

    def keys(self) -> KeyStore:
        """Return the keys that hold now. Problems go to the log, once for each change of the file."""
        seen = _mark_of(self._path)
        if seen != self._seen:
            self._seen = seen
            self._load()
        return self._keys

    def _load(self) -> None:
        try:
            keys = read_key_store(self._path)
        except KeysFileError as error:
            _logger.error("%s; the keys that were read before hold on (%d)", error, len(self._keys.entries))
            return
        for problem in keys.problems:
            _logger.error("%s; the other lines hold", described(self._path, problem))
        _logger.info("%s: %d keys", self._path, len(keys.entries))
        self._keys = keys
        self.revision += 1


def read_key_store(path: Path) -> KeyStore:
    """Read a keys file.

    Raises KeysFileError when it is not there or cannot be read, when others than its owner may write it, or when no
    line of it is right.
    """
    try:
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise KeysFileError(f"{path}: the keys cannot be read: {error.strerror or error}") from None
    if len(data) > _MAX_BYTES:
        raise KeysFileError(f"{path}: not a keys file: larger than {_MAX_BYTES} bytes")
    keys = KeyStore.parse(data)
    if keys.problems and not keys.entries:
        raise KeysFileError(f"no line is right; the first: {described(path, keys.problems[0])}")
    return keys


def add_key(path: Path, entry: KeyEntry) -> None:
    """Write one more line, in a new file if there is none. Raises KeysFileError, also when the name is taken."""
    with _rewritten(path, create=True) as lines:
        if any(_name_on(line) == entry.name for line in lines):
            raise KeysFileError(f"{path}: there is a key {entry.name!r} already; revoke it, or choose another name")
        lines.append(entry.model_dump_json(exclude_defaults=True).encode())


def revoke_key(path: Path, name: str) -> None:
    """Take out the line of a key. Raises KeysFileError, also when there is no such key."""
    with _rewritten(path, create=False) as lines:
        kept = [line for line in lines if _name_on(line) != name]
        if len(kept) == len(lines):
            known = ", ".join(filter(None, map(_name_on, lines))) or "none"
            raise KeysFileError(f"{path}: no key {name!r} (known: {known})")
        lines[:] = kept


def described(path: Path, problem: Problem) -> str:
    """Return the problem of a line as text: file, line, field, and what is wrong."""
    return f"{path}:{problem.line}: {problem.key + ': ' if problem.key else ''}{problem.text}"


@contextlib.contextmanager
def _rewritten(path: Path, *, create: bool) -> Iterator[list[bytes]]:
    """Yield the lines of the file, and write them back as they are at the end of the block, all or nothing.

    Broken lines and comments stay. An owner and a mode that were given to the file stay, too.
    """
    try:
        path = path.resolve()  # a link stays one
        if create:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (path.parent / f".{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = path.lstat() if path.exists() or not create else None
            if found:
                _check_private(path, found)
            lines = path.read_bytes().splitlines() if found else [_HEAD]
            yield lines
            _write(path, lines, found)
    except OSError as error:
        raise KeysFileError(f"{path}: the keys cannot be changed: {error.strerror or error}") from None


def _write(path: Path, lines: list[bytes], found: os.stat_result | None) -> None:
    descriptor, staged = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            if found:
                os.fchmod(descriptor, stat.S_IMODE(found.st_mode))
                with contextlib.suppress(PermissionError):
                    os.fchown(descriptor, found.st_uid, found.st_gid)
            file.write(b"\n".join(lines) + b"\n")
            file.flush()
            os.fsync(descriptor)
        move(Path(staged), path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise


def _check_private(path: Path, found: os.stat_result) -> None:
    """Raise KeysFileError when somebody else could have written the file. Its hashes may be read by anybody."""
    if not stat.S_ISREG(found.st_mode):
        raise KeysFileError(f"{path}: not a keys file: not a regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise KeysFileError(f"{path}: not used: it belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise KeysFileError(f"{path}: not used: its mode is {mode:04o}, so that others may write it; `chmod 600` helps")
    folder = path.resolve().parent.stat()
    if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
        raise KeysFileError(f"{path}: not used: others may write its folder, and so replace it; `chmod go-w` helps")


def _mark_of(path: Path) -> object:
    """Return what changes with the file: with its contents, its owner, its mode, and whether it is there."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _name_on(line: bytes) -> str | None:
    """Return the name that a line gives a key, right or not."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    name = data.get("name") if isinstance(data, dict) else None
    return name if isinstance(name, str) else None
