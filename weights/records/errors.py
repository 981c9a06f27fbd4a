"""Errors of the weights library.

    WeightsError
    ├── FormatError          a source file is not what its format says; names file and tensor
    ├── StoreError           the weight store, or object storage that a checkpoint is in, cannot do what was asked
    │   ├── ModelNotStored       no manifest of that name
    │   ├── StoreVersionError    written by another version of this library
    │   ├── DiskFull             no space left for it
    │   └── ExtentCorrupt        bytes on disk do not match their checksum, or are missing
    ├── SourceRefused        a path outside of the folders that checkpoints may come from
    ├── AdapterError         a LoRA file that cannot be used
    └── BudgetExceeded       the bytes asked for do not fit, even after evicting all that may go

Messages are single strings, so that every one of them survives the trip through a Ray actor.
"""

from __future__ import annotations

from collections.abc import Iterable


class WeightsError(Exception):
    """Anything that goes wrong between bytes and tensors."""


class FormatError(WeightsError):
    """A file that is truncated, damaged or of another format than expected."""


class StoreError(WeightsError):
    """The weight store, or object storage that a checkpoint is in, cannot do what was asked."""


class ModelNotStored(StoreError):
    """No model of that name was externalized into the store."""


class StoreVersionError(StoreError):
    """The store was written by a version of this library that this one does not understand."""


class DiskFull(StoreError):
    """No space, or no more of a user's share, is left on the disk for what was to be written."""


class ExtentCorrupt(StoreError):
    """Bytes are gone or not the ones that were written: those of an extent, if `extent_id` names one."""

    def __init__(self, message: str, extent_id: str | None = None) -> None:
        super().__init__(message)
        self.extent_id = extent_id


class SourceRefused(WeightsError):
    """A path that leads, perhaps by a symlink, outside of the folders that checkpoints may come from."""


class AdapterError(WeightsError):
    """A LoRA file that cannot be used."""


class BudgetExceeded(WeightsError):
    """More bytes are needed than the budget allows, and nothing more may be evicted."""


def listed(names: Iterable[str], most: int = 30, none: str = "none") -> str:
    """Return names for a message: the first `most` of them, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or none) + more
