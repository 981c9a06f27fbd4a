"""How keepers talk to each other: binary frames of fixed size over TCP, in network byte order.

    server                                            client
    Greeting  magic version status nonce         ->
                                                 <-   Hello    magic version nonce proof
    Welcome   magic version status proof         ->
                                                 <-   Request  magic, version, length of the id, transfer, offset,
                                                               nbytes, id
    Reply     magic version status load nbytes   ->   and then nbytes raw bytes, when the status is OK

Requests and replies alternate until one side closes. Both sides prove that they know the cluster's secret without
sending it (HMAC-SHA256 over both nonces). A transfer is one extent to one node, over several connections under one
number of the client's; the load is how many of them a server has under way.

HAZARD: nothing is encrypted and the bytes carry no signature of their own. This keeps strangers out, not somebody who
can rewrite the network's traffic.
"""

from __future__ import annotations

import enum
import hmac
import re
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

MAGIC: Final = b"ATPX"
VERSION: Final = 2
NONCE_BYTES: Final = 32
MIN_SECRET_BYTES: Final = 16
MAX_RANGE_BYTES: Final = 64 * 2**20  # a reply is sent under one timeout

_ID: Final = re.compile(rb"[A-Za-z0-9_-]{1,64}")
_SIGNED: Final = struct.Struct("!4sHH32s")
_HELLO: Final = struct.Struct("!4sHxx32s32s")
_REQUEST: Final = struct.Struct("!4sHHQQQ64s")
_REPLY: Final = struct.Struct("!4sHHHQ")

GREETING_BYTES: Final = _SIGNED.size
HELLO_BYTES: Final = _HELLO.size
WELCOME_BYTES: Final = _SIGNED.size
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size


class PeerAddress(NamedTuple):
    """Where a node's peer server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Status(enum.IntEnum):
    OK = 0
    BUSY = 1  # as many connections, or transfers, as the server takes
    NOT_ALLOWED = 2  # another secret
    UNKNOWN_EXTENT = 3  # not resident here, or not any more
    OUT_OF_RANGE = 4  # outside of the extent, or more than MAX_RANGE_BYTES at once


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes `offset` to `offset + nbytes` of an extent, as part of a transfer of it."""

    extent_id: str
    offset: int
    nbytes: int
    transfer: int


class Reply(NamedTuple):
    """`nbytes` follow; `load` transfers are under way at the server."""

    status: Status
    nbytes: int
    load: int


def check_secret(secret: bytes) -> bytes:
    """Raises ValueError when it is too short to be a secret."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"a secret of {len(secret)} bytes, expected at least {MIN_SECRET_BYTES}")
    return secret


def prove(secret: bytes, role: Literal["client", "server"], server_nonce: bytes, client_nonce: bytes) -> bytes:
    """32 bytes that only who knows the secret can make, and only for these nonces and this side of the connection."""
    return hmac.digest(secret, role.encode() + server_nonce + client_nonce, "sha256")


def encode_greeting(status: Status, nonce: bytes) -> bytes:
    return _SIGNED.pack(MAGIC, VERSION, status, nonce)


def decode_greeting(frame: bytes) -> tuple[Status, bytes]:
    """Status and nonce. Raises ValueError, as all that decode do, when the frame is none of this version."""
    return _decode_signed(frame)


def encode_welcome(status: Status, proof: bytes) -> bytes:
    return _SIGNED.pack(MAGIC, VERSION, status, proof)


def decode_welcome(frame: bytes) -> tuple[Status, bytes]:
    """Status and the server's proof."""
    return _decode_signed(frame)


def encode_hello(nonce: bytes, proof: bytes) -> bytes:
    return _HELLO.pack(MAGIC, VERSION, nonce, proof)


def decode_hello(frame: bytes) -> tuple[bytes, bytes]:
    """The client's nonce and proof."""
    magic, version, nonce, proof = _unpack(_HELLO, frame)
    _check(magic, version)
    return nonce, proof


def encode_request(request: Request) -> bytes:
    id_ = request.extent_id.encode("ascii")
    return _REQUEST.pack(MAGIC, VERSION, len(id_), request.transfer, request.offset, request.nbytes, id_)


def decode_request(frame: bytes) -> Request:
    magic, version, id_length, transfer, offset, nbytes, padded = _unpack(_REQUEST, frame)
    _check(magic, version)
    id_, padding = padded[:id_length], padded[id_length:]
    if not _ID.fullmatch(id_) or id_length > len(padded) or padding.strip(b"\0"):
        raise ValueError(f"{padded!r} of length {id_length} is no extent id")
    return Request(id_.decode("ascii"), offset, nbytes, transfer)


def encode_reply(status: Status, nbytes: int, load: int) -> bytes:
    return _REPLY.pack(MAGIC, VERSION, status, load, nbytes)


def decode_reply(frame: bytes) -> Reply:
    magic, version, status, load, nbytes = _unpack(_REPLY, frame)
    _check(magic, version)
    return Reply(Status(status), nbytes, load)


def receive_frame(connection: socket.socket, nbytes: int, timeout_s: float) -> bytes:
    """Exactly `nbytes`. Raises ConnectionError when the other side ends first, TimeoutError when it takes longer."""
    frame = bytearray()
    deadline_s = time.monotonic() + timeout_s
    while len(frame) < nbytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:  # a timeout of 0 would mean: do not wait, and raise another error
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
