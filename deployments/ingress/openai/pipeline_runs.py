"""GET /v1/pipelines, and POST /v1/pipelines/{pipeline}/runs: a pipeline's parts, and its stages as they run."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from configs.cluster import LimitsConfig
from configs.pipeline import PipelineConfig, StageConfig, is_optional, plain_type
from deployments.ingress.jobs.desk import JobDesk, is_for_later
from deployments.ingress.jobs.routes import BACKGROUND, BEGUN, begun_response
from deployments.ingress.messages.bodies import JsonRoute
from deployments.ingress.messages.responses import (
    INFERENCE_ERRORS,
    Answer,
    call_aside,
    documented,
    error_event,
    event_of,
    json_response,
    json_text,
    rounded,
    stream_events,
)
from deployments.ingress.openai.image_decoders import ImageReaders
from deployments.ingress.openai.image_files import encode_image
from deployments.ingress.openai.uploads import decode_base64_within
from deployments.ingress.service.service import Service
from deployments.pipelines.edge_types import IMAGE, EdgeType
from deployments.pipelines.items import item_tensor
from deployments.pipelines.records import PipelineRequest, PipelineResult, TensorSpec, TensorValue
from deployments.pipelines.runner import StageProgress
from deployments.records import RequestModel
from deployments.records.errors import InvalidRequest
from deployments.replicas.output_channel import OutputChannel

_MAX_SHOWN: Final = 4096  # numbers of an output; a tensor of more is for /v2
_Pieces = OutputChannel[StageProgress | PipelineResult]


class StageAnswer(TypedDict):
    """A stage: its model, tokenizer or function, the stages and inputs that it needs, and its parameters as written."""

    name: str
    kind: Literal["model", "tokenizer", "function"]
    target: str
    needs: list[str]
    inputs: dict[str, Any]


class InputAnswer(TypedDict):
    """An input. `type` is as in the config, without `optional`."""

    name: str
    type: str
    optional: bool


class PipelineAnswer(Answer):
    """A pipeline. `outputs` are the config's references by name; `problem` is why it cannot run now."""

    id: str
    description: str
    inputs: list[InputAnswer]
    stages: list[StageAnswer]
    outputs: dict[str, str]
    problem: str | None


class PipelinesAnswer(Answer):
    """The pipelines of the config."""

    pipelines: list[PipelineAnswer]


class RunBody(RequestModel):
    """The inputs of one item by name: texts, numbers, lists of numbers, and images in base64."""

    inputs: dict[str, Any] = Field(max_length=64)
    background: bool = Field(False, description=BACKGROUND)


class _StageEvent(Answer):
    type: Literal["pipeline.stage"]
    stage: str
    state: Literal["running", "done"]
    ms: float | None


class _CompletedEvent(Answer):
    """The outputs: texts, numbers and lists of them; an image as {"b64_json": PNG}, a large tensor as its shape."""

    type: Literal["pipeline.completed"]
    outputs: dict[str, Any]
    timings_ms: dict[str, float]
    warnings: tuple[str, ...]


def create_pipelines_router(service: Service, readers: ImageReaders, limits: LimitsConfig, desk: JobDesk) -> APIRouter:
    """Return the routes."""
    router = APIRouter(tags=["models"], route_class=JsonRoute)

    @router.get("/v1/pipelines", response_model=PipelinesAnswer)
    async def pipelines() -> Response:
        """Every pipeline of the config, with its stages."""
        known = service.pipelines
        found = [_described(known.config(name), known.problem(name)) for name in known.names()]
        return json_response(PipelinesAnswer(pipelines=found))

    @router.post(
        "/v1/pipelines/{pipeline}/runs",
        response_class=Response,
        responses=documented(*INFERENCE_ERRORS, _409="the idempotency key is that of another request")
        | BEGUN
        | {200: {"content": {"text/event-stream": {}}}},
    )
    async def run(pipeline: str, body: RunBody, request: Request) -> Response:
        """Run a pipeline on one item: server-sent events when a stage begins and ends, then its outputs."""
        specs = {spec.name: spec for spec in service.pipelines.signature(pipeline).inputs}
        read = partial(_tensors, body.inputs, specs, limits)
        has_images = any(_is_image(specs[name]) for name in body.inputs.keys() & specs.keys())
        tensors = await (readers.read(read) if has_images else asyncio.to_thread(read))
        if is_for_later(body.background):
            return begun_response(await desk.begin(request, {"model": pipeline}))
        record = PipelineRequest(pipeline, tensors)

        async def produce(pieces: _Pieces) -> None:
            await pieces.send(await service.run_pipeline(record, on_stage=pieces.put))

        return await stream_events(OutputChannel(produce), _events, error_event)

    return router


