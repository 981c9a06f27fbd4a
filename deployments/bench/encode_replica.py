"""A replica's cache with both of its tiers, in a process of its own: where an encoding is, and how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import ray
import torch
from safetensors.torch import load_file

from cluster.encodings.actor import connect_shared_encodings
from cluster.encodings.ray_tier import RaySharedTier
from deployments.engines.text.loading import load_text_encoder
from deployments.text.cache import Encoding, EncodingCache, EncodingKey
from deployments.text.encode import CachedEncoders, EncodeJob, encode_batch_or_raise
from deployments.text.encoders import KeyedEncoder

CACHE_BYTES: Final = 128 * 2**20
Lookup = tuple[str, float]  # source, milliseconds


class EncodeReplica:
    """`cluster` names the shared encodings."""

    def __init__(self, cluster: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self._tier = RaySharedTier(lambda: connect_shared_encodings(cluster, CACHE_BYTES))
        self._cache = EncodingCache(CACHE_BYTES, self._tier)
        encoder = load_text_encoder(folder, "transformers", None, folder, load_file(folder / "model.safetensors"))
        self._keyed = KeyedEncoder(cluster, encoder)
        self._encoders = CachedEncoders(self._cache, _run)

    async def embed(self, texts: Sequence[str]) -> list[Lookup]:
        """One after the other, from the text on: what a service's replica does, tokenization and all."""
        found: list[Lookup] = []
        for text in texts:
            start = time.perf_counter()
            (source,) = (await self._encoders.embed(self._keyed, [text])).sources
            found.append((source, (time.perf_counter() - start) * 1e3))
        return found

    async def keep(self, numbers: Sequence[int], shape: tuple[int, ...]) -> list[Lookup]:
        """Encodings of `shape` in bfloat16, which would take an encoder of another size; only the cache is timed."""

        async def compute_many(keys: Sequence[EncodingKey]) -> list[Encoding]:
            return [{"hidden": torch.zeros(shape, dtype=torch.bfloat16)} for _ in keys]

        found: list[Lookup] = []
        for number in numbers:
            start = time.perf_counter()
            key = EncodingKey("large", "bfloat16", "none", (number,))
            source = (await self._cache.get_all([key], compute_many))[key].source
            found.append((source, (time.perf_counter() - start) * 1e3))
        return found

    async def num_published(self) -> int:
        """Publishing goes on after an answer."""
        return (await self._tier.stats()).published


def tier_node(cluster: str) -> str:
    """The node of the shared encodings."""
    actor = connect_shared_encodings(cluster, CACHE_BYTES)
    node: str = ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
    return node


async def _run(jobs: Sequence[EncodeJob], priority: int, timeout_s: float | None) -> list[Encoding]:
    return await asyncio.to_thread(encode_batch_or_raise, jobs)


def replica_class() -> Any:
    return ray.remote(EncodeReplica)
