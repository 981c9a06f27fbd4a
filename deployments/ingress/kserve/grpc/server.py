"""The gRPC edge of one ingress replica: Open Inference, health and reflection on a port of their own.

It runs on the replica's own event loop and not behind Serve's gRPC proxy, which binds all interfaces and costs a hop.
Ingress replicas of one node share the port (SO_REUSEPORT): the kernel deals connections out to them. So would a
second cluster with the same port, unnoticed; give each its own.

`grpc.health.v1.Health` is not that of the package grpcio-health-checking, which answers with a status set
before: here each answer asks the directory of models.

An interceptor before every method refuses forbidden callers. Browsers do not speak gRPC, so there is no Host to
check.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, Protocol

import grpc
from grpc_reflection.v1alpha import reflection

from cluster.door.haproxy_rules import REQUEST_ID
from cluster.process.tracing import called
from cluster.ray_seam.request_context import set_request_id
from cluster.ray_seam.request_ids import accepted
from deployments.ingress.access.callers import Caller, Callers, Need, acting_for, shown_key
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.protos import health as messages
from deployments.ingress.kserve.grpc.servicer import (
    MAKERS,
    SERVICE,
    InferenceServicer,
    Method,
    service_handler,
    status_of,
    unsupported_handlers,
)
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository, Statistics
from deployments.ingress.messages.responses import failure_of
from deployments.records.errors import QueueFull, RequestTooSlow, ServiceError

_logger = logging.getLogger("atelier.ingress")

_HEALTH_SERVICE: Final = "grpc.health.v1.Health"
_WATCH_INTERVAL_S: Final = 1.0  # the longest delay of a notification to a watcher
_GRACE_S: Final = 5.0
MAX_OPEN_CALLS: Final = 1024  # at once, of those that need no key
_MESSAGE_S: Final = 10.0  # for the request of such a call
MAX_CALLS: Final = 16_384  # at once, probes and open streams among them; the admission queue bounds inference
_OPEN: Final = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
_OF_OPERATORS: Final = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})
_Handler = Any  # grpc.RpcMethodHandler, whose fields have no types


class ServerState(Protocol):
    """The state of the server, with all that it serves."""

    async def server_ready(self) -> bool:
        """Return whether a model can be asked."""


class _HealthServicer:
    """The methods of the health service.

    All known services are ready when the server is.
    """

    def __init__(self, server: ServerState, services: tuple[str, ...]) -> None:
        self._server = server
        self._services = ("", *services)
        self._num_watchers = 0
        self._poller: asyncio.Task[None] | None = None  # while there are watchers
        self._last: Any = None  # the poller's last status
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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
        """Write the status at once and after every change, until the client goes. One poller serves all watchers."""
        self._num_watchers += 1
        try:
            if self._poller is None:
                self._last, self._poller = None, asyncio.create_task(self._poll())
            last = None
            while True:
                changed = self._changed
                status = self._last if request.service in self._services else "SERVICE_UNKNOWN"
                if status not in (None, last):
                    last = status
                    await context.write(messages.HealthCheckResponse(status=status))
                await asyncio.shield(changed)
        finally:
            self._num_watchers -= 1
            if not self._num_watchers and self._poller is not None:
                self._poller.cancel()
                self._poller = None

    async def _poll(self) -> None:
        """Look at the status, and tell the watchers of each change."""
        while True:
            if (status := await self._status("")) != self._last:
                self._last = status
                changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
                changed.set_result(None)
            await asyncio.sleep(_WATCH_INTERVAL_S)

    async def _status(self, service: str) -> Any:
        if service not in self._services:
            return "SERVICE_UNKNOWN"
        try:
            return "SERVING" if await self._server.server_ready() else "NOT_SERVING"
        except Exception:  # the directory of models is restarting, say
            return "NOT_SERVING"


class GrpcServer:
    """A listening server. `port` is its real port, also if 0 was requested."""

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
    max_open_calls: int = MAX_OPEN_CALLS,
) -> GrpcServer:
    """Listen on `host` and `port`, and return the server. Without `callers` no key is needed.

    gRPC itself refuses larger messages before anything is decoded, and calls beyond `max_calls`, of any kind.

    Raises OSError when it cannot listen there.
    """
    server = grpc.aio.server(
        interceptors=[_RequestIds(), *([_AccessInterceptor(callers, max_open_calls)] if callers else [])],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),  # of answers: images are as large as requested
            ("grpc.so_reuseport", 1),
        ],
        maximum_concurrent_rpcs=max_calls,
    )
    services = (SERVICE, _HEALTH_SERVICE)
    health = _HealthServicer(inference, services)
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
    """Return the right that a call of `/service/method` needs. Health needs none, as over HTTP."""
    name = method.rpartition("/")[2]
    return "nothing" if name in _OPEN else "admin" if name in _OF_OPERATORS else "key"


class _RequestIds(grpc.aio.ServerInterceptor):
    """Gives each call an id, the client's or a new one, which its answer has in the initial metadata."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        handler = await continuation(details)
        if handler is None or inspect.isasyncgenfunction(behavior := _behavior_of(handler)):
            return handler  # no such method, or reflection
        metadata = dict(details.invocation_metadata or ())
        id_ = accepted(metadata.get(REQUEST_ID))

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            set_request_id(id_)
            await context.send_initial_metadata(((REQUEST_ID, id_),))
            with called(details.method, metadata):
                return await behavior(request, context)

        return _with_behavior(handler, answer)


