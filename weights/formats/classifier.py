"""A text classifier's config.json: the classes that it scores. Source: transformers 5.23, `configuration_utils.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from weights.formats.untrusted import shown
from weights.records.errors import FormatError

SUFFIX: Final = "ForSequenceClassification"  # of the classes that are classifiers
_STOCK_CLASSES: Final = 2  # of a config that says nothing
_MAX_CLASSES: Final = 2**16


def read_labels(config: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """Return the names of the classes in order, `LABEL_0` and so on by default. Raises FormatError naming `where`."""
    named = config.get("id2label")
    count = config.get("num_labels", _STOCK_CLASSES) if named is None else None
    if isinstance(named, dict) and 0 < len(named) <= _MAX_CLASSES:
        labels = [named.get(str(number)) for number in range(len(named))]
        if all(isinstance(label, str) for label in labels):
            return tuple(map(str, labels))
    if type(count) is int and 0 < count <= _MAX_CLASSES:
        return tuple(f"LABEL_{number}" for number in range(count))
    raise FormatError(
        f"{where}: expected id2label with a name for each of 0 to n - 1, or num_labels; "
        f"got {shown(named if count is None else count)}"
    )
