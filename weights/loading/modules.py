"""Torch modules whose parameters are given tensors: built without memory for them, nothing copied or drawn."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weights.loading.views import Setters, Views, setters_of
from weights.platform.torch_seam import buffers_of, children_of, is_persistent, parameters_of
from weights.records.errors import WeightsError

__all__ = [
    "Binding",
    "Place",
    "UninitializedOnMeta",
    "assign",
    "copy_structure",
    "find_places",
    "listed",
    "materialize",
    "tied_groups",
    "without_value",
]

_ATOMS = (int, float, str, bytes, type(None), torch.dtype, type)
_TABLES = (dict, set, OrderedDict)
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
    """Build a module with `tensors` as its parameters and persistent buffers, without gradients.

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


class Place(NamedTuple):
    """A place of a tensor: `leaf` of a submodule's parameters or buffers, and the `name` of what belongs there."""

    owner: dict[str, Any]
    leaf: str
    name: str
    is_parameter: bool


class Binding:
    """Places of tensors in a module, so that others can be put there without building it again.

    Holds no reference to the module itself.
    HAZARD: its parameters stay the same objects, with other data. To make new ones takes eight times as long.
    """

    def __init__(self, places: Sequence[Place], computed: Sequence[tuple[dict[str, Any], str, torch.Tensor]]) -> None:
        """`computed` are the buffers that the module made itself: on the device of its tensors while it has some."""
        self._places = tuple(places)
        self._computed = tuple(computed)
        self._parameters: dict[str, nn.Parameter] = {}  # by the names of their tensors, once some were bound
        self._setters: Setters = {}  # of these
        self._buffers = tuple(place for place in places if not place.is_parameter)

    def put_tensors(self, named: Mapping[str, torch.Tensor]) -> None:
        """Bind these tensors, which must have the names and shapes that the module was checked for."""
        if not self._parameters:
            self._make_parameters(named)
        elif self._buffers or not isinstance(named, Views) or not named.put_into(self._setters):
            self._replace_data(named)
        for owner, leaf, name, _ in self._buffers:
            owner[leaf] = named[name]
        if self._computed:
            device = _device_of(named)
            for owner, leaf, made in self._computed:
                owner[leaf] = made.to(device)

    def clear(self) -> None:
        """Let go of all tensors. The module cannot run until others are put in: its parameters have no elements."""
        nothing = {dtype: torch.empty(0, dtype=dtype) for dtype in {one.dtype for one in self._parameters.values()}}
        for parameter in self._parameters.values():
            parameter.data = nothing[parameter.dtype]
        for owner, leaf, _, _ in self._buffers:
            owner[leaf] = torch.empty(0, device="meta")
        for owner, leaf, made in self._computed:
            owner[leaf] = made

    def _make_parameters(self, named: Mapping[str, torch.Tensor]) -> None:
        for owner, leaf, name, is_parameter in self._places:
            if is_parameter:
                if name not in self._parameters:
                    self._parameters[name] = nn.Parameter(named[name], requires_grad=False)
                owner[leaf] = self._parameters[name]
        self._setters = setters_of(self._parameters)

    def _replace_data(self, named: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.data = named[name]
        self._setters = setters_of(self._parameters)  # of other types, perhaps

    def copied(self, copies: Mapping[int, Any]) -> Binding:
        """Return the binding of a copy: `copies` has its tables by the ids of these."""
        places = [place._replace(owner=copies[id(place.owner)]) for place in self._places]
        return Binding(places, [(copies[id(owner)], leaf, made) for owner, leaf, made in self._computed])

    def renamed(self, names: Mapping[str, str]) -> Binding:
        """Return the binding for tensors called `names[name]`; what `names` lacks keeps its name."""
        places = [place._replace(name=names.get(place.name, place.name)) for place in self._places]
        return Binding(places, self._computed)


def _device_of(named: Mapping[str, torch.Tensor]) -> torch.device:
    if isinstance(named, Views):
        return named.device
    return next(iter(named.values())).device if named else torch.device("cpu")


def copy_structure(module: nn.Module, binding: Binding) -> tuple[nn.Module, Binding]:
    """Copy a module's structure, sharing the memory of its tensors; returns the copy and its binding.

    In a third of the time that building takes: deepcopy would spend it on the empty tables of each submodule.
    Raises WeightsError when a submodule has a function of its own.
    """
    copies: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        copies[id(parameter)] = parameter if parameter.is_meta else nn.Parameter(parameter.data, requires_grad=False)
    return _copied(module, copies), binding.copied(copies)


def _copied(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    if (found := copies.get(id(module))) is not None:
        return found
    new = copies[id(module)] = object.__new__(type(module))
    children, tables = children_of(module), (parameters_of(module), buffers_of(module))
    for name, value in module.__dict__.items():
        if value is children:
            place = name
            continue
        if isinstance(value, FunctionType):
            raise WeightsError(f"{name} of a {type(module).__name__} is a function, maybe one that knows this module")
        if isinstance(value, _ATOMS):
            new.__dict__[name] = value
        elif any(value is table for table in tables):
            new.__dict__[name] = copies[id(value)] = value.copy()
        elif type(value) in _TABLES and not value:
            new.__dict__[name] = type(value)()
        else:
            new.__dict__[name] = copy.deepcopy(value, copies)
    new.__dict__[place] = {name: child and _copied(child, copies) for name, child in children.items()}
    return new


def assign(module: nn.Module, named: Mapping[str, torch.Tensor]) -> Binding:
    """Rebind parameters and buffers (as load_state_dict(assign=True) does, ten times faster)."""
    binding = find_places(module, named.keys())
    binding.put_tensors(named)
    return binding


def find_places(module: nn.Module, names: Collection[str]) -> Binding:
    """Find where tensors of these names go; the first given one of tied tensors goes to all their places."""
    sources = {name: name for name in names}
    for group in tied_groups(module):
        source = next((name for name in group if name in sources), None)
        if source is not None:
            sources.update({name: source for name in group if name not in sources})
    places, computed = [], []
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        parameters, buffers = parameters_of(owner), buffers_of(owner)
        for leaf in parameters:
            if (name := sources.get(prefix + leaf)) is not None:
                places.append(Place(parameters, leaf, name, True))
        for leaf, buffer in buffers.items():
            if (name := sources.get(prefix + leaf)) is not None and is_persistent(owner, leaf):
                places.append(Place(buffers, leaf, name, False))
            elif buffer is not None and not buffer.is_meta:
                computed.append((buffers, leaf, buffer))
    return Binding(places, computed)


def tied_groups(module: nn.Module) -> list[list[str]]:
    """Return groups of names that share one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def without_value(module: nn.Module) -> list[str]:
    """Return the parameters and buffers that nothing was assigned to."""
    everything = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    return [name for name, tensor in everything if tensor.is_meta]


def listed(names: Collection[str], noun: str) -> str:
    """Return names for a message: all of one name, the first three of many."""
    shown = ", ".join(repr(name) for name in list(names)[:3])
    return f"{noun} {shown}" if len(names) == 1 else f"{len(names)} {noun}s ({shown}{', …' * (len(names) > 3)})"
