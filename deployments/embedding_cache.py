"""Exact cache of text encodings: the same tokens through the same weights are computed once.

Keyed by (module key of the encoder, token ids), bounded in bytes, least recently used out first. Callers that ask
for what is being computed wait for that computation instead of starting another.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import torch

CacheKey = tuple[str, tuple[int, ...]]
Encoding = Mapping[str, torch.Tensor]
_ENTRY_OVERHEAD_BYTES = 512  # dict, key and tensor headers, so that tiny entries cannot outgrow the bound


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. `joined` counts callers that waited for a computation in flight; they are hits too."""

    hits: int
    joined: int
    misses: int
    evicted: int
    entries: int
    nbytes: int
    max_bytes: int


class EmbeddingCache:
    """One replica's cache. Lives on one event loop; not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[CacheKey, tuple[Encoding, int]] = OrderedDict()
        self._in_flight: dict[CacheKey, asyncio.Task[Encoding]] = {}
        self._nbytes = 0
        self._hits = self._joined = self._misses = self._evicted = 0

    async def get(self, key: CacheKey, compute: Callable[[], Awaitable[Encoding]]) -> tuple[Encoding, bool]:
        """The encoding and whether this caller was spared the computation.

        A failed computation raises for all who waited and is not remembered. A caller that is cancelled does not
        cancel the computation that others wait for.
        """
        if key in self._entries:
            self._entries.move_to_end(key)
            self._hits += 1
            return self._entries[key][0], True
        joined = key in self._in_flight
        if joined:
            self._joined += 1
        else:
            self._misses += 1
            self._in_flight[key] = asyncio.ensure_future(self._compute(key, compute))
        return await asyncio.shield(self._in_flight[key]), joined

    async def _compute(self, key: CacheKey, compute: Callable[[], Awaitable[Encoding]]) -> Encoding:
        try:
            encoding = await compute()
            self._insert(key, encoding)
            return encoding
        finally:
            del self._in_flight[key]

    def _insert(self, key: CacheKey, encoding: Encoding) -> None:
        nbytes = _ENTRY_OVERHEAD_BYTES + 8 * len(key[1]) + sum(tensor.nbytes for tensor in encoding.values())
        if nbytes > self._max_bytes:
            return
        self._entries[key] = (encoding, nbytes)
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self._nbytes -= freed
            self._evicted += 1

    def stats(self) -> CacheStats:
        return CacheStats(
            hits=self._hits,
            joined=self._joined,
            misses=self._misses,
            evicted=self._evicted,
            entries=len(self._entries),
            nbytes=self._nbytes,
            max_bytes=self._max_bytes,
        )
