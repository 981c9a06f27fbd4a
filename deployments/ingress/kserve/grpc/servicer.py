"""The methods of `inference.GRPCInferenceService`: each calls `Inference`, `Repository` or `Statistics`.

Handlers see messages instead of bytes, and raise exceptions instead of status codes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode

from deployments.ingress.access.callers import begin_current_request, current_tenant
from deployments.ingress.kserve.grpc import codec as grpc_codec
from deployments.ingress.kserve.grpc.protos import POOL
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.models import is_decoupled
from deployments.ingress.kserve.repository import Repository, Statistics, statistics_of
from deployments.ingress.kserve.shared_memory import Owner, RegionStatus, parse_grpc_peer, uid_of_client
from deployments.ingress.kserve.tensors import InferRequest, InferResponse
from deployments.ingress.messages.responses import call_aside, failure_of, server_timing
from deployments.ingress.messages.terms import Terms, current_terms, read_terms
from deployments.records.errors import InvalidRequest

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
    413: StatusCode.INVALID_ARGUMENT,  # RESOURCE_EXHAUSTED would invite another try
    422: StatusCode.FAILED_PRECONDITION,
    429: StatusCode.RESOURCE_EXHAUSTED,
    500: StatusCode.INTERNAL,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
SERVICE: Final = "inference.GRPCInferenceService"
# Methods of Triton's service that are not served: clients get the reason instead of "method not found".
_UNSUPPORTED: Final = {
    "shared memory of CUDA": (
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ),
    "tracing": ("TraceSetting",),
    "changing the log": ("LogSettings",),
}
_ERRORS_END_STREAMS: Final = "triton_grpc_error"
MAX_CONCURRENT: Final = 64  # requests of one stream in work; the next ones wait in gRPC's own flow control
_Turn = asyncio.Future[None]


def service_handler(service: str, methods: Mapping[str, Method]) -> grpc.GenericRpcHandler:
    """Return gRPC's handler of a service of the private pool. `methods` are by the names that the .proto has.

    A method gets the request and returns the answer; if the service says `stream` it gets the iterator of requests
    or writes its answers with `context.write`. Its errors go to the client as a status.
    """
    handlers = {}
    for name, method in methods.items():
        described = POOL.FindServiceByName(service).FindMethodByName(name)
        make = MAKERS[described.client_streaming, described.server_streaming]
        request, response = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
        handlers[name] = make(_with_status(method), _reader(request), response.SerializeToString)
    return grpc.method_handlers_generic_handler(service, handlers)


def _parsed(request: Any) -> Any:
    """Return the message of a handler's bytes. Raises InvalidRequest for bytes that are no message."""
    if isinstance(request, DecodeError):
        raise InvalidRequest("the request is not a message of the type that this method takes")
    return request


async def _decoded(request: Any) -> InferRequest:
    """Return the record of a request. Raises InvalidRequest."""
    message = _parsed(request)
    return await call_aside(message.ByteSize(), grpc_codec.read_request, message)


