"""Whether a model fits beside what is registered already: as strict as a cluster config. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cluster.errors import RegistrationConflict, RegistrationRefused
from cluster.registry.directory import Directory, Entry
from configs.model import AdapterConfig

MAX_NAMES: Final = 30


def check_entry(directory: Directory, entry: Entry) -> None:
    """Raises RegistrationRefused naming the field, RegistrationConflict when the id is of another sort."""
    if isinstance(entry.path, Path) and not entry.path.is_absolute():
        raise RegistrationRefused(f"path: {str(entry.path)!r} is relative; expected an absolute path or an s3:// URL")
    record = directory.get(entry.id)
    if record and record.entry and type(record.entry) is not type(entry):
        is_adapter = isinstance(record.entry, AdapterConfig)
        was, now = ("an adapter", "a model") if is_adapter else ("a model", "an adapter")
        raise RegistrationConflict(f"id: {entry.id!r} is {was} already; {now} needs another id")
    if isinstance(entry, AdapterConfig):
        models = [record.id for record in directory if not isinstance(record.entry, AdapterConfig)]
        unknown = sorted(set(entry.base) - set(models))
        if unknown:
            raise RegistrationRefused(f"base: unknown {', '.join(unknown)} (models: {listed(models)})")


def listed(names: Iterable[str]) -> str:
    """For a message: of ten thousand names the first few."""
    names = list(names)
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return (", ".join(names[:MAX_NAMES]) or "none") + more
