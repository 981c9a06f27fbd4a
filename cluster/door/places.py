"""The door's addresses in the environment, and whether a port can be bound."""

from __future__ import annotations

import socket
from typing import Final

HTTP_ADDRESS: Final = "ATELIER_HTTP_ADDRESS"  # of the frontend; Serve's own option says where the replicas listen


MAX_PER_ADDRESS: Final = "ATELIER_MAX_CONNECTIONS_PER_ADDRESS"  # 0: a share of all


MAX_REQUESTS: Final = "ATELIER_MAX_REQUESTS"  # for inference, at once, of each ingress replica


STATS_PORT: Final = "RAY_SERVE_HAPROXY_STATS_PORT"


METRICS_PORT: Final = "RAY_SERVE_HAPROXY_METRICS_PORT"


def why_taken(host: str, port: int) -> str:
    """Return why nothing can listen there, "" where something can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
