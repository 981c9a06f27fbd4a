"""The gRPC edge of one ingress replica: Open Inference, health and reflection on a port of their own.

It runs on the replica's own event loop and not behind Serve's gRPC proxy, which binds all interfaces and costs a hop.
Ingress replicas of one node share the port (SO_REUSEPORT): the kernel deals connections out to them. So would a
second cluster with the same port, unnoticed; give each its own.

`grpc.health.v1.Health` is not that of the package grpcio-health-checking, which answers what somebody has told it
before: readiness lies with the directory of models, so it is asked for each answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection

from deployments.ingress.access.callers import Callers
from deployments.ingress.access.grpc import AccessInterceptor
from deployments.ingress.kserve.grpc.calls import Method, service_handler
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.protos import health as messages
from deployments.ingress.kserve.grpc.servicer import SERVICE, InferenceServicer, unsupported_handlers
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository
from deployments.ingress.kserve.statistics import Statistics

_logger = logging.getLogger("atelier.ingress")

_HEALTH_SERVICE: Final = "grpc.health.v1.Health"
_WATCH_INTERVAL_S: Final = 1.0  # how late a watcher may hear of a change
_GRACE_S: Final = 5.0
MAX_CALLS: Final = 16_384  # at once, probes and open streams among them; the admission queue bounds inference


class _HealthServicer:
    """The methods of the health service.

    `is_ready` is asked for every known service: all of them answer as soon as the server as a whole does.
    """

    def __init__(
        self,
        is_ready: Callable[[], Awaitable[bool]],
        services: tuple[str, ...],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._is_ready = is_ready
        self._services = ("", *services)
        self._sleep = sleep

    def methods(self) -> dict[str, Method]:
        """Return the methods by the names that the .proto has."""
        return {"Check": self.check, "Watch": self.watch}

    async def check(
        self, request: messages.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> messages.HealthCheckResponse:
        status = await self._status(request.service)
        if status == "SERVICE_UNKNOWN":
            known = ", ".join(self._services[1:])
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} (known: {known})")
        return messages.HealthCheckResponse(status=status)

    async def watch(self, request: messages.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        """Write the status at once and whenever it has changed, until the client goes."""
        last = None
        while True:
            status = await self._status(request.service)
            if status != last:
                await context.write(messages.HealthCheckResponse(status=status))
                last = status
            await self._sleep(_WATCH_INTERVAL_S)

    async def _status(self, service: str) -> Any:
        if service not in self._services:
            return "SERVICE_UNKNOWN"
        try:
            return "SERVING" if await self._is_ready() else "NOT_SERVING"
        except Exception:  # the directory of models is restarting, say
            return "NOT_SERVING"


class GrpcServer:
    """A listening server. `port` is the one that it has, also where 0 was asked for."""

    def __init__(self, server: grpc.aio.Server, port: int) -> None:
        self.port = port
        self._server = server

    async def stop(self, grace_s: float = _GRACE_S) -> None:
        """Refuse new calls at once, and cancel the running ones after `grace_s`."""
        await self._server.stop(grace_s)


async def start_grpc_server(
    inference: Inference,
    repository: Repository,
    statistics: Statistics,
    *,
    host: str,
    port: int,
    max_message_bytes: int,
    callers: Callers | None = None,
    max_calls: int = MAX_CALLS,
) -> GrpcServer:
    """Listen on `host` and `port`, and return the server. Without `callers` nobody needs a key.

    gRPC itself refuses larger messages before anything is decoded, and calls beyond `max_calls`, of any kind.

    Raises: OSError when it cannot listen there.
    """
    server = grpc.aio.server(
        interceptors=[AccessInterceptor(callers)] if callers else [],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),  # of answers: images are as large as their request said
            ("grpc.so_reuseport", 1),
        ],
        maximum_concurrent_rpcs=max_calls,
    )
    services = (SERVICE, _HEALTH_SERVICE)
    health = _HealthServicer(inference.server_ready, services)
    server.add_generic_rpc_handlers(
        (
            service_handler(SERVICE, InferenceServicer(inference, repository, statistics).methods()),
            service_handler(_HEALTH_SERVICE, health.methods()),
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
    _logger.info("gRPC listens on %s", f"{host}:{bound}")
    return GrpcServer(server, bound)
