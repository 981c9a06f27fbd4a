"""The protocol between keepers: binary frames of fixed size over TCP, in network byte order.

    server                                            client
    Greeting  magic version status nonce         ->
                                                 <-   Hello    magic version nonce proof
    Welcome   magic version status proof         ->
                                                 <-   Request  magic, version, purpose, length of the id, transfer,
                                                               offset, nbytes, id
    Reply     magic version status load nbytes   ->   and then nbytes raw bytes, when the status is OK

Requests and replies alternate until one side closes. Both sides prove that they know the cluster's secret without
sending it (HMAC-SHA256 over both nonces). A transfer is one extent to one node, over several connections under one
number that the client draws; the load is the number of a server's running transfers. A request may also report, without
asking for bytes, that an extent's bytes were wrong: the server checks its own copy.

HAZARD: nothing is encrypted and the bytes carry no signature of their own. This keeps strangers out, not an attacker
who can rewrite the network's traffic.

Below it are the messages between a keeper and the registry about the extents of nodes. Values only.
"""

from __future__ import annotations

import enum
import hmac
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

if TYPE_CHECKING:
    from weights.records.manifest import ExtentRef


RENEW_S: Final = 1.5


MAGIC: Final = b"ATPX"
VERSION: Final = 3
NONCE_BYTES: Final = 32
_MIN_SECRET_BYTES: Final = 16
MAX_RANGE_BYTES: Final = 64 * 2**20  # a reply is sent under one timeout
# Extents that a node sends at once. A few are finished sooner and can be passed on; one alone may not fill a fast link.
MAX_TRANSFERS: Final = 4

_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_SIGNED: Final = struct.Struct("!4sHH32s")
_HELLO: Final = struct.Struct("!4sHxx32s32s")
_REQUEST: Final = struct.Struct("!4sHBBQQQ64s")
_REPLY: Final = struct.Struct("!4sHHHQ")

GREETING_BYTES: Final = _SIGNED.size
HELLO_BYTES: Final = _HELLO.size
WELCOME_BYTES: Final = _SIGNED.size
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size


class PeerAddress(NamedTuple):
    """The TCP address of a node's peer server. `str` gives "host:port", with brackets around an IPv6 host."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address that `str` made `text` of."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Status(enum.IntEnum):
    """The outcome of a handshake or a request on the wire."""

    OK = 0
    BUSY = 1  # as many connections, or transfers, as the server takes
    NOT_ALLOWED = 2  # another secret
    UNKNOWN_EXTENT = 3  # not resident here, or not any more
    OUT_OF_RANGE = 4  # outside of the extent, or more than MAX_RANGE_BYTES at once


@dataclass(frozen=True, slots=True)
class Request:
    """A request for bytes `offset` to `offset + nbytes` of an extent, as part of a transfer.

    With `is_doubt` it asks for no bytes: the ones that came had a wrong checksum.
    """

    extent_id: str
    offset: int
    nbytes: int
    transfer: int
    is_doubt: bool = False


class Reply(NamedTuple):
    """The header of an answer: `nbytes` raw bytes follow; `load` transfers are under way at the server."""

    status: Status
    nbytes: int
    load: int


def check_secret(secret: bytes) -> bytes:
    """Return the secret. Raises ValueError when it is too short to be one."""
    if len(secret) < _MIN_SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes, expected at least {_MIN_SECRET_BYTES}")
    return secret


def prove(secret: bytes, role: Literal["client", "server"], server_nonce: bytes, client_nonce: bytes) -> bytes:
    """Return the 32-byte HMAC-SHA256 of both nonces and the role, which proves that the caller knows the secret."""
    return hmac.digest(secret, role.encode() + server_nonce + client_nonce, "sha256")


def encode_greeting(status: Status, nonce: bytes) -> bytes:
    """Encode the server's first frame. `nonce` has 32 bytes."""
    return _SIGNED.pack(MAGIC, VERSION, status, nonce)


def decode_greeting(frame: bytes) -> tuple[Status, bytes]:
    """Return status and nonce. Raises ValueError, as all decoders do, when the frame is not one of this version."""
    return _decode_signed(frame)


def encode_welcome(status: Status, proof: bytes) -> bytes:
    """Encode the server's answer to a hello. `proof` has 32 bytes."""
    return _SIGNED.pack(MAGIC, VERSION, status, proof)


def decode_welcome(frame: bytes) -> tuple[Status, bytes]:
    """Return status and the server's proof."""
    return _decode_signed(frame)


def encode_hello(nonce: bytes, proof: bytes) -> bytes:
    """Encode the client's first frame. Both have 32 bytes."""
    return _HELLO.pack(MAGIC, VERSION, nonce, proof)


