"""Judges: somebody else's clients and tools, whose pins are not ours, each in a folder of its own below `.judges`.

The Makefile knows how each is installed (`infra/judges`). A test that wants one installs it, so that a share of the
tests installs few.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_TIMEOUT_S: Final = 240  # less than a test has


def judge_folder(name: str, root: Path = _ROOT) -> Path:
    """Return the folder of a judge, which `make` installs where it is missing or old, one at a time."""
    folder = root / ".judges" / name
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(root, f".judges/{name}/.installed")
    return folder


def _install(root: Path, target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # of a make that runs us
    done = subprocess.run(
        ["make", "--silent", target], cwd=root, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    assert done.returncode == 0, f"make {target} ended with {done.returncode}: {done.stderr[-3000:]}"
