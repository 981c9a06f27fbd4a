"""Where a node gets an extent from: storage, a peer that has it, or a peer that soon will. Pure.

All three are compared by the seconds they are expected to take, from measured bandwidths that are shared equally by
those who use them at the same time. Storage is chosen only when it is faster. What nobody has measured yet is taken to
be as fast as the fastest that is known, and at least `ASSUMED_GBPS`, so it gets tried; being shared, an unknown
peer gets one transfer at a time as long as it is no better than its rivals.

One node reading an extent is enough for a cluster when the others wait for it. Those who wait spread the extent among
themselves, each giving it to one other at a time: every round doubles those who have it. To pull from a peer that
serves nobody disturbs nobody and is judged by itself. But what one of those who wait may do, all may: storage, and a
peer that is busy, are judged as if all of them went there too. Decisions must be made one after the other, where the
offers are known (the registry), each seeing those before it as `active_transfers`, `num_waiting` and
`storage_readers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from cluster.peers.peer_protocol import PeerAddress

HALF_LIFE_BYTES: Final = 2**30
ASSUMED_GBPS: Final = 1.0
# Of what storage would give: a peer below it is given up in the middle. Low, because the bytes so far are lost then.
MIN_SHARE: Final = 0.25
PATIENCE: Final = 2.0  # times the expected wait
PATIENCE_S: Final = 1.0
TIE: Final = 1 + 1e-9  # times that differ by less are equal: the rest is rounding


@dataclass(frozen=True, slots=True)
class BandwidthEstimate:
    """A running average of transfers, in which a byte counts half as much after `HALF_LIFE_BYTES` more.

    Bytes over seconds, so that many small slow transfers weigh no more than what they moved.
    """

    nbytes: float = 0.0
    seconds: float = 0.0

    @property
    def gbps(self) -> float | None:
        """10^9 bytes per second; None until something was measured."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else None

    def observe(self, nbytes: int, seconds: float, num_sharing: int = 1) -> BandwidthEstimate:
        """With one more transfer; `num_sharing` of them went on at the same time, this one included.

        What moved nothing or took no time says nothing.
        """
        if nbytes <= 0 or not 0 < seconds < math.inf:
            return self
        faded = 0.5 ** (nbytes / HALF_LIFE_BYTES)
        return BandwidthEstimate(self.nbytes * faded + nbytes, self.seconds * faded + seconds / max(num_sharing, 1))


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A node that has the extent. `gbps` between it and us when it serves nobody else, None when never measured."""

    address: PeerAddress
    node: str
    gbps: float | None
    active_transfers: int = 0


@dataclass(frozen=True, slots=True)
class ComingOffer:
    """A node that is getting the extent, from storage or a peer, and has it in `left_s` seconds.

    `num_waiting` other nodes wait for it already.
    """

    address: PeerAddress
    node: str
    gbps: float | None
    left_s: float
    num_waiting: int = 0


@dataclass(frozen=True, slots=True)
class FromStorage:
    expected_s: float


@dataclass(frozen=True, slots=True)
class FromPeers:
    """The best first; the others, all expected to be no slower than storage, are for when it fails.

    Below `min_gbps` storage would be faster, even from the beginning: the client should give a peer up.
    """

    addresses: tuple[PeerAddress, ...]
    min_gbps: float
    expected_s: float


@dataclass(frozen=True, slots=True)
class WaitForPeer:
    """Plan again when `node` has the extent, has failed to get it or is gone, and after `max_wait_s` at the latest."""

    node: str
    max_wait_s: float
    expected_s: float


def choose_source(
    extent_bytes: int, storage: BandwidthEstimate, peers: Sequence[PeerOffer], storage_readers: int = 0
) -> FromStorage | FromPeers:
    """For an extent that is wanted now. `storage_readers`: the other transfers that share storage's bandwidth."""
    assumed_gbps = _assumed_gbps(storage, peers)
    storage_gbps = (storage.gbps or assumed_gbps) / (1 + storage_readers)
    storage_s = _seconds(extent_bytes, storage_gbps)
    timed = [
        (_seconds(extent_bytes, (peer.gbps or assumed_gbps) / (1 + peer.active_transfers)), peer) for peer in peers
    ]
    # Known before unknown, and then by name: equal offers give equal plans, whatever order they come in.
    timed.sort(key=lambda found: (found[0], found[1].gbps is None, found[1].node))
    usable = [(expected_s, peer.address) for expected_s, peer in timed if expected_s <= storage_s * TIE]
    if not usable:
        return FromStorage(storage_s)
    floor_gbps = MIN_SHARE * storage_gbps if storage.gbps else 0.0
    return FromPeers(tuple(address for _, address in usable), floor_gbps, usable[0][0])


def plan_fetch(
    extent_bytes: int,
    storage: BandwidthEstimate,
    peers: Sequence[PeerOffer],
    coming: Sequence[ComingOffer] = (),
    storage_readers: int = 0,
) -> FromStorage | FromPeers | WaitForPeer:
    """Also considers who will have the extent soon. `storage_readers` counts those of `coming` that read storage."""
    assumed_gbps = _assumed_gbps(storage, [*peers, *coming])
    num_waiting = sum(offer.num_waiting for offer in coming)
    crowded = [
        replace(peer, active_transfers=peer.active_transfers + num_waiting) if peer.active_transfers else peer
        for peer in peers
    ]
    now = choose_source(extent_bytes, storage, crowded, storage_readers + num_waiting)
    if not coming:
        return now
    rounds = _rounds(num_waiting, num_holders=len(peers) + len(coming))
    wait_s, best = min(
        ((offer.left_s + rounds * _seconds(extent_bytes, offer.gbps or assumed_gbps), offer) for offer in coming),
        key=lambda found: (found[0], found[1].node),
    )
    # On a tie, waiting disturbs nobody.
    if wait_s > now.expected_s * TIE:
        return now
    return WaitForPeer(best.node, PATIENCE_S + PATIENCE * best.left_s, wait_s)


def _assumed_gbps(storage: BandwidthEstimate, offers: Sequence[PeerOffer | ComingOffer]) -> float:
    return max([ASSUMED_GBPS, storage.gbps or 0.0, *(offer.gbps or 0.0 for offer in offers)])


def _rounds(num_waiting: int, num_holders: int) -> int:
    """In which round one more is served after `num_waiting` others, when holders double with every round."""
    growth = math.ceil((num_holders + num_waiting + 1) / num_holders)
    return (growth - 1).bit_length()  # log2, rounded up


def _seconds(nbytes: int, gbps: float) -> float:
    return nbytes / (gbps * 1e9) if gbps > 0 else math.inf
