"""The serving side of a node: its resident extents, range by range, to the keepers of other nodes."""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Self

from cluster.peers.peer_protocol import (
    HELLO_BYTES,
    MAX_RANGE_BYTES,
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
from weights.memory.pages import ByteArray

# All bytes of an extent, in one dimension, or None when it is not here. The array is kept until the range is sent,
# whatever the budget does meanwhile. Called from many threads.
Lookup = Callable[[str], ByteArray | None]

ACCEPT_RETRY_S: Final = 0.1

logger = logging.getLogger("atelier.peers")


@dataclass(frozen=True, slots=True)
class PeerServerStats:
    """A snapshot. `active_transfers` are ranges being sent now, `served_bytes` those of ranges sent to their end."""

    num_connections: int
    active_transfers: int
    served_bytes: int
    num_refused: int


class PeerServer:
    """Listens from the moment it is made until `close`; one thread per connection, `max_connections` at most.

    A connection ends after `idle_timeout_s` without a request; a client that takes longer than `timeout_s` to prove
    that it knows the secret, or to take in one range, is dropped. Raises OSError when it cannot bind to `host`.
    """

    def __init__(
        self,
        lookup: Lookup,
        secret: bytes,
        *,
        host: str,
        port: int = 0,
        max_connections: int = 256,
        idle_timeout_s: float = 30.0,
        timeout_s: float = 10.0,
    ) -> None:
        self._lookup = lookup
        self._secret = check_secret(secret)
        self._max_connections = max_connections
        self._idle_timeout_s = idle_timeout_s
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._threads: dict[socket.socket, threading.Thread] = {}
        self._active_transfers = self._served_bytes = self._num_refused = 0
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=max_connections)
        self.address = PeerAddress(host, self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, name="peer-accept", daemon=True)
        self._acceptor.start()

    def stats(self) -> PeerServerStats:
        with self._lock:
            return PeerServerStats(self._num_open(), self._active_transfers, self._served_bytes, self._num_refused)

    def close(self) -> None:
        """Ends every transfer where it is. When it returns, no thread and no socket is left."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which closing alone does not
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            threads = dict(self._threads)
        for connection, thread in threads.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed, or no file descriptors are left for now
                if self._closing.wait(ACCEPT_RETRY_S):
                    return
                continue
            if not self._admit(connection):
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(self._timeout_s)
                    connection.sendall(encode_greeting(Status.BUSY, bytes(NONCE_BYTES)))

    def _admit(self, connection: socket.socket) -> bool:
        thread = threading.Thread(target=self._serve, args=(connection,), name="peer-serve", daemon=True)
        with self._lock:
            # Only here, and not by themselves when they end: `close` waits for the last step of each.
            self._threads = {found: thread for found, thread in self._threads.items() if thread.is_alive()}
            if self._num_open() < self._max_connections and not self._closing.is_set():
                with contextlib.suppress(RuntimeError):  # the system has no more threads
                    thread.start()
                    self._threads[connection] = thread
                    return True
            self._num_refused += 1
            return False

    def _num_open(self) -> int:
        return sum(connection.fileno() >= 0 for connection in self._threads)

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._authenticate(connection):
                    while not self._closing.is_set():
                        self._answer(connection)
            except (OSError, ValueError):
                return  # who stalls, leaves in the middle or sends what is no frame gets no answer but the end
            except Exception:
                logger.exception("a request of a peer failed")

    def _authenticate(self, connection: socket.socket) -> bool:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.settimeout(self._timeout_s)
        connection.sendall(encode_greeting(Status.OK, nonce))
        client_nonce, proof = decode_hello(receive_frame(connection, HELLO_BYTES, self._timeout_s))
        if hmac.compare_digest(proof, prove(self._secret, "client", nonce, client_nonce)):
            connection.sendall(encode_welcome(Status.OK, prove(self._secret, "server", nonce, client_nonce)))
            return True
        with self._lock:
            self._num_refused += 1
        connection.sendall(encode_welcome(Status.NOT_ALLOWED, bytes(NONCE_BYTES)))
        return False

    def _answer(self, connection: socket.socket) -> None:
        request = decode_request(receive_frame(connection, REQUEST_BYTES, self._idle_timeout_s))
        array = self._lookup(request.extent_id)
        connection.settimeout(self._timeout_s)
        if array is None:
            connection.sendall(encode_reply(Status.UNKNOWN_EXTENT, 0))
        elif request.nbytes > MAX_RANGE_BYTES or request.offset + request.nbytes > array.nbytes:
            connection.sendall(encode_reply(Status.OUT_OF_RANGE, 0))
        else:
            with self._transfer(request.nbytes):
                connection.sendall(encode_reply(Status.OK, request.nbytes))
                connection.sendall(array.data[request.offset : request.offset + request.nbytes])

    @contextlib.contextmanager
    def _transfer(self, nbytes: int) -> Iterator[None]:
        with self._lock:
            self._active_transfers += 1
        sent_bytes = 0
        try:
            yield
            sent_bytes = nbytes
        finally:
            with self._lock:
                self._active_transfers -= 1
                self._served_bytes += sent_bytes
