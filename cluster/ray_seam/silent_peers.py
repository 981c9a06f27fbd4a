"""Calls between replicas end when the other node falls silent (no power, a cut link): nobody closes a connection then.

gRPC's own pings would tell, but a server of Serve's takes more than two in five minutes for an attack and has no
setting for it (Ray 2.60), and gRPC for Python shows nobody its sockets. So they are looked for among this process's
files, and the kernel asks the other kernel: a process that computes, or is stopped, counts as there. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection
from typing import Final

IDLE_S: Final = 4
INTERVAL_S: Final = 2
SILENT_S: Final = 10  # also for what was sent and not acknowledged: then there are no questions
_FILES: Final = "/proc/self/fd"


def end_with_peers(addresses: Collection[tuple[str, int]]) -> int:
    """Let this process's connections to these hosts and ports end `SILENT_S` after the last sign of the other side.

    Returns how many there are.
    """
    num_found = 0
    for name in os.listdir(_FILES) if addresses and os.path.isdir(_FILES) else ():
        with contextlib.suppress(OSError):  # closed just now, or not connected
            if os.readlink(f"{_FILES}/{name}").startswith("socket:") and _end_with_peer(int(name), addresses):
                num_found += 1
    return num_found


def _end_with_peer(file: int, addresses: Collection[tuple[str, int]]) -> bool:
    with socket.socket(fileno=os.dup(file)) as found:  # the options are the connection's, whichever file they come by
        if found.family not in (socket.AF_INET, socket.AF_INET6) or found.type != socket.SOCK_STREAM:
            return False
        host, port = found.getpeername()[:2]
        if (host.removeprefix("::ffff:"), port) not in addresses:
            return False
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, (SILENT_S - IDLE_S) // INTERVAL_S)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
        return True
