"""Rows that a table of embeddings has not, looked up for one caller: its weights stay as they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def reading_rows(table: nn.Module, first: int, rows: torch.Tensor) -> Iterator[None]:
    """Let a table of embeddings give `rows` for the ids from `first` on, in this thread, within the block.

    HAZARD: others may ask the same table meanwhile, in their threads, with rows of their own.
    """
    asked, here = list[torch.Tensor](), threading.get_ident()

    def look_up_known(_: nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        if threading.get_ident() != here:
            return arguments
        asked.append(arguments[0])
        return (torch.where(arguments[0] >= first, 0, arguments[0]),)

    def put_learned(_: nn.Module, __: object, found: torch.Tensor) -> torch.Tensor:
        if threading.get_ident() != here:
            return found
        ids = asked.pop()
        is_learned = ids >= first
        found = found.clone()
        found[is_learned] = rows.to(found)[ids[is_learned] - first]
        return found

    hooks = table.register_forward_pre_hook(look_up_known), table.register_forward_hook(put_learned)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
