"""The protocol's own HTTP and gRPC edge over a backend that gives back what it got: no Ray, no models.

A pipeline of the cluster has the types that its stages know. Here `FP16-3` is a model of FP16 with three dimensions,
and so for every datatype and rank, so that what clients can send is all seen to arrive and leave unchanged.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast, get_args

import uvicorn
from fastapi import FastAPI

from configs.cluster import LimitsConfig
from deployments.ingress.error_forms import install_error_handlers
from deployments.ingress.kserve.grpc.server import start_grpc_server
from deployments.ingress.kserve.inference import Inference
from deployments.ingress.kserve.repository import Repository, Statistics
from deployments.ingress.kserve.rest.routes import create_inference_router, create_server_router
from deployments.ingress.service.catalog import Health, ModelCard
from deployments.pipelines.records import Datatype, PipelineRequest, PipelineResult, Signature, TensorSpec

RANKS = range(6)
MAX_BODY_BYTES = 2**26
START_TIMEOUT_S = 20.0


class EchoBackend:
    """The part of `Service` that the protocol asks. A service, its pipelines and its listing in one."""

    operations: Any = None

    @property
    def pipelines(self) -> EchoBackend:
        return self

    @property
    def listing(self) -> EchoBackend:
        return self

    def names(self) -> list[str]:
        return [f"{datatype}-{rank}" for datatype in get_args(Datatype) for rank in RANKS]

    def signature(self, name: str) -> Signature:
        datatype, _, rank = name.partition("-")
        spec = TensorSpec("value", cast("Datatype", datatype), (-1,) * int(rank))
        return Signature((spec,), (spec,))

    async def run_pipeline(self, request: PipelineRequest) -> PipelineResult:
        return PipelineResult(dict(request.inputs), {"total": 0.0})

    async def models(self) -> list[ModelCard]:
        return [await self.model(name) for name in self.names()]

    async def model(self, id_: str) -> ModelCard:
        return ModelCard(id_, "pipeline", "ready")

    async def health(self) -> Health:
        states = [(card.kind, card.state) for card in await self.models()]
        return Health.of(states, is_starting=any(state == "registering" for _, state in states))


@contextmanager
def echo_server() -> Iterator[tuple[str, str]]:
    """(HTTP url, gRPC address) of a server on a thread of this process, for the length of the block."""
    grpc_ports: list[int] = []
    server = uvicorn.Server(uvicorn.Config(_app(grpc_ports), log_level="error"))
    # Named as TCP, so that asyncio sends without delay, as it does on sockets that it makes itself.
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        deadline = threading.Event()
        for _ in range(int(START_TIMEOUT_S / 0.02)):
            if server.started:
                break
            deadline.wait(0.02)
        assert server.started, "the echo server did not start"
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", f"127.0.0.1:{grpc_ports[0]}"
        finally:
            server.should_exit = True
            thread.join(START_TIMEOUT_S)


def _app(grpc_ports: list[int]) -> FastAPI:
    backend: Any = EchoBackend()
    limits = LimitsConfig(max_body_bytes=MAX_BODY_BYTES, max_pipeline_items=2**21)
    statistics = Statistics()
    inference = Inference(backend, limits, statistics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server = await start_grpc_server(
            inference, Repository(backend), statistics, host="127.0.0.1", port=0, max_message_bytes=MAX_BODY_BYTES
        )
        grpc_ports.append(server.port)
        try:
            yield
        finally:
            await server.stop(0)

    app = FastAPI(lifespan=lifespan)
    install_error_handlers(app)
    app.include_router(create_server_router(inference))
    app.include_router(create_inference_router(inference, limits))
    return app
