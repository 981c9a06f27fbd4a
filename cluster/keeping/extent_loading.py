"""An extent from wherever it comes from fastest: a node that has it, one that will have it soon, or storage."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, Protocol

from cluster.errors import PeerUnavailable
from cluster.keeper_records import Source
from cluster.peers.extent_sources import (
    ASSUMED_GBPS,
    BandwidthEstimate,
    ComingOffer,
    FromPeers,
    FromStorage,
    PeerOffer,
    WaitForPeer,
    choose_source,
    plan_fetch,
)
from cluster.peers.peer_client import PeerClient
from cluster.peers.peer_protocol import PeerAddress
from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray
from weights.reading.extents import ExtentReader, Place
from weights.reading.report import StageClock

Offers = Mapping[str, Sequence[PeerOffer | ComingOffer]]

POLL_S: Final = 0.05
# Longer than that nobody waits for another node to have an extent: storage has it too.
MAX_PEER_WAIT_S: Final = 30.0

logger = logging.getLogger("atelier.keeper")


class Peers(Protocol):
    """The other nodes, as far as this one can reach them."""

    def client(self) -> PeerClient | None:
        """None as long as the cluster's secret is not known."""
        ...

    def locate(self, ids: Sequence[str]) -> Offers:
        """Who else has each extent or is getting it; nothing when nobody can be asked."""
        ...


class ExtentLoader:
    """Thread-safe. A peer that fails or gives other bytes is only a detour: storage has the last word."""

    def __init__(
        self,
        reader: ExtentReader,
        peers: Peers | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._reader = reader
        self._peers = peers
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        self._storage = BandwidthEstimate()
        self._peer_estimates: dict[PeerAddress, BandwidthEstimate] = {}
        self._num_reading = 0
        self._num_fetching: Counter[PeerAddress] = Counter()

    def load(
        self, extent: ExtentRef, offers: Sequence[PeerOffer | ComingOffer], place: Place, stages: StageClock
    ) -> Source:
        """Fill the memory that `place` gives, the same each time; returns where the bytes came from.

        Raises what ExtentReader.read_into raises.
        """
        plan = self._plan(extent, offers)
        if isinstance(plan, FromPeers) and self._fetched(plan, extent, place(), stages):
            return "peer"
        self._read(extent, place, stages)
        return "storage"

    def reload_rate(self, source: Source) -> float | None:
        """Seconds that a byte would take to get again, alone; None when nothing is measured. A peer gives once more."""
        with self._lock:
            peers = [estimate.gbps or 0.0 for estimate in self._peer_estimates.values()] if source == "peer" else []
            gbps = max([self._storage.gbps or 0.0, *peers])
        return 1 / (gbps * 1e9) if gbps else None

    def _plan(self, extent: ExtentRef, offers: Sequence[PeerOffer | ComingOffer]) -> FromStorage | FromPeers:
        if not self._peers or not self._peers.client():
            return FromStorage(0.0)
        give_up_s: float | None = None
        while True:
            plan = self._plan_once(extent, offers)
            if not isinstance(plan, WaitForPeer):
                return plan
            now_s = self._clock()
            give_up_s = give_up_s or now_s + MAX_PEER_WAIT_S
            if now_s >= give_up_s:
                return FromStorage(plan.expected_s)
            self._pause(POLL_S)
            offers = self._peers.locate([extent.id]).get(extent.id, ())

    def _plan_once(
        self, extent: ExtentRef, offers: Sequence[PeerOffer | ComingOffer]
    ) -> FromStorage | FromPeers | WaitForPeer:
        """Judged by what this node measured of each; what the others do to a peer or to storage shows in that.

        Not by how busy each is with this node's own transfers: to share a load between a peer and storage would
        finish sooner, but storage is to be read once per cluster.
        """
        with self._lock:
            storage_s = extent.nbytes / ((self._storage.gbps or ASSUMED_GBPS) * 1e9)
            having = [replace(offer, gbps=self._gbps(offer)) for offer in offers if isinstance(offer, PeerOffer)]
            coming = [
                replace(offer, gbps=self._gbps(offer), left_s=max(offer.left_s, storage_s))
                for offer in offers
                if isinstance(offer, ComingOffer)
            ]
            storage = self._judged_storage([*having, *coming])
            if having or not coming:
                return choose_source(extent.nbytes, storage, having)
            return plan_fetch(extent.nbytes, storage, (), coming, len(coming))

    def _judged_storage(self, offers: Sequence[PeerOffer | ComingOffer]) -> BandwidthEstimate:
        """Storage that this node never read is no better than the slowest offer: only what is measured is faster."""
        known = [offer.gbps for offer in offers if offer.gbps is not None]
        if self._storage.gbps or not known:
            return self._storage
        return BandwidthEstimate(min(known) * 1e9, 1.0)

    def _gbps(self, offer: PeerOffer | ComingOffer) -> float | None:
        return self._peer_estimates.get(offer.address, BandwidthEstimate()).gbps

    def _fetched(self, plan: FromPeers, extent: ExtentRef, out: ByteArray, stages: StageClock) -> bool:
        client = self._peers.client() if self._peers else None
        if client is None:
            return False
        first = plan.addresses[0]
        with self._lock:
            self._num_fetching[first] += 1
        try:
            with stages.measure("read", extent.nbytes):
                shares = client.fetch(plan.addresses, extent, out, min_gbps=plan.min_gbps).shares
        except (PeerUnavailable, ExtentCorrupt) as error:
            logger.warning("storage gives what peers do not: %s", error)
            return False
        finally:
            with self._lock:
                num_sharing = self._num_fetching[first]
                self._num_fetching[first] -= 1
        with self._lock:
            for share in shares:
                known = self._peer_estimates.get(share.address, BandwidthEstimate())
                self._peer_estimates[share.address] = known.observe(share.nbytes, share.seconds, num_sharing)
        return True

    def _read(self, extent: ExtentRef, place: Place, stages: StageClock) -> None:
        place_s = 0.0

        def timed() -> ByteArray:
            nonlocal place_s
            begin_s = self._clock()
            out = place()
            place_s = self._clock() - begin_s
            return out

        start_s = self._clock()
        with self._lock:
            self._num_reading += 1
        try:
            self._reader.read_into(extent, timed, stages)
        finally:
            with self._lock:
                num_sharing = self._num_reading
                self._num_reading -= 1
        with self._lock:
            # A peer's bytes need a place as well.
            self._storage = self._storage.observe(extent.nbytes, self._clock() - start_s - place_s, num_sharing)
