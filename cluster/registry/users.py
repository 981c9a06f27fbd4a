"""The replicas that use a control plane, which ends with the last of them: Ray says which ones run. Pure.

So it goes with its application, by whatever means that ends: another config that replaces it, `serve.delete`, `serve
shutdown`. No time is involved: a replica that Ray starts or drains is there, and one that has ended is not.
"""

from __future__ import annotations

from collections.abc import Collection


class Users:
    """The replicas that have asked for a control plane, by the names that they have with Ray. Lives on one event loop.

    `had_some`: others may have asked the process before this one, which has died.
    """

    def __init__(self, *, had_some: bool = False) -> None:
        self._had_some = had_some
        self._names: set[str] = set()

    @property
    def names(self) -> frozenset[str]:
        """The replicas that may run."""
        return frozenset(self._names)

    def add(self, name: str | None) -> None:
        """Take in a replica; nothing for a caller that is none."""
        if name:
            self._had_some = True
            self._names.add(name)

    def have_ended(self, ended: Collection[str]) -> bool:
        """Remove ended replicas. Return whether there were some, and none is left."""
        self._names.difference_update(ended)
        return self._had_some and not self._names
