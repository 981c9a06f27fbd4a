"""Triton's model configuration, as far as it means something for models that are served here.

Source: Triton, "Model Configuration Extension": the protobuf ModelConfig as JSON. Dimensions leave out the batch.
"""

from __future__ import annotations

from typing import Any

from configs.batching import BatchingConfig
from deployments.ingress.kserve.records import ModelMetadata
from deployments.pipelines.records import TensorSpec


def is_decoupled(metadata: ModelMetadata) -> bool:
    """Whether a request on a stream may have several responses: that of a text model has one per piece."""
    return metadata.parameters.get("kind") == "llm"


def model_configuration(
    metadata: ModelMetadata, max_batch_size: int, batching: BatchingConfig | None = None
) -> dict[str, Any]:
    """`dynamic_batching` is there where requests of several clients are batched: everywhere but in pipelines and heads.

    It has figures where `batching` decides: engines that take in requests at every step need none.
    """
    is_batched = metadata.parameters.get("kind") not in ("pipeline", "head")
    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": "atelier",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": max_batch_size,
        "input": [_tensor(spec) | {"optional": spec.optional} for spec in metadata.inputs],
        "output": [_tensor(spec) for spec in metadata.outputs],
        **({"dynamic_batching": _batching(batching) if batching else {}} if is_batched else {}),
        "model_transaction_policy": {"decoupled": is_decoupled(metadata)},
        "parameters": {name: {"string_value": text} for name, text in metadata.parameters.items()},
    }


def _batching(batching: BatchingConfig) -> dict[str, Any]:
    delay_us = batching.max_queue_delay_us
    return {
        "preferred_batch_size": list(batching.preferred_batch_sizes),
        **({} if delay_us is None else {"max_queue_delay_microseconds": delay_us}),
        "priority_levels": batching.priority_levels,
        "default_priority_level": batching.default_priority,
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    type_ = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {"name": spec.name, "data_type": type_, "dims": list(spec.shape[1:])}
