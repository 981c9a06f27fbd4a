"""The Open Inference Protocol over the service's own calls: one `InferRequest` in, named tensors out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final

import numpy as np

from configs.cluster import LimitsConfig
from deployments.ingress.kserve.models import (
    EMBEDDING,
    PIPELINE,
    PROGRAM,
    ModelConfiguration,
    check_inputs,
    check_outputs,
    find_model,
    is_any_answering,
    is_ready,
    model_configuration,
)
from deployments.ingress.kserve.repository import Statistics
from deployments.ingress.kserve.requests import (
    Schedule,
    embedding_request,
    image_requests,
    schedule_of,
    scoring_request,
    text_requests,
    upscale_requests,
)
from deployments.ingress.kserve.shared_memory import SharedMemory
from deployments.ingress.kserve.tensors import (
    VERSION,
    InferRequest,
    InferResponse,
    ModelMetadata,
    OutputWish,
    ServerMetadata,
    classify_output,
    server_metadata,
    texts,
)
from deployments.ingress.messages.terms import current_terms, with_fields
from deployments.ingress.service.catalog import ModelCard
from deployments.ingress.service.service import Service
from deployments.pipelines.records import PipelineRequest, Signature, TensorValue, text_tensor
from deployments.pipelines.runner import run_together
from deployments.records import (
    CacheUse,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    HeadRequest,
    ImageRequest,
    ProgramRequest,
    ScoringRequest,
    TextChunk,
    TextResult,
    TimingsMs,
    as_record,
    warnings_by_item,
)
from deployments.records.errors import InvalidRequest
from deployments.records.tasks import Deadline
from deployments.replicas.output_channel import OutputChannel
from weights.programs.signature import BATCH

MAX_ID_CHARS: Final = 1024
MAX_PARAMETERS: Final = 256
_IN_ENCODER: Final = ("embedding", "reranker", "classifier")  # kinds whose texts the text encoders batch
_NO_CACHE: Final = CacheUse(0, 0)
_NO_LABELS: Final[Mapping[str, Sequence[str]]] = MappingProxyType({})


class Inference:
    """The answering side of every transport. All methods raise the ServiceErrors of `deployments.records.errors`.

    `statistics` count every request for a model that exists, answered or not.
    """

    def __init__(
        self,
        service: Service,
        limits: LimitsConfig,
        statistics: Statistics | None = None,
        shared_memory: SharedMemory | None = None,
    ) -> None:
        self.shared_memory = shared_memory or SharedMemory(None)
        self._service = service
        self._limits = limits
        self._statistics = statistics or Statistics()

    async def server_ready(self) -> bool:
        """Return whether requests can be answered: all configured models have come or failed, and one is there."""
        return await is_any_answering(self._service)

    async def ready(self, model: str, version: str = "") -> bool:
        """Return whether requests for `model` can be answered. Raises UnknownModel.

        Never waits for a model that is being registered, as a request for it would.
        """
        return await is_ready(self._service, model, version)

    async def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Return the model's inputs and outputs. Waits for a model that is being registered."""
        card, signature = await find_model(self._service, model, version)
        more = {"fingerprint": card.fingerprint} if card.fingerprint else {}
        more |= {"ranges": card.program.ranges_text()} if card.program else {}
        return ModelMetadata(
            name=model,
            versions=(VERSION,),
            platform=f"atelier_{card.kind}",
            inputs=signature.inputs,
            outputs=signature.outputs,
            parameters={"kind": card.kind or "", "description": card.description} | more,
        )

    async def configuration(self, model: str, version: str = "") -> ModelConfiguration:
        """Return Triton's configuration of the model."""
        metadata, (card, _) = await self.metadata(model, version), await find_model(self._service, model, version)
        batching = await self._service.batching() if card.kind in (*_IN_ENCODER, PROGRAM) else None
        most = 0 if card.program and not card.program.has_batch else self._max_items(card)
        return model_configuration(metadata, most, batching)

    def server_metadata(self) -> ServerMetadata:
        """Return the metadata of the server."""
        return server_metadata(*(["system_shared_memory"] if self.shared_memory.is_on else []))

    async def infer(self, request: InferRequest) -> InferResponse:
        """Return the whole answer, with the outputs that are not in shared memory."""
        async with self.shared_memory.read_inputs(request) as read:
            return await self.shared_memory.write_outputs(read, await self._infer(read))

    async def _infer(self, request: InferRequest) -> InferResponse:
        card, signature = await find_model(self._service, request.model, request.version)
        start = time.perf_counter()
        try:
            given, schedule = self._checked(card, signature, request)
            async with Deadline(schedule.timeout_s).bounding():
                answer = await self._answer(card, signature, given, request, schedule)
            outputs = _wished(answer.outputs, request.outputs, self._labels_of(card, request))
        except Exception:
            self._statistics.failed(request.model, (time.perf_counter() - start) * 1e3)
            raise
        timings_ms = {"queue": 0.0, "total": (time.perf_counter() - start) * 1e3} | dict(answer.timings_ms)
        uses = {"cache_hits": answer.cache.hits, "cache_misses": answer.cache.misses}
        self._statistics.succeeded(request.model, timings_ms=timings_ms, batch_size=answer.batch_size, **uses)
        parameters = _warning_parameters(answer.warnings)
        return InferResponse(request.model, VERSION, outputs, request.id, parameters, timings_ms)

    def infer_stream(self, request: InferRequest) -> OutputChannel[InferResponse]:
        """Return the channel of a text model's answer to one prompt, or of another model's whole answer as one piece.

        The reader closes it. The parameter `triton_final_response` is true on the last piece.
        """
        return OutputChannel(partial(self._send_pieces, request))

    async def _send_pieces(self, request: InferRequest, pieces: OutputChannel[InferResponse]) -> None:
        card, signature = await find_model(self._service, request.model, request.version)
        if card.kind != "llm" or _asks_for_embedding(request):
            await pieces.send(_piece(await self.infer(request), is_last=True))
            return
        if any(wish.part is not None for wish in request.outputs):
            raise InvalidRequest("outputs: a stream's pieces do not go into shared memory", "outputs")
        start = time.perf_counter()
        try:
            async with self.shared_memory.read_inputs(request) as read:
                timings_ms = await self._write_text(card, signature, read, pieces)
        except Exception:
            self._statistics.failed(request.model, (time.perf_counter() - start) * 1e3)
            raise
        self._statistics.succeeded(request.model, timings_ms=timings_ms)

    async def _write_text(
        self, card: ModelCard, signature: Signature, request: InferRequest, pieces: OutputChannel[InferResponse]
    ) -> Mapping[str, float]:
        """Send the pieces of a text, and return the times of the last."""
        given, schedule = self._checked(card, signature, request)
        records = text_requests(card.id, given, signature.inputs, request.parameters)
        if len(records) != 1:
            raise InvalidRequest(f"text_input: {len(records)} prompts, a stream answers one", "text_input")
        timings_ms: Mapping[str, float] = {}

        async def on_chunk(chunk: TextChunk) -> None:
            nonlocal timings_ms
            timings_ms = chunk.timings_ms
            outputs = _wished(_text_outputs([chunk]), request.outputs)
            parameters = _warning_parameters(chunk.warnings)
            response = InferResponse(request.model, VERSION, outputs, request.id, parameters, chunk.timings_ms)
            await pieces.send(_piece(response, is_last=chunk.finish_reason is not None))

        async with Deadline(schedule.timeout_s).bounding():
            await self._service.texts.write_text(records[0], on_chunk)
        return timings_ms

    def _checked(
        self, card: ModelCard, signature: Signature, request: InferRequest
    ) -> tuple[dict[str, TensorValue], Schedule]:
        """Return the inputs by name and the schedule. Raises InvalidRequest, before any work is done."""
        if len(request.id) > MAX_ID_CHARS:
            raise InvalidRequest(f"id: {len(request.id)} characters, at most {MAX_ID_CHARS} are allowed", "id")
        if (number := len(request.parameters)) > MAX_PARAMETERS:
            raise InvalidRequest(f"parameters: {number} of them, at most {MAX_PARAMETERS} are allowed", "parameters")
        check_outputs(card.id, signature, [wish.name for wish in request.outputs])
        given = check_inputs(card.id, signature, request.inputs)
        name, num_items = _items(card, signature, given)
        if not 1 <= num_items <= self._max_items(card):
            raise InvalidRequest(f"{name}: {num_items} items, from 1 to {self._max_items(card)} are allowed", name)
        schedule = schedule_of(request.parameters)
        current_terms.set(with_fields(current_terms.get(), schedule))
        return given, schedule

    def _labels_of(self, card: ModelCard, request: InferRequest) -> Mapping[str, Sequence[str]]:
        """Return the names of the classes of each output, if classes are requested."""
        if not any(wish.num_classes for wish in request.outputs):
            return {}
        if card.kind == PIPELINE:
            return self._service.pipelines.labels(card.id)
        return {wish.name: card.labels for wish in request.outputs}

    def _max_items(self, card: ModelCard) -> int:
        limits = self._limits
        if card.program is not None and card.program.has_batch:
            return min(limits.max_head_rows, card.program.ranges[BATCH][1])
        return {
            "diffusion": limits.max_images,
            "upscaler": limits.max_images,
            "llm": limits.max_prompts,
            "head": limits.max_head_rows,
            **dict.fromkeys(_IN_ENCODER, limits.max_embedding_inputs),
        }.get(card.kind or "", limits.max_pipeline_items)

    async def _answer(
        self,
        card: ModelCard,
        signature: Signature,
        given: Mapping[str, TensorValue],
        request: InferRequest,
        schedule: Schedule,
    ) -> _Outputs:
        name, specs, parameters = card.id, signature.inputs, request.parameters
        if card.kind == "diffusion":
            return await _infer_images(self._service, image_requests(name, given, specs, parameters, schedule))
        if card.kind == "upscaler":
            return await _infer_images(self._service, upscale_requests(name, given["image"], schedule))
        if card.kind == "llm" and _asks_for_embedding(request):
            wishes = [wish.name for wish in request.outputs]
            return await _infer_embeddings(self._service, embedding_request(name, given, parameters, wishes, schedule))
        if card.kind == "llm":
            return await _infer_texts(self._service, text_requests(name, given, specs, parameters))
        if card.kind == "embedding":
            (value,) = given.values()
            items = texts(value) if value.datatype == "BYTES" else value.data.tolist()
            fields = {"input": items} | schedule.fields_of(name)
            return await _infer_embeddings(self._service, as_record(EmbeddingRequest, fields))
        if card.kind in ("reranker", "classifier"):
            return await _infer_text_scores(self._service, scoring_request(name, given, parameters, schedule))
        if card.kind == "head":
            return await _infer_scores(self._service, HeadRequest(name, given["features"].data))
        if card.program is not None:
            arrays = {one: value.data for one, value in given.items()}
            run = ProgramRequest(name, arrays, schedule.priority, schedule.timeout_s)
            return await _infer_program(self._service, run, signature, _items(card, signature, given)[1])
        pipeline = PipelineRequest(name, given, schedule.priority, schedule.timeout_s)
        return await _infer_pipeline(self._service, pipeline, _items(card, signature, given)[1])