class _AccessInterceptor(grpc.aio.ServerInterceptor):
    """The gate of every call: it identifies callers by the metadata `authorization` or `x-api-key`.

    It refuses forbidden callers before the message of the call is here. Of calls without a key, few
    are open at once, and their messages have to come soon: a client that opens many takes them from others. A call
    counts against the limits of its key; a stream of requests does not, but each of its requests
    (`begin_current_request`).
    """

    def __init__(self, callers: Callers, max_open_calls: int) -> None:
        self._callers = callers
        self._num_free = max_open_calls

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]], details: grpc.HandlerCallDetails
    ) -> _Handler:
        handler = await continuation(details)
        if handler is None:  # no such method: the server answers itself
            return None
        if (need := _need_of(details.method)) == "nothing":
            return self._one_of_few(handler)
        metadata = dict(details.invocation_metadata or ())
        try:
            key = shown_key(metadata.get("authorization"), metadata.get("x-api-key"))
            caller = self._callers.identify(key, need)
        except ServiceError as error:
            return _refusing(handler, error)
        return _as_caller(handler, caller) if caller else handler

    def _one_of_few(self, handler: _Handler) -> _Handler:
        behavior = handler.unary_unary or handler.unary_stream

        async def answer(requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> Any:
            if not self._num_free:
                return await _abort(context, QueueFull("server busy: too many open calls without a key; try again"))
            self._num_free -= 1
            try:
                try:
                    async with asyncio.timeout(_MESSAGE_S):
                        request = await anext(aiter(requests))
                except (TimeoutError, StopAsyncIteration):
                    return await _abort(context, RequestTooSlow("the message of this call did not come in time"))
                return await behavior(request, context)
            finally:
                self._num_free += 1

        return _before_message(handler, answer)


def _behavior_of(handler: _Handler) -> Callable[..., Any]:
    found: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return found


def _as_caller(handler: _Handler, caller: Caller) -> _Handler:
    behavior = _behavior_of(handler)
    if inspect.isasyncgenfunction(behavior):  # reflection: it takes no tenant's share
        return handler

    async def act(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with acting_for(caller):
            if handler.request_streaming:
                return await behavior(request, context)
            try:
                with caller.begin_request():
                    return await behavior(request, context)
            except ServiceError as error:  # of the key: the method's own errors have become a status already
                return await _abort(context, error)

    return _with_behavior(handler, act)


def _refusing(handler: _Handler, error: ServiceError) -> _Handler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await _abort(context, error)

    return _before_message(handler, refuse)


def _with_behavior(handler: _Handler, behavior: Callable[..., Awaitable[Any]]) -> _Handler:
    make = MAKERS[handler.request_streaming, handler.response_streaming]
    return make(behavior, handler.request_deserializer, handler.response_serializer)


def _before_message(handler: _Handler, behavior: Callable[..., Awaitable[Any]]) -> _Handler:
    """Return a handler whose behavior begins before the call's message is here, and gets an iterator of it."""
    make = MAKERS[True, handler.response_streaming]
    return make(behavior, handler.request_deserializer, handler.response_serializer)


async def _abort(context: grpc.aio.ServicerContext, error: ServiceError) -> None:
    code, text = status_of(error)
    await context.abort(code, text, tuple((failure_of(error).headers or {}).items()))
