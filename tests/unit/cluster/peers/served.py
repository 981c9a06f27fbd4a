"""A node's memory, as a test's peers get it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Served:
    """Extents by id, or found by a function; doubts go to `on_doubt`."""

    def __init__(
        self, extents: dict[str, Any] | Callable[[str], Any], on_doubt: Callable[[str], object] = lambda id_: None
    ) -> None:
        self._extents = extents
        self._on_doubt = on_doubt

    def lookup(self, id_: str) -> Any:
        return self._extents.get(id_) if isinstance(self._extents, dict) else self._extents(id_)

    def resident_ids(self) -> list[str]:
        return list(self._extents) if isinstance(self._extents, dict) else []

    def look_soon(self, id_: str) -> None:
        self._on_doubt(id_)
