"""Values on their way to other ranks: a form that JSON has, and the tensors among them apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

import torch

TENSOR: Final = "tensor"  # the key of a tensor's place
_NO_KINDS: Final[Mapping[str, Any]] = MappingProxyType({})


class NotPlain(ValueError):
    """A value that is neither a tensor nor plain, nor made of such."""


def packed(value: Any, tensors: list[torch.Tensor], kinds: Mapping[str, Any] = _NO_KINDS) -> Any:
    """Return a value as JSON has it, and put its tensors behind the others.

    `kinds` are classes of records by name. Raises NotPlain.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {TENSOR: len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [packed(one, tensors, kinds) for one in value]}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {"dict": {name: packed(one, tensors, kinds) for name, one in value.items()}}
    if (kind := type(value).__name__) in kinds:
        return {kind: {one.name: packed(getattr(value, one.name), tensors, kinds) for one in fields(value)}}
    raise NotPlain(kind)


def unpacked(form: Any, tensors: Sequence[torch.Tensor], kinds: Mapping[str, Any] = _NO_KINDS) -> Any:
    """Return the value of a form of `packed`, with its tensors."""
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == TENSOR:
        return tensors[content]
    if isinstance(content, list):
        return (list if kind == "list" else tuple)(unpacked(one, tensors, kinds) for one in content)
    parts = {name: unpacked(one, tensors, kinds) for name, one in content.items()}
    return parts if kind == "dict" else kinds[kind](**parts)