def _items(card: ModelCard, signature: Signature, given: Mapping[str, TensorValue]) -> tuple[str, int]:
    """Return the input that counts the items of the request, and their number."""
    if card.kind == "embedding" and len(given) != 1:
        raise InvalidRequest(f"model {card.id!r} takes either text or input_ids, got {len(given)} of them")
    counts = [(name, value.shape[0] if value.shape else 1) for name, value in given.items()]
    if card.program is not None:
        return next(iter(counts), ("inputs", 1)) if card.program.has_batch else ("inputs", 1)
    if card.kind == PIPELINE:
        return max(counts, key=lambda count: count[1], default=("inputs", 1))
    leading = signature.inputs[0].name if card.kind != "embedding" else counts[0][0]
    return next(count for count in counts if count[0] == leading)


def _asks_for_embedding(request: InferRequest) -> bool:
    return any(wish.name == EMBEDDING for wish in request.outputs)


def _wished(
    outputs: Sequence[TensorValue], wishes: Sequence[OutputWish], labels: Mapping[str, Sequence[str]] = _NO_LABELS
) -> tuple[TensorValue, ...]:
    if not wishes:
        return tuple(outputs)
    by_name = {value.name: value for value in outputs}
    return tuple(
        classify_output(by_name[wish.name], wish.num_classes, labels.get(wish.name, ()))
        if wish.num_classes
        else by_name[wish.name]
        for wish in wishes
    )


