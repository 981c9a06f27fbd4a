"""The fixture `disk`, a small file system of its own, and what fills it."""

from __future__ import annotations

import os
from pathlib import Path

PAGE_BYTES = 4096
NUM_PAGES = 512


def fill(disk: Path, left: int = 0) -> None:
    """Leave so many pages."""
    (disk / "filler").unlink(missing_ok=True)
    found = os.statvfs(disk)
    with (disk / "filler").open("wb") as file:
        file.write(bytes(found.f_bavail * found.f_frsize - left * PAGE_BYTES))


def free_pages(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize // PAGE_BYTES
