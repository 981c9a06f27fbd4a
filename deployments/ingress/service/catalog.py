"""The ingress's view of the models: a local copy of the directory, and the registry for unknown ones.

Pipelines are models of the OpenAI protocol as well: a client need not know that several models answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeVar

import numpy as np
from ray.exceptions import RayActorError

from cluster.records.errors import ModelUnknown, WeightsUnavailable
from cluster.registry.actor import Method, WeightRegistry
from cluster.registry.directory import ModelRecord
from cluster.registry.snapshot import RegistrySnapshot
from deployments.engines.llm.models.stock_classes import SEEING
from deployments.engines.stock.known import PipelineSource, is_stock_class, knows_class, read_class
from deployments.engines.stock.text_parts import text_parts
from deployments.ingress.messages.terms import pools_of
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
from deployments.records.errors import GenerationFailed, InvalidRequest, ModelUnavailable, UnknownModel
from weights.formats.language_models import LanguageModelDetails
from weights.formats.learned_words import WORDS_CLASS, candidates_in, words_in
from weights.programs.signature import ProgramSignature
from weights.records.errors import listed

_FoundT = TypeVar("_FoundT")
_ANSWERING: Final = ("ready", "updating", "unloaded")  # states of models that can be asked
Endpoint = Literal["images", "larger images", "video", "audio", "text", "embeddings", "ranks", "classes"]  # of /v1
_ENDPOINTS: Final[dict[str | None, Endpoint]] = {
    "diffusion": "images",
    "upscaler": "larger images",
    "llm": "text",
    "embedding": "embeddings",
    "reranker": "ranks",
    "classifier": "classes",
}
AdapterKind = Literal["adapter", "controlnet", "ip_adapter"]
# The field that names the adapters, and their kind.
_ADAPTERS: Final[dict[AdapterKind, tuple[str, str]]] = {
    "adapter": ("lora", "adapter"),
    "controlnet": ("control", "ControlNet"),
    "ip_adapter": ("ip_adapter", "IP-Adapter"),
}
_WANTED = {**_ENDPOINTS, "head": "scores of features", "program": "tensors by a program"}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The listing of one model, adapter or pipeline. `error` names file and tensor when it is unavailable.

    `fingerprint` identifies the served version; `labels` name the outputs of a head. `endpoint` is its path
    under /v1, None for an adapter, say; a language model takes texts to embed as well. A model that
    `encodes_itself` has its text encoders in the worker, and not in the text encoder service. A model that `sees` takes
    images in chats; `facts` are `language_model_facts`. `program` has the inputs and outputs of a stored program.
    """

    id: str
    kind: str | None
    state: str
    nbytes: int = 0
    base: tuple[str, ...] = ()
    description: str = ""
    error: str = ""
    defaults: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    labels: tuple[str, ...] = ()
    endpoint: Endpoint | None = None
    encodes_itself: bool = False
    sees: bool = False
    facts: Mapping[str, bool | int] = field(default_factory=dict)
    program: ProgramSignature | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """The answer to probes. `kinds` are the kinds of usable models, "pipeline" among them.

    `is_starting`: configured models are still entering the store, or the first of their replicas has not come.
    """

    num_models: int
    num_ready: int
    kinds: frozenset[str | None]
    is_starting: bool

    @classmethod
    def of(cls, models: Iterable[tuple[str | None, str]], pools: Set[str], *, is_entering: bool) -> Health:
        """Count models by their kinds and states. `pools` are those with usable replicas."""
        models = list(models)
        usable = [kind for kind, state in models if state in _ANSWERING]
        kinds = [kind for kind in usable if pools_of(kind) <= pools]
        return cls(len(models), len(kinds), frozenset(kinds), is_entering or len(kinds) < len(usable))


