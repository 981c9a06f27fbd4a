"""The components that nodes hold whole, as the registry reports their changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.registry.whole_groups import NO_REVISION, GroupNews, Revision


class HeldComponents:
    """A copy of what the registry knows, for the components that were asked about. `nodes` has them by node."""

    def __init__(self) -> None:
        self.nodes: dict[str, frozenset[str]] = {}
        self._revision = NO_REVISION
        self._asked: dict[str, tuple[str, ...]] = {}  # as the registry has it, once it has answered
        self._asking: dict[str, tuple[str, ...]] = {}

    def query(
        self, wanted: Mapping[str, tuple[str, ...]]
    ) -> tuple[Revision, dict[str, tuple[str, ...]], tuple[str, ...]]:
        """Return what to ask: the revision, and the components that are wanted or not any more since, with extents."""
        self._asking = dict(wanted)
        if self._revision == NO_REVISION:
            return NO_REVISION, self._asking, ()
        added = {name: ids for name, ids in wanted.items() if self._asked.get(name) != ids}
        return self._revision, added, tuple(name for name in self._asked if name not in wanted)

    def apply_update(self, update: GroupNews) -> None:
        """Take in an answer. Where the registry has restarted, what was known holds until it is asked anew."""
        self._revision = update.revision
        if update.revision == NO_REVISION:
            return
        self._asked = self._asking
        known = {**self.nodes, **update.changed}
        self.nodes = {name: known.get(name, frozenset()) for name in update.nodes}
