"""The map of extents to nodes, the claims on extents that no node holds, and the report of residency. Pure.

Of groups of extents it keeps current which nodes hold them whole. Who asks names the groups once, and from then on what
has changed of them: an answer has the nodes of which something has changed since the last one. So where nothing
changes, nothing is sent and nothing is looked at.

An extent that no node holds is claimed by the one that reads it for all. A loader renews its claims while it loads: a
slow disk is not a dead node, and a dead node's claims end soon. One that takes very long does not hold up the others
for ever: one more may load then, later another.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from cluster.peers.protocol import Located, PeerAddress, PeerOffer, Question, ResidencyReport
from cluster.peers.sources import MAX_OFFERS

LOAD_S: Final = 1.0  # an earlier reported load does not count
Revision = tuple[str, int]
NO_REVISION: Revision = ("", 0)
CLAIM_S: Final = 6.0  # a holder that has not renewed for so long is not loading any more
SLOW_S: Final = 30.0  # after so long a second holder may load, after twice that a third, then a fourth


@dataclass(slots=True)
class _LoadingClaim:
    since_s: float
    until_s: float


class _LoadingClaims:
    """The loaders of missing entries. Not thread-safe: the order of calls is what makes the first the first."""

    def __init__(self) -> None:
        self._claims: dict[str, dict[str, _LoadingClaim]] = {}  # by key and holder
        self._by_holder: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def keys(self) -> list[str]:
        """Return the keys that have claims, ended ones perhaps among them."""
        return list(self._claims)

    def loader(self, key: str, now_s: float) -> str | None:
        """Return the holder that has been loading it longest; None when another one may load."""
        found = self._alive(key, now_s)
        if not found:
            return None
        holder, oldest = min(found.items(), key=lambda item: item[1].since_s)
        num_allowed = 1 + int((now_s - oldest.since_s) // SLOW_S).bit_length()
        return holder if len(found) >= num_allowed else None

    def claim(self, key: str, holder: str, now_s: float) -> bool:
        """Return whether it is this holder's to load, from now on or still."""
        found = self._alive(key, now_s)
        if holder not in found:
            if self.loader(key, now_s) is not None:
                return False
            self._by_holder.setdefault(holder, set()).add(key)
        since_s = found[holder].since_s if holder in found else now_s
        self._claims.setdefault(key, found)[holder] = _LoadingClaim(since_s, now_s + CLAIM_S)
        return True

    def renew(self, keys: Iterable[str], holder: str, now_s: float) -> None:
        """Extend the claims of a holder that is still loading; one that ended is claimed anew if nobody else has it."""
        for key in keys:
            self.claim(key, holder, now_s)

    def settle(self, holder: str, keys: Iterable[str]) -> None:
        """End claims of a holder that has loaded them, or has failed to."""
        mine = self._by_holder.get(holder)
        for key in mine.intersection(keys) if mine else ():
            self._end(key, holder)

    def forget(self, holder: str) -> None:
        """End all claims of a holder that is gone or has begun anew."""
        for key in list(self._by_holder.get(holder, ())):
            self._end(key, holder)

    def _alive(self, key: str, now_s: float) -> dict[str, _LoadingClaim]:
        found = self._claims.get(key, {})
        for holder in [holder for holder, claim in found.items() if claim.until_s <= now_s]:
            self._end(key, holder)
        return self._claims.get(key, {})

    def _end(self, key: str, holder: str) -> None:
        found, mine = self._claims[key], self._by_holder[holder]
        del found[holder]
        mine.discard(key)
        if not found:
            del self._claims[key]
        if not mine:
            del self._by_holder[holder]


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


class _WholeGroups:
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
        """Take in groups added and removed since `revision`, and return the changes of nodes since.

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
        """Return the next question: the revision, and the components that became wanted, with extents, or unwanted."""
        self._asking = dict(wanted)
        if self._revision == NO_REVISION:
            return NO_REVISION, self._asking, ()
        added = {name: ids for name, ids in wanted.items() if self._asked.get(name) != ids}
        return self._revision, added, tuple(name for name in self._asked if name not in wanted)

    def apply_update(self, update: GroupNews) -> None:
        """Take in an answer. After a restart of the registry, the last facts hold until it is asked anew."""
        self._revision = update.revision
        if update.revision == NO_REVISION:
            return
        self._asked = self._asking
        known = {**self.nodes, **update.changed}
        self.nodes = {name: known.get(name, frozenset()) for name in update.nodes}


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
        self._claims = _LoadingClaims()
        self._clock = clock
        self._chance = chance
        self._nodes: dict[str, _Node] = {}
        self._holders: dict[str, list[str]] = {}
        self._groups = _WholeGroups()

    def report_residency(self, node_id: str, report: ResidencyReport) -> None:
        """Take in the extents that a node got and gave up."""
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
        self._claims.renew(report.reading, node_id, self._clock())

    def locate(self, node_id: str, question: Question, load: int = 0) -> Located:
        """Return up to `MAX_OFFERS` other holders of each extent, drawn at random, or the node that is reading it.

        Extents that nobody holds or reads are shared out among the nodes: the asker gets claims on its share of them,
        at least one. It also gets `question.insist` unless another node is reading that.
        """
        now_s = self._clock()
        self._note_load(node_id, load)
        offers: dict[str, list[PeerOffer]] = {}
        reading: dict[str, str] = {}
        claimed: list[str] = []
        num_claims = -(-question.max_claims // max(len(self._nodes), 1))
        for id_ in question.ids:
            found = self._offers(id_, node_id) if id_ != question.insist else None
            if found:
                offers[id_] = found
            elif (reader := self._claims.loader(id_, now_s)) is not None and reader != node_id:
                reading[id_] = reader
            elif (len(claimed) < num_claims or id_ == question.insist) and self._claims.claim(id_, node_id, now_s):
                claimed.append(id_)
        return Located(offers, reading, tuple(claimed))

    def follow_groups(
        self, revision: Revision, added: Mapping[str, Sequence[str]], removed: Sequence[str]
    ) -> GroupNews:
        """Return which groups of extents nodes hold whole, as far as it has changed; see `_WholeGroups.follow`."""
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
    """Return the residents of each node, as JSON-able values.

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
