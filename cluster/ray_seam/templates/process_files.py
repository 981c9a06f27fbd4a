"""The processes that templates have made, and those that can make more: one empty file each beside their sockets.

The parent of a process writes and removes its file. Who was killed has left its own behind, so a
reader looks whether the process is there.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Final, Literal

from cluster.ray_seam.template_records import TemplateStats
from cluster.ray_seam.templates.messages import FOLDER_VARIABLE, PROBLEMS

Kind = Literal["template", "copy"]
_SEPARATOR: Final = "="  # in none of the names


def record_process(folder: str, kind: Kind, name: str, process: int) -> None:
    """Write the file of a process that has just begun."""
    with contextlib.suppress(OSError):  # nothing but a count depends on it
        Path(folder, _SEPARATOR.join((kind, name, str(process)))).touch(mode=0o600)


def remove_process(folder: str, process: int) -> None:
    """Remove the file of a process that has ended, if there is one."""
    with contextlib.suppress(OSError):
        for file in Path(folder).glob(f"*{_SEPARATOR}{process}"):
            file.unlink(missing_ok=True)


def count_copies() -> list[TemplateStats] | None:
    """Return the templates of this process's node, by name; None where there are none."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or not os.path.isdir(folder):
        return None
    ready: set[str] = set()
    copies: Counter[str] = Counter()
    for entry in os.listdir(folder):
        kind, *rest = entry.split(_SEPARATOR)
        if len(rest) != 2:
            if entry != PROBLEMS:
                copies[entry] += 0  # the socket of one
            continue
        name, process = rest
        if not _is_running(process):
            continue
        if kind == "template":
            ready.add(name)
        else:
            copies[name] += 1
    return [TemplateStats(name, name in ready, copies[name]) for name in sorted(copies)]


def template_problems() -> list[str]:
    """Return why workers have not become copies so far, each reason once."""
    with contextlib.suppress(OSError, KeyError):
        lines = Path(os.environ[FOLDER_VARIABLE], PROBLEMS).read_text(errors="replace").splitlines()
        return list(dict.fromkeys(lines))
    return []


def _is_running(process: str) -> bool:
    """Return whether a process is there and no zombie, as one is whose parent does not look after it."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
