"""One item of a pipeline as people write it: its inputs by name, as texts, numbers, lists of numbers and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from pydantic import Field

from deployments.pipelines.edge_types import TEXT, EdgeType
from deployments.pipelines.records import (
    NUMPY_DTYPES,
    PipelineRequest,
    Signature,
    TensorSpec,
    TensorValue,
    text_tensor,
)
from deployments.records.errors import InvalidRequest
from deployments.records.requests import Name, Priority, RequestModel, TenantName, as_record


class PipelineItem(RequestModel):
    """A request for one item. An image is an array (height, width, RGB) of uint8; a TensorValue is taken as it is."""

    pipeline: Name
    inputs: dict[str, Any] = Field({}, max_length=64)
    priority: Priority = 0
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False)
    tenant: TenantName = ""


def request_of(request: PipelineRequest | Mapping[str, Any], signature: Callable[[str], Signature]) -> PipelineRequest:
    """Return the request itself, or that of one item. `signature` is that of a pipeline by its name.

    Raises InvalidRequest, and what `signature` raises.
    """
    if isinstance(request, PipelineRequest):
        return request
    item = as_record(PipelineItem, request)
    specs = {spec.name: spec for spec in signature(item.pipeline).inputs}
    given = {name: value for name, value in item.inputs.items() if value is not None}
    tensors = {
        name: value if isinstance(value, TensorValue) else item_tensor(name, value, specs.get(name))
        for name, value in given.items()
    }
    return PipelineRequest(item.pipeline, tensors, item.priority, item.timeout_s, item.tenant)


def item_tensor(name: str, value: Any, spec: TensorSpec | None) -> TensorValue:
    """Return the tensor of one value; a name without a spec is refused later, with all names. Raises InvalidRequest."""
    if spec is None or EdgeType(spec.datatype, spec.shape) == TEXT:
        return text_tensor(name, [value if isinstance(value, str) else str(value)])
    dtype = NUMPY_DTYPES[spec.datatype]
    try:
        given, data = np.asarray(value), np.array([value], dtype=dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"{name}: not a {spec.datatype}: {str(error)[:200]}", name) from None
    # numpy cuts fractions off without a word.
    if np.issubdtype(dtype, np.integer) and given.dtype.kind == "f" and (given != np.rint(given)).any():
        raise InvalidRequest(f"{name}: not a {spec.datatype}: it has a fraction", name)
    return TensorValue(name, spec.datatype, data)
