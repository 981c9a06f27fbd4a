"""Exact cache of text encodings: the same tokens through the same weights are computed once.

Two tiers. This one is a replica's: bounded in bytes, what is cheapest to do without goes first
(`cluster/encodings/eviction.py`). The other is the cluster's (`cluster/encodings/actor.py`), and may be missing: then,
and whenever it fails, the replica computes. In both, who asks for what is being computed waits for that computation.

Encodings are handed out as they lie in the cache, to everybody the same tensors: READ-ONLY. Whoever wants to write
makes a copy. A write by a torch operation is found at the next use, by the tensor's version counter, and the entry
computed anew; one through `.data` or `.numpy()` is not, which is why `tensor_records.pack` gives read-only arrays. What
goes to and comes from the other tier is copied, so a write stays in its replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

import torch

from cluster.encodings.eviction import CostAwareEviction
from cluster.encodings.packed import ByteArray, Layout, join_tensors, split_tensors
from cluster.encodings.records import SharedEncoding, entries_per_gib
from deployments.shared_work import shared_task
from deployments.text.tensor_records import pack, unpack

Encoding = Mapping[str, torch.Tensor]
Source = Literal["local", "joined", "shared", "computed"]

ENTRY_BYTES: Final = 1024  # digest, dictionaries, figures of one entry
TENSOR_BYTES: Final = 512  # of a tensor beside its storage

logger = logging.getLogger("atelier.encodings")


@dataclass(frozen=True, slots=True)
class EncodingKey:
    """What an encoding depends on: the weights, the element type, how it was padded, and the tokens."""

    module_key: str
    dtype: str
    padding: str
    token_ids: tuple[int, ...]

    def digest(self) -> str:
        """Hex sha256."""
        parts = (self.module_key, self.dtype, self.padding, ",".join(map(str, self.token_ids)))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Found:
    """An encoding, read-only, and where it came from: everything but "computed" spared this caller a computation."""

    encoding: Encoding
    source: Source

    @property
    def hit(self) -> bool:
        return self.source != "computed"


class SharedTier(Protocol):
    """The cluster's tier, as a replica sees it. Any exception means that it is of no help now."""

    async def find_or_claim(self, digest: str) -> SharedEncoding | None:
        """None: the caller computes it, and then publishes or abandons it. Waits while somebody else does."""

    async def publish(self, digest: str, layout: Layout, data: ByteArray, cost_s: float, keep: bool) -> None: ...

    async def abandon(self, digest: str) -> None: ...

    async def forget_all(self) -> None: ...

    def note_use(self, digest: str) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. `local`, `joined`, `shared` and `computed` count callers by where theirs came from.

    `shared_errors`: times that the other tier was of no help. `mutated`: entries that somebody had written to.
    `refused`: encodings that were too large, or worth less than everything that is here.
    """

    local: int
    joined: int
    shared: int
    computed: int
    failed: int
    evicted: int
    refused: int
    mutated: int
    shared_errors: int
    entries: int
    kept: int
    nbytes: int
    kept_bytes: int
    max_bytes: int
    entries_per_gib: float


@dataclass(frozen=True, slots=True)
class _Entry:
    """Every torch operation that writes raises a tensor's version, which all of its views share."""

    encoding: Encoding
    versions: tuple[int, ...]

    @property
    def is_sound(self) -> bool:
        return self.versions == _versions(self.encoding)


