"""The service: requests of every protocol are checked, get their model, go to the replicas, and are timed.

HTTP routes, handle calls and pipelines all call these methods. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import Demand
from cluster.records.text_routes import route_of
from cluster.registry.directory import ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from deployments.engines.stock.known import is_stock_class
from deployments.ingress.messages.terms import (
    ENCODER,
    PIPELINES,
    WORKER,
    Request,
    Terms,
    admitted,
    current_terms,
    demand_of,
    demand_of_pipeline,
    with_fields,
)
from deployments.ingress.service.catalog import (
    Catalog,
    Endpoint,
    Health,
    ModelCard,
    PipelineModels,
    card_of,
    endpoint_of,
)
from deployments.ingress.service.counting import Meter, NoMeter, count_text, counted
from deployments.ingress.service.operations import Operations
from deployments.ingress.service.queues import Queues
from deployments.ingress.service.retries import EncoderReply, ResumedImages, RetriedCalls
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.plans import SegmentCall
from deployments.pipelines.records import PipelineRequest, PipelineResult
from deployments.pipelines.runner import OnStage, SegmentReply
from deployments.records import (
    ChatRequest,
    ClipRequest,
    ClipResult,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    HeadRequest,
    ImageProgress,
    ImageRequest,
    ImageResult,
    ProgramRequest,
    ProgramResult,
    PromptTokens,
    ScoringRequest,
    TextChunk,
    TextResult,
    TimingsMs,
    as_record,
)
from deployments.records.errors import InvalidRequest, ModelUnavailable
from deployments.records.tasks import Deadline
from deployments.replicas.output_channel import OutputChannel
from deployments.replicas.replica_calls import OnPiece, ReplicaCalls, WhyNone, nobody_knows
from deployments.requests.defaults import (
    as_upscale,
    merges_lora,
    prompts_of,
    text_rules,
    with_clip_defaults,
    with_image_defaults,
    with_learned_words,
    with_text_defaults,
)
from deployments.requests.fitted_images import with_fitting_images
from deployments.requests.limits import (
    check_clip,
    check_embedding,
    check_head,
    check_image,
    check_program,
    check_scoring,
    check_text,
    check_upscale,
)

OnProgress = Callable[[ImageProgress], Awaitable[None]]
PROBE_TIMEOUT_S: Final = 2.0  # probes do not wait until the models are known


class Service:
    """The methods of every protocol. `operations` is for operators. `encoder` and `worker` are deployment handles.

    `queue` is the admission queue; by default it has one anonymous replica per kind, routed by Serve. `queues` are
    those of several ingresses together. `why_none(deployment)` makes the function that says why no replica of it can answer.
    `meter` counts the requests.
    """

    def __init__(
        self,
        config: ClusterConfig,
        snapshot: RegistrySnapshot,
        encoder: Any,
        worker: Any,
        why_none: Callable[[str], WhyNone] = lambda _: nobody_knows,
        queue: Dispatcher | None = None,
        queues: Queues | None = None,
        meter: Meter | None = None,
    ) -> None:
        if queue is None:
            queue = Dispatcher(config.admission)
            for pool in (WORKER, ENCODER):
                queue.set_replicas(pool, [""])
        queue.set_replicas(PIPELINES, [""])  # they run here
        self.queue = queue
        self.meter: Meter = meter or NoMeter()
        self.queues: Queues = queues or queue
        self.operations = Operations(
            config.name, snapshot, encoder, worker, config.text_encoder.batching, queue, self.queues
        )
        self._config = config
        self._configured = frozenset(config.entries)
        scaling = config.controller.scaling
        self._woken = {WORKER} if scaling and scaling.min_workers == 0 else set[str]()  # by a request
        self._snapshot = snapshot
        self._catalog = Catalog(snapshot)
        self._health: tuple[object, Health] | None = None  # with what it was counted of
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
        """Make images. Raises the ServiceErrors of `deployments.records.errors`."""
        request = as_record(ImageRequest, request)
        if await self._is_pipeline(request.model):
            check_image(request, self._config.ingress.limits)
            return await self._pipeline_models.generate(request)
        silent = request.model_copy(update={"partial_images": 0, "reports_steps": False})
        return await self._make_images(silent)

    def generate_stream(self, request: ImageRequest | Mapping[str, Any]) -> OutputChannel[ImageProgress | ImageResult]:
        """Return the channel of what the request asks to get of its steps, and of its result at the end.

        The reader closes it. A pipeline tells its result only. Reading raises as `generate` does.
        """
        return OutputChannel(partial(self._send_images, request))

    async def _send_images(
        self, request: ImageRequest | Mapping[str, Any], pieces: OutputChannel[ImageProgress | ImageResult]
    ) -> None:
        request = as_record(ImageRequest, request)

        async def on_progress(progress: ImageProgress) -> None:
            if progress.previews or request.reports_steps or (progress.checkpoint and request.checkpoint_steps):
                await pieces.send(progress if request.checkpoint_steps else replace(progress, checkpoint=None))

        is_pipeline = await self._is_pipeline(request.model)
        await pieces.send(await (self.generate(request) if is_pipeline else self._make_images(request, on_progress)))

    @counted("image")
    async def _make_images(self, request: ImageRequest, on_progress: OnProgress | None = None) -> ImageResult:
        """Return images of a worker; `on_progress` gets checkpoints too that nobody asked for. Raises as `generate`."""
        request, terms, warnings = await self._checked_image(request)
        start = time.perf_counter()
        result = await self._worker.receive_stream(
            "stream_images",
            request,
            on_piece=_on_progress(on_progress),
            demand=self._demand(request, terms),
            resumption=ResumedImages(),
        )
        assert isinstance(result, ImageResult)  # it is the last
        _account(result.timings_ms, start)
        return replace(result, warnings=(*result.warnings, *warnings))

    async def _checked_image(self, request: ImageRequest) -> tuple[ImageRequest, Terms, tuple[str, ...]]:
        """Return a request with its defaults, the versions of its models and its terms; and warnings."""
        record = await self._catalog.find_usable(request.model, "diffusion", "upscaler")
        if record.kind == "upscaler":
            return self._checked_upscale(request, record)
        await self._check_makes(record, "images")
        asked, request = request, with_image_defaults(request, record.defaults, record.class_name, record.variant)
        check_image(request, self._config.ingress.limits, asked)
        warnings: tuple[str, ...] = ()
        if request.init_image is not None or request.control:
            fit = partial(with_fitting_images, asked, request, record.class_name, record.variant)
            request, warnings = await asyncio.to_thread(fit)
        if not is_stock_class(record.class_name):
            words = await self._catalog.learned_words(prompts_of(request), request.model)
            request = with_learned_words(request, words)
        find = self._catalog.find_adapter
        adapters = {use.name: await find(use.name, request.model, "adapter") for use in request.lora}
        adapters |= {use.name: await find(use.name, request.model, "controlnet") for use in request.control}
        adapters |= {use.name: await find(use.name, request.model, "ip_adapter") for use in request.ip_adapter}
        versions = {name: adapter.fingerprint for name, adapter in adapters.items()}
        terms = self._terms(request)
        update = {"model_version": record.fingerprint, "adapter_versions": versions, **text_rules(record)}
        update["merges_lora"] = merges_lora(request, adapters)
        update["checkpoint_interval_s"] = 0.0 if request.checkpoint_steps else self._config.worker.checkpoint_interval_s
        return request.model_copy(update=update | {"priority": terms.priority}), terms, warnings

    def _checked_upscale(
        self, request: ImageRequest, record: ModelRecord
    ) -> tuple[ImageRequest, Terms, tuple[str, ...]]:
        request, warnings = as_upscale(request)
        check_upscale(request, self._config.ingress.limits, int(record.variant.get("scale", 1)))
        terms = self._terms(request)
        update = {"model_version": record.fingerprint, "priority": terms.priority}
        return request.model_copy(update=update), terms, warnings

    async def checked_clip(
        self, request: ClipRequest | Mapping[str, Any], makes: Literal["video", "audio"]
    ) -> ClipRequest:
        """Return a request for a clip with its defaults and the version of its model, as `stream_clip` takes it.

        Raises the ServiceErrors of `deployments.records.errors`.
        """
        request = as_record(ClipRequest, request)
        record = await self._catalog.find_usable(request.model, "diffusion")
        await self._check_makes(record, makes)
        request = with_clip_defaults(request, record.defaults, record.class_name)
        check_clip(request, self._config.ingress.limits, makes)
        terms = self._terms(request)
        update = {"model_version": record.fingerprint, "priority": terms.priority, "tenant": terms.tenant}
        return request.model_copy(update=update)

    @counted("clip")
    async def make_clip(
        self, request: ClipRequest, on_progress: OnProgress | None = None, *, max_timeout_s: float | None = None
    ) -> ClipResult:
        """Return the clip of a checked request; `on_progress` gets what it asks to get of its steps.

        `max_timeout_s` is the longest time that it may have, in place of other requests'. Raises the ServiceErrors.
        """
        start, demand = time.perf_counter(), self._demand(request, self._terms(request), max_timeout_s)
        result = await self._worker.receive_stream(
            "stream_clip", request, on_piece=_on_progress(on_progress), demand=demand, resumption=ResumedImages()
        )
        assert isinstance(result, ClipResult)  # it is the last
        _account(result.timings_ms, start)
        return result

    async def _check_makes(self, record: ModelRecord, makes: Endpoint) -> None:
        """Raise InvalidRequest for a pipeline that makes something else."""
        found = await asyncio.to_thread(endpoint_of, record) if is_stock_class(record.class_name) else "images"
        if found != makes:
            raise InvalidRequest(
                f"model {record.id!r}, a {record.class_name}, makes {found or 'nothing'}, and no {makes}", "model"
            )

    async def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> EmbeddingResult:
        """Embed texts. Raises the ServiceErrors of `deployments.records.errors`."""
        request = as_record(EmbeddingRequest, request)
        check_embedding(request, self._config.ingress.limits)
        if await self._is_pipeline(request.model):
            return await self._pipeline_models.embed(request)
        return await self._embed(request)

    @counted("embedding")
    async def _embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        record = await self._catalog.find_usable(request.model, "embedding", "llm")
        if record.kind != "llm" and request.pooling is not None:
            raise InvalidRequest(f"pooling: {request.model!r} has its own; language models have none", "pooling")
        terms, is_of_worker = self._terms(request), record.kind == "llm"
        long_text = request.long_text or text_rules(record)["long_text"]
        update = {"model_version": record.fingerprint, "long_text": long_text}
        request = request.model_copy(update=update | {"by_language_model": is_of_worker, "priority": terms.priority})
        calls, route = (self._worker, "") if is_of_worker else (self._encoder, route_of(request.input))
        result: EmbeddingResult = await self._timed(calls, "embed", request, terms, route)
        return result

    async def score(
        self, request: ScoringRequest | Mapping[str, Any], *kinds: Literal["reranker", "classifier"]
    ) -> EmbeddingResult:
        """Score texts or pairs of texts by a model of one of the kinds. Raises the ServiceErrors."""
        return await self._score(as_record(ScoringRequest, request), *kinds)

    @counted("score")
    async def _score(self, request: ScoringRequest, *kinds: Literal["reranker", "classifier"]) -> EmbeddingResult:
        check_scoring(request, self._config.ingress.limits)
        record = await self._catalog.find_usable(request.model, *(kinds or ("classifier", "reranker")))
        terms = self._terms(request)
        update = {"model_version": record.fingerprint, "priority": terms.priority}
        update["long_text"] = request.long_text or text_rules(record)["long_text"]
        texts = [text if isinstance(text, str) else "\0".join(text) for text in request.input]
        result: EmbeddingResult = await self._timed(
            self._encoder, "score", request.model_copy(update=update), terms, route_of(texts)
        )
        return result

    async def chat(self, request: ChatRequest | Mapping[str, Any]) -> TextResult:
        """Return a whole answer of a chat model. Raises the ServiceErrors of `deployments.records.errors`."""
        return await self._whole(as_record(ChatRequest, request))

    async def complete(self, request: CompletionRequest | Mapping[str, Any]) -> TextResult:
        """Return a whole continuation of a text."""
        return await self._whole(as_record(CompletionRequest, request))

    def chat_stream(self, request: ChatRequest | Mapping[str, Any]) -> OutputChannel[TextChunk]:
        """Return the channel of an answer's pieces, as `stream_text` does."""
        return self.stream_text(as_record(ChatRequest, request))

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
        if await self._is_pipeline(request.model):
            await on_chunk((await self._whole(request)).as_chunk())
        else:
            await self._write_text(request, on_chunk)

    @counted("text")
    async def _write_text(
        self, request: ChatRequest | CompletionRequest, on_chunk: Callable[[TextChunk], Awaitable[None]]
    ) -> None:
        request = await self._checked_text(request)
        demand = self._demand(request, self._terms(request))
        start = time.perf_counter()

        async def on_piece(chunk: TextChunk) -> None:
            if chunk.timings_ms:
                _account(chunk.timings_ms, start)
                count_text(self.meter, request.model, chunk, request.num_texts)
            await on_chunk(chunk)

        await self._worker.receive_stream("stream_text", request, on_piece=on_piece, demand=demand)

    @counted("tokenize")
    async def tokenize(
        self, request: ChatRequest | CompletionRequest, *, has_special_tokens: bool = True
    ) -> PromptTokens:
        """Return the prompt of a request in the tokens of its model, which is loaded for that.

        Without `has_special_tokens`, a text has none that the tokenizer adds by itself.
        """
        request = (await self._checked_text(request)).model_copy(update={"max_tokens": 1})  # no more work than that
        demand = self._demand(request, self._terms(request))
        found: PromptTokens = await self._worker.call("tokenize", request, has_special_tokens, demand=demand)
        return found

    @counted("head")
    async def apply_head(self, request: HeadRequest) -> npt.NDArray[np.float32]:
        """Apply a linear layer that is served on its own: (n, in) features -> (n, out)."""
        check_head(request, self._config.ingress.limits)
        record = await self._catalog.find_usable(request.model, "head")
        versioned = replace(request, model_version=record.fingerprint)
        demand = self._demand(versioned, self._terms(versioned))
        result: npt.NDArray[np.float32] = await self._encoder.call("apply_head", versioned, demand=demand)
        return result

    @counted("program")
    async def run_program(self, request: ProgramRequest) -> ProgramResult:
        """Run a stored program. Raises the ServiceErrors of `deployments.records.errors`."""
        record = await self._catalog.find_usable(request.model, "program")
        if record.signature is None:
            raise ModelUnavailable(f"model {request.model!r} is unavailable: its input signature is unknown", "model")
        check_program(request, record.signature, self._config.ingress.limits)
        terms = self._terms(request)
        versioned = replace(request, model_version=record.fingerprint, priority=terms.priority)
        result: ProgramResult = await self._timed(self._encoder, "run_program", versioned, terms)
        return result

    @counted("pipeline", "pipeline")
    async def run_pipeline(self, request: PipelineRequest, on_stage: OnStage = lambda _: None) -> PipelineResult:
        """Run a multi-model pipeline once it has its place; `on_stage` is called with its stages.

        They have its terms, and no bound refuses them.
        """
        terms = self._terms(request)
        timeout_s, config = self._timeout_s(terms), self.queue.config
        demand = demand_of_pipeline(request.pipeline, terms.checked(config), timeout_s, config.max_running_pipelines)
        deadline = Deadline(timeout_s)
        with admitted(self.queue, demand) as slot:
            async with deadline.bounding():
                await slot.replica()
                left_s = deadline.left_s()
                current_terms.set(replace(terms, timeout_s=left_s, is_inner=True, waited_s=0.0))
                placed = replace(request, timeout_s=left_s, priority=terms.priority)
                result = await self.pipelines.run_pipeline(placed, on_stage)
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

        items = [item for batch in call.inputs.values() if isinstance(batch, list) for item in batch]
        texts = [item for item in items if isinstance(item, str | tuple)]
        route = route_of(texts) if texts else ""

        def begin() -> Any:
            results = [reply.response for reply in upstream]
            return self._encoder.begin_call("run_segment", versioned, *results, route=route)

        replies = [reply for reply in upstream if isinstance(reply, EncoderReply)]
        return EncoderReply(self._encoder, begin, replies)

    async def _whole(self, request: ChatRequest | CompletionRequest) -> TextResult:
        if await self._is_pipeline(request.model):
            check_text(request, self._config.ingress.limits)
            if _has_images(request):
                raise _blind_pipeline(request.model)
            return await self._pipeline_models.write(request)
        return await self._write_whole(request)

    @counted("text")
    async def _write_whole(self, request: ChatRequest | CompletionRequest) -> TextResult:
        request = await self._checked_text(request)
        result: TextResult = await self._timed(self._worker, "write_text", request, self._terms(request))
        count_text(self.meter, request.model, result, request.num_texts)
        return result

    async def _checked_text(self, request: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
        check_text(request, self._config.ingress.limits)
        record = await self._catalog.find_usable(request.model, "llm")
        if _has_images(request):
            await self._catalog.check_sees(record)
        find = self._catalog.find_adapter
        versions = {use.name: (await find(use.name, request.model, "adapter")).fingerprint for use in request.lora}
        update = {"model_version": record.fingerprint, "adapter_versions": versions}
        request = request.model_copy(update=update)
        return with_text_defaults(request, record.defaults)

    async def check_sees(self, model: str) -> None:
        """Raise InvalidRequest for a model or pipeline that takes no images in chats, or as other requests do."""
        if await self._is_pipeline(model):
            raise _blind_pipeline(model)
        await self._catalog.check_sees(await self._catalog.find_usable(model, "llm"))

    async def _timed(self, calls: RetriedCalls, method: str, request: Request, terms: Terms, route: str = "") -> Any:
        """Return the result of a replica's method, with the time that passed here in its times."""
        demand, start = self._demand(request, terms), time.perf_counter()
        result = await calls.call(method, request, demand=demand, route=route)
        _account(result.timings_ms, start)
        return result

    def _terms(self, request: Request | PipelineRequest) -> Terms:
        """Return the terms of a request as far as it or its headers say, and may. Raises InvalidRequest."""
        terms = with_fields(current_terms.get(), request).within_rights(self.queue.config)
        terms.checked(self.queue.config)
        return terms

    def _demand(self, request: Request, terms: Terms, max_timeout_s: float | None = None) -> Demand:
        timeout_s, record = self._timeout_s(terms, max_timeout_s), self._snapshot.find_model(request.model)
        is_stock = record is not None and record.kind == "diffusion" and is_stock_class(record.class_name)
        return demand_of(request, terms.checked(self.queue.config), timeout_s, self._config, is_stock=is_stock)

    def _timeout_s(self, terms: Terms, max_timeout_s: float | None = None) -> float:
        if max_timeout_s is not None:
            return min(max_timeout_s, terms.timeout_s or max_timeout_s) - terms.waited_s
        most_s = self._config.http.request_timeout_s
        timeout_s = min(most_s, terms.timeout_s or self.queue.config.default_timeout_s or most_s)
        return timeout_s - terms.waited_s

    async def models(self) -> list[ModelCard]:
        """Return every model, adapter and pipeline: the configured ones in the order of the config, then those
        registered since, then the pipelines.
        """
        records = await self._catalog.all_records()
        cards = await asyncio.to_thread(lambda: [card_of(record) for record in records])
        return cards + [self._pipeline_card(name) for name in self.pipelines.names()]

    async def model(self, id_: str) -> ModelCard:
        """Return one model, adapter or pipeline. Raises UnknownModel with the known names."""
        if await self._is_pipeline(id_):
            return self._pipeline_card(id_)
        return await asyncio.to_thread(card_of, await self._catalog.find_record(id_))

    async def batching(self) -> BatchingConfig:
        """Return how the text encoders batch requests now."""
        return await self.operations.batching()

    async def health(self) -> Health:
        """Return what probes ask: counted once for each revision of the directory, whoever probes how often.

        A pool that has had a replica counts as there: requests wait for the successor of one that has died.
        """
        await self._snapshot.ready()
        pools = self.queue.met_pools | self._woken
        counted_of = self._snapshot.revision, pools
        if self._health is None or self._health[0] != counted_of:
            entering = {record.id for record in self._snapshot if record.state == "registering"}
            cards = [self._pipeline_card(name) for name in self.pipelines.names()]
            models = [(one.kind, one.state) for one in (*self._snapshot, *cards)]
            is_entering = not entering.isdisjoint(self._configured)
            self._health = counted_of, Health.of(models, pools, is_entering=is_entering)
        return self._health[1]

    def _pipeline_card(self, name: str) -> ModelCard:
        problem = self.pipelines.problem(name)
        return ModelCard(
            id=name,
            kind="pipeline",
            state="unavailable" if problem else "ready",
            description=self.pipelines.description(name),
            error=problem or "",
            endpoint=None if problem else self._pipeline_models.endpoint_of(name),
        )

    def is_known(self, model: str) -> bool:
        """Return whether there is such a model or pipeline now."""
        return model in self.pipelines or self._snapshot.find_model(model) is not None

    async def _is_pipeline(self, model: str) -> bool:
        """Return whether `model` is a pipeline. Waits for the directory: a pipeline's signature depends on it."""
        if model in self.pipelines:
            await self._snapshot.ready()
        return model in self.pipelines


def _has_images(request: ChatRequest | CompletionRequest) -> bool:
    return isinstance(request, ChatRequest) and any(message.images for message in request.messages)


def _blind_pipeline(name: str) -> InvalidRequest:
    return InvalidRequest(f"model {name!r} is a pipeline, whose chats have no images", "messages")


def _on_progress(on_progress: OnProgress | None) -> OnPiece:
    """Return what gives the progress among pieces on."""

    async def on_piece(piece: Any) -> None:
        if on_progress is not None and isinstance(piece, ImageProgress):
            await on_progress(piece)

    return on_piece


def _account(timings_ms: TimingsMs, start: float) -> None:
    """Count the time that passed here but not in the replica as queueing: transport and waiting for a place."""
    elapsed_ms = (time.perf_counter() - start) * 1e3
    inside_ms = timings_ms.get("total", elapsed_ms)
    timings_ms["queue"] = timings_ms.get("queue", 0.0) + max(0.0, elapsed_ms - inside_ms)
    timings_ms["total"] = elapsed_ms
