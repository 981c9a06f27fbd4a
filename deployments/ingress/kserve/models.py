"""Models and pipelines in the Open Inference Protocol: signature, readiness, Triton's configuration.

Source of the configuration: Triton, "Model Configuration Extension": the protobuf ModelConfig as JSON, the parts that
have a meaning here. Its dimensions leave out the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, NotRequired

from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from configs.batching import BatchingConfig
from deployments.ingress.kserve.tensors import VERSION, ModelMetadata
from deployments.ingress.service.catalog import ModelCard
from deployments.ingress.service.service import PROBE_TIMEOUT_S, Service
from deployments.pipelines.records import Signature, TensorSpec, TensorValue, fits_shape, program_specs
from deployments.records.errors import InvalidRequest, ModelUnavailable, UnknownModel


def _option(name: str, datatype: str) -> TensorSpec:
    return TensorSpec(name, datatype, (-1,), optional=True)  # type: ignore[arg-type]  # literals below


# Optional inputs have one element for all prompts or one for each. Their names are the fields of the records in
# `deployments/records/`, save `lora` ("name:scale,name"), `ip_adapter` ("name:scale", which reads `ip_adapter_image`)
# and `chat` (answer the text as one turn of a chat).
_DIFFUSION: Final = Signature(
    inputs=(
        TensorSpec("prompt", "BYTES", (-1,)),
        _option("negative_prompt", "BYTES"),
        _option("seed", "INT64"),
        _option("num_inference_steps", "INT32"),
        _option("guidance_scale", "FP32"),
        _option("true_cfg_scale", "FP32"),
        _option("max_sequence_length", "INT32"),
        _option("clip_skip", "INT32"),
        _option("scheduler", "BYTES"),
        _option("width", "INT32"),
        _option("height", "INT32"),
        _option("lora", "BYTES"),
        TensorSpec("init_image", "UINT8", (-1, -1, -1, 3), optional=True),
        TensorSpec("mask_image", "UINT8", (-1, -1, -1), optional=True),
        _option("strength", "FP32"),
        _option("prompt_syntax", "BYTES"),
        _option("ip_adapter", "BYTES"),
        TensorSpec("ip_adapter_image", "UINT8", (-1, -1, -1, 3), optional=True),
    ),
    outputs=(TensorSpec("images", "UINT8", (-1, -1, -1, 3)), TensorSpec("seed", "INT64", (-1,))),
)
# Every element of `stop` is for every prompt. The prompts' embedding is made only on request, and alone.
EMBEDDING: Final = "embedding"
LLM: Final = Signature(
    inputs=(
        TensorSpec("text_input", "BYTES", (-1,)),
        _option("max_tokens", "INT32"),
        _option("temperature", "FP32"),
        _option("top_p", "FP32"),
        _option("top_k", "INT32"),
        _option("seed", "INT64"),
        _option("stop", "BYTES"),
        _option("lora", "BYTES"),
        _option("chat", "BOOL"),
    ),
    outputs=(
        TensorSpec("text_output", "BYTES", (-1,)),
        TensorSpec("finish_reason", "BYTES", (-1,)),
        TensorSpec("num_input_tokens", "INT64", (-1,)),
        TensorSpec("num_output_tokens", "INT64", (-1,)),
        TensorSpec(EMBEDDING, "FP32", (-1, -1)),
    ),
)
# Exactly one of the two inputs.
_EMBEDDING: Final = Signature(
    inputs=(
        TensorSpec("text", "BYTES", (-1,), optional=True),
        TensorSpec("input_ids", "INT64", (-1, -1), optional=True),
    ),
    outputs=(TensorSpec(EMBEDDING, "FP32", (-1, -1)),),
)
_HEAD: Final = Signature(
    inputs=(TensorSpec("features", "FP32", (-1, -1)),),
    outputs=(TensorSpec("scores", "FP32", (-1, -1)),),
)
# There is one query for all documents, or one for each.
_RERANKER: Final = Signature(
    inputs=(TensorSpec("text", "BYTES", (-1,)), TensorSpec("query", "BYTES", (-1,))),
    outputs=(TensorSpec("score", "FP32", (-1,)),),
)
_CLASSIFIER: Final = Signature(
    inputs=(TensorSpec("text", "BYTES", (-1,)),),
    outputs=(TensorSpec("scores", "FP32", (-1, -1)),),
)
_UPSCALER: Final = Signature(
    inputs=(TensorSpec("image", "UINT8", (-1, -1, -1, 3)),),
    outputs=(TensorSpec("images", "UINT8", (-1, -1, -1, 3)),),
)
_SIGNATURES: Final[Mapping[str, Signature]] = {
    "diffusion": _DIFFUSION,
    "llm": LLM,
    "embedding": _EMBEDDING,
    "reranker": _RERANKER,
    "classifier": _CLASSIFIER,
    "head": _HEAD,
    "upscaler": _UPSCALER,
}


def _described(specs: Sequence[TensorSpec]) -> str:
    """Return `prompt BYTES [-1], seed INT64 [-1] (optional)`."""
    return ", ".join(
        f"{spec.name} {spec.datatype} {list(spec.shape)}{' (optional)' if spec.optional else ''}" for spec in specs
    )


def check_inputs(model: str, signature: Signature, inputs: Sequence[TensorValue]) -> dict[str, TensorValue]:
    """Return the inputs by name. Raises InvalidRequest naming the model's inputs."""
    takes = f"model {model!r} takes {_described(signature.inputs)}"
    specs = {spec.name: spec for spec in signature.inputs}
    given: dict[str, TensorValue] = {}
    for value in inputs:
        spec = specs.get(value.name)
        if spec is None:
            raise InvalidRequest(f"unknown input {value.name!r}; {takes}", value.name)
        if value.name in given:
            raise InvalidRequest(f"input {value.name!r} is given twice", value.name)
        if value.datatype != spec.datatype or not fits_shape(value.shape, spec.shape):
            raise InvalidRequest(
                f"input {value.name!r} is {value.datatype} {list(value.shape)}, "
                f"expected {spec.datatype} {list(spec.shape)}",
                value.name,
            )
        given[value.name] = value
    missing = [spec.name for spec in signature.inputs if not spec.optional and spec.name not in given]
    if missing:
        raise InvalidRequest(f"missing input {missing[0]!r}; {takes}", missing[0])
    return given


