"""The installed distribution: its name, its version, and the parts that serving does without.

The public index has an unrelated package called `atelier`, as the command is.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any, Final

DISTRIBUTION: Final = "atelier-serve"
COMMANDS: Final = "atelier.commands"
DEVICES: Final = "atelier.devices"


def installed_version() -> str:
    """Return the version that is installed, "" in a checkout that is not."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""


def optional_parts(group: str) -> dict[str, Any]:
    """Return the targets of this distribution's entry points of a group, by name, without those that it leaves out."""
    return {name: part for name, part in _parts(group) if part is not None}


def left_out_parts(group: str) -> list[str]:
    """Return the names of the entry points of a group whose modules this installation leaves out."""
    return [name for name, part in _parts(group) if part is None]


def _parts(group: str) -> list[tuple[str, Any]]:
    """Return the names of a group, and the target of each, None where its module is left out.

    Other distributions are not searched: it takes half a second to read all of an environment.
    """
    try:
        points = metadata.distribution(DISTRIBUTION).entry_points
    except metadata.PackageNotFoundError:
        return []  # a checkout that is not installed
    found = []
    for point in points:
        if point.group == group:
            try:
                found.append((point.name, point.load()))
            except ModuleNotFoundError as error:
                if not f"{point.module}.".startswith(f"{error.name}."):
                    raise
                found.append((point.name, None))
    return found
