"""The addresses that a cluster listens on, and what listens there."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.model import StrictModel


class HaproxyConfig(StrictModel):
    """HAProxy's needs beside the public port. Ports without a number are found free when the cluster starts."""

    stats_port: int | None = Field(None, ge=1, le=65535, description="HAProxy's statistics page, on loopback")
    metrics_port: int | None = Field(None, ge=1, le=65535, description="HAProxy's own metrics, on loopback")
    fallback_port: int | None = Field(
        None, ge=1, le=65535, description="Serve's proxy, which keeps requests while no ingress replica lives"
    )
    first_replica_port: int | None = Field(None, ge=1024, le=65000, description="ports of ingress replicas begin here")
    num_replica_ports: int = Field(100, ge=8, le=1000, description="ports for replicas, also for those that restart")
    replica_host: str = Field(
        "127.0.0.1",
        description="where ingress replicas listen for HAProxy; with several nodes 0.0.0.0, behind a firewall",
    )
    max_connections: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="of clients at once, and at most two fifths of `ulimit -Hn`; others wait",
    )
    max_requests: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="for inference that an ingress replica has in hand at once, those that wait in its queue among "
        "them; HAProxy itself refuses more with 429",
    )


class HttpConfig(StrictModel):
    """The ingress's HTTP address, and what listens there."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    proxy: Literal["haproxy", "serve"] = Field(
        "haproxy", description="HAProxy straight to the ingress replicas, or Serve's own proxy, in Python"
    )
    haproxy: HaproxyConfig = HaproxyConfig()
    request_timeout_s: float = Field(300.0, gt=0, description="what a request has in all, over any protocol")

    @property
    def proxy_timeout_s(self) -> float:
        """Timeout of Serve: later, so that the ingress answers, and says what was not done in time."""
        return self.request_timeout_s + 5.0


class GrpcConfig(StrictModel):
    """The gRPC address of the Open Inference Protocol. Every ingress replica of a node listens there."""

    host: str = "127.0.0.1"
    port: int = Field(8001, ge=1, le=65535)
