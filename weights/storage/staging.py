"""Private folders, each claimed by an flock that ends with the process that holds it, however that ends.

A process id would not do: it means nothing on another node that sees the same store, and it is given out again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Final

from weights.platform.durable import disk_errors, make_folder, move, remove_path, sync
from weights.records.errors import StoreError

_WORK_PATH: Final = "ATELIER_WORK_PATH"
_TEMPORARY: Final = "tmp_weight_*"
_SESSION: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
STAGED: Final = ".staged-*"  # folders of a store in which its writers prepare what they will publish
CLAIM: Final = ".alive"
_CLAIM_S: Final = 2.0  # a sweep that came between `mkdir` and `flock` is over long before


@contextlib.contextmanager
def claimed_folder(path: Path) -> Iterator[Path]:
    """Create `path` and hold it; it is removed at the end. Raises StoreError when another process holds it."""
    with _claim(path):
        try:
            yield path
        finally:
            _remove(path)


def is_dead(path: Path) -> bool:
    """Return True for a claimed folder that no process holds any more."""
    with _held_dead(path) as dead:
        return dead


def _remove_if_dead(path: Path) -> bool:
    """Remove a claimed folder that no process holds; anything else stays."""
    with _held_dead(path) as dead:
        if dead:
            _remove(path)
            return True
    # Its process died before it could claim it, or is about to claim it: then that fails, and it begins anew.
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def sweep(parent: Path, pattern: str) -> list[Path]:
    """Remove the dead folders among `pattern` in `parent`; returns which."""
    return [path for path in sorted(parent.glob(pattern)) if _remove_if_dead(path)]


@contextlib.contextmanager
def _held_dead(path: Path) -> Iterator[bool]:
    """Yield True when nobody held `path`; it is held meanwhile, so that nobody can claim it."""
    with contextlib.ExitStack() as stack:
        dead = False
        with contextlib.suppress(OSError):  # no such folder, none of ours, somebody's
            if not path.is_symlink():
                lock = stack.enter_context((path / CLAIM).open("r+"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                dead = _is_linked(lock)
        yield dead


def _is_linked(lock: IO[str]) -> bool:
    """Return False for a deleted file. HAZARD: a lock on one locks nothing; another may be in its place."""
    return os.fstat(lock.fileno()).st_nlink > 0


def _claim(path: Path) -> IO[str]:
    deadline_s = time.monotonic() + _CLAIM_S
    while True:
        make_folder(path.parent)
        path.mkdir(exist_ok=True)  # need not survive a crash
        try:
            lock = (path / CLAIM).open("w")
        except FileNotFoundError:  # swept in between
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_linked(lock):
                return lock
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                lock.close()
                raise StoreError(f"{path}: another process is using it") from None
            time.sleep(0.01)
        lock.close()


def _remove(path: Path) -> None:
    """Remove the folder, its claim last: a removal cut short is taken up by the next sweep."""
    with contextlib.suppress(OSError):
        for child in path.iterdir():
            if child.name != CLAIM:
                remove_path(child)
        (path / CLAIM).unlink(missing_ok=True)
        path.rmdir()


def _resolve_weight_dir(weight_dir: Path | None, environ: Mapping[str, str], cwd: Path, pid: int, session: str) -> Path:
    """Return the folder that is given, or else a temporary one in ATELIER_WORK_PATH; absolute if `cwd` is.

    Raises StoreError for an odd session name.
    """
    if weight_dir is not None:
        return cwd / weight_dir
    if not _SESSION.fullmatch(session):
        raise StoreError(f"session {session!r}: expected letters, digits and '-', 64 at most")
    return cwd / environ.get(_WORK_PATH, "") / _TEMPORARY.replace("*", f"{pid}_{session}")


@contextlib.contextmanager
def opened_weight_dir(
    weight_dir: Path | None, environ: Mapping[str, str], cwd: Path, pid: int, session: str
) -> Iterator[Path]:
    """Create the folder that `_resolve_weight_dir` names, to be given to `externalize`.

    A temporary one is removed at the end, and those beside it whose process died are removed at the start. A given
    one stays: only what dead writers staged in it is removed. Raises StoreError when it cannot be created.
    """
    path = _resolve_weight_dir(weight_dir, environ, cwd, pid, session)
    if weight_dir is not None:
        with disk_errors(path, 0):
            make_folder(path)
            sweep(path, STAGED)
        yield path
        return
    with disk_errors(path, 0):
        sweep(path.parent, _TEMPORARY)
    with contextlib.ExitStack() as stack:
        with disk_errors(path, 0):
            stack.enter_context(claimed_folder(path))
        yield path


@contextlib.contextmanager
def staged_path(folder: Path, kind: str) -> Iterator[Path]:
    """Yield a private path beneath a folder of the store, to be moved into place; then removed."""
    with claimed_folder(folder / STAGED.replace("*", uuid.uuid4().hex)) as claim:
        yield claim / kind


def publish_file(store: Path, target: Path, data: bytes) -> None:
    """Put a file of a store in place, whole and synced."""
    with staged_path(store, "json") as path:
        path.write_bytes(data)
        sync(path)
        move(path, target)
