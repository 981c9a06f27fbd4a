"""The methods of `inference.GRPCInferenceService`: each a question to `Inference`, `Repository` or `Statistics`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Final

import grpc

from deployments.ingress.admission import Admission
from deployments.ingress.kserve.grpc import codec as grpc_codec
from deployments.ingress.kserve.grpc.calls import Method, read_infer, write_infer
from deployments.ingress.kserve.grpc.protos import open_inference as messages
from deployments.ingress.kserve.grpc.stream import InferStream
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository
from deployments.ingress.kserve.rest.routes import server_metadata
from deployments.ingress.kserve.statistics import Statistics, statistics_of
from deployments.ingress.timing import server_timing

SERVICE: Final = "inference.GRPCInferenceService"
# Of Triton's service, but not of this one: clients that try hear why instead of "method not found".
UNSUPPORTED: Final = {
    "shared memory": (
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ),
    "tracing": ("TraceSetting",),
    "changing the log": ("LogSettings",),
}
_ERRORS_END_STREAMS: Final = "triton_grpc_error"


class InferenceServicer:
    """One per ingress replica."""

    def __init__(
        self, inference: Inference, repository: Repository, statistics: Statistics, admission: Admission
    ) -> None:
        self._admission = admission
        self._inference = inference
        self._repository = repository
        self._statistics = statistics

    def methods(self) -> dict[str, Method]:
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelConfig": self.model_config,
            "ModelInfer": self.model_infer,
            "ModelStreamInfer": self.model_stream_infer,
            "ModelStatistics": self.model_statistics,
            "RepositoryIndex": self.repository_index,
            "RepositoryModelLoad": self.repository_model_load,
            "RepositoryModelUnload": self.repository_model_unload,
        }

    async def server_live(self, request: Any, context: Any) -> messages.ServerLiveResponse:
        return messages.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any, context: Any) -> messages.ServerReadyResponse:
        return messages.ServerReadyResponse(ready=await self._inference.server_ready())

    async def model_ready(self, request: messages.ModelReadyRequest, context: Any) -> messages.ModelReadyResponse:
        return messages.ModelReadyResponse(ready=await self._inference.ready(request.name, request.version))

    async def server_metadata(self, request: Any, context: Any) -> messages.ServerMetadataResponse:
        return messages.ServerMetadataResponse(**server_metadata())

    async def model_metadata(
        self, request: messages.ModelMetadataRequest, context: Any
    ) -> messages.ModelMetadataResponse:
        return grpc_codec.write_metadata(await self._inference.metadata(request.name, request.version))

    async def model_config(self, request: messages.ModelConfigRequest, context: Any) -> messages.ModelConfigResponse:
        configuration = await self._inference.configuration(request.name, request.version)
        return messages.ModelConfigResponse(config=grpc_codec.write_config(configuration))

    async def model_infer(
        self, request: messages.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> messages.ModelInferResponse:
        """The stage times are in the trailing metadata, in the form of the HTTP header."""
        with self._admission.place():
            response = await self._inference.infer(await read_infer(request))
            timing = server_timing(response.timings_ms)
            context.set_trailing_metadata([(name.lower(), text) for name, text in timing.items()])
            return await write_infer(response)

    async def model_stream_infer(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext) -> None:
        asked = dict(context.invocation_metadata() or ())
        errors_end_it = asked.get(_ERRORS_END_STREAMS) == "true"
        stream = InferStream(self._inference, context.write, self._admission, errors_end_it=errors_end_it)
        await stream.run(requests)

    async def model_statistics(
        self, request: messages.ModelStatisticsRequest, context: Any
    ) -> messages.ModelStatisticsResponse:
        found = await statistics_of(self._repository, self._statistics, request.name, request.version)
        return grpc_codec.write_statistics(found)

    async def repository_index(
        self, request: messages.RepositoryIndexRequest, context: Any
    ) -> messages.RepositoryIndexResponse:
        index = await self._repository.index(ready=request.ready, repository=request.repository_name)
        return messages.RepositoryIndexResponse(models=[asdict(entry) for entry in index])

    async def repository_model_load(
        self, request: messages.RepositoryModelLoadRequest, context: Any
    ) -> messages.RepositoryModelLoadResponse:
        parameters = grpc_codec.read_parameters(request.parameters)
        await self._repository.load(request.model_name, parameters, request.repository_name)
        return messages.RepositoryModelLoadResponse()

    async def repository_model_unload(
        self, request: messages.RepositoryModelUnloadRequest, context: Any
    ) -> messages.RepositoryModelUnloadResponse:
        parameters = grpc_codec.read_parameters(request.parameters)
        await self._repository.unload(request.model_name, parameters, request.repository_name)
        return messages.RepositoryModelUnloadResponse()


def unsupported_handlers() -> grpc.GenericRpcHandler:
    """For what of Triton's service is not here; requests are not decoded."""
    named = [(method, topic) for topic, methods in UNSUPPORTED.items() for method in methods]
    handlers = {method: grpc.unary_unary_rpc_method_handler(_refusing(topic)) for method, topic in named}
    return grpc.method_handlers_generic_handler(SERVICE, handlers)


def _refusing(topic: str) -> Method:
    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{topic} is not supported by this server")

    return refuse
