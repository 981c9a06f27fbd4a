"""The name that Atelier is installed by: on the public index `atelier`, the name of the command, is a stranger's."""

from __future__ import annotations

from importlib import metadata
from typing import Final

DISTRIBUTION: Final = "atelier-serve"


def installed_version() -> str:
    """Return the version that is installed, "" in a checkout that is not."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""
