"""Mirrors of object storage in a store: their places, locks, and removal when nobody needs them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import quote

from weights.platform.durable import remove_path
from weights.sources.bucket import split_url
from weights.sources.hub import SCHEME, HubName

SOURCES_FOLDER: Final = "sources"  # in the store
_LOCK = ".mirror.lock"
_MAX_NAME: Final = 200  # characters; file systems take 255 bytes


def mirror_folder(sources: Path, url: str) -> Path:
    """Return the folder for a copy of `url`: one per prefix, never inside another. Raises StoreError.

    s3://b/a and s3://b/a/x are two mirrors with two locks.
    """
    if url.startswith(SCHEME):
        folder = sources / HubName.of(url).folder
    else:
        bucket, prefix = split_url(url)
        folder = sources / bucket / (quote(prefix, safe="") or "@")
    return folder.with_name(_short(folder.name))


def _short(name: str) -> str:
    """Return a quoted path as the name of a file: of a long one the beginning, and a hash of it all.

    No other path has that name: "=" is always quoted.
    """
    if len(name) <= _MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: _MAX_NAME - len(digest) - 1]}={digest}"


@contextlib.contextmanager
def locked(mirror: Path) -> Iterator[None]:
    """Hold a mirror for yourself, among all processes: to fill it, to read it, to remove it. Waits for others."""
    with contextlib.ExitStack() as held:
        while not _lock(mirror, held, wait=True):
            pass
        yield


def remove_mirror(mirror: Path) -> bool:
    """Remove a mirror, unless somebody fills or reads it now: then nothing happens. Raises OSError."""
    with contextlib.ExitStack() as held:
        if not (mirror / _LOCK).exists() or not _lock(mirror, held, wait=False):
            return False
        for entry in mirror.iterdir():
            if entry.name != _LOCK:  # last: until it goes, nobody else begins
                remove_path(entry)
        (mirror / _LOCK).unlink()
        with contextlib.suppress(OSError):  # somebody waits, and has begun to use it
            mirror.rmdir()
            mirror.parent.rmdir()
    return True


def unused_mirrors(sources: Path, needed: Collection[str]) -> list[Path]:
    """List the mirrors that no model of the store came from.

    `needed`: the sources of those models, URLs or, in manifests of before, paths inside of a mirror.
    """
    kept = {mirror_folder(sources, source) for source in needed if "://" in source}
    paths = [Path(source) for source in needed if "://" not in source]
    return [
        lock.parent
        for lock in sorted(sources.glob(f"*/*/{_LOCK}"))
        if lock.parent not in kept and not any(path.is_relative_to(lock.parent) for path in paths)
    ]


def _lock(mirror: Path, held: contextlib.ExitStack, *, wait: bool) -> bool:
    """Lock a mirror; False when it is taken (without `wait`), or was removed while we waited."""
    try:
        mirror.mkdir(parents=True, exist_ok=True)
        lock = held.enter_context((mirror / _LOCK).open("ab"))
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return _is_at(lock.fileno(), mirror / _LOCK)
    except (BlockingIOError, FileNotFoundError):
        return False
    except FileExistsError:  # a folder that went at this very moment, too
        if mirror.is_file():
            raise
        return False


def _is_at(descriptor: int, path: Path) -> bool:
    """Return True when the file is still at `path`. HAZARD: after a wait it may be gone, or another be there."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
