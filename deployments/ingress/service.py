"""The service: requests of every protocol are checked, get their model, go to the replicas, and are timed.

HTTP routes, handle calls and pipelines all call these methods. Nothing here knows HTTP.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cluster.control.dispatcher import Dispatcher
from cluster.control.lanes import Ask
from cluster.registry.snapshot import RegistrySnapshot
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from deployments.defaults import merges_lora, text_rules, with_image_defaults, with_text_defaults
from deployments.errors import InvalidRequest
from deployments.ingress.admin.operations import Operations
from deployments.ingress.admitted import RequestQueue, admitted
from deployments.ingress.asking import ENCODER, PIPELINES, WORKER, Request, ask_of, ask_of_pipeline
from deployments.ingress.catalog import Catalog, Health, ModelCard, card_of
from deployments.ingress.pipeline_models import PipelineModels
from deployments.ingress.retries import EncoderReply, RetriedCalls
from deployments.ingress.terms import Terms, current_terms, with_fields
from deployments.limits import check_embedding, check_head, check_image, check_text
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.plans import SegmentCall
from deployments.pipelines.records import PipelineRequest, PipelineResult
from deployments.pipelines.runner import SegmentReply
from deployments.records import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    HeadRequest,
    ImageProgress,
    ImageRequest,
    ImageResult,
    TextChunk,
    TextResult,
    TimingsMs,
    as_record,
)
from deployments.services.deadlines import Deadline
from deployments.services.replica_calls import ReplicaCalls, WhyNone, nobody_knows

PROBE_TIMEOUT_S: Final = 2.0  # probes do not wait until the models are known


class Service:
    """The methods of every protocol. `operations` is for operators. `encoder` and `worker` are deployment handles.

    `queue` is the admission queue; without it one is made for replicas whose names are not known, one of each kind, and
    Serve chooses them. `why_none(deployment)` makes what tells why no replica of it can answer.
    """

    def __init__(
        self,
        config: ClusterConfig,
        snapshot: RegistrySnapshot,
        encoder: Any,
        worker: Any,
        why_none: Callable[[str], WhyNone] = lambda _: nobody_knows,
        queue: RequestQueue | None = None,
    ) -> None:
        if queue is None:
            queue = Dispatcher(config.admission)
            for pool in (WORKER, ENCODER):
                queue.set_replicas(pool, [""])
        queue.set_replicas(PIPELINES, [""])  # they run here
        self.queue = queue
        self.operations = Operations(config.name, snapshot, encoder, worker, config.text_encoder.batching, queue)
        self._config = config
        self._configured = frozenset(config.entries)
        self._snapshot = snapshot
        self._catalog = Catalog(snapshot)
        self._health: tuple[tuple[str, int], Health] | None = None  # with the revision that it is of
        timeout_s = config.http.request_timeout_s
        self._encoder = RetriedCalls(ReplicaCalls(encoder, why_none(ENCODER)), queue, timeout_s)
        self._worker = RetriedCalls(ReplicaCalls(worker, why_none(WORKER)), queue, timeout_s)
        self.pipelines = Pipelines(
            config.pipelines,
            self,
            lambda: snapshot.records,
            max_batch_size=config.text_encoder.batching.max_batch_size,
            limits=config.ingress.limits,
            max_timeout_s=timeout_s,
        )
        self._pipeline_models = PipelineModels(self.pipelines, self.run_pipeline)

    async def generate(self, request: ImageRequest | Mapping[str, Any]) -> ImageResult:
        """Make images. Raises the ServiceErrors of `deployments.errors`."""
        request = as_record(ImageRequest, request)
        if await self._is_pipeline(request.model):
            check_image(request, self._config.ingress.limits)
            return await self._pipeline_models.generate(request)
        silent = request.model_copy(update={"partial_images": 0, "reports_steps": False})
        async with aclosing(self._image_pieces(silent)) as pieces:
            async for piece in pieces:  # to the end: a stream that is left early was given up
                result = piece
        assert isinstance(result, ImageResult)  # it is the last
        return result

    async def generate_stream(
        self, request: ImageRequest | Mapping[str, Any]
    ) -> AsyncGenerator[ImageProgress | ImageResult]:
        """Yield what the request asks to hear of its steps, and its result at the end.

        A caller that stops early closes the generator. A pipeline tells its result only. Raises as `generate` does.
        """
        request = as_record(ImageRequest, request)
        if await self._is_pipeline(request.model):
            yield await self.generate(request)
            return
        async with aclosing(self._image_pieces(request)) as pieces:
            async for piece in pieces:
                if isinstance(piece, ImageResult):
                    yield piece
                elif piece.previews or request.reports_steps or (piece.checkpoint and request.checkpoint_steps):
                    yield piece if request.checkpoint_steps else replace(piece, checkpoint=None)

    async def _image_pieces(self, request: ImageRequest) -> AsyncGenerator[ImageProgress | ImageResult]:
        """Yield what a worker tells, those of its checkpoints too that nobody asked for. Raises as `generate` does."""
        request, terms = await self._checked_image(request)
        start = time.perf_counter()
        async with aclosing(
            self._worker.stream_pieces("stream_images", request, ask=self._ask(request, terms))
        ) as pieces:
            async for piece in pieces:
                if isinstance(piece, ImageResult):
                    _account(piece.timings_ms, start)
                yield piece

    async def _checked_image(self, request: ImageRequest) -> tuple[ImageRequest, Terms]:
        """Return a request with its defaults, the versions of its models and its terms."""
        record = await self._catalog.find_usable(request.model, "diffusion")
        asked, request = request, with_image_defaults(request, record.defaults, record.class_name, record.variant)
        check_image(request, self._config.ingress.limits, asked)
        find = self._catalog.find_adapter
        adapters = {use.name: await find(use.name, request.model, "adapter") for use in request.lora}
        adapters |= {use.name: await find(use.name, request.model, "controlnet") for use in request.control}
        versions = {name: adapter.fingerprint for name, adapter in adapters.items()}
        terms = self._terms(request)
        update = {"model_version": record.fingerprint, "adapter_versions": versions, **text_rules(record)}
        update["merges_lora"] = merges_lora(request, adapters)
        update["checkpoint_interval_s"] = 0.0 if request.checkpoint_steps else self._config.worker.checkpoint_interval_s
        return request.model_copy(update=update | {"priority": terms.priority}), terms

    async def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> EmbeddingResult:
        """Embed texts. Raises the ServiceErrors of `deployments.errors`."""
        request = as_record(EmbeddingRequest, request)
        check_embedding(request, self._config.ingress.limits)
        if await self._is_pipeline(request.model):
            return await self._pipeline_models.embed(request)
        record = await self._catalog.find_usable(request.model, "embedding", "llm")
        if record.kind != "llm" and request.pooling is not None:
            raise InvalidRequest(f"pooling: {request.model!r} has its own; language models have none", "pooling")
        terms = self._terms(request)
        update = {"model_version": record.fingerprint, "long_text": text_rules(record)["long_text"]}
        rules = {"by_language_model": record.kind == "llm", "priority": terms.priority}
        request = request.model_copy(update=update | rules)
        replicas = self._worker if record.kind == "llm" else self._encoder
        start = time.perf_counter()
        result: EmbeddingResult = await replicas.call("embed", request, ask=self._ask(request, terms))
        _account(result.timings_ms, start)
        return result

    async def chat(self, request: ChatRequest | Mapping[str, Any]) -> TextResult:
        """Return a whole answer of a chat model. Raises the ServiceErrors of `deployments.errors`."""
        return await self._whole(as_record(ChatRequest, request))

    async def complete(self, request: CompletionRequest | Mapping[str, Any]) -> TextResult:
        """Return a whole continuation of a text."""
        return await self._whole(as_record(CompletionRequest, request))

    async def chat_stream(self, request: ChatRequest | Mapping[str, Any]) -> AsyncGenerator[TextChunk]:
        """Yield the answer piece by piece. A caller that stops early closes the generator."""
        async with aclosing(self.stream_text(as_record(ChatRequest, request))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream_text(self, request: ChatRequest | CompletionRequest) -> AsyncGenerator[TextChunk]:
        """Yield pieces of text; the last one has the finish reason and the timings.

        A caller that stops early closes the generator. Raises ReplicaLost when the replica dies after the first piece.
        """
        if await self._is_pipeline(request.model):
            yield _as_chunk(await self._whole(request))
            return
        request = await self._checked_text(request)
        ask = self._ask(request, self._terms(request))
        start = time.perf_counter()
        async with aclosing(self._worker.stream_pieces("stream_text", request, ask=ask)) as chunks:
            async for chunk in chunks:
                if chunk.timings_ms:
                    _account(chunk.timings_ms, start)
                yield chunk

    async def apply_head(self, request: HeadRequest) -> npt.NDArray[np.float32]:
        """Apply a linear layer that is served on its own: (n, in) features -> (n, out)."""
        check_head(request, self._config.ingress.limits)
        record = await self._catalog.find_usable(request.model, "head")
        versioned = replace(request, model_version=record.fingerprint)
        ask = self._ask(versioned, self._terms(versioned))
        result: npt.NDArray[np.float32] = await self._encoder.call("apply_head", versioned, ask=ask)
        return result

    async def run_pipeline(self, request: PipelineRequest) -> PipelineResult:
        """Run a multi-model pipeline once it has its place. Its stages have its terms, and no bound refuses them."""
        terms = self._terms(request)
        timeout_s, config = self._timeout_s(terms), self.queue.config
        ask = ask_of_pipeline(request.pipeline, terms.checked(config), timeout_s, config.max_running_pipelines)
        deadline = Deadline(timeout_s)
        with admitted(self.queue, ask) as slot:
            async with deadline.bounding():
                await slot.place()
                left_s = deadline.left_s()
                current_terms.set(replace(terms, timeout_s=left_s, is_inner=True, waited_s=0.0))
                result = await self.pipelines.run_pipeline(replace(request, timeout_s=left_s, priority=terms.priority))
            slot.is_answered = True
        return result

    def run_segment(self, call: SegmentCall, upstream: tuple[SegmentReply, ...], /) -> SegmentReply:
        """Begin the stages of a pipeline that one text encoder runs in one call. Returns at once."""
        records = [record for model in call.plan.models if (record := self._snapshot.find_model(model))]
        versioned = replace(
            call,
            versions={record.id: record.fingerprint for record in records},
            long_texts={record.id: text_rules(record)["long_text"] for record in records},
        )

        def ask() -> Any:
            return self._encoder.begin_call("run_segment", versioned, *(reply.response for reply in upstream))

        replies = [reply for reply in upstream if isinstance(reply, EncoderReply)]
        return EncoderReply(self._encoder, ask, replies)

    async def _whole(self, request: ChatRequest | CompletionRequest) -> TextResult:
        if await self._is_pipeline(request.model):
            check_text(request, self._config.ingress.limits)
            return await self._pipeline_models.write(request)
        request = await self._checked_text(request)
        ask = self._ask(request, self._terms(request))
        start = time.perf_counter()
        result: TextResult = await self._worker.call("write_text", request, ask=ask)
        _account(result.timings_ms, start)
        return result

    async def _checked_text(self, request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
        check_text(request, self._config.ingress.limits)
        record = await self._catalog.find_usable(request.model, "llm")
        find = self._catalog.find_adapter
        versions = {use.name: (await find(use.name, request.model, "adapter")).fingerprint for use in request.lora}
        update = {"model_version": record.fingerprint, "adapter_versions": versions}
        request = request.model_copy(update=update)
        return with_text_defaults(request, record.defaults)

    def _terms(self, request: Request | PipelineRequest) -> Terms:
        """Return the terms of a request as far as it or its headers say. Raises InvalidRequest."""
        terms = with_fields(current_terms.get(), request)
        terms.checked(self.queue.config)
        return terms

    def _ask(self, request: Request, terms: Terms) -> Ask:
        return ask_of(request, terms.checked(self.queue.config), self._timeout_s(terms), self._config)

    def _timeout_s(self, terms: Terms) -> float:
        most_s = self._config.http.request_timeout_s
        timeout_s = min(most_s, terms.timeout_s or self.queue.config.default_timeout_s or most_s)
        return timeout_s - terms.waited_s

    async def models(self) -> list[ModelCard]:
        """Return every model, adapter and pipeline: the configured ones in the order of the config, then those
        registered since, then the pipelines.
        """
        cards = [card_of(record) for record in await self._catalog.all_records()]
        return cards + [self._pipeline_card(name) for name in self.pipelines.names()]

    async def model(self, id_: str) -> ModelCard:
        """Return one model, adapter or pipeline. Raises UnknownModel with the known names."""
        if await self._is_pipeline(id_):
            return self._pipeline_card(id_)
        return card_of(await self._catalog.find_record(id_))

    async def batching(self) -> BatchingConfig:
        """Return how the text encoders batch requests now."""
        return await self.operations.batching()

    async def health(self) -> Health:
        """Return what probes ask: counted once for each revision of the directory, whoever probes how often."""
        await self._snapshot.ready()
        revision = self._snapshot.revision
        if self._health is None or self._health[0] != revision:
            entering = {record.id for record in self._snapshot if record.state == "registering"}
            cards = [self._pipeline_card(name) for name in self.pipelines.names()]
            models = [(one.kind, one.state) for one in (*self._snapshot, *cards)]
            self._health = revision, Health.of(models, is_starting=not entering.isdisjoint(self._configured))
        return self._health[1]

    def _pipeline_card(self, name: str) -> ModelCard:
        problem = self.pipelines.problem(name)
        return ModelCard(
            id=name,
            kind="pipeline",
            state="unavailable" if problem else "ready",
            description=self.pipelines.description(name),
            error=problem or "",
        )

    async def _is_pipeline(self, model: str) -> bool:
        """Return whether `model` is a pipeline. Waits for the directory: a pipeline's signature depends on it."""
        if model in self.pipelines:
            await self._snapshot.ready()
        return model in self.pipelines


def _as_chunk(result: TextResult) -> TextChunk:
    return TextChunk(
        result.text,
        result.num_prompt_tokens,
        result.num_completion_tokens,
        result.finish_reason,
        result.timings_ms,
        warnings=result.warnings,
    )


def _account(timings_ms: TimingsMs, start: float) -> None:
    """Count the time that passed here but not in the replica as queueing: transport and waiting for a place."""
    elapsed_ms = (time.perf_counter() - start) * 1e3
    inside_ms = timings_ms.get("total", elapsed_ms)
    timings_ms["queue"] = timings_ms.get("queue", 0.0) + max(0.0, elapsed_ms - inside_ms)
    timings_ms["total"] = elapsed_ms
