"""The map of extents to nodes, the claims on extents that no node holds, and the report of residency. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from cluster.peers.messages import Located, PeerOffer, Question, ResidencyReport
from cluster.peers.protocol import PeerAddress
from cluster.peers.sources import MAX_OFFERS
from cluster.registry.whole_groups import GroupNews, Revision, WholeGroups
from weights.residency.claims import LoadingClaims

LOAD_S: Final = 1.0  # a load that was reported earlier says nothing about now


@dataclass(slots=True)
class _Node:
    """One node. `extents` gives, by id, its index in the list of the extent's holders."""

    address: PeerAddress | None = None
    extents: dict[str, int] = field(default_factory=dict)
    load: int = 0
    load_s: float = 0.0


class ResidencyMap:
    """A map of extents to the nodes that hold them, and back, as last reported: an offered copy may be gone already.

    The cost of a question does not grow with the number of nodes that hold an extent.
    """

    def __init__(self, clock: Callable[[], float], chance: random.Random) -> None:
        self._claims = LoadingClaims(clock)
        self._clock = clock
        self._chance = chance
        self._nodes: dict[str, _Node] = {}
        self._holders: dict[str, list[str]] = {}
        self._groups = WholeGroups()

    def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        """Take in what a node has got and given up."""
        node = self._nodes.setdefault(node_id, _Node())
        node.address = report.address
        self._note_load(node_id, report.load)
        added, removed = dict.fromkeys(report.added), dict.fromkeys(report.removed)
        self._claims.settle(node_id, [*added, *removed])
        for id_ in node.extents.keys() - added if report.is_full else removed.keys() & node.extents:
            self._drop(id_, node_id)
        for id_ in added:
            if id_ not in node.extents:
                holders = self._holders.setdefault(id_, [])
                node.extents[id_] = len(holders)
                holders.append(node_id)
                self._groups.gain(node_id, id_)
        self._claims.renew(report.reading, node_id)

    def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        """Return up to `MAX_OFFERS` other holders of each extent, drawn at random, or the node that is reading it.

        Extents that nobody holds or reads are shared out among the nodes: the asker gets claims on its share of them,
        at least one. It also gets `question.insist` unless another node is reading that.
        """
        self._note_load(node_id, load)
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

    def follow_groups(
        self, revision: Revision, added: Mapping[str, Sequence[str]], removed: Sequence[str]
    ) -> GroupNews:
        """Return which groups of extents nodes hold whole, as far as it has changed; see `WholeGroups.follow`."""
        held = {node_id: node.extents for node_id, node in self._nodes.items()}
        return self._groups.follow(revision, added, removed, held, f"{self._chance.getrandbits(64):x}")

    def forget(self, node_id: str) -> None:
        """Forget a node that is gone, with its copies and claims."""
        self._claims.forget(node_id)
        for id_ in list(self._nodes.get(node_id, _Node()).extents):
            self._drop(id_, node_id)
        self._nodes.pop(node_id, None)
        self._groups.forget(node_id)

    def end_claims(self, node_id: str) -> None:
        """End the claims of a node whose keeper has restarted."""
        self._claims.forget(node_id)

    def _offers(self, id_: str, asker: str) -> list[PeerOffer]:
        holders = self._holders.get(id_, ())
        # One more than needed: the asker may be among them.
        drawn = self._chance.sample(holders, min(MAX_OFFERS + 1, len(holders)))
        found = [offer for node_id in drawn if node_id != asker and (offer := self._offer(node_id)) is not None]
        return found[:MAX_OFFERS]

    def _offer(self, node_id: str) -> PeerOffer | None:
        node = self._nodes[node_id]
        if node.address is None:
            return None
        is_fresh = self._clock() - node.load_s < LOAD_S
        return PeerOffer(node.address, node_id, node.load if is_fresh else 0)

    def _note_load(self, node_id: str, load: int) -> None:
        if node := self._nodes.get(node_id):
            node.load, node.load_s = load, self._clock()

    def _drop(self, id_: str, node_id: str) -> None:
        self._groups.lose(node_id, id_)
        holders = self._holders[id_]
        place, last = self._nodes[node_id].extents.pop(id_), holders.pop()
        if last != node_id:  # the last holder moves to the free index
            holders[place] = last
            self._nodes[last].extents[id_] = place
        if not holders:
            del self._holders[id_]


def cluster_residency(
    stats: Mapping[str, Any], residents: Mapping[str, Any], extents_of: Mapping[str, Iterable[str]]
) -> dict[str, Any]:
    """Return what is resident where, as JSON-able values.

    `nodes` has each node's keeper figures, or `unreachable` with the reason. `models` has, by id and node, the bytes
    and extents that are resident, whether all of those are pinned, who leases them, and how often they were used.

    `stats` and `residents` are the keepers' answers by node, which may be exceptions; `extents_of` has the extent ids
    of each model. Extents that models share count for each of them. Models without resident extents are left out.
    Linear in the extents of the models and in those that are resident.
    """
    nodes = [_node(node_id, stats[node_id]) for node_id in sorted(stats)]
    users: dict[str, list[str]] = {}
    for model, ids in extents_of.items():
        for id_ in ids:
            users.setdefault(id_, []).append(model)
    found: dict[str, dict[str, list[Any]]] = {}  # extents by model and node
    for node_id, answer in sorted(residents.items()):
        for extent in () if isinstance(answer, BaseException) else answer:
            for model in users.get(extent.id, ()):
                found.setdefault(model, {}).setdefault(node_id, []).append(extent)
    models = {
        model: {node_id: _share(extents) for node_id, extents in by_node.items()} for model, by_node in found.items()
    }
    return {"nodes": nodes, "models": models}


def _share(extents: list[Any]) -> dict[str, Any]:
    """Return a node's share of a model."""
    return {
        "host_bytes": sum(extent.nbytes for extent in extents),
        "num_extents": len(extents),
        "pinned": all(extent.pinned for extent in extents),
        "holders": sorted({holder for extent in extents for holder in extent.holders}),
        "hits": sum(extent.hits for extent in extents),
    }


def _node(node_id: str, stats: Any) -> dict[str, Any]:
    if isinstance(stats, BaseException):
        return {"node_id": node_id, "unreachable": str(stats) or type(stats).__name__}
    return asdict(stats)
