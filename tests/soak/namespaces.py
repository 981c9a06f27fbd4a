"""The namespaces of a soak: processes, /dev/shm, a folder for temporary files, and the store's disk are its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

TMP: Final = Path("/mnt")  # paths of sockets have to be short
STORE_SIZE, SHM_SIZE = "192m", "2g"
# As PID 1, a shell takes in what others leave behind.
FIRST_PROCESS: Final = """
set -e
mkdir -p "$1/store" "$1/tmp"
mount --bind "$1/tmp" "$4"
mount -t tmpfs -o size=$2 tmpfs "$1/store"
mount -t tmpfs -o size=$3 tmpfs /dev/shm
shift 4
set +e
"$@"
exit $?
"""


def in_namespaces(folder: str) -> list[str]:
    """Return the beginning of a command that runs there: its store is `store` in the folder."""
    return [*_unshared(), "bash", "-c", FIRST_PROCESS, "soak", folder, STORE_SIZE, SHM_SIZE, str(TMP)]


def missing() -> str:
    """Return the reason why this machine cannot run a soak, "" for none."""
    absent = [tool for tool in ("unshare", "mount", "bash", "cc") if not shutil.which(tool)]
    if absent:
        return f"a soak needs {', '.join(absent)}: it has a disk, processes and a clock of its own"
    tried = subprocess.run([*_unshared(), "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


def _unshared() -> list[str]:
    own = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *own, "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
