"""Ports for servers that a test or a benchmark starts by number.

A port that was only seen to be free is another's a moment later: a test's in another process, or a connection's, which
the kernel gives any of its own range. These are of one process alone, until it ends.
"""

from __future__ import annotations

import random
import socket
from typing import Final

# Below what the kernel gives connections (32,768 and up), and beside the ports of Ray's workers (10,002 to 19,999) and
# of Atelier's ingress replicas (30,000 and up).
_PORTS: Final = range(22_000, 30_000)
_claims: Final[list[socket.socket]] = []  # a name each, which no other process can bind while this one lives


def free_port(in_a_row: int = 1) -> int:
    """Return a port of 127.0.0.1 where nobody listens, or the first of several in a row.

    No test or benchmark of this machine is given any of them again while this process lives.
    """
    ports = list(_PORTS)
    begin = random.SystemRandom().randrange(len(ports))
    for port in ports[begin:] + ports[:begin]:
        if all(_claim(next_one) for next_one in range(port, port + in_a_row)):
            return port
    raise RuntimeError(f"{in_a_row} in a row of ports {_PORTS[0]} to {_PORTS[-1]} are not free")


def _claim(port: int) -> bool:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0atelier-test-port-{port}")
    except OSError:  # another's, or our own from before
        claim.close()
        return False
    _claims.append(claim)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
