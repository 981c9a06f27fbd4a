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
    """Return the targets of this distribution's entry points of a group, by name, without those that it leaves out.

    Other distributions are not searched: it takes half a second to read all of an environment.
    """
    try:
        points = metadata.distribution(DISTRIBUTION).entry_points
    except metadata.PackageNotFoundError:
        return {}  # a checkout that is not installed
    found = {}
    for point in points:
        if point.group == group:
            try:
                found[point.name] = point.load()
            except ModuleNotFoundError as error:
                if not f"{point.module}.".startswith(f"{error.name}."):
                    raise
    return found
