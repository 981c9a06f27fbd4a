"""What steps of a pipeline may do in a replica of the embedding service: tokenize, encode, apply a head."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from deployments.encoding.cached_encoders import CachedEncoders, embedding_of
from deployments.encoding.keyed_encoders import is_text_encoder
from deployments.engines.protocol import EngineError
from deployments.hosting.model_host import ModelHost
from deployments.pipelines.plans import SegmentCall


class EncoderOps:
    """`SegmentOps` for one call. A model is leased for its own step only: two calls that each hold what the other
    waits for would wait for ever.
    """

    def __init__(self, host: ModelHost, encoders: CachedEncoders, call: SegmentCall) -> None:
        self._host = host
        self._encoders = encoders
        self._call = call

    async def tokenize(self, model: str, texts: Sequence[str]) -> list[tuple[int, ...]]:
        async with self._lease(model) as lease:
            (keyed,) = lease.modules.values()
            found = await asyncio.to_thread(keyed.encoder.tokenize, texts, as_embedding=True)
        for number, text in enumerate(found):
            if text.num_ignored:  # a step has nobody to tell that it cut something off, so it does not
                length = len(text.token_ids)
                raise EngineError(f"text {number} has {length + text.num_ignored} tokens, {model!r} takes {length}")
        return [text.token_ids for text in found]

    async def encode(self, model: str, texts: Sequence[str] | Sequence[tuple[int, ...]]) -> Sequence[torch.Tensor]:
        async with self._lease(model) as lease:
            (keyed,) = lease.modules.values()
            encoded = await self._encoders.embed(
                keyed, texts, long_text="error", priority=self._call.priority, timeout_s=self._call.timeout_s
            )
        return [embedding_of(output) for output in encoded.outputs]

    async def head(self, model: str, features: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        async with self._lease(model) as lease:
            (head,) = lease.modules.values()
            if out is None or head.dtype != torch.float32:
                scores: torch.Tensor = await asyncio.to_thread(head.apply, features)
                return scores.float()
            into: torch.Tensor = await asyncio.to_thread(head.apply, features, out)
            return into

    def _lease(self, model: str) -> Any:
        return self._host.lease(model, is_text_encoder, version=self._call.versions.get(model))
