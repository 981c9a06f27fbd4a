"""A node's measurements of the sources of its extents: storage, and its peers. Pure: no clock, no I/O."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from cluster.peers.protocol import PeerAddress, PeerOffer
from cluster.peers.sources import (
    DAMAGED_S,
    STORAGE_MARGIN,
    BandwidthEstimate,
    Choice,
    FetchOutcome,
    PeerRecord,
    ask_again_s,
    choose_source,
)

MAX_PEERS: Final = 1024  # remembered, before those without recent measurements are forgotten


class KnownSources:
    """Storage's bandwidth, the records of peers, and whose copies were damaged. Not thread-safe."""

    def __init__(self, chance: random.Random) -> None:
        self.storage = BandwidthEstimate()
        self.peers: dict[PeerAddress, PeerRecord] = {}
        self.best_peer_gbps = 0.0  # of all that were measured
        self._chance = chance
        # By id: until when no peer is asked for it whose copy was damaged. The other extents of that peer may be sound.
        self._damaged_until_s: dict[str, dict[PeerAddress, float]] = {}

    def choose(self, id_: str, nbytes: int, offers: Sequence[PeerOffer], num_sharing: int, now_s: float) -> Choice:
        """Choose the source of an extent: see `choose_source`."""
        damaged = self._damaged_until_s.get(id_, {})
        sound = [offer for offer in offers if damaged.get(offer.address, -math.inf) <= now_s]
        return choose_source(nbytes, self.storage, sound, self.peers, now_s, num_sharing)

    def is_storage_best(self, now_s: float) -> bool:
        """Return whether storage is clearly faster, as measured on both sides.

        Then there is no reason to wait for a copy.
        """
        if not self.storage.gbps:
            return False
        measured = [gbps for record in self.peers.values() if (gbps := record.gbps(now_s)) is not None]
        return bool(measured) and self.storage.gbps > STORAGE_MARGIN * max(measured)

    def peer_gbps(self, address: PeerAddress) -> float | None:
        """Return the bandwidth of a peer as measured, 10^9 bytes per second; None without a measurement."""
        record = self.peers.get(address)
        return record.bandwidth.gbps if record else None

    def note_read(self, nbytes: int, seconds: float, num_sharing: float) -> None:
        """Take in a read from storage."""
        self.storage = self.storage.observe(nbytes, seconds, num_sharing)

    def note_fetch(self, id_: str, fetched: FetchOutcome, num_sharing: float, now_s: float) -> None:
        """Take in what peers did in a fetch."""
        for share in fetched.shares:
            record = self.peers.get(share.address, PeerRecord())
            self.peers[share.address] = record.observe(share.nbytes, share.seconds, max(num_sharing, share.load), now_s)
        for address in fetched.failed:
            self.peers[address] = self.peers.get(address, PeerRecord()).failed(now_s)
        for address in fetched.corrupt:
            self._damaged_until_s.setdefault(id_, {})[address] = now_s + DAMAGED_S
        for address in fetched.busy:
            until_s = now_s + ask_again_s(0, self._chance.random())
            self.peers[address] = self.peers.get(address, PeerRecord()).busy(until_s)
        if len(self.peers) > MAX_PEERS:
            self.peers = {address: record for address, record in self.peers.items() if record.is_recent(now_s)}
        self.best_peer_gbps = max((record.bandwidth.gbps or 0.0 for record in self.peers.values()), default=0.0)

    def forget(self, id_: str) -> None:
        """Forget the sources of damaged copies of an extent: it is here, or not wanted."""
        self._damaged_until_s.pop(id_, None)
