"""SharedEncodings: one cache of text encodings for the whole cluster. A named, detached actor.

Small encodings travel in the answer. Larger ones are objects that the actor owns, so that they outlive the replica
that computed them: mapped without a copy on the actor's node, pulled by Ray on others. It holds a view of each, as
keepers do: an object with a view is never spilled. All of it is cache: the actor restarts empty, and a replica that
gets no answer computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import ray

from cluster.actor_names import encodings_name
from cluster.encodings.ledger import CLAIM_S, EncodingLedger, Waiter
from cluster.encodings.packed import ByteArray, Layout
from cluster.encodings.records import INLINE_BYTES, Answer, SharedEncoding, SharedStats
from cluster.keeper.object_store import ObjectStore, StoreFull, capacity_bytes
from cluster.ray_calls import connect_actor

__all__ = ["SharedEncodings", "connect_shared_encodings"]

MAX_STORE_SHARE: Final = 0.1  # of the node's object store, most of which is for weights
ENTRY_BYTES: Final = 1024  # digest, dictionaries and layout of one entry
REFERENCE_BYTES: Final = 3072  # what Ray keeps of an object in its owner
EXPIRE_EVERY_S: Final = 0.2
MAX_CALLS: Final = 10_000  # at once: who waits does it in a call, and costs a coroutine

logger = logging.getLogger("atelier.encodings")


class Store(Protocol):
    """An object store for encodings that are too large for an answer. `put` blocks, and raises StoreFull."""

    capacity_bytes: int

    def put(self, array: ByteArray) -> tuple[Any, ByteArray]: ...


class _NodeStore:
    """Ray's object store, opened at the first `put`: opening blocks, which an actor's start must not."""

    def __init__(self) -> None:
        self._node_id: str = ray.get_runtime_context().get_node_id()
        self.capacity_bytes = capacity_bytes(self._node_id)
        self._opening = threading.Lock()
        self._store: ObjectStore | None = None

    def put(self, array: ByteArray) -> tuple[Any, ByteArray]:
        with self._opening:
            self._store = self._store or ObjectStore(self._node_id)
        # 0: which of the store's pages have been touched is not known here, so each put looks for room.
        return self._store.put(array, 0)


@dataclass(frozen=True, slots=True)
class _Held:
    encoding: SharedEncoding
    view: ByteArray


class SharedEncodings:
    """The actor. It is async: a waiting call holds no thread. `store` replaces Ray's."""

    def __init__(
        self,
        max_bytes: int,
        *,
        claim_s: float = CLAIM_S,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store or _NodeStore()
        limit_bytes = int(self._store.capacity_bytes * MAX_STORE_SHARE)
        if max_bytes > limit_bytes:
            logger.warning("%d bytes of shared encodings instead of %d: Ray's store is small", limit_bytes, max_bytes)
        self._ledger: EncodingLedger[_Held] = EncodingLedger(min(max_bytes, limit_bytes), claim_s=claim_s, clock=clock)
        self._expiring: asyncio.Task[None] | None = None
        self._life = uuid.uuid4().hex
        self._num_forgotten = 0
        self._forgetting = asyncio.Event()

    async def find_or_claim(
        self, digests: Sequence[str], holder: str, used: Iterable[str] = ()
    ) -> list[Answer[SharedEncoding]]:
        """Answer for all digests, as `EncodingLedger` does. `used`: those of which the holder used its own copy."""
        self._expiring = self._expiring or asyncio.ensure_future(self._expire())
        self._ledger.note_uses(used)
        return [_told(self._ledger.find_or_claim(digest, holder)) for digest in digests]

    async def wait(self, digest: str, holder: str, timeout_s: float) -> Answer[SharedEncoding]:
        """Wait until the encoding or the claim is the holder's; "wait" when there is nothing new after `timeout_s`."""
        future: asyncio.Future[Answer[_Held]] = asyncio.get_running_loop().create_future()

        def tell(answer: Answer[_Held]) -> None:
            if not future.done():
                future.set_result(answer)

        waiter = Waiter(holder, tell)
        if answer := self._ledger.wait(digest, waiter):
            return _told(answer)
        await asyncio.wait([future], timeout=timeout_s)
        self._ledger.stop_waiting(digest, waiter)
        return _told(future.result()) if future.done() else Answer("wait")

    async def publish(self, digest: str, layout: Layout, data: ByteArray, cost_s: float, keep: bool) -> None:
        """Keep an encoding and give it to all who wait."""
        generation = self.generation
        if data.nbytes <= INLINE_BYTES:
            own = data.copy()  # not a view of the message that it came in
            held = _Held(SharedEncoding(layout, own, cost_s, generation), own)
            self._ledger.publish(digest, held, ENTRY_BYTES + own.nbytes, cost_s, keep=keep)
            return
        try:
            ref, view = await asyncio.to_thread(self._store.put, data)
        except StoreFull as error:
            logger.warning("an encoding cannot be kept: %s", error)
            self._ledger.hand_out(digest, _Held(SharedEncoding(layout, data, cost_s, generation), data))
            return
        held = _Held(SharedEncoding(layout, ref, cost_s, generation), view)
        if generation != self.generation:  # all was forgotten while it was put
            self._ledger.hand_out(digest, held)
            return
        self._ledger.publish(digest, held, ENTRY_BYTES + REFERENCE_BYTES + view.nbytes, cost_s, keep=keep)

    async def publish_all(self, encodings: Sequence[tuple[str, Layout, ByteArray, float, bool]]) -> None:
        """Keep several, each as `publish` does."""
        for encoding in encodings:
            await self.publish(*encoding)

    async def abandon(self, digests: Sequence[str], holder: str) -> None:
        """Pass the holder's claims on."""
        for digest in digests:
            self._ledger.abandon(digest, holder)

    async def renew(self, digests: Sequence[str], holder: str) -> None:
        """Keep the holder's claims alive."""
        self._ledger.renew(digests, holder)

    async def forget_all(self) -> None:
        """Drop everything, and tell all replicas by another `generation`."""
        self._ledger.forget_all()
        self._num_forgotten += 1
        self._forgetting.set()
        self._forgetting = asyncio.Event()

    @property
    def generation(self) -> str:
        """Another one after every `forget_all`, and in every life of the actor."""
        return f"{self._life}/{self._num_forgotten}"

    async def next_generation(self, known: str | None, timeout_s: float) -> str:
        """Return the generation when it is not, or no longer, the `known` one; at the latest after `timeout_s`."""
        if known == self.generation:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._forgetting.wait()
        return self.generation

    async def stats(self) -> SharedStats:
        """Return a snapshot."""
        return self._ledger.stats()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            self._ledger.expire()


def _told(answer: Answer[_Held]) -> Answer[SharedEncoding]:
    return Answer(answer.state, answer.payload.encoding if answer.payload else None)


def connect_shared_encodings(key: str, max_bytes: int) -> Any:
    """Return the handle of the cluster's shared encodings; the first caller starts them. Blocks."""
    return connect_actor(SharedEncodings, encodings_name(key), MAX_CALLS, max_bytes)
