"""Exact cache of text encodings: the same tokens through the same weights are computed once.

Each replica has its own cache, bounded in bytes; the least valuable entry is evicted first (`eviction.py`). Requests
wait for a key in computation instead of computing it again. This holds over the cluster, because equal texts go to the
same replica (`cluster/records/text_routes.py`).

All callers get the cache's own tensors: READ-ONLY. Copy before writing. The next use finds a write by a torch
operation, by the tensor's version counter, and recomputes the entry. It does not find a write through `.data` or
`.numpy()`, so `requests.pack` returns read-only arrays.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch

from deployments.records.tasks import shared_task
from deployments.text.eviction import CostAwareEviction

Encoding = Mapping[str, torch.Tensor]
Source = Literal["local", "joined", "computed"]

ENTRY_BYTES: Final = 1024  # digest, dictionaries, figures of one entry
TENSOR_BYTES: Final = 512  # of a tensor beside its storage
MAX_JOINS: Final = 3  # computations of others that may fail before a caller goes alone

logger = logging.getLogger("atelier.encodings")


@dataclass(frozen=True, slots=True)
class EncodingKey:
    """The identity of an encoding: the weights, the element type, how it was padded, and the tokens."""

    module_key: str
    dtype: str
    padding: str
    token_ids: tuple[int, ...]

    def digest(self) -> str:
        """Return the hex sha256."""
        parts = (self.module_key, self.dtype, self.padding, ",".join(map(str, self.token_ids)))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


# Keys of one module -> their encodings, in order.
ComputeMany = Callable[[Sequence[EncodingKey]], Awaitable[Sequence[Encoding]]]


@dataclass(frozen=True, slots=True)
class Found:
    """A read-only encoding and its source; every source but "computed" saved this caller a computation."""

    encoding: Encoding
    source: Source


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. `local`, `joined`, `computed` and `failed` count lookups by where they ended.

    `mutated`: entries that a caller had written to. `refused`: encodings that were too large, or worth less than all
    entries.
    """

    local: int
    joined: int
    computed: int
    failed: int
    evicted: int
    refused: int
    mutated: int
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


@dataclass(slots=True, eq=False)
class _Claim:
    """A missing encoding that one request computes for all requests that need it."""

    key: EncodingKey
    digest: str
    keep: bool
    generation: int
    future: asyncio.Future[Found]


