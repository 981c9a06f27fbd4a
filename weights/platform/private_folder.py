"""Folders of this user alone, in places where others could have made them first."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weights.platform.durable import replaced

MAX_REMEMBERED_BYTES: Final = 2**20


def temporary_folder() -> Path:
    """Return the user's folder in the temporary directory. HAZARD: guessable; use it through `private_folder`."""
    return Path(tempfile.gettempdir()) / f"atelier-{os.getuid()}"


def private_folder(path: Path) -> Path:
    """Create `path` with mode 0700, or take one that is there and could have been made so by nobody else.

    Raises PermissionError, one line, when it is a link or no folder, belongs to another user, or lets others in;
    and other OSErrors when it cannot be created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(f"{path}: not used: it is a link or a file, where a folder of this user's is expected")
    if found.st_uid != os.geteuid():
        raise PermissionError(
            f"{path}: not used: it belongs to user {found.st_uid}, and this is user {os.geteuid()}; "
            "set XDG_RUNTIME_DIR to a folder of your own"
        )
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"{path}: not used: its mode is {mode:04o}, other users can read it; `chmod 700` helps")
    return path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's cache folder, as the XDG base directory specification has it."""
    return _xdg_folder(environ, "XDG_CACHE_HOME", ".cache")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the user's folder of what should outlive a reboot, such as logs; by the same specification."""
    return _xdg_folder(environ, "XDG_STATE_HOME", ".local/state")


def _xdg_folder(environ: Mapping[str, str], variable: str, under_home: str) -> Path:
    base = environ.get(variable, "")
    if base.startswith("/"):  # the specification: a path that is not absolute is ignored
        return Path(base) / "atelier"
    return Path(environ["HOME"]) / under_home / "atelier" if environ.get("HOME") else temporary_folder()


def check_cache_folder(folder: Path) -> None:
    """Raise OSError when the cache folder is the guessable one and somebody else may have made it."""
    if folder == temporary_folder():
        private_folder(folder)


def remember(file: Path, content: bytes) -> None:
    """Replace a file of measurements, which save time only: nothing happens where it cannot be written."""
    with contextlib.suppress(OSError):
        check_cache_folder(file.parent)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(file) as staged:
            staged.write_bytes(content)


def recall(file: Path) -> bytes:
    """Return the first `MAX_REMEMBERED_BYTES` of what was remembered; nothing where it cannot be read."""
    try:
        check_cache_folder(file.parent)
        with file.open("rb") as opened:
            return opened.read(MAX_REMEMBERED_BYTES)
    except OSError:
        return b""
