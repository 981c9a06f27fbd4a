"""Gives a module its tensors: checked against the module, assigned, never copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from deployments.engines.protocol import EngineError

# Buffers that old checkpoints saved and that are computed from the config instead.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def assign_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> None:
    """Makes `tensors` the parameters of `module`, which was built on the meta device.

    The memory of the tensors is shared, not copied, and never written; it may be read-only. `tied` maps the
    name of a parameter to the one whose tensor it takes when the checkpoint has none of its own.

    Raises:
        EngineError: a tensor is missing, unknown, of another shape, or not of the one floating dtype.
    """
    given = {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED_SUFFIXES)}
    for name, source in tied.items():
        if name not in given and source in given:
            given[name] = given[source]
    expected = module.state_dict()
    _check_names(given, expected)
    _check_tensors(given, expected)
    module.load_state_dict(given, assign=True)
    module.requires_grad_(False)


def _check_names(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    missing = [name for name in expected if name not in given]
    if missing:
        name = missing[0]
        raise EngineError(
            f"tensor {name!r} of shape {tuple(expected[name].shape)} is missing{_and_others(missing)}: "
            f"{len(given)} tensors came, the model has {len(expected)}"
        )
    unknown = [name for name in given if name not in expected]
    if unknown:
        name = unknown[0]
        raise EngineError(
            f"tensor {name!r} of shape {tuple(given[name].shape)} is unknown here{_and_others(unknown)}: "
            f"{len(given)} tensors came, the model has {len(expected)}"
        )


def _check_tensors(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    first, reference = next(iter(given.items()))
    for name, tensor in given.items():
        if tensor.shape != expected[name].shape:
            raise EngineError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}"
            )
        if not tensor.is_floating_point():
            raise EngineError(f"tensor {name!r} is {tensor.dtype}, expected a floating-point dtype")
        if tensor.dtype != reference.dtype:
            raise EngineError(f"tensor {name!r} is {tensor.dtype}, expected {reference.dtype} as {first!r} is")


def _and_others(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
