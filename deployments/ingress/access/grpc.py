"""Access over gRPC: an interceptor in front of every method. Browsers do not speak it, so there is no Host to check."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from deployments.errors import ServiceError
from deployments.ingress.access.callers import Caller, Callers, Need, acting_for, shown_key
from deployments.ingress.errors import failure_of
from deployments.ingress.kserve.grpc.calls import status_of

_OPEN: Final = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
_OF_OPERATORS: Final = frozenset({"RepositoryModelLoad", "RepositoryModelUnload"})
_MAKERS: Final[dict[tuple[bool, bool], Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_Handler = Any  # grpc.RpcMethodHandler, whose fields have no types


def _need_of(method: str) -> Need:
    """Return what a call of `/service/method` needs. Health is for everybody, as over HTTP."""
    name = method.rpartition("/")[2]
    return "nothing" if name in _OPEN else "admin" if name in _OF_OPERATORS else "key"


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Knows who calls by the metadata `authorization` or `x-api-key`, and refuses whom the config does not let in.

    A call counts against the limits of its key; a stream of requests does not, but each of its requests
    (`begin_current_request`).
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
