"""The fetching side of a node: reads an extent from peers in ranges, over several connections, into its final place."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

import xxhash

from cluster.peers.connections import PeerBusy, PeerConnections
from cluster.peers.protocol import MAX_RANGE_BYTES, MAX_TRANSFERS, PeerAddress, Request, Status, check_secret
from cluster.peers.sources import FetchOutcome, PeerShare
from cluster.records.errors import PeerUnavailable
from weights.memory.host_pool import ByteArray
from weights.reading.extents import Place
from weights.records.errors import ExtentCorrupt
from weights.records.manifest import ExtentRef

__all__ = ["GRACE_S", "MIN_GBPS", "ExtentRange", "ExtentRanges", "FetchFailed", "PeerClient"]

GRACE_S: Final = 1.0  # of each range before its rate counts: TCP starts slowly, a peer may be busy for a moment
MIN_GBPS: Final = 0.002  # the share that each of a few transfers gets on a slow link


class FetchFailed(PeerUnavailable):
    """No peer is left to ask and bytes are missing. `fetched` has the behaviour of each peer."""

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
    ) -> None:
        if not 0 < range_bytes <= MAX_RANGE_BYTES:
            raise ValueError(f"ranges of {range_bytes} bytes, expected 1 to {MAX_RANGE_BYTES}")
        self._num_connections = num_connections
        self._range_bytes = range_bytes
        self._min_gbps = min_gbps
        self._grace_s = grace_s
        self._connections = PeerConnections(check_secret(secret), num_connections, timeout_s)

    def fetch_extent(
        self, addresses: Sequence[PeerAddress], extent: ExtentRef, place: Place, *, min_gbps: float = 0.0
    ) -> FetchOutcome:
        """Fill what `place` gives from the first peer; when it fails, the rest from the next.

        `place` is asked once, in this thread, when a peer has a slot for the extent: not for a peer that is busy. It
        gives contiguous memory as long as the extent, whose bytes are undefined after an error. The time that it takes
        does not count against the peer. HAZARD: the peer holds the slot for `server.LINGER_S` meanwhile, no longer.
        `min_gbps` raises the client's own floor for this fetch.

        A peer with bytes of a wrong checksum gets a notice, and the next one is asked for all of them. If
        several gave some, the last one is asked again alone: the damaged one is not known.

        Raises:
            FetchFailed: no peer is left; the message has each peer's reason.
            ExtentCorrupt: the extent is empty, and the manifest's checksum is another.
            ValueError: the place is not writable, contiguous bytes of the extent's size.
            Exception: any error of `place`.
        """
        arriving = _Arriving(extent, place, self._range_bytes)
        min_bytes_per_s = max(min_gbps, self._min_gbps) * 1e9 / self._num_connections
        fetched, reasons, left = FetchOutcome(), list[str](), deque(addresses)
        while left and arriving.missing_bytes:
            address = left.popleft()
            source = _Source(self._connections, address, extent.id, min_bytes_per_s, self._grace_s)
            reasons += self._fetch_share(source, arriving, fetched)
            if not arriving.missing_bytes:
                if checksum := arriving.wrong_checksum():
                    if arriving.begin_again() == {address}:
                        reasons.append(f"peer {address}: its bytes have checksum {checksum}, not {extent.checksum}")
                        fetched.corrupt.append(address)
                        source.doubt()
                    else:
                        left.appendleft(address)
            elif source.is_busy:
                fetched.busy.append(address)
            else:
                self._connections.drop_idle(address)
                fetched.failed.append(address)
        if arriving.missing_bytes:
            raise FetchFailed(
                f"extent {extent.id}: {arriving.missing_bytes} of {extent.nbytes} bytes are missing; "
                f"{'; '.join(dict.fromkeys(reasons)) or 'no peer was offered'}",
                fetched,
            )
        if not extent.nbytes and (checksum := arriving.wrong_checksum()):  # an empty extent needs no peer
            raise ExtentCorrupt(f"extent {extent.id}: no bytes have checksum {checksum}, not {extent.checksum}")
        return fetched

    def close(self) -> None:
        """Close all connections; fetches under way raise PeerUnavailable."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fetch_share(self, source: _Source, arriving: _Arriving, fetched: FetchOutcome) -> list[str]:
        """Fetch missing bytes from this peer. Return the reasons why it did not give all."""
        start_s = time.perf_counter()
        try:
            source.take_slot()
        except PeerUnavailable as error:
            return [str(error)]
        slot_s, missing_bytes = time.perf_counter(), arriving.missing_bytes
        ranges = arriving.ranges()
        start_s += time.perf_counter() - slot_s
        reasons = self._fetch_from(source, ranges)
        if arrived_bytes := missing_bytes - ranges.missing_bytes:
            arriving.givers.add(source.address)
            fetched.shares.append(PeerShare(source.address, arrived_bytes, time.perf_counter() - start_s, source.load))
        return reasons

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


