"""Exact cache of text encodings: the same tokens through the same weights are computed once.

Two tiers. This one is a replica's: bounded in bytes, the entry that is cheapest to do without is evicted first
(`cluster/encodings/eviction.py`). The other is the cluster's (`cluster/encodings/actor.py`), and may be missing: then,
and whenever it fails, the replica computes. It is asked where that is worth the wait (`cluster/encodings/worth.py`).
In both, a key that is being computed is waited for, not computed again.

Encodings are handed out as they lie in the cache, to everybody the same tensors: READ-ONLY. Whoever wants to write
makes a copy. A write by a torch operation is found at the next use, by the tensor's version counter, and the entry
computed anew; one through `.data` or `.numpy()` is not, which is why `requests.pack` gives read-only arrays. What
goes to and comes from the other tier is copied, so a write stays in its replica.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

import torch

from cluster.encodings.eviction import CostAwareEviction
from cluster.encodings.packed import ByteArray, join_tensors, split_tensors
from cluster.encodings.records import Answer, Publication, SharedEncoding, entries_per_gib
from cluster.encodings.worth import AskingWorth
from deployments.tasks import shared_task
from deployments.text.requests import pack, unpack

if TYPE_CHECKING:  # it loads Ray
    from cluster.encodings.ray_tier import RaySharedTier

Encoding = Mapping[str, torch.Tensor]
Source = Literal["local", "joined", "shared", "computed"]

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
    """An encoding, read-only, and its source: all but "computed" spared this caller a computation."""

    encoding: Encoding
    source: Source


@dataclass(frozen=True, slots=True)
class CacheStats:
    """A snapshot. `local`, `joined`, `shared`, `computed` and `failed` count lookups by where they ended.

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
    """Every torch operation that writes raises a tensor's version, which all of its views share.

    `generation` is the other tier's, of a copy from there; None of what was computed here.
    """

    encoding: Encoding
    versions: tuple[int, ...]
    generation: str | None


@dataclass(slots=True, eq=False)
class _Claim:
    """A missing encoding that one request obtains for all in this replica who ask for it meanwhile.

    `is_shared`: the other tier has to be told how it ends: it knows of the claim, or was not asked.
    """

    key: EncodingKey
    digest: str
    keep: bool
    generation: int
    future: asyncio.Future[Found]
    is_shared: bool = False


