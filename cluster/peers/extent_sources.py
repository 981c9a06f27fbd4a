"""Where a node gets an extent from: storage, or a peer that has it. Pure.

Sources are compared by measured bandwidth, each as if this transfer were alone with it. What nobody has measured yet
is taken to be as fast as the fastest that is known, and at least `ASSUMED_GBPS`, so it gets tried. Load only ranks
peers: that a peer is busy for a moment is no reason to read storage, for what one node does then, all nodes do, and
storage is to be read once per cluster. A node goes to storage when that is clearly faster, or when no peer can give
the extent; otherwise it waits, with jitter, and asks again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.peers.peer_protocol import PeerAddress

MAX_OFFERS: Final = 4  # of those that have an extent: enough to choose from, however many there are
HALF_LIFE_BYTES: Final = 2**30
ASSUMED_GBPS: Final = 1.0
# Storage is everybody's: to spare it, a node accepts peers that are slower by no more than this.
STORAGE_MARGIN: Final = 1.5
# Of the best source known: a peer below it is not asked, or given up in the middle. Low: the bytes so far are lost.
MIN_SHARE: Final = 0.25
FORGET_S: Final = 60.0  # a bandwidth that was measured so long ago says nothing about now
AVOID_S: Final = 30.0  # a peer that failed is not asked for so long
FIRST_WAIT_S: Final = 0.1
MAX_WAIT_S: Final = 0.5
PATIENCE_S: Final = 10.0
PATIENCE: Final = 2.0  # times what storage would take


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

    def observe(self, nbytes: int, seconds: float, num_sharing: float = 1.0) -> BandwidthEstimate:
        """With one more transfer; `num_sharing` of them went on at the same time, this one included.

        What moved nothing or took no time says nothing.
        """
        if nbytes <= 0 or not 0 < seconds < math.inf:
            return self
        faded = 0.5 ** (nbytes / HALF_LIFE_BYTES)
        return BandwidthEstimate(self.nbytes * faded + nbytes, self.seconds * faded + seconds / max(num_sharing, 1.0))


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A node that has the extent, and how many transfers it said it has under way."""

    address: PeerAddress
    node: str
    active_transfers: int = 0


@dataclass(frozen=True, slots=True)
class PeerShare:
    """What one peer gave to a fetch: what a BandwidthEstimate is fed with.

    `load` is how many transfers, this one included, the peer had under way, on average over its replies.
    """

    address: PeerAddress
    nbytes: int
    seconds: float
    load: float = 1.0


@dataclass(slots=True)
class Fetched:
    """How a fetch went: who gave what, who had no slot, and who failed or did not have the extent."""

    shares: list[PeerShare] = field(default_factory=list)
    busy: list[PeerAddress] = field(default_factory=list)
    failed: list[PeerAddress] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """What this node has seen of a peer. All of it ends with time: a peer is tried again after a bad moment."""

    bandwidth: BandwidthEstimate = BandwidthEstimate()
    measured_s: float = -math.inf
    avoided_until_s: float = -math.inf
    busy_until_s: float = -math.inf

    def gbps(self, now_s: float) -> float | None:
        """Between it and us, alone. None when never measured, or too long ago."""
        return self.bandwidth.gbps if now_s - self.measured_s < FORGET_S else None

    def is_recent(self, now_s: float) -> bool:
        return self.gbps(now_s) is not None or now_s < max(self.avoided_until_s, self.busy_until_s)

    def observe(self, nbytes: int, seconds: float, num_sharing: float, now_s: float) -> PeerRecord:
        known = self.bandwidth if self.gbps(now_s) is not None else BandwidthEstimate()
        return PeerRecord(known.observe(nbytes, seconds, num_sharing), now_s)

    def failed(self, now_s: float) -> PeerRecord:
        return replace(self, avoided_until_s=now_s + AVOID_S)

    def busy(self, until_s: float) -> PeerRecord:
        return replace(self, busy_until_s=until_s)


@dataclass(frozen=True, slots=True)
class FromStorage:
    """Storage is clearly faster than any peer that has it."""


@dataclass(frozen=True, slots=True)
class FromPeers:
    """The best first; the others are for when it is busy or fails.

    The client should give up a peer that is slower than `min_gbps`.
    """

    addresses: tuple[PeerAddress, ...]
    min_gbps: float


@dataclass(frozen=True, slots=True)
class AllBusy:
    """Who has it has just refused for want of a slot."""

    until_s: float


@dataclass(frozen=True, slots=True)
class NobodyLeft:
    """Everybody who is said to have it has failed a moment ago."""


Choice = FromStorage | FromPeers | AllBusy | NobodyLeft


def choose_source(
    nbytes: int,
    storage: BandwidthEstimate,
    offers: Sequence[PeerOffer],
    records: Mapping[PeerAddress, PeerRecord],
    now_s: float,
    num_sharing: int = 1,
) -> Choice:
    """For an extent that is wanted now. `num_sharing` transfers will share a path, here or at the peer.

    Equal offers keep their order, which the caller draws at random.
    """
    known = {offer.address: records.get(offer.address, PeerRecord()) for offer in offers}
    usable = [offer for offer in offers if known[offer.address].avoided_until_s <= now_s]
    if not usable:
        return NobodyLeft()
    measured = {offer.address: known[offer.address].gbps(now_s) for offer in usable}
    best_known_gbps = max(storage.gbps or 0.0, *(gbps or 0.0 for gbps in measured.values()), 0.0)
    assumed_gbps = max(ASSUMED_GBPS, best_known_gbps)
    alone = {address: assumed_gbps if gbps is None else gbps for address, gbps in measured.items()}
    fastest_gbps = max(alone.values())
    if storage.gbps and storage.gbps > STORAGE_MARGIN * fastest_gbps:
        return FromStorage()
    good = [offer for offer in usable if alone[offer.address] >= MIN_SHARE * fastest_gbps]
    free = [offer for offer in good if known[offer.address].busy_until_s <= now_s]
    if not free:
        return AllBusy(min(known[offer.address].busy_until_s for offer in good))
    free.sort(
        key=lambda offer: (
            seconds(nbytes, alone[offer.address]) * (1 + offer.active_transfers),
            measured[offer.address] is None,
        )
    )
    return FromPeers(tuple(offer.address for offer in free), MIN_SHARE * best_known_gbps / num_sharing)


def ask_again_s(num_times: int, chance: float) -> float:
    """How long to wait after so many questions in vain; `chance` is drawn from [0, 1).

    Grows, so that a thousand who wait ask no more than a registry answers, and is spread, so that they do not come
    together.
    """
    return min(FIRST_WAIT_S * 2 ** min(num_times, 16), MAX_WAIT_S) * (0.5 + chance)


def patience_s(nbytes: int, storage: BandwidthEstimate) -> float:
    """How long a node may wait for peers without getting anything before it asks to read storage itself.

    The best forecast of what is left of a wait is what has passed of it: peers are waited for as long as that is less
    than what storage would take, with some more for storage, which is everybody's.
    """
    return max(PATIENCE_S, PATIENCE * seconds(nbytes, storage.gbps or ASSUMED_GBPS))


def seconds(nbytes: int, gbps: float) -> float:
    return nbytes / (gbps * 1e9) if gbps > 0 else math.inf