class _Arriving:
    """An extent being written into its place, which is made once, and the peers of its arrived bytes.

    Not thread-safe, but for its ranges.
    """

    def __init__(self, extent: ExtentRef, place: Place, range_bytes: int) -> None:
        self._extent = extent
        self._place = place
        self._range_bytes = range_bytes
        self._view: memoryview | None = None
        self._ranges: ExtentRanges | None = None
        self.givers: set[PeerAddress] = set()

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not arrived, right or wrong."""
        return self._extent.nbytes if self._ranges is None else self._ranges.missing_bytes

    def ranges(self) -> ExtentRanges:
        """Return the missing ranges of the extent's place. Raises errors of making it, ValueError for a bad place."""
        if self._ranges is None:
            if self._view is None:
                self._view = _writable(self._place(), self._extent)
            self._ranges = ExtentRanges(self._view, self._range_bytes)
        return self._ranges

    def wrong_checksum(self) -> str:
        """Return the checksum of the arrived bytes if it is not the manifest's, else ""."""
        checksum = self.ranges().checksum()
        return "" if checksum == self._extent.checksum else checksum

    def begin_again(self) -> set[PeerAddress]:
        """Count all bytes as missing. Return the peers that gave the dropped ones."""
        givers, self.givers, self._ranges = self.givers, set(), None
        return givers


class _Source:
    """One extent at one peer, fetched as one transfer. Thread-safe."""

    def __init__(
        self, connections: PeerConnections, address: PeerAddress, id_: str, min_bytes_per_s: float, grace_s: float
    ) -> None:
        self._connections = connections
        self.address = address
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

    def doubt(self) -> None:
        """Tell the peer that its copy is damaged. An unreachable peer is left alone."""
        request = Request(self._id, 0, 0, self._transfer, is_doubt=True)
        with contextlib.suppress(PeerUnavailable):
            self._connections.fetch_range(self.address, request, memoryview(b""), self._min_bytes_per_s, self._grace_s)

    def fetch_range(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the extent's bytes from `offset`. Raises PeerUnavailable, also when the peer refuses."""
        request = Request(self._id, offset, view.nbytes, self._transfer)
        try:
            reply = self._connections.fetch_range(self.address, request, view, self._min_bytes_per_s, self._grace_s)
            if reply.status == Status.BUSY:
                raise PeerBusy(f"peer {self.address}: has no slot for extent {self._id}: BUSY")
        except PeerBusy:
            self.is_busy = True
            raise
        if reply.status != Status.OK:
            raise PeerUnavailable(f"peer {self.address}: refuses {request}: {reply.status.name}")
        self._loads.append(min(max(reply.load, 1), MAX_TRANSFERS))  # any number may come


def _writable(out: ByteArray, extent: ExtentRef) -> memoryview:
    view = out.data
    if view.readonly or not view.c_contiguous or view.format != "B" or view.shape != (extent.nbytes,):
        raise ValueError(
            f"extent {extent.id} needs {extent.nbytes} writable, contiguous bytes, got {out.dtype} {list(out.shape)}"
        )
    return view
