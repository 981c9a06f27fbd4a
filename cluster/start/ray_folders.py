"""The folders of this user's private Rays, and the end of those that nobody needs any more."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from weights.platform.private_folder import private_folder, temporary_folder

_MAX_FOLDER_CHARS: Final = 37  # of the folder of a Ray, in which its sockets have 70 more
_SESSION_NAME: Final = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}_\d+")
_QUIET_S: Final = 600.0  # a Ray that runs writes its state down every 10 s, also one in another container


def ray_folder(name: str) -> Path:
    """Return the folder of the files of this user's private Ray for a cluster, if it has its own."""
    return temporary_folder() / f"r-{zlib.crc32(name.encode()):08x}"


def ray_logs(name: str) -> Path:
    """Return the logs of the last private Ray of a cluster of this user."""
    own = ray_folder(name)
    return (own if own.exists() else usual_folder()) / "session_latest" / "logs"


def own_folder(name: str) -> str | None:
    """Return `ray_folder`, made if need be; None for Ray's usual place: where that is named, or paths get too long.

    The usual folder may be another user's, and says which Ray `auto` means: that stays the one of who began it there.
    Raises OSError.
    """
    folder = str(ray_folder(name))
    if os.environ.get("RAY_TMPDIR") or len(folder) > _MAX_FOLDER_CHARS:
        return None
    private_folder(temporary_folder())
    return folder


def usual_folder() -> Path:
    """Return Ray's default folder of files."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"


def begin_removing_old_sessions(folder: Path) -> None:
    """Remove this user's ended Ray sessions in a folder, in a thread, except the last: its logs may be needed."""
    threading.Thread(target=lambda: _remove_old_sessions(folder, time.time()), daemon=True).start()


def _remove_old_sessions(folder: Path, now_s: float) -> None:
    """Remove the ended sessions in Ray's folder but the last one. `now_s` is the time of files."""
    written_s = {path: _last_written_s(path) for path in _sessions(folder)}
    ended = {path for path, last_s in written_s.items() if last_s < now_s - _QUIET_S}
    ended -= {path for path in ended if path.name in _running_sessions()} if ended else set()
    for path in sorted(ended, key=lambda path: written_s[path])[:-1]:
        shutil.rmtree(path, ignore_errors=True)


def _sessions(folder: Path) -> Iterator[Path]:
    """Yield the folders of sessions of this user."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _SESSION_NAME.fullmatch(path.name) and not path.is_symlink() and path.lstat().st_uid == os.geteuid():
                yield path


def _last_written_s(path: Path) -> float:
    """Return when something was last written into a session's logs."""
    last_s = path.lstat().st_mtime
    with contextlib.suppress(OSError), os.scandir(path / "logs") as files:
        for file in files:
            last_s = max(last_s, file.stat(follow_symlinks=False).st_mtime)
    return last_s


def _running_sessions() -> set[str]:
    """Return the sessions that processes of this machine name in their command lines, as Ray's own do."""
    lines = (" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return {name for line in lines for name in _SESSION_NAME.findall(line)}
