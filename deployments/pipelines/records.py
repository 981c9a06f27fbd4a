"""What a pipeline is asked and what it answers. Free of Ray, of HTTP and of torch.

Inputs and outputs are named tensors; a text is a BYTES element, a picture UINT8 (height, width, 3). The first
dimension of every tensor of a pipeline counts the items of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deployments.pipelines.tensor_values import TensorSpec, TensorValue


@dataclass(frozen=True, slots=True)
class Signature:
    """What a pipeline takes and gives, in the order in which the config declares it.

    Optional inputs have a default in the config.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    description: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PipelineRequest:
    """`priority` 1 is the most urgent, 0 every step's default; `timeout_s` bounds the whole run."""

    pipeline: str
    inputs: Mapping[str, TensorValue]
    priority: int = 0
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PipelineResult:
    """`timings_ms` has one entry per step, by its name, and "total". `warnings` begin with their step's name."""

    outputs: dict[str, TensorValue]
    timings_ms: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