async def _write_infer(response: InferResponse) -> messages.ModelInferResponse:
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
            return await method(_parsed(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if (headers := failure_of(error).headers) is not None:
                context.set_trailing_metadata(tuple(headers.items()))
            await context.abort(*status_of(error))

    return handle


def status_of(error: Exception) -> tuple[StatusCode, str]:
    """Return code and text of any exception, by HTTP's one table."""
    failure = failure_of(error)
    text = failure.message
    return _CODES[failure.status], text if len(text) <= _MAX_DETAIL_CHARS else text[: _MAX_DETAIL_CHARS - 3] + "..."


class InferenceServicer:
    """The methods of one ingress replica."""

    def __init__(self, inference: Inference, repository: Repository, statistics: Statistics) -> None:
        self._inference = inference
        self._repository = repository
        self._statistics = statistics

    def methods(self) -> dict[str, Method]:
        """Return the methods by the names that the .proto has."""
        return {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelConfig": self._model_config,
            "ModelInfer": self._model_infer,
            "ModelStreamInfer": self._model_stream_infer,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._repository_model_load,
            "RepositoryModelUnload": self._repository_model_unload,
            "SystemSharedMemoryStatus": self._shared_memory_status,
            "SystemSharedMemoryRegister": self._register_shared_memory,
            "SystemSharedMemoryUnregister": self._unregister_shared_memory,
        }

    async def _server_live(self, request: Any, context: Any) -> messages.ServerLiveResponse:
        return messages.ServerLiveResponse(live=True)

    async def _server_ready(self, request: Any, context: Any) -> messages.ServerReadyResponse:
        return messages.ServerReadyResponse(ready=await self._inference.server_ready())

    async def _model_ready(self, request: messages.ModelReadyRequest, context: Any) -> messages.ModelReadyResponse:
        return messages.ModelReadyResponse(ready=await self._inference.ready(request.name, request.version))

    async def _server_metadata(self, request: Any, context: Any) -> messages.ServerMetadataResponse:
        return messages.ServerMetadataResponse(**asdict(self._inference.server_metadata()))

    async def _model_metadata(
        self, request: messages.ModelMetadataRequest, context: Any
    ) -> messages.ModelMetadataResponse:
        return grpc_codec.write_metadata(await self._inference.metadata(request.name, request.version))

    async def _model_config(self, request: messages.ModelConfigRequest, context: Any) -> messages.ModelConfigResponse:
        configuration = await self._inference.configuration(request.name, request.version)
        return messages.ModelConfigResponse(config=grpc_codec.write_config(configuration))

    async def _model_infer(
        self, request: messages.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> messages.ModelInferResponse:
        """The phase times are in the trailing metadata, in the form of the HTTP header."""
        current_terms.set(_terms_of(context))
        response = await self._inference.infer(await _read_infer(context, request))
        timing = server_timing(response.timings_ms)
        context.set_trailing_metadata([(name.lower(), text) for name, text in timing.items()])
        return await _write_infer(response)

    async def _model_stream_infer(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        asked = dict(context.invocation_metadata() or ())
        errors_end_it = asked.get(_ERRORS_END_STREAMS) == "true"
        current_terms.set(_terms_of(context))
        stream = _InferStream(self._inference, context, errors_end_it=errors_end_it)
        await stream.answer_requests(requests)

    async def _model_statistics(
        self, request: messages.ModelStatisticsRequest, context: Any
    ) -> messages.ModelStatisticsResponse:
        found = await statistics_of(self._repository, self._statistics, request.name, request.version)
        return grpc_codec.write_statistics(found)

    async def _repository_index(
        self, request: messages.RepositoryIndexRequest, context: Any
    ) -> messages.RepositoryIndexResponse:
        index = await self._repository.index(ready=request.ready, repository=request.repository_name)
        return messages.RepositoryIndexResponse(models=[asdict(entry) for entry in index])

    async def _repository_model_load(
        self, request: messages.RepositoryModelLoadRequest, context: Any
    ) -> messages.RepositoryModelLoadResponse:
        parameters = grpc_codec.read_parameters(request.parameters)
        await self._repository.load(request.model_name, parameters, request.repository_name)
        return messages.RepositoryModelLoadResponse()

    async def _repository_model_unload(
        self, request: messages.RepositoryModelUnloadRequest, context: Any
    ) -> messages.RepositoryModelUnloadResponse:
        parameters = grpc_codec.read_parameters(request.parameters)
        await self._repository.unload(request.model_name, parameters, request.repository_name)
        return messages.RepositoryModelUnloadResponse()

    async def _shared_memory_status(
        self, request: messages.SystemSharedMemoryStatusRequest, context: grpc.aio.ServicerContext
    ) -> messages.SystemSharedMemoryStatusResponse:
        found = self._inference.shared_memory.list_regions(await self._owner(context), request.name)
        status = messages.SystemSharedMemoryStatusResponse.RegionStatus
        return messages.SystemSharedMemoryStatusResponse(regions={one.name: status(**one._asdict()) for one in found})

    async def _register_shared_memory(
        self, request: messages.SystemSharedMemoryRegisterRequest, context: grpc.aio.ServicerContext
    ) -> messages.SystemSharedMemoryRegisterResponse:
        owner = await self._owner(context)
        region = RegionStatus(request.name, request.key, request.offset, request.byte_size)
        await self._inference.shared_memory.register(owner, region)
        return messages.SystemSharedMemoryRegisterResponse()

    async def _unregister_shared_memory(
        self, request: messages.SystemSharedMemoryUnregisterRequest, context: grpc.aio.ServicerContext
    ) -> messages.SystemSharedMemoryUnregisterResponse:
        await self._inference.shared_memory.unregister(await self._owner(context), request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    async def _owner(self, context: grpc.aio.ServicerContext) -> Owner:
        """Return the owner of regions who calls. Ends the call if shared memory is off."""
        if not self._inference.shared_memory.is_on:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "shared memory is not supported by this server")
        return await _owner_of(context)


async def _owner_of(context: grpc.aio.ServicerContext) -> Owner:
    """Return the calling user and tenant. Raises NotAllowed for a client on another machine."""
    uid = await asyncio.to_thread(uid_of_client, parse_grpc_peer(context.peer()))
    return Owner(uid, current_tenant.get())


async def _read_infer(context: grpc.aio.ServicerContext, request: Any) -> InferRequest:
    """Return the record of a request, with its owner if some of its tensors are in shared memory."""
    asked = await _decoded(request)
    return replace(asked, owner=await _owner_of(context)) if asked.has_shared else asked


def unsupported_handlers() -> grpc.GenericRpcHandler:
    """Return handlers for the methods of Triton's service that are not here; requests are not decoded."""
    named = [(method, topic) for topic, methods in _UNSUPPORTED.items() for method in methods]
    handlers = {method: grpc.unary_unary_rpc_method_handler(_refusing(topic)) for method, topic in named}
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _refusing(topic: str) -> Method:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{topic} is not supported by this server")

    return refuse


class _InferStream:
    """One ModelStreamInfer call: a stream of requests, each with one response or, of a text model, one per piece.

    As in Triton, responses of text models (decoupled ones) go out at once, and all others in the order of
    their requests. An error is a response with `error_message`, and the stream goes on; a client that sends the header
    `triton_grpc_error: true` gets it as the status of the whole stream instead. `triton_final_response` is true on the
    last response of each request, error or not, so no empty one has to follow it.

    With `errors_end_it`, `answer_requests` raises the error of a request.
    """

    def __init__(self, inference: Inference, context: grpc.aio.ServicerContext, *, errors_end_it: bool) -> None:
        self._inference = inference
        self._context = context
        self._errors_end_it = errors_end_it
        self._room = asyncio.Semaphore(MAX_CONCURRENT)
        self._writing = asyncio.Lock()  # gRPC takes one write of a call at a time

    async def answer_requests(self, requests: AsyncIterator[Any]) -> None:
        """Answer all requests until the client sends no more. A cancellation ends all work on them."""
        before = _ended_turn()
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await self._room.acquire()
                    done = asyncio.get_running_loop().create_future()
                    task = tasks.create_task(self._answer(request, before, done))
                    task.add_done_callback(self._make_room)
                    before = done
        except* Exception as group:
            raise _first(group) from None

    async def _answer(self, request: Any, before: _Turn, done: _Turn) -> None:
        """`before` is done when the earlier responses are out, `done` when the next request's may go."""
        if await self._is_decoupled(request):
            before.add_done_callback(lambda _: _end_turn(done))
            await self._respond(request, _ended_turn())
        else:
            await self._respond(request, before)
            _end_turn(done)

    async def _respond(self, request: Any, before: _Turn) -> None:
        try:
            with begin_current_request():
                asked = await _read_infer(self._context, request)
                async with self._inference.infer_stream(asked) as responses:
                    async for response in responses:
                        await self._send(before, infer_response=await _write_infer(response))
        except Exception as error:
            if self._errors_end_it:
                raise
            _, text = status_of(error)
            await self._send(before, error_message=text, infer_response=_end_of(request))

    async def _send(self, before: _Turn, **fields: Any) -> None:
        await asyncio.shield(before)
        async with self._writing:
            await self._context.write(messages.ModelStreamInferResponse(**fields))

    async def _is_decoupled(self, request: Any) -> bool:
        try:
            return is_decoupled(await self._inference.metadata(_parsed(request).model_name))
        except Exception:  # the request's own answer has the error
            return False

    def _make_room(self, _: asyncio.Task[None]) -> None:
        self._room.release()


def _terms_of(context: grpc.aio.ServicerContext) -> Terms:
    """Return the terms of a call: its metadata, and gRPC's own deadline. Raises InvalidRequest."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    terms = read_terms(metadata, current_tenant.get())
    left_s = context.time_remaining()
    if left_s is None:
        return terms
    return replace(terms, timeout_s=max(1e-3, min(left_s, terms.timeout_s or left_s)))


def _end_of(request: Any) -> messages.ModelInferResponse:
    """Return the last response of a request with an error: its id, and the mark that no more will follow."""
    if not isinstance(request, messages.ModelInferRequest):
        return messages.ModelInferResponse()
    final = {"triton_final_response": messages.InferParameter(bool_param=True)}
    return messages.ModelInferResponse(model_name=request.model_name, id=request.id, parameters=final)


def _ended_turn() -> _Turn:
    turn: _Turn = asyncio.get_running_loop().create_future()
    turn.set_result(None)
    return turn


def _end_turn(turn: _Turn) -> None:
    if not turn.done():
        turn.set_result(None)


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
