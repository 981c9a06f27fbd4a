"""`grpc.health.v1.Health` over what the server knows when it is asked.

The package grpcio-health-checking answers what somebody has told it before; here readiness lies with the directory
of models, so it is asked for each answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from deployments.ingress.kserve.grpc.calls import Method
from deployments.ingress.kserve.grpc.protos import health as messages

SERVICE: Final = "grpc.health.v1.Health"
WATCH_INTERVAL_S: Final = 1.0  # how late a watcher may hear of a change


class HealthServicer:
    """`is_ready` is asked for every known service: all of them answer as soon as the server as a whole does."""

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
        """The status at once and whenever it has changed, until the client goes."""
        last = None
        while True:
            status = await self._status(request.service)
            if status != last:
                await context.write(messages.HealthCheckResponse(status=status))
                last = status
            await self._sleep(WATCH_INTERVAL_S)

    async def _status(self, service: str) -> Any:
        if service not in self._services:
            return "SERVICE_UNKNOWN"
        try:
            return "SERVING" if await self._is_ready() else "NOT_SERVING"
        except Exception:  # the directory of models is restarting, say
            return "NOT_SERVING"
