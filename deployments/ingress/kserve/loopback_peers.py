"""The user at the other end of a connection of this machine, as the kernel knows it (`/proc/net/tcp`). It blocks.

HAProxy stands between a client and a replica, and says in a header which connection its client has. That is believed
only of a peer that runs as this server's own user: HAProxy does, and nobody else can speak for another user.
"""

from __future__ import annotations

import ipaddress
import os
import struct
from pathlib import Path
from typing import Final

from deployments.errors import NotAllowed

_TABLES: Final = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED: Final = "01"  # others may have lost their user: TIME_WAIT shows root
_MAX_HEADER_CHARS: Final = 80
Peer = tuple[str, int]  # address and port


def uid_of_client(peer: Peer | None, header: str | None = None) -> int:
    """Return the user who runs the client of a connection from `peer`; `header` is what HAProxy says of it.

    Raises NotAllowed for a client on another machine, or one that cannot be told.
    """
    uid = _uid_of(peer)
    if header is not None and uid == os.geteuid():
        uid = _uid_of(_parsed(header))
    if uid is None:
        raise NotAllowed("shared memory is for clients on this machine, over a loopback address without a proxy")
    return uid


def _uid_of(peer: Peer | None, tables: tuple[Path, ...] = _TABLES) -> int | None:
    """Return the user whose end of an open connection has this address; None when there is none on this machine."""
    if peer is None:
        return None
    try:
        address = ipaddress.ip_address(peer[0])
    except ValueError:
        return None
    plain = getattr(address, "ipv4_mapped", None) or address
    if not plain.is_loopback:
        return None
    wanted = {f"{_hex(one)}:{peer[1]:04X}" for one in _forms(plain)}
    for table in tables:
        try:
            with table.open() as lines:
                for line in lines:
                    fields = line.split()
                    if fields[1] in wanted and fields[3] == _ESTABLISHED:
                        return int(fields[7])
        except OSError:
            continue
    return None


def _forms(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[bytes]:
    """Return an address as sockets have it: one of version 4 also as a socket of version 6 does."""
    mapped = [] if address.version == 6 else [b"\0" * 10 + b"\xff\xff" + address.packed]
    return [address.packed, *mapped]


def _hex(packed: bytes) -> str:
    """Return an address as the kernel writes it: words of four bytes in the order of this machine."""
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)


def _parsed(header: str) -> Peer | None:
    """Return the address of HAProxy's header, `address:port`."""
    host, _, port = header[:_MAX_HEADER_CHARS].rpartition(":")
    return (host.strip("[]"), int(port)) if port.isascii() and port.isdigit() and len(port) <= 5 else None


def parse_grpc_peer(peer: str) -> Peer | None:
    """Return the address of a gRPC peer: `ipv4:127.0.0.1:4321`, `ipv6:%5B::1%5D:4321`."""
    kind, _, rest = peer.partition(":")
    return _parsed(rest.replace("%5B", "").replace("%5D", "")) if kind in ("ipv4", "ipv6") else None
