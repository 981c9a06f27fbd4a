"""The fetching side of a node: reads an extent from peers in ranges, over several connections, into its final place."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import xxhash

from cluster.errors import PeerUnavailable
from cluster.peers.connections import PeerBusy, PeerConnections
from cluster.peers.protocol import MAX_RANGE_BYTES, MAX_TRANSFERS, PeerAddress, Request, Status, check_secret
from cluster.peers.sources import FetchOutcome, PeerShare
from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef
from weights.memory.host_pool import ByteArray
from weights.reading.extents import Place

__all__ = ["GRACE_S", "MIN_GBPS", "ExtentRange", "ExtentRanges", "FetchFailed", "PeerClient"]

GRACE_S: Final = 1.0  # of each range before its rate counts: TCP starts slowly, a peer may be busy for a moment
MIN_GBPS: Final = 0.002  # the share that each of a few transfers gets on a slow link


class FetchFailed(PeerUnavailable):
    """No peer is left to ask and bytes are missing. `fetched` says how each peer behaved."""

    def __init__(self, message: str, fetched: FetchOutcome) -> None:
        super().__init__(message)
        self.fetched = fetched


class PeerClient:
    """A client of other nodes' peer servers, with at most `num_connections` to each. Thread-safe.

    A peer that is silent for `timeout_s`, or slower than `min_gbps` (10^9 bytes per second, over all connections), is
    given up. Bytes go straight into the caller's memory.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        num_connections: int = 4,
        range_bytes: int = 8 * 2**20,
        timeout_s: float = 5.0,
        min_gbps: float = MIN_GBPS,
        grace_s: float = GRACE_S,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 < range_bytes <= MAX_RANGE_BYTES:
            raise ValueError(f"ranges of {range_bytes} bytes, expected 1 to {MAX_RANGE_BYTES}")
        self._num_connections = num_connections
        self._range_bytes = range_bytes
        self._min_gbps = min_gbps
        self._grace_s = grace_s
        self._clock = clock
        self._connections = PeerConnections(check_secret(secret), num_connections, timeout_s)

    def fetch_extent(
        self, addresses: Sequence[PeerAddress], extent: ExtentRef, place: Place, *, min_gbps: float = 0.0
    ) -> FetchOutcome:
        """Fill what `place` gives from the first peer; when it fails, the rest from the next.

        `place` is asked once, in this thread, when a peer has a slot for the extent: not for a peer that is busy. It
        gives contiguous memory as long as the extent, whose bytes are undefined after an error. The time that it takes
        does not count against the peer. HAZARD: the peer holds the slot for `server.LINGER_S` meanwhile, no longer.
        `min_gbps` raises the client's own floor for this fetch.

        Raises:
            FetchFailed: no peer is left; the message has each peer's reason.
            ExtentCorrupt: the bytes do not have the manifest's checksum; the message names the peers.
            ValueError: the place is not writable, contiguous bytes of the extent's size.
            Exception: whatever `place` raises.
        """
        ranges: ExtentRanges | None = None
        missing_bytes = extent.nbytes
        min_bytes_per_s = max(min_gbps, self._min_gbps) * 1e9 / self._num_connections
        fetched = FetchOutcome()
        reasons: list[str] = []
        for address in addresses:
            if not missing_bytes:
                break
            source = _Source(self._connections, address, extent.id, min_bytes_per_s, self._grace_s)
            start_s = self._clock()
            try:
                source.take_slot()
            except PeerUnavailable as error:
                reasons.append(str(error))
            else:
                slot_s = self._clock()
                ranges = ranges or self._ranges_in(place(), extent)
                start_s += self._clock() - slot_s
                reasons += self._fetch_from(source, ranges)
                if arrived_bytes := missing_bytes - ranges.missing_bytes:
                    fetched.shares.append(PeerShare(address, arrived_bytes, self._clock() - start_s, source.load))
                missing_bytes = ranges.missing_bytes
            if missing_bytes and source.is_busy:
                fetched.busy.append(address)
            elif missing_bytes:
                self._connections.drop_idle(address)
                fetched.failed.append(address)
        if missing_bytes:
            raise FetchFailed(
                f"extent {extent.id}: {missing_bytes} of {extent.nbytes} bytes are missing; "
                f"{'; '.join(dict.fromkeys(reasons)) or 'no peer was offered'}",
                fetched,
            )
        ranges = ranges or self._ranges_in(place(), extent)  # an empty extent needs no peer
        _check_sum(extent, ranges.checksum(), fetched)
        return fetched

    def close(self) -> None:
        """Close all connections; fetches under way raise PeerUnavailable."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _ranges_in(self, out: ByteArray, extent: ExtentRef) -> ExtentRanges:
        return ExtentRanges(_writable(out, extent), self._range_bytes)

    def _fetch_from(self, source: _Source, ranges: ExtentRanges) -> list[str]:
        """Fetch as many ranges as this peer gives. Return the reasons why connections failed."""

        def work() -> str | None:
            while (part := ranges.take_range()) is not None:
                try:
                    source.fetch_range(part.offset, part.view)
                except BaseException as error:
                    # The other connections may still be good: they take over this range.
                    ranges.return_range(part)
                    if isinstance(error, PeerUnavailable):
                        return str(error)
                    raise
                ranges.mark_arrived(part)
            return None

        num_workers = min(self._num_connections, ranges.num_missing)
        with ThreadPoolExecutor(max(num_workers - 1, 1), thread_name_prefix="peer-fetch") as threads:
            others = [threads.submit(work) for _ in range(num_workers - 1)]
            reasons = [work(), *(other.result() for other in others)]
        return [reason for reason in reasons if reason]


@dataclass(frozen=True, slots=True)
class ExtentRange:
    """A part of an extent: its bytes start at `offset` of the extent and belong into `view`."""

    index: int
    offset: int
    view: memoryview


class ExtentRanges:
    """The missing ranges of one extent, and the checksum of those that arrived. Thread-safe.

    Each byte is hashed once, in order, by the thread that closes the gap before it. A thread that takes a range must
    return it or mark it as arrived.
    """

    def __init__(self, view: memoryview, range_bytes: int) -> None:
        self._parts = [
            ExtentRange(index, offset, view[offset : offset + range_bytes])
            for index, offset in enumerate(range(0, view.nbytes, range_bytes))
        ]
        self._waiting = self._parts[::-1]
        self._has_arrived = [False] * len(self._parts)
        self._num_hashed = 0
        self._is_hashing = False
        self._digest = xxhash.xxh3_128()
        self._num_taken = 0
        self._changed = threading.Condition()
        self.missing_bytes = view.nbytes

    @property
    def num_missing(self) -> int:
        """The number of ranges that have not arrived."""
        return self._has_arrived.count(False)

    def take_range(self) -> ExtentRange | None:
        """Return a range that no thread has, or None when all have arrived. Block while others fetch the last ones."""
        with self._changed:
            while not self._waiting and self._num_taken:
                self._changed.wait()
            if not self._waiting:
                return None
            self._num_taken += 1
            return self._waiting.pop()

    def return_range(self, part: ExtentRange) -> None:
        """Let another thread take a range that this one could not fetch."""
        with self._changed:
            self._num_taken -= 1
            self._waiting.append(part)
            self._changed.notify_all()

    def mark_arrived(self, part: ExtentRange) -> None:
        """Count the range as arrived: its bytes are in its view and must not change any more."""
        with self._changed:
            self._num_taken -= 1
            self._changed.notify_all()
            self._has_arrived[part.index] = True
            self.missing_bytes -= part.view.nbytes
            if self._is_hashing:
                return
            self._is_hashing = True
        while (following := self._next_to_hash()) is not None:
            self._digest.update(following.view)  # outside the lock: the other threads keep receiving

    def checksum(self) -> str:
        """Return the XXH3-128 of all bytes. Call it once every range has arrived."""
        return self._digest.hexdigest()

    def _next_to_hash(self) -> ExtentRange | None:
        with self._changed:
            index = self._num_hashed
            if index == len(self._parts) or not self._has_arrived[index]:
                self._is_hashing = False
                return None
            self._num_hashed += 1
            return self._parts[index]


class _Source:
    """One extent at one peer, fetched as one transfer. Thread-safe."""

    def __init__(
        self, connections: PeerConnections, address: PeerAddress, id_: str, min_bytes_per_s: float, grace_s: float
    ) -> None:
        self._connections = connections
        self._address = address
        self._id = id_
        self._min_bytes_per_s = min_bytes_per_s
        self._grace_s = grace_s
        self._transfer = secrets.randbits(64)
        self._loads: list[int] = []
        self.is_busy = False

    @property
    def load(self) -> float:
        """The mean load that the peer's replies have named."""
        return sum(self._loads) / len(self._loads)

    def take_slot(self) -> None:
        """Begin the transfer, before more connections are opened. Raises PeerUnavailable when the peer refuses."""
        self.fetch_range(0, memoryview(b""))

    def fetch_range(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the extent's bytes from `offset`. Raises PeerUnavailable, also when the peer refuses."""
        request = Request(self._id, offset, view.nbytes, self._transfer)
        try:
            reply = self._connections.fetch_range(self._address, request, view, self._min_bytes_per_s, self._grace_s)
            if reply.status == Status.BUSY:
                raise PeerBusy(f"peer {self._address}: has no slot for extent {self._id}: BUSY")
        except PeerBusy:
            self.is_busy = True
            raise
        if reply.status != Status.OK:
            raise PeerUnavailable(f"peer {self._address}: refuses {request}: {reply.status.name}")
        self._loads.append(min(max(reply.load, 1), MAX_TRANSFERS))  # whatever it says


def _check_sum(extent: ExtentRef, checksum: str, fetched: FetchOutcome) -> None:
    """Raise ExtentCorrupt when the bytes are not the manifest's."""
    if checksum == extent.checksum:
        return
    peers = ", ".join(str(share.address) for share in fetched.shares) or "nobody"
    raise ExtentCorrupt(
        f"extent {extent.id} from {peers} has checksum {checksum}, expected {extent.checksum}", extent.id
    )


def _writable(out: ByteArray, extent: ExtentRef) -> memoryview:
    view = out.data
    if view.readonly or not view.c_contiguous or view.format != "B" or view.shape != (extent.nbytes,):
        raise ValueError(
            f"extent {extent.id} needs {extent.nbytes} writable, contiguous bytes, got {out.dtype} {list(out.shape)}"
        )
    return view
