"""The gRPC edge of one ingress replica: Open Inference, health and reflection on a port of their own.

It runs on the replica's own event loop and not behind Serve's gRPC proxy, which binds all interfaces and costs a hop.
Ingress replicas of one node share the port (SO_REUSEPORT): the kernel deals connections out to them. So would a
second cluster with the same port, unnoticed; give each its own.

`grpc.health.v1.Health` is not that of the package grpcio-health-checking, which answers what somebody has told it
before: readiness lies with the directory of models, so it is asked for each answer.

An interceptor in front of every method refuses who may not call. Browsers do not speak gRPC, so there is no Host to
check.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc
from grpc_reflection.v1alpha import reflection

from deployments.errors import ServiceError
from deployments.ingress.access.callers import Caller, Callers, Need, acting_for, shown_key
from deployments.ingress.errors import failure_of
from deployments.ingress.kserve.grpc.calls import Method, service_handler, status_of
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
_OPEN: Final = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
_OF_OPERATORS: Final = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})
_MAKERS: Final[dict[tuple[bool, bool], Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_Handler = Any  # grpc.RpcMethodHandler, whose fields have no types


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

    Raises OSError when it cannot listen there.
    """
    server = grpc.aio.server(
        interceptors=[_AccessInterceptor(callers)] if callers else [],
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


def _need_of(method: str) -> Need:
    """Return what a call of `/service/method` needs. Health is for everybody, as over HTTP."""
    name = method.rpartition("/")[2]
    return "nothing" if name in _OPEN else "admin" if name in _OF_OPERATORS else "key"


class _AccessInterceptor(grpc.aio.ServerInterceptor):
    """The gate of every call: it knows who calls by the metadata `authorization` or `x-api-key`.

    It refuses whom the config does not let in. A call counts against the limits of its key; a stream of requests does
    not, but each of its requests (`begin_current_request`).
    """

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        handler = await continuation(details)
        if handler is None:  # no such method, which the server says itself
            return None
        metadata = dict(details.invocation_metadata or ())
        try:
            key = shown_key(metadata.get("authorization"), metadata.get("x-api-key"))
            caller = self._callers.identify(key, _need_of(details.method))
        except ServiceError as error:
            return _refusing(handler, error)
        return _acting(handler, caller) if caller else handler


def _acting(handler: _Handler, caller: Caller) -> _Handler:
    behavior = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    if inspect.isasyncgenfunction(behavior):  # reflection: it works for nobody's share
        return handler

    async def act(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with acting_for(caller):
            if handler.request_streaming:
                return await behavior(request, context)
            try:
                with caller.begin_request():
                    return await behavior(request, context)
            except ServiceError as error:  # of the key: what a method raises has become a status in there
                return await _abort(context, error)

    return _with_behavior(handler, act)


def _refusing(handler: _Handler, error: ServiceError) -> _Handler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await _abort(context, error)

    return _with_behavior(handler, refuse)


def _with_behavior(handler: _Handler, behavior: Callable[..., Awaitable[Any]]) -> _Handler:
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(behavior, handler.request_deserializer, handler.response_serializer)


async def _abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    code, text = status_of(error)
    await context.abort(code, text, tuple((failure_of(error).headers or {}).items()))
