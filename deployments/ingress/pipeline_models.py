"""Pipelines as models of the OpenAI protocol: whoever asks need not know that several models answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from deployments.errors import GenerationFailed, InvalidRequest
from deployments.ingress.catalog import Endpoint
from deployments.pipelines.edge_types import IMAGE, TEXT, EdgeType
from deployments.pipelines.pipelines import Pipelines
from deployments.pipelines.records import (
    NUMPY_DTYPES,
    PipelineRequest,
    PipelineResult,
    Signature,
    TensorSpec,
    TensorValue,
    text_tensor,
)
from deployments.records import (
    CacheUse,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    EmbeddingResult,
    ImageRequest,
    ImageResult,
    TextResult,
)


class PipelineModels:
    """The pipelines that fit an OpenAI endpoint.

    Methods raise the ServiceErrors of `deployments.errors`, InvalidRequest for an option that the pipeline lacks.
    """

    def __init__(
        self, pipelines: Pipelines, run_pipeline: Callable[[PipelineRequest], Awaitable[PipelineResult]]
    ) -> None:
        self._pipelines = pipelines
        self._run_pipeline = run_pipeline

    def endpoint_of(self, name: str) -> Endpoint | None:
        """Return the endpoint that a pipeline fits, None when it fits none. Raises ModelUnavailable."""
        role = _openai_role(self._pipelines.signature(name))
        return role.endpoint if role else None

    async def generate(self, request: ImageRequest) -> ImageResult:
        """Return images. Each image after the first has the next seed, where the pipeline takes one."""
        role = self._role(request.model, "images")
        given = _given(request, without={"model", "prompt", "n"})
        count = request.n
        if request.seed is not None:
            given["seed"] = [request.seed + number for number in range(count)]
        result = await self._run(request.model, role, [request.prompt] * count, given, request)
        return ImageResult(
            model=request.model,
            images=list(result.outputs[role.output].data),
            seed=request.seed,
            num_inference_steps=request.num_inference_steps,
            timings_ms=result.timings_ms,
            switch=None,
            cache=CacheUse(0, 0),
            warnings=result.warnings,
        )

    async def write(self, request: ChatRequest | CompletionRequest) -> TextResult:
        """Return a text. Of a chat, the pipeline gets the last turn: it has no memory of its own."""
        role = self._role(request.model, "text")
        text = request.messages[-1].text if isinstance(request, ChatRequest) else request.prompt
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt: pipeline {request.model!r} takes one text", "prompt")
        given = _given(request, without={"model", "messages", "prompt"})
        result = await self._run(request.model, role, [text], given, request)
        answer: bytes = result.outputs[role.output].data[0]
        return TextResult(
            model=request.model,
            text=answer.decode("utf-8", "replace"),
            finish_reason="stop",
            num_prompt_tokens=0,
            num_completion_tokens=0,
            timings_ms=result.timings_ms,
            warnings=result.warnings,
        )

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Return one vector for each text."""
        role = self._role(request.model, "embeddings")
        texts = [text for text in request.input if isinstance(text, str)]
        if len(texts) != len(request.input):
            raise InvalidRequest(f"input: pipeline {request.model!r} takes text, not token ids", "input")
        result = await self._run(request.model, role, texts, {}, request)
        vectors = result.outputs[role.output].data
        if not np.isfinite(vectors).all():  # a function's: JSON cannot write them, and nobody can search with them
            raise GenerationFailed(f"pipeline {request.model!r}: {role.output} has numbers that are not finite")
        return EmbeddingResult(
            model=request.model,
            embeddings=list(vectors),
            num_tokens=0,
            timings_ms=result.timings_ms,
            cache=CacheUse(0, 0),
            warnings=result.warnings,
        )

    async def _run(
        self, model: str, role: _OpenAiRole, texts: list[str], given: dict[str, Any], request: Any
    ) -> PipelineResult:
        signature = self._pipelines.signature(model)
        specs = {spec.name: spec for spec in signature.inputs}
        unknown = sorted(given.keys() - set(role.options))
        if unknown:
            options = ", ".join(role.options) or "none"
            raise InvalidRequest(f"{unknown[0]}: pipeline {model!r} does not take it (options: {options})", unknown[0])
        inputs = {name: _tensor(specs[name], value, len(texts)) for name, value in given.items()}
        inputs[role.input] = text_tensor(role.input, texts)
        asked = PipelineRequest(model, inputs, request.priority, request.timeout_s, request.tenant)
        return await self._run_pipeline(asked)

    def _role(self, model: str, endpoint: Endpoint) -> _OpenAiRole:
        role = _openai_role(self._pipelines.signature(model))
        if role is None or role.endpoint != endpoint:
            fits = f"is one of {role.endpoint}" if role else "fits no endpoint of /v1; ask /v2/models"
            raise InvalidRequest(f"pipeline {model!r} does not make {endpoint}: it {fits}", "model")
        return role


# Options of models that are off where nobody says them: to say so asks for nothing.
_HOLDS_ANYWAY: Final = {
    "true_cfg_scale": 1.0,
    "deterministic": False,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def _given(request: Any, *, without: set[str]) -> dict[str, Any]:
    """Return the fields that the request sets itself, but for the options that every request may have."""
    ours = {"priority", "timeout_s", "tenant", "model_version"}
    ours |= {"adapter_versions", "text_padding", "long_text", "merges_lora"}
    said = request.model_fields_set - without - ours
    defaults = {name: field.default for name, field in type(request).model_fields.items()} | _HOLDS_ANYWAY
    values = {name: getattr(request, name) for name in said}
    return {
        name: value
        for name, value in values.items()
        if value is not None and (defaults[name] is None or value != defaults[name])
    }


def _tensor(spec: TensorSpec, value: Any, count: int) -> TensorValue:
    values = value if isinstance(value, list) else [value] * count
    try:
        if spec.datatype == "BYTES":
            return text_tensor(spec.name, values)
        return TensorValue(spec.name, spec.datatype, np.array(values, dtype=NUMPY_DTYPES[spec.datatype]))
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{spec.name}: not a {spec.datatype}: {error}", spec.name) from None


@dataclass(frozen=True, slots=True)
class _OpenAiRole:
    """The endpoint that a pipeline fits.

    `input` takes the prompt, `output` is the answer. `options` are inputs that may be left out: those of
    the name of a field of the protocol (`seed`, say) take its value.
    """

    endpoint: Endpoint
    input: str
    output: str
    options: tuple[str, ...]


def _openai_role(signature: Signature) -> _OpenAiRole | None:
    """Return the role of a pipeline by its first output; None unless its only required input is a text."""
    required = [spec for spec in signature.inputs if not spec.optional]
    if len(required) != 1 or EdgeType(required[0].datatype, required[0].shape) != TEXT:
        return None
    output = signature.outputs[0]
    given = EdgeType(output.datatype, output.shape)
    options = tuple(spec.name for spec in signature.inputs if spec.optional)
    if given == IMAGE:
        return _OpenAiRole("images", required[0].name, output.name, options)
    if given == TEXT:
        return _OpenAiRole("text", required[0].name, output.name, options)
    if given.datatype == "FP32" and len(given.shape) == 2:
        return _OpenAiRole("embeddings", required[0].name, output.name, options)
    return None
