"""File-system operations that survive a crash, free space in place, and say in bytes why they failed.

A rename is only as durable as the folder it happened in, and a file only as its data: both are synced, files first.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from weights.records.errors import DiskFull, StoreError

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_BLOCK_BYTES: Final = 4096  # smaller holes would be zeros written, not space freed
_REFUSALS: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def sync(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(path: Path) -> None:
    """Flush a file, or everything below a folder and itself."""
    if path.is_file():
        sync(path)
    for root, _, names in os.walk(path):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def make_folder(path: Path) -> None:
    """Create a folder and its parents (`mkdir -p`) so that the new entries survive a crash."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename within one file system, durably. `source` must be synced already."""
    source.replace(target)
    sync(target.parent)


@contextlib.contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` that becomes it at the end, or is removed: nobody finds a part of a file.

    Not synced to disk: that is the caller's to decide. Raises OSError.
    """
    staged = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield staged
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a file or a folder. The first error is raised as it is, where shutil.copytree collects them."""
    if source.is_dir():
        target.mkdir()
        for child in source.iterdir():
            copy_tree(child, target / child.name)
    else:
        shutil.copyfile(source, target)


def remove_path(path: Path) -> None:
    """Delete a file, a folder or a symlink (never what it points to); nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Turn errors of the file system into StoreError; a full disk, DiskFull, says how much was needed and free."""
    free_bytes = _free_bytes(folder)
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            needed = f"{needed_bytes} bytes were needed, " if needed_bytes else ""
            raise DiskFull(f"{folder}: disk full: {needed}{free_bytes} were free; nothing was published") from error
        raise StoreError(f"{error.filename or folder}: {error.strerror or error}") from error


def _free_bytes(folder: Path) -> int:
    for existing in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
    return 0


def dead_ranges(live: Iterable[tuple[int, int]], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield whole blocks of a file of `size_bytes` that no `live` range touches; ranges as (begin, end)."""
    position = 0
    file_end = size_bytes + -size_bytes % _BLOCK_BYTES
    occupied = sorted((begin, end) for begin, end in live if end > begin)
    for begin, end in [*occupied, (file_end, file_end)]:
        first, last = position + -position % _BLOCK_BYTES, begin - begin % _BLOCK_BYTES
        if last > first:
            yield first, last
        position = max(position, end)


def punch(path: Path, ranges: Iterable[tuple[int, int]]) -> bool:
    """Make the (begin, end) ranges holes; the file keeps its size.

    False, with nothing done, where another hard link names the file: a backup by `cp -al` or `rsync --link-dest` needs
    the bytes, and as long as it does nothing would be freed. False as well where the file system makes no holes. Raises
    OSError for anything else that goes wrong.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_nlink > 1:
            return False
        for begin, end in ranges:
            if libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, end - begin):
                code = ctypes.get_errno()
                if code in _REFUSALS:
                    return False
                raise OSError(code, os.strerror(code), str(path))
        os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)


def allocated_bytes(path: Path, *, own: bool = False) -> int:
    """Return the bytes of a file or folder on disk, without holes. Symlinks are not followed.

    `own`: without files that other hard links name, which removing frees nothing of.
    """
    files = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    found = [file.lstat() for file in files]
    return sum(one.st_blocks * 512 for one in found if not (own and stat.S_ISREG(one.st_mode) and one.st_nlink > 1))
