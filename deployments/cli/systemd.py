"""Messages to systemd, of a cluster that is one of its services (`Type=notify`)."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

_SOCKET: Final = "NOTIFY_SOCKET"


def tell_systemd(state: str) -> None:
    """Send a state, such as `READY=1`, as sd_notify(3) does. Without a service manager that listens, do nothing."""
    address = os.environ.get(_SOCKET, "")
    if address[:1] not in ("/", "@"):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
