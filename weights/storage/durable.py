"""Making writes survive a crash, and saying in bytes why they failed.

A rename is only as durable as the folder it happened in, and a file only as its data: both are synced, files first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from weights.errors import StoreError


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
    """`mkdir -p` whose new entries survive a crash."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def move(source: Path, target: Path) -> None:
    """Rename within one file system, durably. `source` must be synced already."""
    source.replace(target)
    sync(target.parent)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a file or a folder. The first error is raised as it is, where shutil.copytree collects them."""
    if source.is_dir():
        target.mkdir()
        for child in source.iterdir():
            copy_tree(child, target / child.name)
    else:
        shutil.copyfile(source, target)


def remove(path: Path) -> None:
    """Delete a file, a folder or a symlink (never what it points to); nothing there is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(folder: Path, needed_bytes: int) -> Iterator[None]:
    """What the file system refuses becomes a StoreError; a full disk says how much was needed and free."""
    free_bytes = _free_bytes(folder)
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreError(
                f"{folder}: disk full: {needed_bytes} bytes were needed, {free_bytes} were free; nothing was published"
            ) from error
        raise StoreError(f"{error.filename or folder}: {error.strerror or error}") from error


def _free_bytes(folder: Path) -> int:
    for existing in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(existing).free
    return 0
