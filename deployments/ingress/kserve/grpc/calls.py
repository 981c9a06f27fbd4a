"""How a handler of this server looks to gRPC: messages in and out of bytes, errors as status codes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from deployments.errors import InvalidRequest
from deployments.ingress.json_answers import aside
from deployments.ingress.kserve.grpc import codec as grpc_codec
from deployments.ingress.kserve.grpc.errors import status_of
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.records import InferRequest, InferResponse

Method = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]


def service_handler(service: str, methods: Mapping[str, Method]) -> grpc.GenericRpcHandler:
    """Handlers for the methods of a service of the private pool, by the names that it has in the .proto.

    A method gets the request and gives the answer; where the service says `stream` it gets the iterator of requests
    or writes its answers with `context.write`. What it raises goes to the client as a status.
    """
    handlers = {}
    for name, method in methods.items():
        described = POOL.FindServiceByName(service).FindMethodByName(name)
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[described.client_streaming, described.server_streaming]
        request, response = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
        handlers[name] = make(_with_status(method), _reader(request), response.SerializeToString)
    return grpc.method_handlers_generic_handler(service, handlers)


def parsed(request: Any) -> Any:
    """The message, or InvalidRequest for bytes that are none: what a handler's request may be."""
    if isinstance(request, DecodeError):
        raise InvalidRequest("the request is not a message of the type that this method takes")
    return request


async def read_infer(request: Any) -> InferRequest:
    """Raises InvalidRequest."""
    message = parsed(request)
    return await aside(message.ByteSize(), grpc_codec.read_request, message)


async def write_infer(response: InferResponse) -> messages.ModelInferResponse:
    num_bytes = sum(output.data.nbytes for output in response.outputs)
    return await aside(num_bytes, grpc_codec.write_response, response)


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
            await context.abort(*status_of(error))

    return handle
