"""The messages between a node's keeper and the registry: which node has which extents. Values only, no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cluster.peers.protocol import PeerAddress

if TYPE_CHECKING:
    from weights.manifest import ExtentRef


@dataclass(frozen=True, slots=True)
class ResidencyReport:
    """A node's report to the registry: extents that came and went, by id.

    `is_full`: the node holds exactly `added`. Without an `address` (of its peer server) the node is not offered.
    `load` is how many extents it is sending to others, `reading` what it claimed and still reads from storage.
    """

    address: PeerAddress | None
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    is_full: bool = False
    load: int = 0
    reading: Sequence[str] = ()


class Question(NamedTuple):
    """A node's question to the registry: who has each extent?

    The node offers to read extents that no node has from storage, up to `max_claims` of them. `insist` is one of `ids`
    that it wants to read although others have it, because no peer could give it. `unreadable` are all of them, where
    the node cannot read storage: it gets no claims, and another node has to read what nobody holds.
    """

    ids: tuple[str, ...]
    max_claims: int
    insist: str | None = None
    unreadable: tuple[ExtentRef, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A node that has an extent, and how many transfers it last reported under way."""

    address: PeerAddress
    node: str
    active_transfers: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """The registry's answer, by extent id: peers that have it, the node that is reading it, or the asker's claim.

    An id that is in none of them is held by nobody, and may be asked for again.
    """

    offers: Mapping[str, Sequence[PeerOffer]] = field(default_factory=dict)
    reading: Mapping[str, str] = field(default_factory=dict)
    claimed: tuple[str, ...] = ()
