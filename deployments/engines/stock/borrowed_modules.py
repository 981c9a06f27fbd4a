"""The modules of a stock call, which other calls run between its turns: each call finds them as it left them.

Pipelines put attention processors and hooks into modules, make a VAE float32 and float16 again, and some VAEs keep the
last frames in themselves. Another call, which has its turn in between, may see none of that.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Sequence
from operator import is_
from types import CodeType, FunctionType
from typing import Any, Final

import torch
from torch import nn

from deployments.engines.nn.streamed_blocks import is_streamed
from weights.platform.torch_seam import buffers_of, forward_hooks_of

_EMPTY: Final[dict[Any, Any]] = {}  # most modules have no hooks
_LISTS: Final = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class BorrowedModules:
    """The changes that a call makes in shared modules, put in with each of its turns and taken out after it.

    These are attributes of the modules and of parts whose classes set some outside `__init__`, hooks, buffers, and the
    types of parameters. HAZARD: a change in place, of a list in an attribute say, is a change for all calls.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        everything = list(dict.fromkeys(part for module in modules for part in module.modules()))
        self._tables: list[dict[Any, Any]] = [
            vars(part) for part in everything if part in modules or _changes_itself(part)
        ]
        self._tables += [forward_hooks_of(part) for part in everything]
        self._tables += [buffers for part in everything if (buffers := buffers_of(part))]
        parameters = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
        self._weights = [(parameter, parameter.data) for parameter in parameters]
        self._before: list[dict[Any, Any]] = []
        self._own: dict[int, dict[Any, Any]] = {}  # tables by number
        self._own_weights: list[torch.Tensor] = []

    def take(self) -> None:
        """Put in the call's changes from its last turn."""
        self._before = [table.copy() if table else _EMPTY for table in self._tables]
        for number, own in self._own.items():
            _fill(self._tables[number], own)
        if self._own_weights:
            for (parameter, _), own_weight in zip(self._weights, self._own_weights, strict=True):
                parameter.data = own_weight

    def give_back(self) -> None:
        """Restore the state from before the turn, and remember the changes."""
        self._own = {}
        for number, (table, before) in enumerate(zip(self._tables, self._before, strict=True)):
            if (table or before) and not _is_same(table, before):
                self._own[number] = dict(table)
                _fill(table, before)
        is_cast = any(parameter.dtype is not weight.dtype for parameter, weight in self._weights)
        self._own_weights = [parameter.data for parameter, _ in self._weights] if is_cast else []
        if is_cast:
            self._restore_weights()

    def end(self) -> None:
        """Give the modules back for good, private copies included."""
        self.give_back()
        self._restore_weights()

    def _restore_weights(self) -> None:
        for parameter, weight in self._weights:
            if parameter.dtype != weight.dtype or parameter.data_ptr() != weight.data_ptr():
                parameter.data = weight


def blocks_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a module that run one after the other, at any depth: a call may pause before each.

    A streamed module has none: the weights of a block are there in its own forward only.
    """
    if is_streamed(module):
        return
    blocks = dict.fromkeys(module.children())
    for part in module.modules():
        if isinstance(part, _LISTS):
            blocks |= dict.fromkeys(part.children())
    yield from (block for block in blocks if next(block.children(), None) is not None and not isinstance(block, _LISTS))


def _is_same(table: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Return whether both have the same objects in the same order. Thousands are compared at each turn's end."""
    return len(table) == len(before) and all(map(is_, table.values(), before.values()))


def _fill(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    """Give a table this content. Others may read it meanwhile: unchanged entries stay all the time."""
    for name in table.keys() - content.keys():
        del table[name]
    for name, value in content.items():
        if table.get(name, table) is not value:
            table[name] = value


def _changes_itself(part: nn.Module) -> bool:
    cls: Any = type(part)
    return _sets_attributes(cls)


@functools.lru_cache(maxsize=4096)
def _sets_attributes(cls: Any) -> bool:
    """Return whether methods of a class, other than its constructor, set attributes."""
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    return any(
        _stores(method.__code__)
        for base in bases
        for name, method in vars(base).items()
        if isinstance(method, FunctionType) and name != "__init__"
    )


def _stores(code: CodeType) -> bool:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return any(one.opname == "STORE_ATTR" for one in dis.get_instructions(code)) or any(map(_stores, inner))