class EncodingCache:
    """One replica's cache. Lives on one event loop; not thread-safe. `shared` is of no help when it raises."""

    def __init__(
        self, max_bytes: int, shared: RaySharedTier | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shared = shared
        self._clock = clock
        self._worth = AskingWorth()
        self._eviction = CostAwareEviction(max_bytes)
        self._entries: dict[str, _Entry] = {}
        self._in_flight: dict[str, asyncio.Future[Found]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._generation = 0  # of what may be kept: rises when all is forgotten
        self._counts = dict.fromkeys(("local", "joined", "shared", "computed", "failed"), 0)
        self._refused = self._mutated = self._shared_errors = 0

    async def get_all(
        self, keys: Sequence[EncodingKey], compute_many: ComputeMany, *, keep: Collection[EncodingKey] = ()
    ) -> dict[EncodingKey, Found]:
        """Return the encodings: claim what is missing, compute that in one batch per module, then await others' work.

        Nobody computes a key twice, and nobody waits for others before the own claims are under way, so no two
        requests wait for each other. A failed computation releases its claims: its own request raises, and one that
        waited looks again. A cancelled request cancels no computation, for others may have joined it. `keep`: keys
        that will be wanted by others, as empty and negative prompts are; they stay as long as they fit into their
        share. Raises what `compute_many` raises.
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
                self._tasks.add(task := shared_task(self._obtain(own, compute_many)))
                task.add_done_callback(self._tasks.discard)
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
        """Forget what is here and in the other tier; keep nothing of what is being computed, and let nobody join it.

        For weights that were found damaged: nobody knows since when they were, and which encodings they made. Other
        replicas drop their copies of what was in the other tier, by its `generation`.
        """
        self._generation += 1
        for digest in self._entries:
            self._eviction.remove(digest)
        self._entries.clear()
        self._in_flight.clear()
        if self._shared:
            self._shared.forget_all()

    def cache_stats(self) -> CacheStats:
        """Return a snapshot."""
        return CacheStats(
            **self._counts,
            evicted=self._eviction.num_evicted,
            refused=self._refused,
            mutated=self._mutated,
            shared_errors=self._shared_errors + (self._shared.num_untold if self._shared else 0),
            entries=len(self._entries),
            kept=self._eviction.num_kept,
            nbytes=self._eviction.nbytes,
            kept_bytes=self._eviction.kept_bytes,
            max_bytes=self._eviction.max_bytes,
            entries_per_gib=entries_per_gib(len(self._entries), self._eviction.nbytes),
        )

    def _claim(self, key: EncodingKey, digest: str, keep: bool) -> _Claim:
        claim = _Claim(key, digest, keep, self._generation, asyncio.get_running_loop().create_future())
        self._in_flight[digest] = claim.future
        return claim

    async def _obtain(self, claims: Sequence[_Claim], compute_many: ComputeMany) -> None:
        """Bring all claims to their end: ask the other tier once, compute what is ours, and receive the rest."""
        try:
            answers = await self._ask_shared(claims)
            batches: dict[str, list[_Claim]] = {}
            work = []
            for claim, answer in zip(claims, answers, strict=True):
                if answer and answer.state != "yours":
                    work.append(self._receive(claim, answer, compute_many))
                else:
                    claim.is_shared = answer is not None
                    batches.setdefault(claim.key.module_key, []).append(claim)
            await asyncio.gather(*work, self._compute_all(batches.values(), compute_many))
        except BaseException as error:
            self._fail(claims, error)
            raise

    async def _ask_shared(self, claims: Sequence[_Claim]) -> Sequence[Answer[SharedEncoding] | None]:
        """Return what the other tier has; None where it is of no help. What it need not be asked is ours to compute."""
        modules = [claim.key.module_key for claim in claims]
        if self._shared is None:
            return [None] * len(claims)
        if not self._worth.is_worth_asking(modules):
            return [Answer("yours")] * len(claims)
        start_s = self._clock()
        try:
            answers = await self._shared.find_or_claim([claim.digest for claim in claims])
        except Exception as error:  # whatever it is, the text can be encoded here
            self._note_shared_error(error)
            return [None] * len(claims)
        is_found = [answer.state != "yours" for answer in answers]
        self._worth.note_answers(zip(modules, is_found, strict=True), self._clock() - start_s)
        return answers

    async def _receive(self, claim: _Claim, answer: Answer[SharedEncoding], compute_many: ComputeMany) -> None:
        """Take what the other tier has or gets; compute it when the claim passes to us or the tier fails."""
        assert self._shared is not None
        try:
            if shared := await self._shared.receive(claim.digest, answer):
                encoding = unpack(split_tensors(shared.layout, shared.data))
                self._worth.note_computed(claim.key.module_key, shared.cost_s)
                own = self._insert(claim, encoding, shared.cost_s, shared.generation)
                self._resolve(claim, Found(own, "shared"))
                return
            claim.is_shared = True
        except Exception as error:
            self._note_shared_error(error)
        await self._compute_all([[claim]], compute_many)

    async def _compute_all(self, batches: Iterable[Sequence[_Claim]], compute_many: ComputeMany) -> None:
        """Run the batches, then tell the other tier of all together: a call for each would keep the next one waiting.

        HAZARD: not later, when what others compute has come, too: they may wait for these.
        """
        computed = await asyncio.gather(*(self._compute(batch, compute_many) for batch in batches))
        told = [one for batch in computed for one in batch]
        sound = [(new, data) for claim, new, data in told if claim.generation == self._generation]
        forgotten = [claim.digest for claim, *_ in told if claim.generation != self._generation]
        if self._shared and sound:
            self._shared.publish(*zip(*sound, strict=True))
        if self._shared and forgotten:
            self._shared.abandon(forgotten)

    async def _compute(
        self, claims: Sequence[_Claim], compute_many: ComputeMany
    ) -> list[tuple[_Claim, Publication, ByteArray]]:
        """Run one batch, and return what the other tier is to be told of it.

        The cost is how long it took from here: the next one would wait for queue and batch, too.
        """
        start_s, told = self._clock(), list[tuple[_Claim, Publication, ByteArray]]()
        try:
            computed = await compute_many([claim.key for claim in claims])
            cost_s = self._clock() - start_s
            self._worth.note_computed(claims[0].key.module_key, cost_s)
            for claim, encoding in zip(claims, computed, strict=True):
                own = self._insert(claim, encoding, cost_s)
                if claim.is_shared:
                    layout, data = join_tensors(pack(own))  # copied before anybody else has it
                    told.append((claim, Publication(claim.digest, layout, cost_s, claim.keep), data))
                self._resolve(claim, Found(own, "computed"))
        except Exception as error:
            self._fail(claims, error)
        return told

    def _fail(self, claims: Sequence[_Claim], error: BaseException) -> None:
        """Release those that have not ended well: somebody else may compute them."""
        failed = [claim for claim in claims if not claim.future.done()]
        if self._shared and (digests := [claim.digest for claim in failed if claim.is_shared]):
            self._shared.abandon(digests)
        if isinstance(error, asyncio.CancelledError | StopIteration):  # a future takes neither as its own
            error = RuntimeError(f"the computation of an encoding ended by {error!r}")
        for claim in failed:
            self._end(claim)
            claim.future.set_exception(error)
            claim.future.exception()  # perhaps nobody waits any more

    def _resolve(self, claim: _Claim, found: Found) -> None:
        self._end(claim)
        claim.future.set_result(found)

    def _end(self, claim: _Claim) -> None:
        if self._in_flight.get(claim.digest) is claim.future:  # it may be forgotten, or another request went alone
            del self._in_flight[claim.digest]

    def _raise_failure(self, claims: Sequence[_Claim]) -> None:
        errors = [error for claim in claims if claim.future.done() and (error := claim.future.exception())]
        self._counts["failed"] += len(errors)
        if errors:
            raise errors[0]

    def _insert(
        self, claim: _Claim, encoding: Encoding, cost_s: float, shared_generation: str | None = None
    ) -> Encoding:
        own = MappingProxyType({name: _compact(tensor) for name, tensor in encoding.items()})
        if claim.generation != self._generation or not self._is_current(shared_generation):
            return own
        self._entries[claim.digest] = _Entry(own, _versions(own), shared_generation)
        nbytes = ENTRY_BYTES + sum(TENSOR_BYTES + tensor.nbytes for tensor in own.values())
        for victim in self._eviction.add(claim.digest, nbytes, cost_s, self._clock(), keep=claim.keep):
            del self._entries[victim]
        self._refused += claim.digest not in self._entries
        return own

    def _sound_entry(self, digest: str) -> _Entry | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        is_current, is_unwritten = self._is_current(entry.generation), entry.versions == _versions(entry.encoding)
        if is_current and is_unwritten:
            return entry
        if is_current:
            logger.error("a cached encoding was written to by one who used it; it is computed anew")
            self._mutated += 1
        self._eviction.remove(digest)
        del self._entries[digest]
        return None

    def _is_current(self, generation: str | None) -> bool:
        return generation is None or self._shared is None or generation == self._shared.generation

    def _note_use(self, digest: str, keep: bool) -> None:
        if digest in self._entries:
            self._eviction.touch(digest, self._clock(), keep=keep)
        if self._shared:
            self._shared.note_use(digest)

    def _count(self, found: Found) -> Found:
        self._counts[found.source] += 1
        return found

    def _note_shared_error(self, error: BaseException) -> None:
        self._shared_errors += 1
        logger.debug("the shared encodings are of no help: %r", error)


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return it with storage and version of its own: a row of a batch would keep the whole batch in memory."""
    tensor = tensor.detach()
    if tensor.is_inference() or tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def _versions(encoding: Encoding) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in encoding.values())
