"""A computer of texts for a cache, in tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from deployments.text.cache import EncodingKey


class Batches:
    """Stands for `compute_many`: remembers its batches, and ends them when it is open."""

    def __init__(self) -> None:
        self.made: list[tuple[str, list[int]]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None

    async def __call__(self, keys: Sequence[EncodingKey]) -> list[dict[str, torch.Tensor]]:
        assert len({key.module_key for key in keys}) == 1
        self.made.append((keys[0].module_key, [key.token_ids[0] for key in keys]))
        await self.open.wait()
        if self.error:
            raise self.error
        return [{"pooled": torch.tensor([float(key.token_ids[0])])} for key in keys]

    @property
    def numbers(self) -> list[list[int]]:
        return [numbers for _, numbers in self.made]
