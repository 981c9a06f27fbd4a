"""Triton's model configuration, as far as it means something for models that are served here.

Source: Triton, "Model Configuration Extension": the protobuf ModelConfig as JSON. Dimensions leave out the batch.
"""

from __future__ import annotations

from typing import Any

from deployments.ingress.open_inference.records import ModelMetadata
from deployments.tensor_values import TensorSpec


def model_configuration(metadata: ModelMetadata, max_batch_size: int) -> dict[str, Any]:
    """`dynamic_batching` is there where requests of several clients are merged: everywhere but in pipelines."""
    is_pipeline = metadata.parameters.get("kind") == "pipeline"
    return {
        "name": metadata.name,
        "platform": metadata.platform,
        "backend": "atelier",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": max_batch_size,
        "input": [_tensor(spec) | {"optional": spec.optional} for spec in metadata.inputs],
        "output": [_tensor(spec) for spec in metadata.outputs],
        **({} if is_pipeline else {"dynamic_batching": {}}),
        "parameters": {name: {"string_value": text} for name, text in metadata.parameters.items()},
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    type_ = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
    return {"name": spec.name, "data_type": type_, "dims": list(spec.shape[1:])}
