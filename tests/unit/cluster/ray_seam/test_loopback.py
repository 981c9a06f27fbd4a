"""Servers that listen on loopback only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil
import pytest
import ray
from ray._private import ray_constants, services
from ray.serve._private import replica

from cluster.ray_seam.loopback import ray_on_loopback, replica_calls_on_loopback

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("node", "on_loopback"), [("127.0.0.1", True), ("::1", True), ("192.0.2.7", False)])
def test_other_replicas_call_where_ray_is(monkeypatch: pytest.MonkeyPatch, node: str, on_loopback: bool) -> None:
    monkeypatch.setattr(replica, "add_port_to_grpc_server", replica.add_port_to_grpc_server)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: node)
    replica_calls_on_loopback()
    server = grpc.server(ThreadPoolExecutor(1))
    port = replica.add_port_to_grpc_server(server, "[::]:0")
    server.start()
    try:
        listening = {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == port}
        assert all("127.0.0.1" in ip for ip in listening) == on_loopback
        assert listening
    finally:
        server.stop(None)


def test_a_ray_that_starts_in_the_block_takes_a_loopback_address() -> None:
    with ray_on_loopback():
        assert services.get_node_ip_address() == "127.0.0.1"
    assert ray_constants.ENABLE_RAY_CLUSTER
