"""Requests to an engine's loop, and to what stands before one, that tests follow to the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from deployments.engines.llm.engine import LLMEngine
from deployments.local import LocalModels
from deployments.records import ImageRequest, ImageResult, SwitchReport, TextChunk, TextRequestRecord
from deployments.replicas.output_channel import OutputChannel
from deployments.replicas.step_loop import DeviceThread, EngineLoop
from deployments.services.image_service import EncodeText, ImagePiece, ImageService
from deployments.services.text_service import TextService


class AskedModels:
    """The models of a process, asked as the image service is."""

    def __init__(self, models: LocalModels) -> None:
        self._models = models

    async def generate(self, request: ImageRequest) -> ImageResult:
        return await asyncio.to_thread(self._models.generate, request)


async def last_output(loop: EngineLoop[Any, Any], request: Any, on_output: Callable[[Any], None] | None = None) -> Any:
    """Return the last output of one request; `on_output` sees every one."""
    return await loop.run_request(request, on_output or (lambda _: None))


def stream_outputs(loop: EngineLoop[Any, Any], request: Any, *, coalesces: bool = False) -> OutputChannel[Any]:
    """Return the outputs of one request as they come."""

    async def run(outputs: OutputChannel[Any]) -> None:
        await loop.run_request(request, outputs.put, coalesces=coalesces)

    return OutputChannel(run)


def stream_images(
    images: ImageService, request: ImageRequest, encode: EncodeText, **options: Any
) -> OutputChannel[ImagePiece]:
    """Return the pieces of an image as they come."""

    async def run(pieces: OutputChannel[ImagePiece]) -> None:
        pieces.put(await images.generate(request, encode, pieces.put, **options))

    return OutputChannel(run)


def text_service_of(engine: LLMEngine) -> TextService:
    """Return a service over one engine, whatever model is asked for."""
    loops: list[Any] = []

    def bound(make: Callable[[], Any]) -> Any:
        loops[:] = loops or [make()]
        return loops[0]

    report = SwitchReport("m", 1.0, 0.5, 0.5, 10, (), ())
    lease = SimpleNamespace(modules={"model": engine}, bound=bound, report=report)

    @asynccontextmanager
    async def leased(*_: Any, **__: Any) -> AsyncIterator[Any]:
        yield lease

    cache: Any = SimpleNamespace(lease=leased)
    return TextService(cache, DeviceThread())


async def written_chunks(texts: TextService, request: TextRequestRecord) -> list[TextChunk]:
    """Return all pieces of a text."""
    chunks: list[TextChunk] = []
    await texts.write(request, chunks.append)
    return chunks
