"""Keeping on loopback what Ray and Serve would open on every interface.

Through those ports anybody could run code: they take pickled calls and ask for no password.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from typing import Any

import ray
from ray._private import ray_constants

from cluster.ray_seam import shims


@contextlib.contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Let a Ray that starts in the block listen on 127.0.0.1 only, as Ray itself does on macOS.

    `ray.init(_node_ip_address="127.0.0.1")` does not do it: Ray replaces a loopback address by another one.
    """
    shims.require(shims.RAY_LOOPBACK)
    known = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = known


def replica_calls_on_loopback() -> None:
    """Let this replica listen for calls of other replicas on loopback, when its Ray is there as well.

    To be called in the constructor of a deployment: Serve opens the port after it, on all interfaces.
    """
    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        return
    from ray.serve._private import replica

    shims.require(shims.REPLICA_LOOPBACK)
    add_port = replica.add_port_to_grpc_server

    def add_loopback_port(server: Any, address: str) -> Any:
        return add_port(_OnLoopback(server), address)

    replica.add_port_to_grpc_server = add_loopback_port


class _OnLoopback:
    """A gRPC server that opens its ports on loopback, whatever address it is given."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_insecure_port(self, address: str) -> Any:
        return self._server.add_insecure_port(_loopback(address))

    def add_secure_port(self, address: str, credentials: Any) -> Any:
        return self._server.add_secure_port(_loopback(address), credentials)


def _loopback(address: str) -> str:
    return f"127.0.0.1:{address.rpartition(':')[2]}"
