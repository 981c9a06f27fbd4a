"""A module some of whose blocks have no memory of their own: each gets its weights as its forward begins.

Between its forwards a block's parameters are on `meta`: they have types and shapes, and whoever would compute with
what lies in a buffer by then is told so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from weights.memory.block_stream import BlockStream
from weights.platform.torch_seam import buffers_of, parameters_of

_ATTRIBUTE: Final = "_atelier_streaming"


@dataclass(frozen=True, slots=True)
class _Place:
    """`leaf` of a submodule's parameters or buffers, the tensor that belongs there, and what stands in for it."""

    owner: dict[str, Any]
    leaf: str
    name: str
    blank: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Streaming:
    stream: BlockStream
    handles: list[Any]


def stream_blocks(module: nn.Module, stream: BlockStream) -> None:
    """Let the blocks of `stream` come as they are needed. The module has `stream.first_tensors()` in their places.

    HAZARD: hooks belong to the module, so one thread at a time may run it, and a block's weights may be read in its
    own forward only.
    """
    handles: list[Any] = []
    for number, block in enumerate(stream.plan.blocks):
        part = module.get_submodule(block.path)
        places = _places(part, block.path, block.offsets)
        _empty(places)
        handles.append(part.register_forward_pre_hook(_coming(stream, number, places), prepend=True))
        handles.append(part.register_forward_hook(_going(places)))
    setattr(module, _ATTRIBUTE, _Streaming(stream, handles))


def end_streaming(module: nn.Module) -> None:
    """Take the hooks off a module that streams, and let the memory of its blocks go. Others are left as they are."""
    streaming: _Streaming | None = module.__dict__.pop(_ATTRIBUTE, None)
    if streaming is not None:
        for handle in streaming.handles:
            handle.remove()
        streaming.stream.close()


def is_streamed(module: nn.Module) -> bool:
    """Return whether blocks of the module come as they are needed."""
    return _ATTRIBUTE in module.__dict__


def _places(part: nn.Module, path: str, names: Mapping[str, int]) -> list[_Place]:
    found = []
    for below, owner in part.named_modules():
        prefix = ".".join(filter(None, (path, below)))
        tables: list[dict[str, Any]] = [parameters_of(owner), buffers_of(owner)]
        for table in tables:
            for leaf, tensor in table.items():
                name = f"{prefix}.{leaf}"
                if tensor is not None and name in names:
                    blank: torch.Tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                    if table is tables[0]:
                        blank = nn.Parameter(blank, requires_grad=False)
                    found.append(_Place(table, leaf, name, blank))
    return found


def _coming(stream: BlockStream, number: int, places: list[_Place]) -> Any:
    bound: dict[int, list[torch.Tensor]] = {}  # by the identity of what the stream gives: there are two of it

    def bind(part: nn.Module, args: Any) -> None:
        tensors = stream.tensors_of(number)
        if id(tensors) not in bound:
            bound[id(tensors)] = [
                nn.Parameter(tensors[place.name], requires_grad=False)
                if isinstance(place.blank, nn.Parameter)
                else tensors[place.name]
                for place in places
            ]
        for place, tensor in zip(places, bound[id(tensors)], strict=True):
            place.owner[place.leaf] = tensor

    return bind


def _going(places: list[_Place]) -> Any:
    def empty(part: nn.Module, args: Any, output: Any) -> None:
        _empty(places)

    return empty


def _empty(places: list[_Place]) -> None:
    for place in places:
        place.owner[place.leaf] = place.blank
