"""Which node holds which extents, as far as the nodes have said, and who reads what nobody holds. Pure: no Ray.

What a question costs does not grow with the number of nodes that hold an extent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from cluster.peers.extent_sources import MAX_OFFERS, PeerOffer
from cluster.peers.fetch_queue import Located, Question
from cluster.peers.peer_protocol import PeerAddress
from weights.residency.claims import LoadingClaims

LOAD_S: Final = 1.0  # a load that was told longer ago says nothing about now


@dataclass(slots=True)
class _Node:
    """`extents`: by id, the node's place among those that hold it."""

    address: PeerAddress | None = None
    extents: dict[str, int] = field(default_factory=dict)
    load: int = 0
    load_s: float = 0.0


class ExtentDirectory:
    """Extent ids by node and back. What it says may be late: who is told of a copy may find it gone."""

    def __init__(self, claims: LoadingClaims, clock: Callable[[], float], chance: random.Random) -> None:
        self._claims = claims
        self._clock = clock
        self._chance = chance
        self._nodes: dict[str, _Node] = {}
        self._holders: dict[str, list[str]] = {}

    def report(
        self,
        node_id: str,
        address: PeerAddress | None,
        added: Iterable[str],
        removed: Iterable[str],
        *,
        full: bool,
        load: int = 0,
    ) -> None:
        """What a node has got and given up; `full`: it has exactly `added`. Without an address nobody is sent to it.

        `load` is how many extents it is sending to others.
        """
        node = self._nodes.setdefault(node_id, _Node())
        node.address = address
        self._told_load(node_id, load)
        added, removed = dict.fromkeys(added), dict.fromkeys(removed)
        self._claims.settle(node_id, [*added, *removed])
        for id_ in node.extents.keys() - added if full else removed.keys() & node.extents:
            self._drop(id_, node_id)
        for id_ in added:
            if id_ not in node.extents:
                holders = self._holders.setdefault(id_, [])
                node.extents[id_] = len(holders)
                holders.append(node_id)

    def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        """Up to `MAX_OFFERS` other nodes that hold each extent, drawn at random, with their load; who is reading it.

        What nobody holds or reads is shared out among the nodes that ask: the asker may read as much of it as falls to
        it, at least one. `question.insist` it may read unless somebody reads it already.
        """
        self._told_load(node_id, load)
        offers: dict[str, list[PeerOffer]] = {}
        reading: dict[str, str] = {}
        claimed: list[str] = []
        num_claims = -(-question.max_claims // max(len(self._nodes), 1))
        for id_ in question.ids:
            found = self._offers(id_, node_id) if id_ != question.insist else None
            if found:
                offers[id_] = found
            elif (reader := self._claims.loader(id_)) is not None and reader != node_id:
                reading[id_] = reader
            elif (len(claimed) < num_claims or id_ == question.insist) and self._claims.claim(id_, node_id):
                claimed.append(id_)
        return Located(offers, reading, tuple(claimed))

    def forget(self, node_id: str) -> None:
        """The node is gone, and its copies and claims with it."""
        self._claims.forget(node_id)
        for id_ in list(self._nodes.get(node_id, _Node()).extents):
            self._drop(id_, node_id)
        self._nodes.pop(node_id, None)

    def num_extents(self, node_id: str) -> int:
        node = self._nodes.get(node_id)
        return len(node.extents) if node else 0

    def _offers(self, id_: str, asker: str) -> list[PeerOffer]:
        holders = self._holders.get(id_, ())
        # One more than wanted: the asker may be among them.
        drawn = self._chance.sample(holders, min(MAX_OFFERS + 1, len(holders)))
        found = [offer for node_id in drawn if node_id != asker and (offer := self._offer(node_id)) is not None]
        return found[:MAX_OFFERS]

    def _offer(self, node_id: str) -> PeerOffer | None:
        node = self._nodes[node_id]
        if node.address is None:
            return None
        is_fresh = self._clock() - node.load_s < LOAD_S
        return PeerOffer(node.address, node_id, node.load if is_fresh else 0)

    def _told_load(self, node_id: str, load: int) -> None:
        if node := self._nodes.get(node_id):
            node.load, node.load_s = load, self._clock()

    def _drop(self, id_: str, node_id: str) -> None:
        holders = self._holders[id_]
        place, last = self._nodes[node_id].extents.pop(id_), holders.pop()
        if last != node_id:  # the last one takes its place
            holders[place] = last
            self._nodes[last].extents[id_] = place
        if not holders:
            del self._holders[id_]