class Catalog:
    """The look-up of models. No call leaves this process for a model that the local copy knows."""

    def __init__(self, snapshot: RegistrySnapshot) -> None:
        self._snapshot = snapshot

    async def all_records(self) -> list[ModelRecord]:
        """Return all models and adapters."""
        await self._snapshot.ready()
        return list(self._snapshot)

    async def find_record(self, id_: str) -> ModelRecord:
        """Return a model; wait for one that is being registered. Raises UnknownModel with the known names."""
        await self._snapshot.ready()
        found = self._snapshot.find_model(id_)
        if found is not None and found.state != "registering":
            return found
        return await self._call_registry(WeightRegistry.find_model, id_)

    async def details(self, id_: str) -> LanguageModelDetails:
        """Return the facts in a language model's files. Raises UnknownModel, ModelUnavailable."""
        return await self._call_registry(WeightRegistry.model_details, id_)

    async def solver_config(self, id_: str) -> Mapping[str, Any]:
        """Return the config of a pipeline's solver. Raises UnknownModel, ModelUnavailable."""
        return await self._call_registry(WeightRegistry.solver_config, id_)

    async def _call_registry(self, method: Method[[str], _FoundT], id_: str) -> _FoundT:
        """Call a method of the registry for a model."""
        try:
            return await self._snapshot.call_registry(method, id_)
        except ModelUnknown as error:
            raise UnknownModel(str(error), "model") from None
        except WeightsUnavailable as error:
            raise ModelUnavailable(str(error), "model") from None
        except RayActorError:
            raise ModelUnavailable(
                f"model {id_!r}: the directory of models is restarting; try again", "model"
            ) from None

    async def find_usable(self, id_: str, *kinds: str) -> ModelRecord:
        """Return a usable model of one of the kinds; errors name the first kind.

        Raises UnknownModel, ModelUnavailable, or InvalidRequest for a model of another kind or without room.
        """
        record = await self.find_record(id_)
        if not record.serves:
            raise ModelUnavailable(f"model {id_!r} is unavailable: {record.error}", "model")
        if record.state == "does_not_fit":
            raise InvalidRequest(f"model {id_!r} does not fit this cluster: {record.error}", "model")
        if record.kind not in kinds:
            fitting = listed(other.id for other in await self.all_records() if other.kind in kinds)
            raise InvalidRequest(
                f"model {id_!r} ({record.kind}) does not make {_WANTED[kinds[0]]}; models that do: {fitting}", "model"
            )
        if record.state == "unloaded":
            self._snapshot.notify_registry(WeightRegistry.want, id_)
        return record

    async def check_sees(self, record: ModelRecord) -> None:
        """Raise InvalidRequest, with the models that see images, if this one does not."""
        if not _sees_images(record):
            seeing = listed(other.id for other in await self.all_records() if _sees_images(other))
            raise InvalidRequest(f"model {record.id!r} sees no images; models that do: {seeing}", "messages")

    async def find_adapter(self, id_: str, model: str, kind: AdapterKind) -> ModelRecord:
        """Return a LoRA, a ControlNet or an IP-Adapter of `model`.

        Raises UnknownModel with those that fit `model`, or ModelUnavailable.
        """
        param, what = _ADAPTERS[kind]
        try:
            record = await self.find_record(id_)
        except UnknownModel:
            record = None
        if record is None or model not in record.base or record.kind not in (kind, None):
            known = [other for other in await self.all_records() if model in other.base and other.kind in (kind, None)]
            fitting = listed(other.id for other in known)
            raise UnknownModel(f"no {what} {id_!r} for {model!r} (known: {fitting})", param)
        if not record.serves:
            raise ModelUnavailable(f"{what} {id_!r} is unavailable: {record.error}", param)
        return record

    async def learned_words(self, text: str, model: str) -> list[str]:
        """Return the textual inversions of a model that a text names; unusable ones stay plain words."""
        await self._snapshot.ready()
        words = [one for one in self._snapshot if one.class_name == WORDS_CLASS and model in one.base]
        named = candidates_in(text) if words else set()
        fitting = [one for one in words if one.id.lower() in named]
        return sorted(words_in(text, [one.id for one in fitting if one.serves]))


def _sees_images(record: ModelRecord) -> bool:
    """Return whether it is a language model that takes images in chats."""
    return record.kind == "llm" and record.class_name in SEEING


def endpoint_of(record: ModelRecord) -> Endpoint | None:
    """Return the endpoint of a model. The first call for a class reads the class's source, which takes 0.1 s."""
    source = _source_of(record)
    return _ENDPOINTS.get(record.kind) if source is None else source.makes


