"""Chats and completions, whole or in pieces, of language models and of pipelines that write."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from cluster.admission.records import Demand
from configs.cluster import LimitsConfig
from deployments.ingress.service.catalog import Catalog, PipelineModels
from deployments.ingress.service.counting import Meter, count_text, counted
from deployments.ingress.service.demands import Demands
from deployments.ingress.service.listing import Listing
from deployments.ingress.service.preparing import Preparing, has_images
from deployments.ingress.service.retries import RetriedCalls
from deployments.ingress.service.timing import account, timed_call
from deployments.records import ChatRequest, CompletionRequest, PromptTokens, TextChunk, TextResult
from deployments.records.errors import InvalidRequest
from deployments.replicas.output_channel import OutputChannel
from deployments.requests.limits import check_text


class TextWriter:
    """Writes texts. Its methods raise the ServiceErrors of `deployments.records.errors`."""

    def __init__(
        self,
        worker: RetriedCalls,
        catalog: Catalog,
        preparing: Preparing,
        demands: Demands,
        listing: Listing,
        pipeline_models: PipelineModels,
        limits: LimitsConfig,
        meter: Meter,
    ) -> None:
        self._worker = worker
        self.listing = listing
        self._catalog = catalog
        self._preparing = preparing
        self._demands = demands
        self._pipeline_models = pipeline_models
        self._limits = limits
        self.meter = meter

    def stream_text(self, request: ChatRequest | CompletionRequest) -> OutputChannel[TextChunk]:
        """Return the channel of a text's pieces, which the reader closes. Reading raises as `write_text` does."""

        async def send_chunks(chunks: OutputChannel[TextChunk]) -> None:
            await self.write_text(request, chunks.send)

        return OutputChannel(send_chunks)

    async def write_text(
        self, request: ChatRequest | CompletionRequest, on_chunk: Callable[[TextChunk], Awaitable[None]]
    ) -> None:
        """Give the pieces of a text to `on_chunk`; the last one has the finish reason and the timings.

        Raises the ServiceErrors of `deployments.records.errors`; ReplicaLost when the replica dies after the first
        piece.
        """
        if await self.listing.is_pipeline(request.model):
            await on_chunk((await self.whole(request)).as_chunk())
        else:
            await self._write_text(request, on_chunk)

    @counted("text")
    async def _write_text(
        self, request: ChatRequest | CompletionRequest, on_chunk: Callable[[TextChunk], Awaitable[None]]
    ) -> None:
        request = await self._preparing.text(request)
        demand = self._demand(request)
        start = time.perf_counter()

        async def on_piece(chunk: TextChunk) -> None:
            if chunk.timings_ms:
                account(chunk.timings_ms, start)
                count_text(self.meter, request.model, chunk, request.num_texts)
            await on_chunk(chunk)

        await self._worker.receive_stream("stream_text", request, on_piece=on_piece, demand=demand)

    @counted("tokenize")
    async def tokenize(
        self, request: ChatRequest | CompletionRequest, *, has_special_tokens: bool = True
    ) -> PromptTokens:
        """Return the prompt of a request in the tokens of its model, which is loaded for that.

        Without `has_special_tokens`, the tokenizer adds none of its special tokens to a text.
        """
        request = (await self._preparing.text(request)).model_copy(update={"max_tokens": 1})  # the least work
        demand = self._demand(request)
        found: PromptTokens = await self._worker.call("tokenize", request, has_special_tokens, demand=demand)
        return found

    async def whole(self, request: ChatRequest | CompletionRequest) -> TextResult:
        """Return a whole text."""
        if await self.listing.is_pipeline(request.model):
            check_text(request, self._limits)
            if has_images(request):
                raise _blind_pipeline(request.model)
            return await self._pipeline_models.write(request)
        return await self._write_whole(request)

    @counted("text")
    async def _write_whole(self, request: ChatRequest | CompletionRequest) -> TextResult:
        request = await self._preparing.text(request)
        result: TextResult = await timed_call(self._worker, "write_text", request, self._demand(request))
        count_text(self.meter, request.model, result, request.num_texts)
        return result

    async def check_sees(self, model: str) -> None:
        """Raise InvalidRequest for a model or pipeline that takes no images in chats, or as other requests do."""
        if await self.listing.is_pipeline(model):
            raise _blind_pipeline(model)
        await self._catalog.check_sees(await self._catalog.find_usable(model, "llm"))

    def _demand(self, request: ChatRequest | CompletionRequest) -> Demand:
        return self._demands.demand(request, self._demands.terms(request))


def _blind_pipeline(name: str) -> InvalidRequest:
    return InvalidRequest(f"model {name!r} is a pipeline, whose chats have no images", "messages")
