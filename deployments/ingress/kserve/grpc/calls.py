"""Calls of gRPC as handlers see them: messages instead of bytes, exceptions instead of status codes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode

from deployments.errors import InvalidRequest
from deployments.ingress.errors import failure_of
from deployments.ingress.kserve.grpc import codec as grpc_codec
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.records import InferRequest, InferResponse
from deployments.ingress.responses import call_aside

Method = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
# Of handlers, by whether requests and answers stream.
MAKERS: Final[dict[tuple[bool, bool], Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
_MAX_DETAIL_CHARS: Final = 2_000  # details travel in a header, and clients take 8 KiB of headers by default
# Where Triton has a code for the case, it is this one.
_CODES: Final[dict[int, StatusCode]] = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.FAILED_PRECONDITION,
    413: StatusCode.INVALID_ARGUMENT,  # RESOURCE_EXHAUSTED would ask to be tried again
    422: StatusCode.FAILED_PRECONDITION,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


def service_handler(service: str, methods: Mapping[str, Method]) -> grpc.GenericRpcHandler:
    """Return gRPC's handler of a service of the private pool. `methods` are by the names that the .proto has.

    A method gets the request and gives the answer; where the service says `stream` it gets the iterator of requests
    or writes its answers with `context.write`. What it raises goes to the client as a status.
    """
    handlers = {}
    for name, method in methods.items():
        described = POOL.FindServiceByName(service).FindMethodByName(name)
        make = MAKERS[described.client_streaming, described.server_streaming]
        request, response = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
        handlers[name] = make(_with_status(method), _reader(request), response.SerializeToString)
    return grpc.method_handlers_generic_handler(service, handlers)


def parsed(request: Any) -> Any:
    """Return the message that a handler got. Raises InvalidRequest for bytes that are none."""
    if isinstance(request, DecodeError):
        raise InvalidRequest("the request is not a message of the type that this method takes")
    return request


async def read_infer(request: Any) -> InferRequest:
    """Return the record of a request. Raises InvalidRequest."""
    message = parsed(request)
    return await call_aside(message.ByteSize(), grpc_codec.read_request, message)


async def write_infer(response: InferResponse) -> messages.ModelInferResponse:
    """Return the message of a response."""
    num_bytes = sum(output.data.nbytes for output in response.outputs)
    return await call_aside(num_bytes, grpc_codec.write_response, response)


def _reader(message: Any) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return message.FromString(data)
        except DecodeError as error:  # raised here, it would be an INTERNAL error with a traceback in the log
            return error

    return read


def _with_status(method: Method) -> Method:
    async def handle(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(parsed(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if (headers := failure_of(error).headers) is not None:
                context.set_trailing_metadata(tuple(headers.items()))
            await context.abort(*status_of(error))

    return handle


def status_of(error: Exception) -> tuple[StatusCode, str]:
    """Return code and text of any exception, by way of the one table that HTTP has."""
    failure = failure_of(error)
    text = failure.message
    return _CODES[failure.status], text if len(text) <= _MAX_DETAIL_CHARS else text[: _MAX_DETAIL_CHARS - 3] + "..."
