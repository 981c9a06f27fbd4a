"""API keys: their making, the store that knows them by their hashes, and its file.

A key is 256 random bits, so a thief of the file gets only its plain SHA-256: guessing a key takes 2^255 tries
whatever one try costs. A slow hash such as scrypt defends words that people choose; here it would only cost every
request tens of milliseconds.

A store is a text with one JSON object per line; lines that are empty or begin with # are skipped. One broken line is a
problem of its own, and the others hold. The file is read again when it changes, and written whole and atomically under
a lock. HAZARD: `keys` looks at it on every request, on the event loop: keep it on a local disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from configs.access import MaxConcurrent, MaxPriority, RequestRate
from configs.errors import Problem
from configs.model import ModelId
from weights.platform.durable import move

_PREFIX: Final = "atl_"  # so that a leaked key is found by programs that look for secrets
_KEY_BYTES: Final = 32
_MAX_KEY_CHARS: Final = 256  # of a shown key: a longer text is no key, and is not hashed

Tenant = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$")]

_logger = logging.getLogger("atelier.ingress")

_MAX_BYTES: Final = 2**24
_HEAD: Final = b"# Keys of an Atelier cluster, one JSON object per line, written by `atelier keys`: only their hashes."


class KeyEntry(BaseModel, frozen=True, extra="forbid", strict=True):
    """A line of the keys file. None is for the limits of the cluster's config."""

    name: ModelId
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False
    tenant: Tenant | None = Field(None, description="the tenant whose share its requests take; default: its own name")
    requests_per_s: RequestRate | None = None
    max_concurrent: MaxConcurrent | None = None
    max_priority: MaxPriority | None = Field(None, description="the most urgent priority of its requests")
    created: str | None = Field(None, description="for people; nothing depends on it")

    @property
    def share(self) -> str:
        """The tenant whose share of the cluster the key's requests take."""
        return self.tenant or self.name


@dataclass(frozen=True, slots=True)
class KeyStore:
    """The valid keys by hash, and the problems of the other lines."""

    entries: dict[str, KeyEntry]
    problems: tuple[Problem, ...] = ()

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a store. Problems do not quote their lines, which may have a key in place of its hash."""
        entries: dict[str, KeyEntry] = {}
        lines_by_name: dict[str, int] = {}
        problems = []
        for number, line in enumerate(data.split(b"\n"), start=1):
            text = line.strip()
            if not text or text.startswith(b"#"):
                continue
            try:
                entry = KeyEntry.model_validate_json(text)
            except ValidationError as error:
                first = error.errors(include_input=False)[0]
                problems.append(Problem(number, ".".join(map(str, first["loc"])), first["msg"]))
                continue
            twice = entries.get(entry.sha256)
            if entry.name in lines_by_name:
                problems.append(
                    Problem(number, "name", f"{entry.name!r} is on line {lines_by_name[entry.name]} already")
                )
            elif twice:
                problems.append(Problem(number, "sha256", f"the same key as {twice.name!r}"))
            else:
                entries[entry.sha256] = entry
                lines_by_name[entry.name] = number
        return cls(entries, tuple(problems))

    def find(self, key: str) -> KeyEntry | None:
        """Return the entry of a key, None for an invalid one.

        Takes the same time however near a wrong key is: it meets the store only as its hash, which a caller can neither
        choose nor approach, and the table is searched by a hash with a seed of this process (SipHash of Python).
        """
        if len(key) > _MAX_KEY_CHARS:
            return None
        return self.entries.get(hash_of(key))


def new_key() -> str:
    """Return a new random key."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """Return the file's form of a key: its SHA-256 in hexadecimal digits."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


class KeysFileError(Exception):
    """A keys file that cannot be used, or a change that it does not allow; the message is one line."""


class KeysFile:
    """The present keys of a file. Changes count from the next look on.

    While the file cannot be used, the last good keys are valid; before the first, none is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = KeyStore({})
        self._seen: object = None
        self.revision = 0  # of the keys: a new number means other keys

    def keys(self) -> KeyStore:
        """Return the valid keys. Problems go to the log, once for each change of the file."""
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
    """Add a line, in a new file if there is none. Raises KeysFileError, also for a name that is taken."""
    with _rewritten(path, create=True) as lines:
        if any(_name_on(line) == entry.name for line in lines):
            raise KeysFileError(f"{path}: there is a key {entry.name!r} already; revoke it, or choose another name")
        lines.append(entry.model_dump_json(exclude_defaults=True).encode())


def revoke_key(path: Path, name: str) -> None:
    """Remove the line of a key. Raises KeysFileError, also if there is no such key."""
    with _rewritten(path, create=False) as lines:
        kept = [line for line in lines if _name_on(line) != name]
        if len(kept) == len(lines):
            known = ", ".join(filter(None, map(_name_on, lines))) or "none"
            raise KeysFileError(f"{path}: no key {name!r} (known: {known})")
        lines[:] = kept


def described(path: Path, problem: Problem) -> str:
    """Return the problem of a line as text: file, line, field and error."""
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
    """Raise KeysFileError if another user could have written the file. Any user may read its hashes."""
    if not stat.S_ISREG(found.st_mode):
        raise KeysFileError(f"{path}: not a keys file: not a regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise KeysFileError(f"{path}: not used: it belongs to user {found.st_uid}, and this is user {os.geteuid()}")
    if found.st_mode & 0o022:
        mode = stat.S_IMODE(found.st_mode)
        raise KeysFileError(f"{path}: not used: its mode is {mode:04o}, so other users may write it; `chmod 600` helps")
    folder = path.resolve().parent.stat()
    if folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
        raise KeysFileError(f"{path}: not used: other users may write its folder, and replace it; `chmod go-w` helps")


def _mark_of(path: Path) -> object:
    """Return a mark that differs once the file's contents, owner, mode or existence change."""
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _name_on(line: bytes) -> str | None:
    """Return the name of a line's key, even if the line is broken."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    name = data.get("name") if isinstance(data, dict) else None
    return name if isinstance(name, str) else None