class EncodingCache:
    """One replica's cache. Lives on one event loop; not thread-safe."""

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._eviction = CostAwareEviction(max_bytes)
        self._entries: dict[str, _Entry] = {}
        self._in_flight: dict[str, asyncio.Future[Found]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._generation = 0  # of what may be kept: rises when all is forgotten
        self._counts = dict.fromkeys(("local", "joined", "computed", "failed"), 0)
        self._refused = self._mutated = 0

    async def get_all(
        self, keys: Sequence[EncodingKey], compute_many: ComputeMany, *, keep: Collection[EncodingKey] = ()
    ) -> dict[EncodingKey, Found]:
        """Return the encodings: claim missing keys, compute them in one batch per module, then await others' claims.

        No key is computed twice. A request starts its own claims before it waits for others, so no two requests wait
        for each other. A failed computation releases its claims: its own request raises, and waiters look again. A
        cancelled request cancels no computation, because others may have joined it. `keep`: keys that others will need,
        such as empty and negative prompts; they stay while they fit into their share. Raises the errors of
        `compute_many`.
        """
        found: dict[EncodingKey, Found] = {}
        for num_joins in range(MAX_JOINS + 1):
            joined: dict[EncodingKey, tuple[str, asyncio.Future[Found]]] = {}
            own: list[_Claim] = []
            for key in keys:
                if key in found:
                    continue
                digest = key.digest()
                if entry := self._sound_entry(digest):
                    self._note_use(digest, key in keep)
                    found[key] = self._count(Found(entry.encoding, "local"))
                elif digest in self._in_flight and num_joins < MAX_JOINS:
                    joined[key] = digest, self._in_flight[digest]
                else:
                    own.append(self._claim(key, digest, key in keep))
            if own:
                self._begin_batches(own, compute_many)
                await asyncio.wait([claim.future for claim in own], return_when=asyncio.FIRST_EXCEPTION)
                self._raise_failure(own)
                found |= {claim.key: self._count(claim.future.result()) for claim in own}
            if joined:
                await asyncio.wait([future for _, future in joined.values()])
                for key, (digest, future) in joined.items():
                    if not future.exception():
                        self._note_use(digest, key in keep)
                        found[key] = self._count(Found(future.result().encoding, "joined"))
            if len(found) == len(keys):
                break
        return found

    def forget_all(self) -> None:
        """Drop all entries; let no request join a running computation, and store none of its results.

        For weights that were found damaged: it is unknown which encodings they made.
        """
        self._generation += 1
        for digest in self._entries:
            self._eviction.remove(digest)
        self._entries.clear()
        self._in_flight.clear()

    def cache_stats(self) -> CacheStats:
        """Return a snapshot."""
        return CacheStats(
            **self._counts,
            evicted=self._eviction.num_evicted,
            refused=self._refused,
            mutated=self._mutated,
            entries=len(self._entries),
            kept=self._eviction.num_kept,
            nbytes=self._eviction.nbytes,
            kept_bytes=self._eviction.kept_bytes,
            max_bytes=self._eviction.max_bytes,
            entries_per_gib=len(self._entries) * 2**30 / self._eviction.nbytes if self._entries else 0.0,
        )

    def _claim(self, key: EncodingKey, digest: str, keep: bool) -> _Claim:
        claim = _Claim(key, digest, keep, self._generation, asyncio.get_running_loop().create_future())
        self._in_flight[digest] = claim.future
        return claim

    def _begin_batches(self, claims: Sequence[_Claim], compute_many: ComputeMany) -> None:
        """Begin one batch per module. They end independently of the request."""
        batches: dict[str, list[_Claim]] = {}
        for claim in claims:
            batches.setdefault(claim.key.module_key, []).append(claim)
        for batch in batches.values():
            self._tasks.add(task := shared_task(self._compute(batch, compute_many)))
            task.add_done_callback(self._tasks.discard)

    async def _compute(self, claims: Sequence[_Claim], compute_many: ComputeMany) -> None:
        """Run one batch. Its cost is the time from here, because the next one would wait for queue and batch, too."""
        start_s = self._clock()
        try:
            computed = await compute_many([claim.key for claim in claims])
            cost_s = self._clock() - start_s
            for claim, encoding in zip(claims, computed, strict=True):
                own = self._insert(claim, encoding, cost_s)
                self._end(claim)
                claim.future.set_result(Found(own, "computed"))
        except BaseException as error:
            self._fail(claims, error)
            if not isinstance(error, Exception):
                raise

    def _fail(self, claims: Sequence[_Claim], error: BaseException) -> None:
        """Release failed claims, so that others may compute them."""
        failed = [claim for claim in claims if not claim.future.done()]
        if isinstance(error, asyncio.CancelledError | StopIteration):  # a future takes neither as its own
            error = RuntimeError(f"the computation of an encoding ended by {error!r}")
        for claim in failed:
            self._end(claim)
            claim.future.set_exception(error)
            claim.future.exception()  # perhaps nobody waits any more

    def _end(self, claim: _Claim) -> None:
        if self._in_flight.get(claim.digest) is claim.future:  # it may be forgotten, or another request went alone
            del self._in_flight[claim.digest]

    def _raise_failure(self, claims: Sequence[_Claim]) -> None:
        errors = [error for claim in claims if claim.future.done() and (error := claim.future.exception())]
        self._counts["failed"] += len(errors)
        if errors:
            raise errors[0]

    def _insert(self, claim: _Claim, encoding: Encoding, cost_s: float) -> Encoding:
        own = MappingProxyType({name: _compact(tensor) for name, tensor in encoding.items()})
        if claim.generation != self._generation:
            return own
        self._entries[claim.digest] = _Entry(own, _versions(own))
        nbytes = ENTRY_BYTES + sum(TENSOR_BYTES + tensor.nbytes for tensor in own.values())
        for victim in self._eviction.add(claim.digest, nbytes, cost_s, self._clock(), keep=claim.keep):
            del self._entries[victim]
        self._refused += claim.digest not in self._entries
        return own

    def _sound_entry(self, digest: str) -> _Entry | None:
        entry = self._entries.get(digest)
        if entry is None or entry.versions == _versions(entry.encoding):
            return entry
        logger.error("cached encoding was modified in place; recomputing")
        self._mutated += 1
        self._eviction.remove(digest)
        del self._entries[digest]
        return None

    def _note_use(self, digest: str, keep: bool) -> None:
        if digest in self._entries:
            self._eviction.touch(digest, self._clock(), keep=keep)

    def _count(self, found: Found) -> Found:
        self._counts[found.source] += 1
        return found


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with its own storage and version: a row would keep its whole batch in memory."""
    tensor = tensor.detach()
    if tensor.is_inference() or tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def _versions(encoding: Encoding) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in encoding.values())