def check_outputs(model: str, signature: Signature, names: Sequence[str]) -> None:
    """Raise InvalidRequest for an unknown output, naming the model's outputs, and for one that is named twice."""
    known = {spec.name for spec in signature.outputs}
    for position, name in enumerate(names):
        if name not in known:
            gives = _described(signature.outputs)
            raise InvalidRequest(f"unknown output {name!r}; model {model!r} gives {gives}", name)
        if name in names[:position]:
            raise InvalidRequest(f"output {name!r} is asked for twice", name)


PIPELINE: Final = "pipeline"
PROGRAM: Final = "program"
_KINDS: Final = (*_SIGNATURES, PROGRAM, PIPELINE)
_READY_STATES: Final = ("ready", "updating")


async def find_model(service: Service, model: str, version: str) -> tuple[ModelCard, Signature]:
    """Return a model or pipeline that answers requests, and its signature.

    Waits for a model that is being registered. Raises UnknownModel, ModelUnavailable, and InvalidRequest for an
    adapter, which answers no requests of its own.
    """
    _check_version(model, version)
    card = await service.listing.model(model)
    if card.kind == PIPELINE:
        return card, service.pipelines.signature(model)
    if card.kind is None:
        raise ModelUnavailable(f"model {model!r} is unavailable: {card.error}", "model")
    if card.program is not None:
        return card, program_specs(card.program)
    if card.kind not in _SIGNATURES:
        raise InvalidRequest(
            f"model {model!r} ({card.kind}) answers no requests of its own; kinds that do: {', '.join(_KINDS)}", "model"
        )
    return card, _SIGNATURES[card.kind]


