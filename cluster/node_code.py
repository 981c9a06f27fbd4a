"""The code that a process runs. Nodes send each other objects of its classes, so they all have to have the same."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

_ROOMS: Final = ("cluster", "configs", "deployments", "weights")
_DIGEST_CHARS: Final = 8


@functools.cache
def running_code() -> tuple[str, ...]:
    """Return Atelier with a digest of its files, and Python, in words: equal ones run the same code. Reads the files.

    A checkout has the same version for months, so that the number alone tells little.
    """
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(file for room in _ROOMS for file in (root / room).rglob("*.py")):
        digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    python = ".".join(map(str, sys.version_info[:2]))
    return f"Atelier {_version()}({digest.hexdigest()[:_DIGEST_CHARS]})", f"Python {python}"


def why_other_code(node: str, there: Sequence[str], here: Sequence[str]) -> str:
    """Return what a node at that address has otherwise than this one, and what to do, "" where it is the same."""
    if list(there) == list(here):
        return ""
    other = " and ".join(one for one in there if one not in here)
    wanted = " and ".join(one for one in here if one not in there)
    return (
        f"node {node} has {other}, and this cluster {wanted}: install the same there, and start Ray of that node again"
    )


def _version() -> str:
    try:
        return f"{version('atelier')} "
    except PackageNotFoundError:  # a checkout that is not installed
        return ""
