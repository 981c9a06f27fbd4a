"""In which order a traced program wants the dimensions of its tensors to lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

_TENSOR_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def traced_strides(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    """Of every tensor that the graph takes, as the graph was traced with them (a convolution's channels_last, ...)."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    return {
        spec.target: nodes[spec.arg.name].meta["val"].stride()
        for spec in program.graph_signature.input_specs
        if spec.target is not None and spec.kind in _TENSOR_KINDS
    }


def memory_order(shape: Sequence[int], strides: Sequence[int] | None) -> list[int]:
    """The dimensions in the order in which dense memory has them; C order for what is not dense."""
    identity = list(range(len(shape)))
    for order in (identity, sorted(identity, key=lambda dim: -strides[dim]) if strides else identity):
        expected = 1
        for dim in reversed(order):
            if strides and shape[dim] != 1 and strides[dim] != expected:
                break
            expected *= shape[dim]
        else:
            return order
    return identity


def in_traced_order(stored: torch.Tensor, shape: Sequence[int], strides: Sequence[int] | None) -> torch.Tensor:
    """A tensor stored in memory order, as the view of `shape` and `strides` that the graph takes."""
    order = memory_order(shape, strides)
    if stored.dim() != len(order):
        return stored
    return stored.permute([order.index(dim) for dim in range(len(order))])