def _warning_parameters(warnings: Sequence[str]) -> dict[str, str]:
    """Return warnings as parameters of a response, which are plain values."""
    return {"warnings": "; ".join(warnings)} if warnings else {}


def _piece(response: InferResponse, *, is_last: bool) -> InferResponse:
    return replace(response, parameters={**response.parameters, "triton_final_response": is_last})


@dataclass(frozen=True, slots=True)
class _Outputs:
    """All outputs of a model for one request, in the order of its signature, with figures and warnings."""

    outputs: tuple[TensorValue, ...]
    timings_ms: Mapping[str, float]
    batch_size: int = 1
    cache: CacheUse = _NO_CACHE
    warnings: tuple[str, ...] = ()


async def _infer_images(service: Service, requests: Sequence[ImageRequest]) -> _Outputs:
    """Return one image for each request. The requests run side by side and share the forwards of a step loop."""
    made = await run_together([service.generate(request) for request in requests])
    results = [result.opaque("the tensor images") for result in made]
    arrays = [result.images[0] for result in results]
    seeds = [result.seed for result in results if result.seed is not None]  # an upscaler has none
    return _Outputs(
        outputs=(
            TensorValue("images", "UINT8", np.stack(arrays)),
            *((TensorValue("seed", "INT64", np.array(seeds, np.int64)),) if seeds else ()),
        ),
        timings_ms=_slowest([result.timings_ms for result in results]),
        batch_size=len(results),
        cache=CacheUse(sum(one.cache.hits for one in results), sum(one.cache.misses for one in results)),
        warnings=warnings_by_item([result.warnings for result in results]),
    )


