"""The fetching side of a node: an extent in ranges, over several connections at once, straight into its place."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Self

from cluster.errors import PeerUnavailable
from cluster.peers.extent_ranges import ExtentRanges
from cluster.peers.extent_sources import Fetched, PeerShare
from cluster.peers.peer_connection import PeerBusy, PeerConnections
from cluster.peers.peer_protocol import MAX_RANGE_BYTES, PeerAddress, Request, Status, check_secret
from cluster.peers.transfer_slots import MAX_TRANSFERS
from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray

GRACE_S: Final = 1.0  # of each range: TCP starts slowly, and a peer may be busy for a moment
MIN_GBPS: Final = 0.002  # what each of a few transfers gets of a slow link


class FetchFailed(PeerUnavailable):
    """No peer is left, and bytes are missing."""

    def __init__(self, message: str, fetched: Fetched) -> None:
        super().__init__(message)
        self.fetched = fetched


class PeerClient:
    """Fetches extents from peers, `num_connections` to each, however many threads ask. Thread-safe.

    `timeout_s` is how long a peer may be silent; one below `min_gbps` (10^9 bytes per second, over all connections)
    is given up. Memory: only the caller's.
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

    def fetch(
        self, addresses: Sequence[PeerAddress], extent: ExtentRef, out: ByteArray, *, min_gbps: float = 0.0
    ) -> Fetched:
        """Fill `out` (contiguous, as long as the extent) from the first peer; when it fails, the rest from the next.

        `min_gbps` raises the client's own floor for this fetch. Whatever is raised, `out` holds nothing of worth:
        FetchFailed when no peer is left, with each one's reason; ExtentCorrupt naming the peers when what they
        gave is not what the manifest says.
        """
        ranges = ExtentRanges(_writable(out, extent), self._range_bytes)
        min_bytes_per_s = max(min_gbps, self._min_gbps) * 1e9 / self._num_connections
        fetched = Fetched()
        reasons: list[str] = []
        for address in addresses:
            if not ranges.missing_bytes:
                break
            source = _Source(self._connections, address, extent.id, min_bytes_per_s, self._grace_s)
            start_s, missing_bytes = self._clock(), ranges.missing_bytes
            reasons += self._fetch_from(source, ranges)
            if missing_bytes > ranges.missing_bytes:
                seconds, nbytes = self._clock() - start_s, missing_bytes - ranges.missing_bytes
                fetched.shares.append(PeerShare(address, nbytes, seconds, source.load))
            if ranges.missing_bytes and source.is_busy:
                fetched.busy.append(address)
            elif ranges.missing_bytes:
                self._connections.drop_idle(address)
                fetched.failed.append(address)
        if ranges.missing_bytes:
            raise FetchFailed(
                f"extent {extent.id}: {ranges.missing_bytes} of {extent.nbytes} bytes are missing; "
                f"{'; '.join(dict.fromkeys(reasons)) or 'no peer was offered'}",
                fetched,
            )
        if ranges.checksum() != extent.checksum:
            raise ExtentCorrupt(
                f"extent {extent.id} from {', '.join(str(share.address) for share in fetched.shares) or 'nobody'} has "
                f"checksum {ranges.checksum()}, expected {extent.checksum}"
            )
        return fetched

    def close(self) -> None:
        """Fetches under way end with PeerUnavailable."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fetch_from(self, source: _Source, ranges: ExtentRanges) -> list[str]:
        """As much as this peer gives. What went wrong, if anything did."""

        def work() -> str | None:
            while (part := ranges.take()) is not None:
                try:
                    source.fetch(part.offset, part.view)
                except BaseException as error:
                    # The other connections may still be good: they take over what this one leaves.
                    ranges.give_back(part)
                    if isinstance(error, PeerUnavailable):
                        return str(error)
                    raise
                ranges.arrived(part)
            return None

        try:
            source.fetch(0, memoryview(b""))  # a slot, or a refusal, before more connections are opened
        except PeerUnavailable as error:
            return [str(error)]
        num_workers = min(self._num_connections, ranges.num_missing)
        with ThreadPoolExecutor(max(num_workers - 1, 1), thread_name_prefix="peer-fetch") as threads:
            others = [threads.submit(work) for _ in range(num_workers - 1)]
            reasons = [work(), *(other.result() for other in others)]
        return [reason for reason in reasons if reason]


class _Source:
    """An extent at one peer, as one transfer. Thread-safe."""

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
        return sum(self._loads) / len(self._loads)

    def fetch(self, offset: int, view: memoryview) -> None:
        """Raises PeerUnavailable, also when the peer refuses."""
        request = Request(self._id, offset, view.nbytes, self._transfer)
        try:
            reply = self._connections.fetch(self._address, request, view, self._min_bytes_per_s, self._grace_s)
            if reply.status == Status.BUSY:
                raise PeerBusy(f"peer {self._address}: has no slot for extent {self._id}: BUSY")
        except PeerBusy:
            self.is_busy = True
            raise
        if reply.status != Status.OK:
            raise PeerUnavailable(f"peer {self._address}: refuses {request}: {reply.status.name}")
        self._loads.append(min(max(reply.load, 1), MAX_TRANSFERS))  # whatever it says


def _writable(out: ByteArray, extent: ExtentRef) -> memoryview:
    view = out.data
    if view.readonly or not view.c_contiguous or view.format != "B" or view.shape != (extent.nbytes,):
        raise ValueError(
            f"extent {extent.id} needs {extent.nbytes} writable, contiguous bytes, got {out.dtype} {list(out.shape)}"
        )
    return view