async def is_ready(service: Service, model: str, version: str) -> bool:
    """Return whether `model` answers requests now: not while it is registered nor, as in Triton, when unloaded."""
    _check_version(model, version)
    cards = {card.id: card for card in await service.listing.models()}
    card = cards.get(model) or await service.listing.model(model)
    return card.state in _READY_STATES and card.kind in _KINDS


async def is_any_answering(service: Service) -> bool:
    """Return whether all configured models have come or failed, and one can be used. Unloaded ones count.

    False when the models are not known within `PROBE_TIMEOUT_S`: probes do not wait until they are.
    """
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            health = await service.listing.health()
            return not health.kinds.isdisjoint(_KINDS)
    except TimeoutError:
        return False


def _check_version(model: str, version: str) -> None:
    if version not in ("", VERSION):
        raise UnknownModel(f"model {model!r} has no version {version!r} (known: {VERSION})", "model")


class TensorConfiguration(TypedDict):
    """An input or output. `dims` leave out the batch, if there is one."""

    name: str
    data_type: str
    dims: list[int]
    optional: NotRequired[bool]


class BatchingConfiguration(TypedDict, total=False):
    """The batch policy of the text encoders; empty for an engine that takes in requests at every step."""

    preferred_batch_size: list[int]
    max_queue_delay_microseconds: int
    priority_levels: int
    default_priority_level: int


class TransactionPolicy(TypedDict):
    decoupled: bool


class ModelConfiguration(TypedDict):
    """Triton's configuration of a model. Pipelines and heads have no `dynamic_batching`."""

    name: str
    platform: str
    backend: str
    version_policy: dict[str, dict[str, int]]
    max_batch_size: int
    input: list[TensorConfiguration]
    output: list[TensorConfiguration]
    dynamic_batching: NotRequired[BatchingConfiguration]
    model_transaction_policy: TransactionPolicy
    parameters: dict[str, dict[str, str]]


def is_decoupled(metadata: ModelMetadata) -> bool:
    """Return whether a request on a stream may have several responses: that of a text model has one per piece."""
    return metadata.parameters.get("kind") == "llm"


def model_configuration(
    metadata: ModelMetadata, max_batch_size: int, batching: BatchingConfig | None = None
) -> ModelConfiguration:
    """Return the configuration. `batching` is the batch policy of the text encoders' models.

    `max_batch_size` 0 means, as in Triton, that the first dimension counts no rows.
    """
    first = 1 if max_batch_size else 0
    configuration = ModelConfiguration(
        name=metadata.name,
        platform=metadata.platform,
        backend="atelier",
        version_policy={"latest": {"num_versions": 1}},
        max_batch_size=max_batch_size,
        input=[_tensor(spec, first) | {"optional": spec.optional} for spec in metadata.inputs],
        output=[_tensor(spec, first) for spec in metadata.outputs],
        model_transaction_policy={"decoupled": is_decoupled(metadata)},
        parameters={name: {"string_value": text} for name, text in metadata.parameters.items()},
    )
    if max_batch_size and metadata.parameters.get("kind") not in ("pipeline", "head"):
        configuration["dynamic_batching"] = _batching(batching) if batching else {}
    return configuration


def _batching(batching: BatchingConfig) -> BatchingConfiguration:
    configuration = BatchingConfiguration(
        preferred_batch_size=list(batching.preferred_batch_sizes),
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority,
    )
    if batching.max_queue_delay_us is not None:
        configuration["max_queue_delay_microseconds"] = batching.max_queue_delay_us
    return configuration


def _tensor(spec: TensorSpec, first: int) -> TensorConfiguration:
    type_ = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {"name": spec.name, "data_type": type_, "dims": list(spec.shape[first:])}