class EmbeddingCache:
    """One replica's cache. Lives on one event loop; not thread-safe."""

    def __init__(
        self, max_bytes: int, shared: SharedTier | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shared = shared
        self._clock = clock
        self._eviction = CostAwareEviction(max_bytes)
        self._entries: dict[str, _Entry] = {}
        self._in_flight: dict[str, asyncio.Task[Found]] = {}
        self._telling: set[asyncio.Future[None]] = set()
        self._generation = 0  # of what may be kept: rises when all is forgotten
        self._counts = dict.fromkeys(("local", "joined", "shared", "computed", "failed"), 0)
        self._refused = self._mutated = self._shared_errors = 0

    async def get(self, key: EncodingKey, compute: Callable[[], Awaitable[Encoding]], *, keep: bool = False) -> Found:
        """The encoding; `compute` is called when nobody has it, for all who ask meanwhile.

        A failed computation raises for all who waited here and is not remembered; who waits in another replica tries
        on his own. A caller that is cancelled does not cancel the computation that others wait for. `keep`: it will
        be wanted by others, as empty and negative prompts are, and stays as long as such fit into their share.
        HAZARD: `compute` must not wait for other keys; two replicas that do could wait for each other.
        """
        digest = key.digest()
        if entry := self._sound_entry(digest):
            self._use(digest, keep)
            return self._count(Found(entry.encoding, "local"))
        joined = digest in self._in_flight
        if not joined:
            task = shared_task(self._obtain(digest, compute, keep))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits any more
            self._in_flight[digest] = task
        try:
            found = await asyncio.shield(self._in_flight[digest])
        except Exception:
            self._counts["failed"] += 1
            raise
        if joined:
            self._use(digest, keep)
            found = Found(found.encoding, "joined")
        return self._count(found)

    def forget_all(self) -> None:
        """Forget what is here and in the other tier, and keep nothing of what is being computed.

        For weights that were found damaged: nobody knows since when they were, and which encodings they made.
        """
        self._generation += 1
        for digest in self._entries:
            self._eviction.remove(digest)
        self._entries.clear()
        if self._shared:
            self._tell(self._shared.forget_all())

    def stats(self) -> CacheStats:
        return CacheStats(
            **self._counts,
            evicted=self._eviction.num_evicted,
            refused=self._refused,
            mutated=self._mutated,
            shared_errors=self._shared_errors,
            entries=len(self._entries),
            kept=self._eviction.num_kept,
            nbytes=self._eviction.nbytes,
            kept_bytes=self._eviction.kept_bytes,
            max_bytes=self._eviction.max_bytes,
            entries_per_gib=entries_per_gib(len(self._entries), self._eviction.nbytes),
        )

    async def _obtain(self, digest: str, compute: Callable[[], Awaitable[Encoding]], keep: bool) -> Found:
        generation = self._generation
        try:
            claimed = False
            if self._shared:
                try:
                    if shared := await self._shared.find_or_claim(digest):
                        encoding = unpack(split_tensors(shared.layout, shared.data))
                        return Found(self._insert(digest, encoding, shared.cost_s, keep, generation), "shared")
                    claimed = True
                except Exception as error:  # whatever it is, the text can be encoded here
                    self._note_shared_error(error)
            return Found(await self._compute(digest, compute, keep, claimed, generation), "computed")
        finally:
            del self._in_flight[digest]

    async def _compute(
        self, digest: str, compute: Callable[[], Awaitable[Encoding]], keep: bool, claimed: bool, generation: int
    ) -> Encoding:
        """The cost is how long it took from here: queue and batch are what the next one would wait for, too."""
        start_s = self._clock()
        try:
            computed = await compute()
        except BaseException:
            if self._shared and claimed:
                self._tell(self._shared.abandon(digest))
            raise
        cost_s = self._clock() - start_s
        encoding = self._insert(digest, computed, cost_s, keep, generation)
        if self._shared and claimed and generation != self._generation:
            self._tell(self._shared.abandon(digest))
        elif self._shared and claimed:
            layout, data = join_tensors(pack(encoding))  # copied before anybody else has it
            self._tell(self._shared.publish(digest, layout, data, cost_s, keep))
        return encoding

    def _insert(self, digest: str, encoding: Encoding, cost_s: float, keep: bool, generation: int) -> Encoding:
        own = MappingProxyType({name: _compact(tensor) for name, tensor in encoding.items()})
        if generation != self._generation:
            return own
        self._entries[digest] = _Entry(own, _versions(own))
        nbytes = ENTRY_BYTES + sum(TENSOR_BYTES + tensor.nbytes for tensor in own.values())
        for victim in self._eviction.add(digest, nbytes, cost_s, self._clock(), keep=keep):
            del self._entries[victim]
        self._refused += digest not in self._entries
        return own

    def _sound_entry(self, digest: str) -> _Entry | None:
        entry = self._entries.get(digest)
        if entry is None or entry.is_sound:
            return entry
        logger.error("a cached encoding was written to by one who used it; it is computed anew")
        self._mutated += 1
        self._eviction.remove(digest)
        del self._entries[digest]
        return None

    def _use(self, digest: str, keep: bool) -> None:
        if digest in self._entries:
            self._eviction.touch(digest, self._clock(), keep=keep)
        if self._shared:
            self._shared.note_use(digest)

    def _count(self, found: Found) -> Found:
        self._counts[found.source] += 1
        return found

    def _tell(self, telling: Coroutine[Any, Any, None]) -> None:
        """In the background: nobody has to wait until the other tier knows."""
        task = shared_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._told)

    def _told(self, task: asyncio.Future[None]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._note_shared_error(error)

    def _note_shared_error(self, error: BaseException) -> None:
        self._shared_errors += 1
        logger.debug("the shared encodings are of no help: %r", error)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """With storage and version of its own: a slice would keep its whole batch alive in a cache that holds one row."""
    tensor = tensor.detach()
    if tensor.is_inference() or tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def _versions(encoding: Encoding) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in encoding.values())
