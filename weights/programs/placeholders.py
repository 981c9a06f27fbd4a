"""A traced program with other tensors than its own, or with next to none."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch.export import ExportedProgram


def with_tensors(program: ExportedProgram, tensors: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """The same graph with other tensors and without example inputs.

    A shallow copy, because the constructor would change the graph it is given and forget its guards.
    """
    changed = copy.copy(program)
    changed._state_dict = {name: tensors.get(name, value) for name, value in program.state_dict.items()}
    changed._constants = {name: tensors.get(name, value) for name, value in program.constants.items()}
    changed._example_inputs = None
    return changed


def placeholder_of(value: torch.Tensor) -> torch.Tensor:
    """Of the same type and shape, with the memory of one element."""
    if value.numel() == 0:  # torch.export.save cannot write an empty view of memory that is not empty
        return wrapped_like(value, torch.empty(value.shape, dtype=value.dtype))
    return wrapped_like(value, torch.zeros((), dtype=value.dtype).expand(value.shape))


def wrapped_like(value: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, as a parameter if `value` is one."""
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=value.requires_grad)
    return tensor
