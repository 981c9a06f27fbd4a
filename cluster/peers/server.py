"""The serving side of a node: sends its resident extents, range by range, to the keepers of other nodes."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, Self

from cluster.peers.protocol import (
    HELLO_BYTES,
    MAX_RANGE_BYTES,
    MAX_TRANSFERS,
    NONCE_BYTES,
    REQUEST_BYTES,
    PeerAddress,
    Status,
    check_secret,
    decode_hello,
    decode_request,
    encode_greeting,
    encode_reply,
    encode_welcome,
    prove,
    receive_frame,
)
from weights.memory.host_pool import ByteArray

__all__ = [
    "LINGER_S",
    "PeerServer",
    "PeerServerStats",
    "ServedMemory",
    "ServerLimits",
    "StoredBytes",
    "TransferSlots",
]


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """A run of a file that a node sends from its storage."""

    path: Path
    offset: int
    nbytes: int

    def read(self, offset: int, nbytes: int) -> bytes | None:
        """Return bytes of the run; None if the file lacks them, or cannot be read."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.pread(descriptor, nbytes, self.offset + offset)
            finally:
                os.close(descriptor)
        except OSError:
            return None
        return found if len(found) == nbytes else None


class ServedMemory(Protocol):
    """A node's memory for other nodes. Called from many threads."""

    def lookup(self, id_: str) -> ByteArray | StoredBytes | None:
        """Return all bytes of an extent as a 1-D array, or their place in storage; None if it is not resident.

        The array is referenced until the range is sent, so that an eviction meanwhile does no harm.
        """
        ...

    def resident_ids(self) -> list[str]:
        """Return the ids of all extents for other nodes."""
        ...

    def look_soon(self, id_: str) -> object:
        """Note that a peer got wrong bytes of an extent. Must not block."""
        ...


_ACCEPT_RETRY_S: Final = 0.1
MAX_STRANGERS: Final = 32  # connections that have not proved the secret yet
_HELLO_TIMEOUT_S: Final = 2.0
# A connection that has just answered is likely to be used again: only after this may another take its place.
MIN_IDLE_S: Final = 0.1
# Between two ranges of a transfer. A transfer that is silent for longer has ended without saying so.
LINGER_S: Final = 0.5

logger = logging.getLogger("atelier.peers")


@dataclass(frozen=True, slots=True)
class PeerServerStats:
    """A snapshot of a peer server. `num_connections` have proved the secret, `num_strangers` have not yet.

    `active_ranges` are being sent now, as parts of `active_transfers` extents; `served_bytes` counts ranges sent to
    their end.
    """

    num_connections: int
    num_strangers: int
    active_ranges: int
    active_transfers: int
    served_bytes: int
    num_refused: int


