"""The Open Inference Protocol over the service's own calls: one `InferRequest` in, named tensors out."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from configs.cluster import LimitsConfig
from deployments.errors import InvalidRequest
from deployments.ingress.kserve import answers
from deployments.ingress.kserve.answers import Answer, Backend
from deployments.ingress.kserve.classification import classified
from deployments.ingress.kserve.model_configuration import model_configuration
from deployments.ingress.kserve.prompts import image_requests, text_requests
from deployments.ingress.kserve.records import (
    VERSION,
    InferRequest,
    InferResponse,
    ModelMetadata,
    OutputWish,
    Parameters,
)
from deployments.ingress.kserve.schedule import Schedule, schedule_of
from deployments.ingress.kserve.signatures import check_inputs, check_outputs
from deployments.ingress.kserve.statistics import Recorder
from deployments.ingress.kserve.targets import PIPELINE, Target, find_target, is_any_answering, is_ready
from deployments.ingress.kserve.tensors import texts
from deployments.pipelines.records import PipelineRequest, TensorValue
from deployments.records import EmbeddingRequest, HeadRequest, as_record
from deployments.services.deadlines import Deadline

MAX_ID_CHARS: Final = 1024
MAX_PARAMETERS: Final = 256


class Inference:
    """Answers requests of every transport. All methods raise the ServiceErrors of `deployments.errors`.

    `recorder` hears of every request for a model that exists, answered or not.
    """

    def __init__(self, service: Backend, limits: LimitsConfig, recorder: Recorder | None = None) -> None:
        self._service = service
        self._limits = limits
        self._recorder = recorder

    async def server_ready(self) -> bool:
        """Whether requests can be answered: all that is configured has come or failed, and something is there."""
        return await is_any_answering(self._service)

    async def ready(self, model: str, version: str = "") -> bool:
        """Never waits for a model that is being registered, as a request for it would. Raises UnknownModel."""
        return await is_ready(self._service, model, version)

    async def metadata(self, model: str, version: str = "") -> ModelMetadata:
        target = await find_target(self._service, model, version)
        fingerprint = {"fingerprint": target.fingerprint} if target.fingerprint else {}
        return ModelMetadata(
            name=model,
            versions=(VERSION,),
            platform=f"atelier_{target.kind}",
            inputs=target.signature.inputs,
            outputs=target.signature.outputs,
            parameters={"kind": target.kind, "description": target.description} | fingerprint,
        )

    async def configuration(self, model: str, version: str = "") -> dict[str, Any]:
        """Triton's, as JSON."""
        metadata = await self.metadata(model, version)
        kind = metadata.parameters["kind"]
        batching = await self._service.batching() if kind == "embedding" else None
        return model_configuration(metadata, self._most(kind), batching)

    async def infer(self, request: InferRequest) -> InferResponse:
        """The whole answer."""
        target = await find_target(self._service, request.model, request.version)
        start = time.perf_counter()
        try:
            given, schedule = self._checked(target, request)
            async with Deadline(schedule.timeout_s).bounding():
                answer = await self._answer(target, given, request.parameters, schedule)
            outputs = _wished(answer.outputs, request.outputs, target.labels)
        except Exception:
            if self._recorder:
                self._recorder.failed(request.model, (time.perf_counter() - start) * 1e3)
            raise
        timings_ms = {"queue": 0.0, "total": (time.perf_counter() - start) * 1e3} | dict(answer.timings_ms)
        self._succeeded(request.model, answer, timings_ms)
        parameters = _told(answer.warnings)
        return InferResponse(request.model, VERSION, outputs, request.id, parameters, timings_ms)

    async def infer_stream(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """The answer of a text model to one prompt, piece by piece; of any other model the whole, as one piece. To be
        closed by who stops early.

        The parameter `triton_final_response` is true on the last piece.
        """
        target = await find_target(self._service, request.model, request.version)
        if target.kind != "llm":
            yield _piece(await self.infer(request), is_last=True)
            return
        start = time.perf_counter()
        timings_ms: Mapping[str, float] = {}
        try:
            async with aclosing(self._text_pieces(target, request)) as pieces:
                async for response, is_last in pieces:
                    timings_ms = response.timings_ms
                    yield _piece(response, is_last=is_last)
        except Exception:
            if self._recorder:
                self._recorder.failed(request.model, (time.perf_counter() - start) * 1e3)
            raise
        self._succeeded(request.model, Answer((), {}), timings_ms)

    async def _text_pieces(self, target: Target, request: InferRequest) -> AsyncGenerator[tuple[InferResponse, bool]]:
        """The pieces, and whether each is the last one."""
        given, schedule = self._checked(target, request)
        records = text_requests(target.name, given, target.signature.inputs, request.parameters)
        if len(records) != 1:
            raise InvalidRequest(f"text_input: {len(records)} prompts, a stream answers one", "text_input")
        deadline = Deadline(schedule.timeout_s)
        async with aclosing(self._service.stream(records[0])) as chunks:
            while True:
                async with deadline.bounding():
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                outputs, told = _wished(answers.text_outputs([chunk]), request.outputs), _told(chunk.warnings)
                response = InferResponse(request.model, VERSION, outputs, request.id, told, chunk.timings_ms)
                yield response, chunk.finish_reason is not None

    def _checked(self, target: Target, request: InferRequest) -> tuple[dict[str, TensorValue], Schedule]:
        """What can be refused before anything is asked."""
        if len(request.id) > MAX_ID_CHARS:
            raise InvalidRequest(f"id: {len(request.id)} characters, at most {MAX_ID_CHARS} are allowed", "id")
        if (number := len(request.parameters)) > MAX_PARAMETERS:
            raise InvalidRequest(f"parameters: {number} of them, at most {MAX_PARAMETERS} are allowed", "parameters")
        check_outputs(target.name, target.signature, [wish.name for wish in request.outputs])
        given = check_inputs(target.name, target.signature, request.inputs)
        name, num_items = _items(target, given)
        if not 1 <= num_items <= self._most(target.kind):
            raise InvalidRequest(f"{name}: {num_items} items, from 1 to {self._most(target.kind)} are allowed", name)
        return given, schedule_of(request.parameters)

    def _most(self, kind: str) -> int:
        limits = self._limits
        return {
            "diffusion": limits.max_images,
            "llm": limits.max_prompts,
            "embedding": limits.max_embedding_inputs,
            "head": limits.max_head_rows,
        }.get(kind, limits.max_pipeline_items)

    async def _answer(
        self, target: Target, given: Mapping[str, TensorValue], parameters: Parameters, schedule: Schedule
    ) -> Answer:
        name, specs = target.name, target.signature.inputs
        if target.kind == "diffusion":
            return await answers.images(self._service, image_requests(name, given, specs, parameters, schedule))
        if target.kind == "llm":
            return await answers.texts(self._service, text_requests(name, given, specs, parameters))
        if target.kind == "embedding":
            (value,) = given.values()
            items = texts(value) if value.datatype == "BYTES" else value.data.tolist()
            waits = {"priority": schedule.priority, "timeout_s": schedule.timeout_s}
            fields = {"model": name, "input": items, **waits}
            return await answers.embeddings(self._service, as_record(EmbeddingRequest, fields))
        if target.kind == "head":
            return await answers.scores(self._service, HeadRequest(name, given["features"].data))
        pipeline = PipelineRequest(name, given, schedule.priority, schedule.timeout_s)
        return await answers.pipeline(self._service, pipeline, _items(target, given)[1])

    def _succeeded(self, model: str, answer: Answer, timings_ms: Mapping[str, float]) -> None:
        if self._recorder:
            self._recorder.succeeded(
                model,
                timings_ms=timings_ms,
                batch_size=answer.batch_size,
                cache_hits=answer.cache_hits,
                cache_misses=answer.cache_misses,
            )


def _items(target: Target, given: Mapping[str, TensorValue]) -> tuple[str, int]:
    """The input that says how many items the request has, and how many."""
    if target.kind == "embedding" and len(given) != 1:
        raise InvalidRequest(f"model {target.name!r} takes either text or input_ids, got {len(given)} of them")
    counts = [(name, value.shape[0] if value.shape else 1) for name, value in given.items()]
    if target.kind == PIPELINE:
        return max(counts, key=lambda count: count[1], default=("inputs", 1))
    leading = target.signature.inputs[0].name if target.kind != "embedding" else counts[0][0]
    return next(count for count in counts if count[0] == leading)


def _wished(
    outputs: Sequence[TensorValue], wishes: Sequence[OutputWish], labels: Sequence[str] = ()
) -> tuple[TensorValue, ...]:
    if not wishes:
        return tuple(outputs)
    by_name = {value.name: value for value in outputs}
    return tuple(
        classified(by_name[wish.name], wish.num_classes, labels) if wish.num_classes else by_name[wish.name]
        for wish in wishes
    )


def _told(warnings: Sequence[str]) -> dict[str, str]:
    """As parameters of a response, which are plain values."""
    return {"warnings": "; ".join(warnings)} if warnings else {}


def _piece(response: InferResponse, *, is_last: bool) -> InferResponse:
    return replace(response, parameters={**response.parameters, "triton_final_response": is_last})
