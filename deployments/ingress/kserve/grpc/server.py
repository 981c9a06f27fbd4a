"""The gRPC edge of one ingress replica: Open Inference, health and reflection on a port of their own.

It runs on the replica's own event loop and not behind Serve's gRPC proxy, which binds all interfaces and costs a hop.
Ingress replicas of one node share the port (SO_REUSEPORT): the kernel deals connections out to them. So would a
second cluster with the same port, unnoticed; give each its own.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

import grpc
from grpc_reflection.v1alpha import reflection

from deployments.ingress.admission import Admission
from deployments.ingress.kserve.grpc import health as grpc_health
from deployments.ingress.kserve.grpc.calls import service_handler
from deployments.ingress.kserve.grpc.health import HealthServicer
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.servicer import SERVICE, InferenceServicer, unsupported_handlers
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository
from deployments.ingress.kserve.statistics import Statistics

logger = logging.getLogger("atelier.ingress")

GRACE_S: Final = 5.0
SPARE_CALLS: Final = 4096  # probes, open streams, and inference that is just being refused
MAX_CALLS: Final = 2**31 - 1


class GrpcServer:
    """A server that listens; `port` is the one that it has, also where 0 was asked for."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self.port = port
        self._server = server

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """No new calls at once; those that run are cancelled after `grace_s`."""
        await self._server.stop(grace_s)


async def start_grpc_server(
    inference: Inference,
    repository: Repository,
    statistics: Statistics,
    *,
    host: str,
    port: int,
    max_message_bytes: int,
    admission: Admission | None = None,
) -> GrpcServer:
    """Larger requests are refused by gRPC itself, before anything is decoded, and so are calls of any kind, probes too,
    when there are `SPARE_CALLS` more of them than `admission` has places for. None: it has enough for all.

    Raises OSError when it cannot listen there.
    """
    admission = admission or Admission(sys.maxsize)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),  # of answers: pictures are as large as their request said
            ("grpc.so_reuseport", 1),
        ],
        maximum_concurrent_rpcs=min(admission.max_requests + SPARE_CALLS, MAX_CALLS),
    )
    services = (SERVICE, grpc_health.SERVICE)
    health = HealthServicer(inference.server_ready, services)
    server.add_generic_rpc_handlers(
        (
            service_handler(SERVICE, InferenceServicer(inference, repository, statistics, admission).methods()),
            service_handler(grpc_health.SERVICE, health.methods()),
            unsupported_handlers(),
        )
    )
    reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server, POOL)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {address}: {error}") from None
    await server.start()
    logger.info("gRPC listens on %s", f"{host}:{bound}")
    return GrpcServer(server, bound)
