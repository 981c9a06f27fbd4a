"""Which node holds which extents, as far as the nodes have said. Pure: no Ray, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cluster.peers.extent_sources import PeerOffer
from cluster.peers.peer_protocol import PeerAddress


@dataclass(slots=True)
class _Node:
    address: PeerAddress | None = None
    extents: set[str] = field(default_factory=set)


class ExtentDirectory:
    """Extent ids by node and back. What it says may be late: who is told of a copy may find it gone."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._holders: dict[str, set[str]] = {}

    def report(
        self, node_id: str, address: PeerAddress | None, added: Iterable[str], removed: Iterable[str], *, full: bool
    ) -> None:
        """What a node has got and given up; `full`: it has exactly `added`. Without an address nobody is sent to it."""
        node = self._nodes.setdefault(node_id, _Node())
        node.address = address
        added = set(added)
        for id_ in (node.extents - added) if full else set(removed) & node.extents:
            node.extents.discard(id_)
            self._drop(id_, node_id)
        for id_ in added - node.extents:
            node.extents.add(id_)
            self._holders.setdefault(id_, set()).add(node_id)

    def locate(self, ids: Iterable[str], but_not: str) -> Mapping[str, list[PeerOffer]]:
        """The other nodes that hold each; ids that nobody else holds are left out."""
        found: dict[str, list[PeerOffer]] = {}
        for id_ in ids:
            offers = [self._offer(node_id) for node_id in sorted(self._holders.get(id_, ())) if node_id != but_not]
            if offers := [offer for offer in offers if offer is not None]:
                found[id_] = offers
        return found

    def forget(self, node_id: str) -> None:
        """The node is gone, and its copies with it."""
        node = self._nodes.pop(node_id, _Node())
        for id_ in node.extents:
            self._drop(id_, node_id)

    def address(self, node_id: str) -> PeerAddress | None:
        node = self._nodes.get(node_id)
        return node.address if node else None

    def num_extents(self, node_id: str) -> int:
        node = self._nodes.get(node_id)
        return len(node.extents) if node else 0

    def _offer(self, node_id: str) -> PeerOffer | None:
        address = self.address(node_id)
        return PeerOffer(address, node_id, gbps=None) if address is not None else None

    def _drop(self, id_: str, node_id: str) -> None:
        holders = self._holders[id_]
        holders.discard(node_id)
        if not holders:
            del self._holders[id_]