async def _events(pieces: AsyncIterator[StageProgress | PipelineResult]) -> AsyncIterator[str]:
    async for piece in pieces:
        if isinstance(piece, PipelineResult):
            yield await call_aside(sum(value.data.nbytes for value in piece.outputs.values()), _completed, piece)
            continue
        state: Literal["running", "done"] = "running" if piece.took_ms is None else "done"
        ms = None if piece.took_ms is None else round(piece.took_ms, 2)
        event = _StageEvent(type="pipeline.stage", stage=piece.stage, state=state, ms=ms)
        yield event_of(json_text(event), event.type)


def _completed(result: PipelineResult) -> str:
    completed = _CompletedEvent(
        type="pipeline.completed",
        outputs={name: _shown(value) for name, value in result.outputs.items()},
        timings_ms=rounded(result.timings_ms),
        warnings=result.warnings,
    )
    return event_of(json_text(completed), completed.type)


def _shown(value: TensorValue) -> Any:
    """Return the one item of an output as JSON has it."""
    item = value.data[0]
    if value.datatype == "BYTES":
        return (
            item.decode("utf-8", "replace")
            if isinstance(item, bytes)
            else [one.decode("utf-8", "replace") for one in item]
        )
    if value.datatype == "UINT8" and item.ndim == 3 and item.shape[2] == 3:
        return {"b64_json": base64.b64encode(encode_image(np.ascontiguousarray(item), "png")).decode()}
    if item.size > _MAX_SHOWN:
        return {"datatype": value.datatype, "shape": list(item.shape)}
    numbers = item.astype(np.float64) if value.datatype in ("BF16", "FP16") else item
    if np.issubdtype(numbers.dtype, np.floating) and not np.isfinite(numbers).all():
        return [str(number) for number in numbers.ravel().tolist()]  # JSON has no name for them
    return numbers.tolist()


def _tensors(
    inputs: Mapping[str, Any], specs: Mapping[str, TensorSpec], limits: LimitsConfig
) -> dict[str, TensorValue]:
    """Return tensors of one item. The pipeline checks unknown names. Raises InvalidRequest. Blocks."""
    given = {name: value for name, value in inputs.items() if value is not None}
    return {name: _tensor(name, value, specs.get(name), limits) for name, value in given.items()}


def _tensor(name: str, value: Any, spec: TensorSpec | None, limits: LimitsConfig) -> TensorValue:
    if spec is None or not _is_image(spec):
        return item_tensor(name, value, spec)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: expected a PNG, JPEG or WebP file in base64", name)
    pixels = decode_base64_within(value, name, limits).pixels
    return TensorValue(name, spec.datatype, pixels[np.newaxis])


def _is_image(spec: TensorSpec) -> bool:
    return EdgeType(spec.datatype, spec.shape) == IMAGE


def _described(config: PipelineConfig, problem: str | None) -> PipelineAnswer:
    return PipelineAnswer(
        id=config.id,
        description=config.description,
        inputs=[
            InputAnswer(name=name, type=plain_type(type_), optional=is_optional(type_))
            for name, type_ in config.inputs.items()
        ],
        stages=[_stage(stage) for stage in config.stages],
        outputs=dict(config.outputs),
        problem=problem,
    )


def _stage(stage: StageConfig) -> StageAnswer:
    kind: Literal["model", "tokenizer", "function"] = (
        "model" if stage.model else "tokenizer" if stage.tokenizer else "function"
    )
    needs = sorted({reference.source for reference in stage.references.values()})
    target = stage.model or stage.tokenizer or stage.function or ""
    return StageAnswer(name=stage.name, kind=kind, target=target, needs=needs, inputs=dict(stage.inputs))