async def _infer_texts(service: Service, requests: Sequence[ChatRequest | CompletionRequest]) -> _Outputs:
    """Return one text for each request. They run side by side."""
    results = await run_together(
        [
            service.chat(request) if isinstance(request, ChatRequest) else service.complete(request)
            for request in requests
        ]
    )
    return _Outputs(
        outputs=_text_outputs(results),
        timings_ms=_slowest([result.timings_ms for result in results]),
        batch_size=len(results),
        warnings=warnings_by_item([result.warnings for result in results]),
    )


def _text_outputs(results: Sequence[TextResult | TextChunk]) -> tuple[TensorValue, ...]:
    """Return the outputs of an LLM.

    A piece of a stream has its part of the text, and no finish reason before the last.
    """
    num_output_tokens = [result.num_completion_tokens for result in results]
    return (
        text_tensor("text_output", [result.text for result in results]),
        text_tensor("finish_reason", [result.finish_reason or "" for result in results]),
        TensorValue("num_input_tokens", "INT64", np.array([result.num_prompt_tokens for result in results], np.int64)),
        TensorValue("num_output_tokens", "INT64", np.array(num_output_tokens, np.int64)),
    )


async def _infer_embeddings(service: Service, request: EmbeddingRequest) -> _Outputs:
    """Return one vector for each input. Raises InvalidRequest when they differ in size."""
    result = await service.embed(request)
    if len({vector.shape for vector in result.embeddings}) > 1:
        raise InvalidRequest(f"model {request.model!r} gives these texts embeddings of different sizes; ask one by one")
    return _of_texts(TensorValue(EMBEDDING, "FP32", np.stack(result.embeddings)), result)


def _of_texts(output: TensorValue, result: EmbeddingResult) -> _Outputs:
    return _Outputs((output,), result.timings_ms, len(result.embeddings), result.cache, result.warnings)


async def _infer_text_scores(service: Service, request: ScoringRequest) -> _Outputs:
    """Return the score of each text beside its query, or the scores of its classes."""
    result = await service.score(request)
    found = np.stack(result.embeddings)
    ranks = not isinstance(request.input[0], str)
    return _of_texts(
        TensorValue("score", "FP32", found[:, 0]) if ranks else TensorValue("scores", "FP32", found), result
    )


async def _infer_scores(service: Service, request: HeadRequest) -> _Outputs:
    """Return a head's scores for each row of features."""
    found = await service.apply_head(request)
    return _Outputs((TensorValue("scores", "FP32", found),), {}, len(found))


async def _infer_program(service: Service, request: ProgramRequest, signature: Signature, batch_size: int) -> _Outputs:
    """Return the outputs of a stored program for a request of `batch_size` rows."""
    result = await service.run_program(request)
    outputs = [TensorValue(spec.name, spec.datatype, result.outputs[spec.name]) for spec in signature.outputs]
    return _Outputs(tuple(outputs), result.timings_ms, batch_size)


async def _infer_pipeline(service: Service, request: PipelineRequest, batch_size: int) -> _Outputs:
    """Return the outputs of a pipeline for a request of `batch_size` items."""
    result = await service.run_pipeline(request)
    return _Outputs(tuple(result.outputs.values()), result.timings_ms, batch_size, warnings=result.warnings)


def _slowest(timings_ms: Sequence[TimingsMs]) -> TimingsMs:
    """Return the longest time of each phase among parallel parts."""
    phases = {phase: None for timings in timings_ms for phase in timings}
    return {phase: max(timings.get(phase, 0.0) for timings in timings_ms) for phase in phases}
