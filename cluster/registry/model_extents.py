"""The extents of the served versions of models, and the models that share an extent. No I/O."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from cluster.registry.watched_directory import WatchedDirectory


class ModelExtents:
    """Extent ids by model, of every model of a directory with a version in the store; and models by extent."""

    def __init__(self, directory: WatchedDirectory) -> None:
        self._directory = directory
        self._extents: dict[str, tuple[str, ...]] = {}
        self._users: dict[str, set[str]] = {}

    @property
    def by_model(self) -> Mapping[str, tuple[str, ...]]:
        """The extent ids by model."""
        return self._extents

    def is_known(self, model: str) -> bool:
        """Return whether there is a model of that id, served or not yet."""
        return model in self._directory

    def note(self, model: str, ids: Iterable[str]) -> None:
        """Take these for the extents of the model, instead of those before; none for a model that is gone."""
        before, now = self._extents.get(model, ()), tuple(map(sys.intern, ids))
        if now == before:
            return
        for id_ in before:
            self._users[id_].discard(model)
            if not self._users[id_]:
                del self._users[id_]
        for id_ in now:
            self._users.setdefault(id_, set()).add(model)
        if now:
            self._extents[model] = now
        else:
            self._extents.pop(model, None)

    def of_no_other(self, model: str) -> list[str]:
        """Return the ids of the model's extents that no other loaded model has."""
        return [
            id_
            for id_ in self._extents.get(model, ())
            if not any(other != model and self._directory.is_loaded(other) for other in self._users[id_])
        ]
