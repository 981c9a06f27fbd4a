"""The choice of the source of an extent: storage, or a peer that has it. Pure.

Sources are compared by measured bandwidth, each as if this transfer were alone with it. A source that was never
measured counts as fast as the fastest known one, and at least `ASSUMED_GBPS`, so that it is tried. Load only ranks
peers: a busy peer is no reason to read storage, because all nodes would do the same, and storage should be read once
per cluster. A node reads storage when that is clearly faster, or when no peer can give the extent; otherwise it waits,
with jitter, and asks again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.peers.protocol import PeerAddress, PeerOffer

MAX_OFFERS: Final = 4  # peers per extent in one answer of the registry: enough to choose from
HALF_LIFE_BYTES: Final = 2**30
ASSUMED_GBPS: Final = 1.0
# Storage is shared by all nodes: to spare it, a node accepts peers that are up to this factor slower.
STORAGE_MARGIN: Final = 1.5
# Of the best known source's rate: a slower peer is not asked, or given up midway. Low, since its bytes are then lost.
MIN_SHARE: Final = 0.25
FORGET_S: Final = 60.0  # an older bandwidth does not count
AVOID_S: Final = 30.0  # after a failure, a peer is not asked for this long
DAMAGED_S: Final = 5.0  # and not for this long for an extent with a damaged copy: the peer got a notice
_FIRST_WAIT_S: Final = 0.1
MAX_WAIT_S: Final = 0.5
PATIENCE_S: Final = 10.0
_PATIENCE: Final = 2.0  # times the seconds that storage would take


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
        """Return the estimate with one more transfer; `num_sharing`, this one included, ran at the same time.

        A transfer without bytes or seconds changes nothing.
        """
        if nbytes <= 0 or not 0 < seconds < math.inf:
            return self
        faded = 0.5 ** (nbytes / HALF_LIFE_BYTES)
        return BandwidthEstimate(self.nbytes * faded + nbytes, self.seconds * faded + seconds / max(num_sharing, 1.0))


@dataclass(frozen=True, slots=True)
class PeerShare:
    """One peer's part of a fetch: an observation for a BandwidthEstimate.

    `load` is the mean number of transfers, this one included, that the peer had under way.
    """

    address: PeerAddress
    nbytes: int
    seconds: float
    load: float = 1.0


@dataclass(slots=True)
class FetchOutcome:
    """The outcome of a fetch, by peer: the peers that gave bytes, had no slot, failed or lacked the extent, and
    those whose bytes of it, alone, were wrong.
    """

    shares: list[PeerShare] = field(default_factory=list)
    busy: list[PeerAddress] = field(default_factory=list)
    failed: list[PeerAddress] = field(default_factory=list)
    corrupt: list[PeerAddress] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PeerRecord:
    """A node's experience with one peer. It expires, so that a peer is tried again after a bad moment."""

    bandwidth: BandwidthEstimate = BandwidthEstimate()
    measured_s: float = -math.inf
    avoided_until_s: float = -math.inf
    busy_until_s: float = -math.inf

    def gbps(self, now_s: float) -> float | None:
        """Return the bandwidth of the path to the peer, or None when there is no recent measurement."""
        return self.bandwidth.gbps if now_s - self.measured_s < FORGET_S else None

    def is_recent(self, now_s: float) -> bool:
        """Return whether anything in the record still counts."""
        return self.gbps(now_s) is not None or now_s < max(self.avoided_until_s, self.busy_until_s)

    def observe(self, nbytes: int, seconds: float, num_sharing: float, now_s: float) -> PeerRecord:
        """Return the record with one more transfer."""
        known = self.bandwidth if self.gbps(now_s) is not None else BandwidthEstimate()
        return PeerRecord(known.observe(nbytes, seconds, num_sharing), now_s)

    def failed(self, now_s: float) -> PeerRecord:
        """Return the record of a peer that failed now and is avoided for `AVOID_S`."""
        return replace(self, avoided_until_s=now_s + AVOID_S)

    def busy(self, until_s: float) -> PeerRecord:
        """Return the record of a peer that had no slot and is not asked before `until_s`."""
        return replace(self, busy_until_s=until_s)


@dataclass(frozen=True, slots=True)
class FromStorage:
    """A choice: storage, which is clearly faster than any peer that has the extent."""


@dataclass(frozen=True, slots=True)
class FromPeers:
    """A choice: these peers, the best first, the others for when it is busy or fails.

    The client should give up a peer that is slower than `min_gbps`.
    """

    addresses: tuple[PeerAddress, ...]
    min_gbps: float


@dataclass(frozen=True, slots=True)
class AllBusy:
    """A choice: wait, because every good peer has just refused for want of a slot."""

    until_s: float


@dataclass(frozen=True, slots=True)
class NobodyLeft:
    """A choice: none, because every offered peer failed a moment ago."""


Choice = FromStorage | FromPeers | AllBusy | NobodyLeft


def choose_source(
    nbytes: int,
    storage: BandwidthEstimate,
    offers: Sequence[PeerOffer],
    records: Mapping[PeerAddress, PeerRecord],
    now_s: float,
    num_sharing: int = 1,
) -> Choice:
    """Choose the source of an extent that is wanted now.

    `num_sharing` transfers will share a path, here or at the peer. Equal offers keep their order, which the caller
    draws at random.
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
            _seconds(nbytes, alone[offer.address]) * (1 + offer.active_transfers),
            measured[offer.address] is None,
        )
    )
    return FromPeers(tuple(offer.address for offer in free), MIN_SHARE * best_known_gbps / num_sharing)


def ask_again_s(num_times: int, chance: float) -> float:
    """Return the seconds to wait after `num_times` questions in vain; `chance` is drawn from [0, 1).

    The wait grows, so that a thousand nodes do not ask more than a registry can answer, and has jitter, so that they do
    not ask all at once.
    """
    return min(_FIRST_WAIT_S * 2 ** min(num_times, 16), MAX_WAIT_S) * (0.5 + chance)


def patience_s(nbytes: int, storage: BandwidthEstimate) -> float:
    """Return the seconds that a node waits for peers without progress before it asks to read storage itself.

    The best forecast of the rest of a wait is its length so far: peers are waited for as long as that is less than
    `_PATIENCE` times the time of storage, since storage is shared by all nodes.
    """
    return max(PATIENCE_S, _PATIENCE * _seconds(nbytes, storage.gbps or ASSUMED_GBPS))


def _seconds(nbytes: int, gbps: float) -> float:
    """Return how long `nbytes` take at `gbps` (10^9 bytes per second)."""
    return nbytes / (gbps * 1e9) if gbps > 0 else math.inf