@dataclass(slots=True, eq=False)
class _Connection:
    """An accepted connection. `idle_since_s` is None until the secret is proved, and while a request is answered."""

    socket: socket.socket
    host: str
    is_stranger: bool = True
    idle_since_s: float | None = None

    def end(self) -> None:
        """Shut the connection down, from any thread; the thread that serves it then closes it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """The bounds of a peer server. At most `max_transfers` extents are sent at once; further ones are refused as BUSY.

    At most `max_strangers` connections have not proved the secret, each for at most `hello_timeout_s`. A transfer that
    asks for no range for `linger_s` is over. A connection ends after `idle_timeout_s` without a whole request, or when
    the peer takes longer than `timeout_s` to receive a range.
    """

    max_connections: int = 256
    max_strangers: int = MAX_STRANGERS
    max_transfers: int = MAX_TRANSFERS
    idle_timeout_s: float = 30.0
    timeout_s: float = 10.0
    hello_timeout_s: float = _HELLO_TIMEOUT_S
    linger_s: float = LINGER_S


_LIMITS: Final = ServerLimits()


class PeerServer:
    """A TCP server of extents that listens from its construction until `close`, with one thread per connection.

    Strangers cannot keep peers out: one more than `limits.max_strangers` ends the oldest of the host that has most of
    them. Among `max_connections` peers, a new connection takes the place of the one that has been idle longest. Raises
    OSError when it cannot bind to `host`.
    """

    def __init__(
        self,
        memory: ServedMemory,
        secret: bytes,
        *,
        host: str,
        port: int = 0,
        limits: ServerLimits = _LIMITS,
    ) -> None:
        self._memory = memory
        self._secret = check_secret(secret)
        self._limits = limits
        self._slots = TransferSlots(limits.max_transfers, limits.linger_s)
        self._lock = threading.Lock()
        self._open: dict[_Connection, None] = {}  # the oldest first; without ending ones
        self._threads: set[threading.Thread] = set()
        self._active_ranges = self._served_bytes = self._num_refused = 0
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=limits.max_connections)
        self.address = PeerAddress(host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="peer-accept", daemon=True)
        self._acceptor.start()

    def stats(self) -> PeerServerStats:
        """Return a snapshot of connections and transfers."""
        with self._lock:
            num_strangers = len(self._strangers())
            return PeerServerStats(
                len(self._open) - num_strangers,
                num_strangers,
                self._active_ranges,
                self._slots.num_active,
                self._served_bytes,
                self._num_refused,
            )

    @property
    def active_transfers(self) -> int:
        """The number of extents being sent to other nodes."""
        return self._slots.num_active

    def close(self) -> None:
        """Abort every transfer. No thread and no socket is left on return."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which closing alone does not
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            for connection in self._open:
                connection.end()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                accepted, address = self._listener.accept()
            except OSError:  # closed, or no file descriptors are left for now
                if self._closing.wait(_ACCEPT_RETRY_S):
                    return
                continue
            if not self._admit(_Connection(accepted, address[0])):
                with accepted, contextlib.suppress(OSError):
                    accepted.settimeout(0)  # the acceptor never waits, and a new socket has room for a frame
                    accepted.sendall(encode_greeting(Status.BUSY, bytes(NONCE_BYTES)))

    def _admit(self, connection: _Connection) -> bool:
        thread = threading.Thread(target=self._serve, args=(connection,), name="peer-serve", daemon=True)
        with self._lock:
            # Ended threads are removed only here, so that `close` joins each one that still runs.
            self._threads = {found for found in self._threads if found.is_alive()}
            if not self._closing.is_set():
                with contextlib.suppress(RuntimeError):  # the system has no more threads
                    thread.start()
                    self._threads.add(thread)
                    self._open[connection] = None
                    if len(strangers := self._strangers()) > self._limits.max_strangers:
                        self._end(_most_intrusive(strangers))
                    return True
            self._num_refused += 1
            return False

    def _accept_peer(self, connection: _Connection) -> bool:
        """Count the connection among the peers, if need be in place of an idle one. Return False when all are busy."""
        with self._lock:
            peers = [found for found in self._open if not found.is_stranger]
            if len(peers) >= self._limits.max_connections:
                idle_until_s = time.monotonic() - MIN_IDLE_S
                idle = [
                    (found.idle_since_s, index)
                    for index, found in enumerate(peers)
                    if found.idle_since_s is not None and found.idle_since_s <= idle_until_s
                ]
                if not idle:
                    self._num_refused += 1
                    return False
                self._end(peers[min(idle)[1]])
            connection.is_stranger = False
            return True

    def _strangers(self) -> list[_Connection]:
        return [found for found in self._open if found.is_stranger]

    def _end(self, connection: _Connection) -> None:
        del self._open[connection]
        self._num_refused += connection.is_stranger
        connection.end()

    def _serve(self, connection: _Connection) -> None:
        with connection.socket:
            try:
                connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._authenticate(connection):
                    while not self._closing.is_set():
                        self._answer(connection)
            except (OSError, ValueError):
                return  # a peer that stalls, leaves or sends an invalid frame gets no answer: its connection ends
            except Exception:
                logger.exception("a request of a peer failed")
            finally:
                with self._lock:
                    self._open.pop(connection, None)

    def _authenticate(self, connection: _Connection) -> bool:
        stream, nonce = connection.socket, secrets.token_bytes(NONCE_BYTES)
        stream.settimeout(self._limits.hello_timeout_s)
        stream.sendall(encode_greeting(Status.OK, nonce))
        client_nonce, proof = decode_hello(receive_frame(stream, HELLO_BYTES, self._limits.hello_timeout_s))
        if not hmac.compare_digest(proof, prove(self._secret, "client", nonce, client_nonce)):
            with self._lock:
                self._num_refused += 1
            stream.sendall(encode_welcome(Status.NOT_ALLOWED, bytes(NONCE_BYTES)))
            return False
        is_accepted = self._accept_peer(connection)
        status = Status.OK if is_accepted else Status.BUSY
        stream.sendall(encode_welcome(status, prove(self._secret, "server", nonce, client_nonce)))
        return is_accepted

    def _answer(self, connection: _Connection) -> None:
        stream = connection.socket
        connection.idle_since_s = time.monotonic()
        request = decode_request(receive_frame(stream, REQUEST_BYTES, self._limits.idle_timeout_s))
        connection.idle_since_s = None
        stream.settimeout(self._limits.timeout_s)
        if request.is_doubt:
            self._memory.look_soon(request.extent_id)
            stream.sendall(encode_reply(Status.OK, 0, self._slots.num_active))
            return
        found = self._memory.lookup(request.extent_id)
        if found is None:
            self._refuse(stream, Status.UNKNOWN_EXTENT)
        elif request.nbytes > MAX_RANGE_BYTES or request.offset + request.nbytes > found.nbytes:
            self._refuse(stream, Status.OUT_OF_RANGE)
        elif (part := _part(found, request.offset, request.nbytes)) is None:
            self._refuse(stream, Status.UNKNOWN_EXTENT)
        elif not self._slots.begin_range(request.transfer, found.nbytes):
            self._refuse(stream, Status.BUSY)
        else:
            with self._sending(request.transfer, request.nbytes):
                stream.sendall(encode_reply(Status.OK, request.nbytes, self._slots.num_active))
                stream.sendall(part)

    def _refuse(self, stream: socket.socket, status: Status) -> None:
        stream.sendall(encode_reply(status, 0, self._slots.num_active))

    @contextlib.contextmanager
    def _sending(self, transfer: int, nbytes: int) -> Iterator[None]:
        with self._lock:
            self._active_ranges += 1
        sent_bytes = 0
        try:
            yield
            sent_bytes = nbytes
        finally:
            with self._lock:
                self._active_ranges -= 1
                self._served_bytes += sent_bytes
            self._slots.end_range(transfer, sent_bytes)


