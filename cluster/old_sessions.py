"""Folders of Ray sessions that have ended: Ray leaves their logs in its temporary folder, gigabytes in a month."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

_NAME: Final = re.compile(r"session_\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_\d{6}_\d+")
_QUIET_S: Final = 600.0  # a Ray that runs writes its state down every 10 s, also one in another container


def begin_removing_old_sessions() -> None:
    """Remove the folders of this user's Ray sessions that have ended, in a thread, save the last: it may say why."""
    folder = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    threading.Thread(target=lambda: remove_old_sessions(folder, time.time()), daemon=True).start()


def remove_old_sessions(folder: Path, now_s: float) -> None:
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
            if _NAME.fullmatch(path.name) and not path.is_symlink() and path.lstat().st_uid == os.geteuid():
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
    return {name for line in lines for name in _NAME.findall(line)}
