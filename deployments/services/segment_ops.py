"""What stages of a pipeline may do in a replica of the text-encoder service: tokenize, encode, apply a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from configs.model import LongText
from deployments.modules.model_host import ModelHost
from deployments.pipelines.plans import SegmentCall
from deployments.tasks import in_thread
from deployments.text.encode import CachedEncoders, cut_warnings, embedding_items, embedding_of, tokenize_items
from deployments.text.encoders import is_text_encoder


class EncoderOps:
    """`SegmentOps` for one call. A model is leased for its own stage only: two calls that each hold what the other
    waits for would wait for ever.
    """

    def __init__(self, host: ModelHost, encoders: CachedEncoders, call: SegmentCall) -> None:
        self._host = host
        self._encoders = encoders
        self._call = call
        self._warnings: list[str] = []

    async def tokenize(self, model: str, texts: Sequence[str], first: int) -> list[tuple[int, ...]]:
        async with self._lease(model) as lease:
            (keyed,) = lease.modules.values()
            items = embedding_items(keyed, texts, self._long_text(model), first)
            found = await in_thread(tokenize_items, items)
        self._warnings += cut_warnings(items, found)
        return [text.token_ids for (text,) in found]

    async def encode(
        self, model: str, texts: Sequence[str] | Sequence[tuple[int, ...]], first: int
    ) -> Sequence[torch.Tensor]:
        async with self._lease(model) as lease:
            (keyed,) = lease.modules.values()
            encoded = await self._encoders.embed(
                keyed,
                texts,
                long_text=self._long_text(model),
                first=first,
                priority=self._call.priority,
                timeout_s=self._call.timeout_s,
            )
        self._warnings += encoded.warnings
        return [embedding_of(output) for output in encoded.outputs]

    async def head(self, model: str, features: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        async with self._lease(model) as lease:
            (head,) = lease.modules.values()
            if out is None or head.dtype != torch.float32:
                scores: torch.Tensor = await in_thread(head.apply, features)
                return scores.float()
            into: torch.Tensor = await in_thread(head.apply, features, out)
            return into

    def take_warnings(self) -> Sequence[str]:
        taken, self._warnings = self._warnings, []
        return taken

    def _long_text(self, model: str) -> LongText:
        return self._call.long_texts.get(model, "truncate")

    def _lease(self, model: str) -> Any:
        return self._host.lease(model, is_text_encoder, version=self._call.versions.get(model))
