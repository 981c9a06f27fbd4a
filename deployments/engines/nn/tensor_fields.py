"""The tensors in the fields of a dataclass, and what is left of it without them: its form."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def form_of(thing: Any) -> Hashable:
    """Return all of a dataclass but the values of its tensors: things of one form compute by the same operations."""
    if isinstance(thing, torch.Tensor):
        return tuple(thing.shape), thing.stride(), str(thing.dtype)
    if is_dataclass(thing):
        return type(thing).__name__, *(form_of(getattr(thing, one.name)) for one in fields(thing))
    found: Hashable = thing
    return found


def tensors_of(thing: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a dataclass, and of those in its fields, in the order of the fields."""
    if isinstance(thing, torch.Tensor):
        yield thing
    elif is_dataclass(thing):
        for one in fields(thing):
            yield from tensors_of(getattr(thing, one.name))


def with_tensors(thing: T, tensors: Iterator[torch.Tensor]) -> T:
    """Return the same thing with others in the place of `tensors_of` it, taken in that order."""
    if isinstance(thing, torch.Tensor):
        found: Any = next(tensors)
        return found
    if not is_dataclass(thing) or isinstance(thing, type):
        return thing
    return replace(thing, **{one.name: with_tensors(getattr(thing, one.name), tensors) for one in fields(thing)})
