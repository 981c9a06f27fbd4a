"""Groups of extents, and the nodes that hold them whole, kept current with every extent that comes or goes. Pure.

Who asks names the groups once, and from then on what has changed of them: an answer has the nodes of which something
has changed since the last one. So where nothing changes, nothing is sent and nothing is looked at.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

Revision = tuple[str, int]
NO_REVISION: Revision = ("", 0)


@dataclass(frozen=True, slots=True)
class GroupNews:
    """The groups that nodes hold whole: of the nodes that changed. `nodes` are all that there are.

    `revision` is what to ask with the next time; `NO_REVISION` where the groups are not known here: all are to be named
    again.
    """

    revision: Revision
    changed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    nodes: frozenset[str] = frozenset()


@dataclass(slots=True)
class _HeldGroups:
    """One node: how many extents of each group it has, the groups that it has whole, and when these changed."""

    num_held: Counter[str] = field(default_factory=Counter)
    whole: set[str] = field(default_factory=set)
    changed: int = 0


class WholeGroups:
    """The groups that one asker has named."""

    def __init__(self) -> None:
        self._epoch = ""
        self._num_changes = 0
        self._groups: dict[str, frozenset[str]] = {}
        self._users: dict[str, set[str]] = {}  # the groups of an extent
        self._nodes: dict[str, _HeldGroups] = {}

    def follow(
        self,
        revision: Revision,
        added: Mapping[str, Collection[str]],
        removed: Iterable[str],
        held: Mapping[str, Collection[str]],
        new_epoch: str,
    ) -> GroupNews:
        """Take in groups that were added and removed since `revision`, and return what has changed of nodes since.

        `NO_REVISION` begins anew: `added` are all groups. `held` has the extents of each node.
        """
        if revision == NO_REVISION:
            self._epoch, self._num_changes = new_epoch, 0
            self._groups, self._users, self._nodes = {}, {}, {}
        elif revision[0] != self._epoch:
            return GroupNews(NO_REVISION)
        for name in removed:
            self._remove(name)
        for node_id in held:
            self._node(node_id)
        for name, ids in added.items():
            self._remove(name)
            self._add(name, frozenset(ids), held)
        changed = {name: frozenset(node.whole) for name, node in self._nodes.items() if node.changed > revision[1]}
        return GroupNews((self._epoch, self._num_changes), changed, frozenset(self._nodes))

    def gain(self, node_id: str, extent: str) -> None:
        """Take in that a node holds an extent that it did not hold."""
        if (names := self._users.get(extent)) is None:
            return
        node = self._node(node_id)
        for name in names:
            node.num_held[name] += 1
            if node.num_held[name] == len(self._groups[name]):
                node.whole.add(name)
                node.changed = self._change()

    def lose(self, node_id: str, extent: str) -> None:
        """Take in that a node does not hold an extent any more."""
        if (node := self._nodes.get(node_id)) is None:
            return
        for name in self._users.get(extent, ()):
            node.num_held[name] -= 1
            if name in node.whole:
                node.whole.discard(name)
                node.changed = self._change()

    def forget(self, node_id: str) -> None:
        """Forget a node that is gone."""
        self._nodes.pop(node_id, None)

    def _node(self, node_id: str) -> _HeldGroups:
        if (node := self._nodes.get(node_id)) is None:
            empty = {name for name, ids in self._groups.items() if not ids}
            node = self._nodes[node_id] = _HeldGroups(whole=empty, changed=self._change())
        return node

    def _add(self, name: str, ids: frozenset[str], held: Mapping[str, Collection[str]]) -> None:
        self._groups[name] = ids
        for id_ in ids:
            self._users.setdefault(id_, set()).add(name)
        for node_id, node in self._nodes.items():
            node.num_held[name] = sum([id_ in held.get(node_id, ()) for id_ in ids])
            if node.num_held[name] == len(ids):
                node.whole.add(name)
                node.changed = self._change()

    def _remove(self, name: str) -> None:
        for id_ in self._groups.pop(name, ()):
            self._users[id_].discard(name)
            if not self._users[id_]:
                del self._users[id_]
        for node in self._nodes.values():
            node.num_held.pop(name, None)
            if name in node.whole:
                node.whole.discard(name)
                node.changed = self._change()

    def _change(self) -> int:
        self._num_changes += 1
        return self._num_changes


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