def _source_of(record: ModelRecord) -> PipelineSource | None:
    """Return the source of a class that diffusers' own code runs, None for any other model."""
    is_stock = record.kind == "diffusion" and is_stock_class(record.class_name) and knows_class(record.class_name)
    return read_class(record.class_name) if is_stock else None


def card_of(record: ModelRecord) -> ModelCard:
    """Return the public part of a model's record. Blocks as `endpoint_of` does."""
    source = _source_of(record)
    return ModelCard(
        id=record.id,
        kind="workflow" if record.workflow is not None else record.kind,
        state=record.state,
        nbytes=record.nbytes,
        base=record.base,
        description=record.description,
        error=record.error,
        defaults=record.defaults.model_dump(exclude_none=True),
        fingerprint=record.fingerprint,
        labels=record.features.labels,
        endpoint=endpoint_of(record),
        encodes_itself=source is not None and not text_parts(record.class_name),
        sees=_sees_images(record),
        facts=record.variant if record.kind == "llm" else {},
        program=record.signature,
    )


class PipelineRunner(Protocol):
    """The pipelines themselves, or a service that lets their requests wait for a slot first."""

    async def run_pipeline(self, request: PipelineRequest) -> PipelineResult:
        """Return the outputs of a request."""


class PipelineModels:
    """The pipelines that fit an OpenAI endpoint.

    Methods raise the ServiceErrors of `deployments.records.errors`, InvalidRequest for an option that the pipeline
    lacks.
    """

    def __init__(self, pipelines: Pipelines, runner: PipelineRunner) -> None:
        self._pipelines = pipelines
        self._runner = runner

    def endpoint_of(self, name: str) -> Endpoint | None:
        """Return the endpoint that a pipeline fits, None when it fits none. Raises ModelUnavailable."""
        role = _openai_role(self._pipelines.signature(name))
        return role.endpoint if role else None

    async def generate(self, request: ImageRequest) -> ImageResult:
        """Return images. Each image after the first has the next seed, if the pipeline takes one."""
        role = self._role(request.model, "images")
        given = _set_fields(request, without={"model", "prompt", "n"})
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
        given = _set_fields(request, without={"model", "messages", "prompt"})
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
        if not np.isfinite(vectors).all():  # from a function: JSON cannot write them, and no search can use them
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
        return await self._runner.run_pipeline(asked)

    def _role(self, model: str, endpoint: Endpoint) -> _OpenAiRole:
        role = _openai_role(self._pipelines.signature(model))
        if role is None or role.endpoint != endpoint:
            fits = f"is one of {role.endpoint}" if role else "fits no endpoint of /v1; ask /v2/models"
            raise InvalidRequest(f"pipeline {model!r} does not make {endpoint}: it {fits}", "model")
        return role


# Options of models that are off by default: to switch them off asks for nothing.
_HOLDS_ANYWAY: Final = {
    "true_cfg_scale": 1.0,
    "deterministic": False,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


def _set_fields(request: Any, *, without: set[str]) -> dict[str, Any]:
    """Return the fields that the request sets itself, without the options common to every request."""
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

    `input` takes the prompt, `output` is the answer. `options` are optional inputs: those with
    the name of a field of the protocol (`seed`, say) take its value.
    """

    endpoint: Endpoint
    input: str
    output: str
    options: tuple[str, ...]


def _openai_role(signature: Signature) -> _OpenAiRole | None:
    """Return the role of a pipeline by its first output; None unless its only required input is a text, or its
    `prompt` is one and nothing is required.
    """
    required = [spec for spec in signature.inputs if not spec.optional]
    required = required or [spec for spec in signature.inputs if spec.name == "prompt"]
    if len(required) != 1 or EdgeType(required[0].datatype, required[0].shape) != TEXT:
        return None
    output = signature.outputs[0]
    given = EdgeType(output.datatype, output.shape)
    options = tuple(spec.name for spec in signature.inputs if spec is not required[0])
    if given == IMAGE:
        return _OpenAiRole("images", required[0].name, output.name, options)
    if given == TEXT:
        return _OpenAiRole("text", required[0].name, output.name, options)
    if given.datatype == "FP32" and len(given.shape) == 2:
        return _OpenAiRole("embeddings", required[0].name, output.name, options)
    return None