@dataclass(slots=True)
class _Transfer:
    left_bytes: int
    num_ranges: int
    last_s: float


class TransferSlots:
    """The bound on the extents that a node sends at once. Thread-safe.

    A transfer is one extent to one peer: ranges over several connections, under one number. It keeps its slot until all
    bytes are sent, or until it has not asked for a range for `linger_s`.
    """

    def __init__(
        self, max_transfers: int, linger_s: float = LINGER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_transfers = max_transfers
        self._linger_s = linger_s
        self._clock = clock
        self._lock = threading.Lock()
        self._transfers: dict[int, _Transfer] = {}

    @property
    def num_active(self) -> int:
        """The number of transfers that have a slot now."""
        with self._lock:
            self._forget_silent()
            return len(self._transfers)

    def begin_range(self, transfer: int, nbytes: int) -> bool:
        """Count one more range of a transfer of `nbytes` as being sent. Return False when others have every slot."""
        with self._lock:
            self._forget_silent()
            if transfer not in self._transfers and len(self._transfers) >= self._max_transfers:
                return False
            found = self._transfers.setdefault(transfer, _Transfer(nbytes, 0, 0.0))
            found.num_ranges += 1
            return True

    def end_range(self, transfer: int, sent_bytes: int) -> None:
        """Count the range as ended. `sent_bytes` is 0 when the peer went away."""
        with self._lock:
            found = self._transfers[transfer]
            found.num_ranges -= 1
            found.left_bytes -= sent_bytes
            found.last_s = self._clock()
            if found.left_bytes <= 0 and not found.num_ranges:
                del self._transfers[transfer]

    def _forget_silent(self) -> None:
        since_s = self._clock() - self._linger_s
        self._transfers = {
            number: found for number, found in self._transfers.items() if found.num_ranges or found.last_s >= since_s
        }


def _part(found: ByteArray | StoredBytes, offset: int, nbytes: int) -> memoryview | bytes | None:
    if isinstance(found, StoredBytes):
        return found.read(offset, nbytes)
    return found.data[offset : offset + nbytes]


def _most_intrusive(strangers: list[_Connection]) -> _Connection:
    """Return the oldest stranger of the host that has most.

    A host that floods a node loses its own connections first.
    """
    num_of_host = Counter(found.host for found in strangers)
    return max(strangers, key=lambda found: num_of_host[found.host])  # of equals the first