def decode_hello(frame: bytes) -> tuple[bytes, bytes]:
    """Return the client's nonce and proof."""
    magic, version, nonce, proof = _unpack(_HELLO, frame)
    _check(magic, version)
    return nonce, proof


def encode_request(request: Request) -> bytes:
    """Encode a request for one range."""
    id_ = request.extent_id.encode("ascii")
    numbers = request.transfer, request.offset, request.nbytes
    return _REQUEST.pack(MAGIC, VERSION, request.is_doubt, len(id_), *numbers, id_)


def decode_request(frame: bytes) -> Request:
    """Return the request. Raises ValueError also for an id of no extent, and for an unknown purpose."""
    magic, version, purpose, id_length, transfer, offset, nbytes, padded = _unpack(_REQUEST, frame)
    _check(magic, version)
    if purpose not in (0, 1):
        raise ValueError(f"purpose {purpose} of a request, expected 0 for bytes or 1 for a doubt")
    id_, padding = padded[:id_length], padded[id_length:]
    if not _ID.fullmatch(id_) or id_length > len(padded) or padding.strip(b"\0"):
        raise ValueError(f"{padded!r} of length {id_length} is no extent id")
    return Request(id_.decode("ascii"), offset, nbytes, transfer, bool(purpose))


def encode_reply(status: Status, nbytes: int, load: int) -> bytes:
    """Encode the header of a reply; the caller sends the `nbytes` raw bytes after it."""
    return _REPLY.pack(MAGIC, VERSION, status, load, nbytes)


def decode_reply(frame: bytes) -> Reply:
    """Return the header of a reply."""
    magic, version, status, load, nbytes = _unpack(_REPLY, frame)
    _check(magic, version)
    return Reply(Status(status), nbytes, load)


def receive_frame(connection: socket.socket, nbytes: int, timeout_s: float) -> bytes:
    """Return exactly `nbytes`.

    Raises ConnectionError when the other side closes first, TimeoutError after `timeout_s`.
    """
    frame = bytearray()
    deadline_s = time.monotonic() + timeout_s
    while len(frame) < nbytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:  # a socket timeout of 0 would mean non-blocking
            raise TimeoutError(f"{len(frame)} of {nbytes} bytes came in {timeout_s} s")
        connection.settimeout(left_s)
        chunk = connection.recv(nbytes - len(frame))
        if not chunk:
            raise ConnectionError(f"closed after {len(frame)} of {nbytes} bytes")
        frame += chunk
    return bytes(frame)


def _decode_signed(frame: bytes) -> tuple[Status, bytes]:
    magic, version, status, signature = _unpack(_SIGNED, frame)
    _check(magic, version)
    return Status(status), signature


def _unpack(form: struct.Struct, frame: bytes) -> tuple[Any, ...]:
    if len(frame) != form.size:
        raise ValueError(f"a frame of {len(frame)} bytes, expected {form.size}")
    return form.unpack(frame)


def _check(magic: bytes, version: int) -> None:
    if magic != MAGIC:
        raise ValueError(f"{magic!r} is not the beginning of a frame ({MAGIC!r})")
    if version != VERSION:
        raise ValueError(f"protocol version {version}, this node speaks version {VERSION}")


@dataclass(frozen=True, slots=True)
class ResidencyReport:
    """A node's report to the registry: extents that came and went, by id.

    `is_full`: the node holds exactly `added`. Without an `address` (of its peer server) the node is not offered.
    `load` is the number of extents that it is sending, `reading` its claims that it still reads from storage.
    """

    address: PeerAddress | None
    added: Sequence[str] = ()
    removed: Sequence[str] = ()
    is_full: bool = False
    load: int = 0
    reading: Sequence[str] = ()


class Question(NamedTuple):
    """A node's question to the registry: who has each extent?

    The node offers to read extents that no node has from storage, up to `max_claims` of them. `insist` is one of `ids`
    that it wants to read although others have it, because no peer gave it. `unreadable` are all of them, if
    the node cannot read storage: it gets no claims, and another node has to read extents that no node holds.
    """

    ids: tuple[str, ...]
    max_claims: int
    insist: str | None = None
    unreadable: tuple[ExtentRef, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """A node that has an extent, and its last reported number of transfers."""

    address: PeerAddress
    node: str
    active_transfers: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """The registry's answer, by extent id: peers that have it, the node that is reading it, or the asker's claim.

    No node holds an id that is in none of them; it may be asked for again.
    """

    offers: Mapping[str, Sequence[PeerOffer]] = field(default_factory=dict)
    reading: Mapping[str, str] = field(default_factory=dict)
    claimed: tuple[str, ...] = ()
