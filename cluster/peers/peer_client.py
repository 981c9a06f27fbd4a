"""The fetching side of a node: an extent in ranges, over several connections at once, straight into its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Self

from cluster.errors import PeerUnavailable
from cluster.peers.extent_ranges import ExtentRanges
from cluster.peers.peer_connection import PeerConnections
from cluster.peers.peer_protocol import MAX_RANGE_BYTES, PeerAddress, Request, Status, check_secret
from weights.errors import ExtentCorrupt
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray

GRACE_S: Final = 1.0  # of each range: TCP starts slowly, and a peer may be busy for a moment


@dataclass(frozen=True, slots=True)
class PeerShare:
    """What one peer gave to a fetch: what a BandwidthEstimate is fed with."""

    address: PeerAddress
    nbytes: int
    seconds: float


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
        min_gbps: float = 0.02,
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
    ) -> tuple[PeerShare, ...]:
        """Fill `out` (contiguous, as long as the extent) from the first peer; when it fails, the rest from the next.

        `min_gbps` raises the client's own floor for this fetch. Whatever is raised, `out` holds nothing of worth:
        PeerUnavailable when no peer is left, with each one's reason; ExtentCorrupt naming the peers when what they
        gave is not what the manifest says.
        """
        ranges = ExtentRanges(_writable(out, extent), self._range_bytes)
        min_bytes_per_s = max(min_gbps, self._min_gbps) * 1e9 / self._num_connections
        shares: list[PeerShare] = []
        reasons: list[str] = []
        for address in addresses:
            if not ranges.missing_bytes:
                break
            start_s, missing_bytes = self._clock(), ranges.missing_bytes
            reasons += self._fetch_from(address, extent, ranges, min_bytes_per_s)
            if missing_bytes > ranges.missing_bytes:
                shares.append(PeerShare(address, missing_bytes - ranges.missing_bytes, self._clock() - start_s))
        if ranges.missing_bytes:
            raise PeerUnavailable(
                f"extent {extent.id}: {ranges.missing_bytes} of {extent.nbytes} bytes are missing; "
                f"{'; '.join(dict.fromkeys(reasons)) or 'no peer was offered'}"
            )
        if ranges.checksum() != extent.checksum:
            raise ExtentCorrupt(
                f"extent {extent.id} from {', '.join(str(share.address) for share in shares) or 'nobody'} has checksum "
                f"{ranges.checksum()}, expected {extent.checksum}"
            )
        return tuple(shares)

    def close(self) -> None:
        """Fetches under way end with PeerUnavailable."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _fetch_from(
        self, address: PeerAddress, extent: ExtentRef, ranges: ExtentRanges, min_bytes_per_s: float
    ) -> list[str]:
        """As much as this peer gives. What went wrong, if anything did."""

        def work() -> str | None:
            while (part := ranges.take()) is not None:
                request = Request(extent.id, part.offset, part.view.nbytes)
                try:
                    with self._connections.borrow(address) as connection:
                        status = connection.fetch(request, part.view, min_bytes_per_s, self._grace_s)
                    if status != Status.OK:
                        raise PeerUnavailable(f"peer {address}: refuses {request}: {status.name}")
                except BaseException as error:
                    # The other connections may still be good: they take over what this one leaves.
                    ranges.give_back(part)
                    if isinstance(error, PeerUnavailable):
                        return str(error)
                    raise
                ranges.arrived(part)
            return None

        num_workers = min(self._num_connections, ranges.num_missing)
        with ThreadPoolExecutor(max(num_workers - 1, 1), thread_name_prefix="peer-fetch") as threads:
            others = [threads.submit(work) for _ in range(num_workers - 1)]
            reasons = [work(), *(other.result() for other in others)]
        if ranges.missing_bytes:
            self._connections.drop_idle(address)
        return [reason for reason in reasons if reason]


def _writable(out: ByteArray, extent: ExtentRef) -> memoryview:
    view = out.data
    if view.readonly or not view.c_contiguous or view.format != "B" or view.shape != (extent.nbytes,):
        raise ValueError(
            f"extent {extent.id} needs {extent.nbytes} writable, contiguous bytes, got {out.dtype} {list(out.shape)}"
        )
    return view
