"""A torch module whose parameters *are* given tensors: built without memory for them, nothing copied or drawn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weights.errors import WeightsError

_RANDOM_FILLS = frozenset({"normal_", "uniform_", "kaiming_uniform_", "trunc_normal_"})


class UninitializedOnMeta(TorchFunctionMode):
    """Within it, this thread's `torch.empty` allocates nothing, and nobody draws random values for it.

    Layers make their parameters with it, and fill buffers by other means (arange, zeros), so those stay
    real. Unlike accelerate's init_empty_weights it changes nothing for modules that other threads make.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty:
            return func(*args, **{**kwargs, "device": "meta"})
        # By name, because transformers puts wrappers of its own into torch.nn.init.
        if getattr(func, "__name__", "") in _RANDOM_FILLS:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def materialize(
    build: Callable[[], nn.Module], tensors: Mapping[str, torch.Tensor], *, strict: bool = True
) -> nn.Module:
    """The module that `build` makes, with `tensors` as its parameters and persistent buffers, without gradients.

    Nothing is copied. Of parameters that share one (tied weights) one name is enough; buffers that are not given are
    those of `build`. `strict` False ignores tensors that the module has no place for.
    Raises WeightsError naming what is missing, unexpected or of another shape.
    """
    with UninitializedOnMeta():
        module = build()
    expected = {name: value for name, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
    tied = {name for group in tied_groups(module) if any(n in tensors for n in group) for name in group}
    what = type(module).__name__
    if missing := [name for name in expected if name not in tensors and name not in tied]:
        raise WeightsError(f"{listed(missing, 'tensor')} missing for a {what}")
    if strict and (unexpected := [name for name in tensors if name not in expected]):
        raise WeightsError(f"a {what} has no place for {listed(unexpected, 'tensor')}")
    for name, tensor in tensors.items():
        if name in expected and tensor.shape != expected[name].shape:
            raise WeightsError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, a {what} takes {tuple(expected[name].shape)}"
            )
    assign(module, tensors)
    if left := without_value(module):
        raise WeightsError(f"{listed(left, 'tensor')} of a {what} got no value")
    return module.requires_grad_(False)


def assign(module: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    """Rebinds parameters and buffers (load_state_dict(assign=True) does the same, ten times slower)."""
    groups = tied_groups(module)
    device = next(iter(named.values())).device if named else torch.device("cpu")
    owners = dict(module.named_modules())
    parameters = {name: nn.Parameter(t, requires_grad=False) for name, t in named.items()}
    for group in groups:
        source = next((parameters[name] for name in group if name in parameters), None)
        if source is not None:
            parameters.update({name: source for name in group if name not in parameters})
    for path, owner in owners.items():
        prefix = f"{path}." if path else ""
        for leaf in owner._parameters:
            if (parameter := parameters.get(prefix + leaf)) is not None:
                owner._parameters[leaf] = parameter
        for leaf, buffer in owner._buffers.items():
            if (given := named.get(prefix + leaf)) is not None and leaf not in owner._non_persistent_buffers_set:
                owner._buffers[leaf] = given
            elif buffer is not None and buffer.device != device and buffer.device.type != "meta":
                owner._buffers[leaf] = buffer.to(device)


def tied_groups(module: nn.Module) -> list[list[str]]:
    """Names that share one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def without_value(module: nn.Module) -> list[str]:
    """Parameters and buffers that nothing was assigned to."""
    everything = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    return [name for name, tensor in everything if tensor.is_meta]


def listed(names: Collection[str], noun: str) -> str:
    """For a message: all of one name, the first three of many."""
    shown = ", ".join(repr(name) for name in list(names)[:3])
    return f"{noun} {shown}" if len(names) == 1 else f"{len(names)} {noun}s ({shown}{', …' * (len(names) > 3)})"
