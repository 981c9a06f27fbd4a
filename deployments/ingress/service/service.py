"""The service: requests of every protocol are checked, get their model, go to the replicas, and are timed.

HTTP routes, handle calls and pipelines all call these methods. Nothing here depends on HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from cluster.admission.dispatcher import Dispatcher
from cluster.records.text_routes import route_of
from cluster.registry.snapshot import RegistrySnapshot
from configs.batching import BatchingConfig
from configs.cluster import ClusterConfig
from deployments.ingress.messages.running_job import current_job
from deployments.ingress.messages.terms import (
    ENCODER,
    PIPELINES,
    WORKER,
    admitted,
    current_terms,
    demand_of_pipeline,
)
from deployments.ingress.service.catalog import Catalog, PipelineModels
from deployments.ingress.service.counting import Meter, NoMeter, counted
from deployments.ingress.service.demands import Demands
from deployments.ingress.service.listing import Listing
from deployments.ingress.service.operations import Operations
from deployments.ingress.service.preparing import Preparing
from deployments.ingress.service.queues import Queues
from deployments.ingress.service.retries import EncoderReply, ResumedImages, RetriedCalls
from deployments.ingress.service.texts import TextWriter
from deployments.ingress.service.timing import account, timed_call
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.plans import SegmentCall
from deployments.pipelines.records import PipelineRequest, PipelineResult
from deployments.pipelines.runner import OnStage, SegmentReply, WorkflowResult
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
    ScoringRequest,
    TextResult,
    as_record,
)
from deployments.records.errors import InvalidRequest, ModelUnavailable
from deployments.records.tasks import Deadline
from deployments.replicas.output_channel import OutputChannel
from deployments.replicas.replica_calls import OnPiece, ReplicaCalls, WhyNone, nobody_knows
from deployments.requests.defaults import (
    text_rules,
)
from deployments.requests.limits import (
    check_embedding,
    check_head,
    check_image,
    check_program,
    check_scoring,
)

OnProgress = Callable[[ImageProgress], Awaitable[None]]
PROBE_TIMEOUT_S: Final = 2.0  # probes do not wait until the models are known


class Workflows(Protocol):
    """Who knows the nodes of registered workflows, and runs them by asking this service for images and texts."""

    async def run(self, workflow: str, inputs: Mapping[str, Any], /) -> WorkflowResult: ...


class Service:
    """The methods of every protocol, with those of `texts` and `listing`; `operations` is for operators.

    `encoder` and `worker` are deployment handles. `queue` is the admission queue; by default it has one anonymous
    replica per kind, routed by Serve. `queues` are those of several ingresses together. `why_none` explains by
    deployment why no replica of it can answer. `meter` counts the requests.
    """

    def __init__(
        self,
        config: ClusterConfig,
        snapshot: RegistrySnapshot,
        encoder: Any,
        worker: Any,
        why_none: Mapping[str, WhyNone] | None = None,
        queue: Dispatcher | None = None,
        queues: Queues | None = None,
        meter: Meter | None = None,
    ) -> None:
        if queue is None:
            queue = Dispatcher(config.admission)
            for pool in (WORKER, ENCODER):
                queue.set_replicas(pool, [""])
        queue.set_replicas(PIPELINES, [""])  # pipelines run in this process
        self.queue = queue
        self.workflows: Workflows | None = None  # set by the application: its nodes ask this service
        self.meter: Meter = meter or NoMeter()
        self.queues: Queues = queues or queue
        self.operations = Operations(
            config.name, snapshot, encoder, worker, config.text_encoder.batching, queue, self.queues
        )
        self._config = config
        self._snapshot = snapshot
        self._catalog = Catalog(snapshot)
        self._demands = Demands(config, queue, snapshot)
        self._preparing = Preparing(config, self._catalog, self._demands)
        timeout_s, why_none = config.http.request_timeout_s, why_none or {}
        self._encoder = RetriedCalls(ReplicaCalls(encoder, why_none.get(ENCODER, nobody_knows)), queue, timeout_s)
        self._worker = RetriedCalls(ReplicaCalls(worker, why_none.get(WORKER, nobody_knows)), queue, timeout_s)
        self.pipelines = Pipelines(
            config.pipelines,
            self,
            snapshot,
            max_batch_size=config.text_encoder.batching.max_batch_size,
            limits=config.ingress.limits,
            max_timeout_s=timeout_s,
        )
        self._pipeline_models = PipelineModels(self.pipelines, self)
        scaling = config.controller.scaling
        woken = {WORKER} if scaling and scaling.min_workers == 0 else set[str]()  # by a request
        self.listing = Listing(snapshot, queue, self.pipelines, self._pipeline_models, config.entries, woken)
        self.texts = TextWriter(
            self._worker,
            self._catalog,
            self._preparing,
            self._demands,
            self.listing,
            self._pipeline_models,
            config.ingress.limits,
            self.meter,
        )

    async def generate(self, request: ImageRequest | Mapping[str, Any]) -> ImageResult:
        """Make images. Raises the ServiceErrors of `deployments.records.errors`."""
        request = as_record(ImageRequest, request)
        if await self.listing.is_pipeline(request.model):
            check_image(request, self._config.ingress.limits)
            return await self._pipeline_models.generate(request)
        job = current_job.get()
        silent = request.model_copy(update={"partial_images": 0, "reports_steps": job is not None})
        return await self._make_images(silent, job.note_progress if job else None)

    def generate_stream(self, request: ImageRequest | Mapping[str, Any]) -> OutputChannel[ImageProgress | ImageResult]:
        """Return the channel of the requested progress of steps, with the result at the end.

        The reader closes it. A pipeline sends its result only. Reading raises as `generate` does.
        """
        return OutputChannel(partial(self._send_images, request))

    async def _send_images(
        self, request: ImageRequest | Mapping[str, Any], pieces: OutputChannel[ImageProgress | ImageResult]
    ) -> None:
        request = as_record(ImageRequest, request)

        async def on_progress(progress: ImageProgress) -> None:
            if progress.previews or request.reports_steps or (progress.checkpoint and request.checkpoint_steps):
                await pieces.send(progress if request.checkpoint_steps else replace(progress, checkpoint=None))

        is_pipeline = await self.listing.is_pipeline(request.model)
        await pieces.send(await (self.generate(request) if is_pipeline else self._make_images(request, on_progress)))

    @property
    def snapshot(self) -> RegistrySnapshot:
        """The directory of models, and the way to the registry."""
        return self._snapshot

    @counted("image")
    async def _make_images(self, request: ImageRequest, on_progress: OnProgress | None = None) -> ImageResult:
        """Return images of a worker; `on_progress` gets unrequested checkpoints, too. Raises as `generate`."""
        request, terms, warnings = await self._preparing.image(request)
        start = time.perf_counter()
        result = await self._worker.receive_stream(
            "stream_images",
            request,
            on_piece=_on_progress(on_progress),
            demand=self._demands.demand(request, terms),
            resumption=ResumedImages(),
        )
        assert isinstance(result, ImageResult)  # it is the last
        account(result.timings_ms, start)
        return replace(result, warnings=(*result.warnings, *warnings))

    async def checked_clip(
        self, request: ClipRequest | Mapping[str, Any], makes: Literal["video", "audio"]
    ) -> ClipRequest:
        """Return a request for a clip with its defaults and the version of its model, as `make_clip` takes it.

        Raises the ServiceErrors of `deployments.records.errors`.
        """
        return await self._preparing.clip(as_record(ClipRequest, request), makes)

    @counted("clip")
    async def make_clip(self, request: ClipRequest, on_progress: OnProgress | None = None) -> ClipResult:
        """Return the clip of a checked request; a job learns of its steps if nobody else does.

        Raises the ServiceErrors.
        """
        start, demand = time.perf_counter(), self._demands.demand(request, self._demands.terms(request))
        if on_progress is None and (job := current_job.get()):
            on_progress = job.note_progress
        result = await self._worker.receive_stream(
            "stream_clip", request, on_piece=_on_progress(on_progress), demand=demand, resumption=ResumedImages()
        )
        assert isinstance(result, ClipResult)  # it is the last
        account(result.timings_ms, start)
        return result

    async def embed(self, request: EmbeddingRequest | Mapping[str, Any]) -> EmbeddingResult:
        """Embed texts. Raises the ServiceErrors of `deployments.records.errors`."""
        request = as_record(EmbeddingRequest, request)
        check_embedding(request, self._config.ingress.limits)
        if await self.listing.is_pipeline(request.model):
            return await self._pipeline_models.embed(request)
        return await self._embed(request)

    @counted("embedding")
    async def _embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        record = await self._catalog.find_usable(request.model, "embedding", "llm")
        if record.kind != "llm" and request.pooling is not None:
            raise InvalidRequest(f"pooling: {request.model!r} has its own; language models have none", "pooling")
        terms, is_of_worker = self._demands.terms(request), record.kind == "llm"
        long_text = request.long_text or text_rules(record)["long_text"]
        update = {"model_version": record.fingerprint, "long_text": long_text}
        request = request.model_copy(update=update | {"by_language_model": is_of_worker, "priority": terms.priority})
        demand = self._demands.demand(request, terms)
        calls, route = (self._worker, "") if is_of_worker else (self._encoder, route_of(request.input))
        result: EmbeddingResult = await timed_call(calls, "embed", request, demand, route)
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
        terms = self._demands.terms(request)
        update = {"model_version": record.fingerprint, "priority": terms.priority}
        update["long_text"] = request.long_text or text_rules(record)["long_text"]
        texts = [text if isinstance(text, str) else "\0".join(text) for text in request.input]
        request = request.model_copy(update=update)
        demand = self._demands.demand(request, terms)
        result: EmbeddingResult = await timed_call(self._encoder, "score", request, demand, route_of(texts))
        return result

    async def chat(self, request: ChatRequest | Mapping[str, Any]) -> TextResult:
        """Return a whole answer of a chat model. Raises the ServiceErrors of `deployments.records.errors`."""
        return await self.texts.whole(as_record(ChatRequest, request))

    async def complete(self, request: CompletionRequest | Mapping[str, Any]) -> TextResult:
        """Return a whole continuation of a text."""
        return await self.texts.whole(as_record(CompletionRequest, request))

    @counted("head")
    async def apply_head(self, request: HeadRequest) -> npt.NDArray[np.float32]:
        """Apply a linear layer served on its own: (n, in) features -> (n, out)."""
        check_head(request, self._config.ingress.limits)
        record = await self._catalog.find_usable(request.model, "head")
        versioned = replace(request, model_version=record.fingerprint)
        demand = self._demands.demand(versioned, self._demands.terms(versioned))
        result: npt.NDArray[np.float32] = await self._encoder.call("apply_head", versioned, demand=demand)
        return result

    @counted("program")
    async def run_program(self, request: ProgramRequest) -> ProgramResult:
        """Run a stored program. Raises the ServiceErrors of `deployments.records.errors`."""
        record = await self._catalog.find_usable(request.model, "program")
        if record.signature is None:
            raise ModelUnavailable(f"model {request.model!r} is unavailable: its input signature is unknown", "model")
        check_program(request, record.signature, self._config.ingress.limits)
        terms = self._demands.terms(request)
        versioned = replace(request, model_version=record.fingerprint, priority=terms.priority)
        result: ProgramResult = await timed_call(
            self._encoder, "run_program", versioned, self._demands.demand(versioned, terms)
        )
        return result

    @counted("pipeline", "pipeline")
    async def run_pipeline(self, request: PipelineRequest, on_stage: OnStage = lambda _: None) -> PipelineResult:
        """Run a multi-model pipeline once it has its place; `on_stage` is called with its stages.

        The stages have its terms, and no bound refuses them.
        """
        terms = self._demands.terms(request)
        timeout_s, config = self._demands.timeout_s(terms), self.queue.config
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

    async def run_workflow(self, workflow: str, inputs: Mapping[str, Any], /) -> WorkflowResult:
        """Run a registered workflow for one item. Raises the ServiceErrors of `deployments.records.errors`."""
        if self.workflows is None:
            raise ModelUnavailable(f"workflow {workflow!r}: this process runs none", "model")
        return await self.workflows.run(workflow, inputs)

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
        return EncoderReply(self._encoder, versioned, upstream, route_of(texts) if texts else "")

    async def batching(self) -> BatchingConfig:
        """Return the present settings of the text encoders' batching."""
        return await self.operations.batching()


def _on_progress(on_progress: OnProgress | None) -> OnPiece:
    """Return a function that passes on the pieces of progress."""

    async def on_piece(piece: Any) -> None:
        if on_progress is not None and isinstance(piece, ImageProgress):
            await on_progress(piece)

    return on_piece
