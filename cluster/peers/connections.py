"""Connections to other nodes' peer servers: opened when needed, kept for reuse, a bounded number to each."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Final

from cluster.peers.protocol import (
    GREETING_BYTES,
    NONCE_BYTES,
    REPLY_BYTES,
    WELCOME_BYTES,
    PeerAddress,
    Reply,
    Request,
    Status,
    decode_greeting,
    decode_reply,
    decode_welcome,
    encode_hello,
    encode_request,
    prove,
    receive_frame,
)
from cluster.records.errors import PeerUnavailable

_MAX_IDLE: Final = 64  # connections kept for reuse, over all peers: each is a file descriptor on either side


class PeerBusy(PeerUnavailable):
    """The peer has no free connection or no slot for another transfer now."""


class _Yielded(PeerUnavailable):
    """The peer closed a kept connection to make room for others. A new one may work."""


class _PeerConnection:
    """One authenticated connection to a peer, for one range at a time.

    Every failure is PeerUnavailable and names the peer and the reason. The peer may be silent for `timeout_s`. After an
    error the connection can only be closed.
    """

    def __init__(self, address: PeerAddress, secret: bytes, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._has_answered = False
        with _speaking_to(address):
            self._socket = socket.create_connection(address, timeout_s)
        try:
            with _speaking_to(address):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._authenticate(secret)
        except BaseException:
            self._socket.close()
            raise

    def fetch_range(self, request: Request, out: memoryview, min_bytes_per_s: float, grace_s: float) -> Reply:
        """Fill `out`, of the request's size. A reply that is not OK leaves `out` and the connection as they were.

        Raises PeerUnavailable, also when the rate is below `min_bytes_per_s` after `grace_s`.
        """
        with _speaking_to(self._address):
            start_s = time.monotonic()
            self._socket.settimeout(self._timeout_s)
            reply = self._reply_to(request)
            if reply.nbytes != (request.nbytes if reply.status == Status.OK else 0):
                raise ValueError(
                    f"announces {reply.nbytes} bytes as {reply.status.name}, {request.nbytes} were asked for"
                )
            if reply.status == Status.OK:
                self._receive(out, start_s, min_bytes_per_s, grace_s)
            return reply

    def _reply_to(self, request: Request) -> Reply:
        try:
            self._socket.sendall(encode_request(request))
            frame = receive_frame(self._socket, REPLY_BYTES, self._timeout_s)
        except ConnectionError as error:
            if self._has_answered:
                raise _Yielded(f"peer {self._address}: {error}") from error
            raise
        self._has_answered = True
        return decode_reply(frame)

    @property
    def is_open(self) -> bool:
        """True unless the peer is known to have closed its end. Sends nothing."""
        try:
            self._socket.setblocking(False)
            # Readable between two requests: end of file, or bytes that were not requested.
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def abort(self) -> None:
        """Shut the connection down, from any thread: a fetch under way raises PeerUnavailable."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket.

        HAZARD: never during a fetch of another thread, which would go on with a reused descriptor.
        """
        self._socket.close()

    def _authenticate(self, secret: bytes) -> None:
        status, server_nonce = decode_greeting(receive_frame(self._socket, GREETING_BYTES, self._timeout_s))
        self._check_welcome(status)
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._socket.sendall(encode_hello(nonce, prove(secret, "client", server_nonce, nonce)))
        status, proof = decode_welcome(receive_frame(self._socket, WELCOME_BYTES, self._timeout_s))
        self._check_welcome(status)
        if not hmac.compare_digest(proof, prove(secret, "server", server_nonce, nonce)):
            raise ValueError("does not know the cluster's secret")

    def _check_welcome(self, status: Status) -> None:
        if status == Status.BUSY:
            raise PeerBusy(f"peer {self._address}: refuses the connection: BUSY")
        if status != Status.OK:
            raise ValueError(f"refuses the connection: {status.name} (is the cluster's secret the same?)")

    def _receive(self, out: memoryview, start_s: float, min_bytes_per_s: float, grace_s: float) -> None:
        self._socket.settimeout(self._timeout_s)
        received_bytes = 0
        while received_bytes < out.nbytes:
            chunk_bytes = self._socket.recv_into(out[received_bytes:])
            if not chunk_bytes:
                raise ConnectionError(f"closed after {received_bytes} of {out.nbytes} bytes")
            received_bytes += chunk_bytes
            elapsed_s = time.monotonic() - start_s
            if elapsed_s > grace_s and received_bytes < min_bytes_per_s * elapsed_s:
                raise TimeoutError(
                    f"too slow: {received_bytes} bytes in {elapsed_s:.1f} s, "
                    f"expected {min_bytes_per_s / 1e6:.3f} MB/s per connection"
                )


class PeerConnections:
    """A pool of at most `max_per_peer` connections to each peer; a caller waits while all are in use. Thread-safe."""

    def __init__(self, secret: bytes, max_per_peer: int, timeout_s: float) -> None:
        self._secret = secret
        self._max_per_peer = max_per_peer
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._slots: dict[PeerAddress, threading.Semaphore] = {}
        self._idle: dict[PeerAddress, list[_PeerConnection]] = {}
        self._in_use: set[_PeerConnection] = set()
        self._num_failed: Counter[PeerAddress] = Counter()
        self._closed = False

    def fetch_range(
        self, address: PeerAddress, request: Request, out: memoryview, min_bytes_per_s: float, grace_s: float
    ) -> Reply:
        """Fetch as `_PeerConnection.fetch_range` does, over a connection that no other caller uses meanwhile."""
        while True:
            # Terminates: _Yielded is raised only by connections that have answered before.
            with contextlib.suppress(_Yielded), self._borrow(address) as connection:
                return connection.fetch_range(request, out, min_bytes_per_s, grace_s)

    @contextlib.contextmanager
    def _borrow(self, address: PeerAddress) -> Iterator[_PeerConnection]:
        """Yield a connection for one range and keep it for the next, unless the block raises.

        Raises PeerUnavailable.
        """
        with self._lock:
            slots = self._slots.setdefault(address, threading.Semaphore(self._max_per_peer))
            num_failed = self._num_failed[address]
        with slots:
            connection = self._take_idle(address) or self._open(address, num_failed)
            is_good = False
            try:
                self._lend(connection)
                yield connection
                is_good = True
            finally:
                with self._lock:
                    self._in_use.discard(connection)
                    is_kept = is_good and not self._closed
                    surplus = self._keep(address, connection) if is_kept else connection
                if surplus:
                    surplus.close()

    def drop_idle(self, address: PeerAddress) -> None:
        """Close the idle connections to a peer that failed."""
        with self._lock:
            dropped = self._idle.pop(address, [])
        for connection in dropped:
            connection.close()

    def close(self) -> None:
        """Close all connections; fetches under way raise PeerUnavailable."""
        with self._lock:
            self._closed = True
            for connection in self._in_use:  # its borrower closes it
                connection.abort()
            addresses = list(self._idle)
        for address in addresses:
            self.drop_idle(address)

    def _keep(self, address: PeerAddress, connection: _PeerConnection) -> _PeerConnection | None:
        """Keep the connection as idle.

        Return one to close, of the least recently used peer, when there are too many.
        """
        idle = self._idle.pop(address, [])
        self._idle[address] = [*idle, connection]
        if sum(map(len, self._idle.values())) <= _MAX_IDLE:
            return None
        oldest = next(iter(self._idle))
        surplus = self._idle[oldest].pop(0)
        if not self._idle[oldest]:
            del self._idle[oldest]
        return surplus

    def _open(self, address: PeerAddress, num_failed: int) -> _PeerConnection:
        if self._num_failed[address] != num_failed:
            # Otherwise all threads that wait for a dead node would time out one after the other.
            raise PeerUnavailable(f"peer {address}: could not be reached a moment ago")
        try:
            return _PeerConnection(address, self._secret, self._timeout_s)
        except PeerUnavailable:
            with self._lock:
                self._num_failed[address] += 1
            raise

    def _lend(self, connection: _PeerConnection) -> None:
        with self._lock:
            if self._closed:
                raise PeerUnavailable("this node's client is closed")
            self._in_use.add(connection)

    def _take_idle(self, address: PeerAddress) -> _PeerConnection | None:
        while True:
            with self._lock:
                idle = self._idle.get(address)
                if not idle:
                    return None
                connection = idle.pop()
            if connection.is_open:
                return connection
            connection.close()


@contextlib.contextmanager
def _speaking_to(address: PeerAddress) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise PeerUnavailable(f"peer {address}: {error}") from error
