"""The extents in a node's shared memory: their holding, their writing, and the audit of their bytes.

A restarted keeper adopts the extents that replicas still have mapped, before it reads any again. All held extents are
audited again and again: shared memory cannot be made read-only for the processes that map it, and one wrong in-place
operation in one replica changes the weights of all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeVar

import numpy as np
import ray
import xxhash
from xxhash import xxh3_128

from cluster.keeper.budgets import MAX_SHARE, max_budget_bytes
from cluster.keeper.extent_loading import Writing
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.object_store import NewObject
from cluster.keeper.records import HeldExtent, HeldOffer, StoreFull, copy_name
from cluster.keeper.residents import Residents
from cluster.process.ray_calls import get
from weights.memory.host_pool import ByteArray
from weights.records.errors import BudgetExceeded
from weights.records.manifest import ExtentRef

_Result = TypeVar("_Result")
AUDIT_BYTES_PER_S: Final = 64 * 2**20
BLOCK_BYTES: Final = 4 * 2**20
IDLE_S: Final = 1.0
MAX_NAMED_CORRUPT: Final = 20
MAX_INVALIDATED: Final = 1000  # damaged copies named to replicas, which ask every second

# Replicas offer a restarted keeper their extents within a second; until then storage is not read. On a busy machine
# some take longer: each offer gives the next one this much more time.
ADOPTION_S: Final = 3.0
LOWEST_PRIORITY: Final = 19

logger = logging.getLogger("atelier.keeper")


class Adoption:
    """The offers of replicas to a restarted keeper. Thread-safe. Damaged extents go to no other holder."""

    def __init__(
        self,
        held: HeldExtents,
        damage: DamageLog,
        *,
        verify: bool,
        wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._held = held
        self._damage = damage
        self._verify = verify
        self._clock = clock
        self._wait_s = wait_s
        self._until_s = clock() + wait_s
        self._counting = threading.Lock()
        self.adopted_bytes = 0

    def wait_for(self, ids: Sequence[str]) -> None:
        """Wait until all of them are resident, or no further offer is expected."""
        while (left_s := self._until_s - self._clock()) > 0:
            if self._held.wait_until_known(ids, left_s):
                return

    def take_offers(self, holder: str, offers: Sequence[HeldOffer]) -> None:
        """Take over the offers, with the leases on the holder's own copies."""
        self._expect_more()
        for offer in offers:
            self._expect_more()
            if self._held.holders.lease_same(offer.extent.id, offer.ref, holder, offer.num_leases):
                continue
            view = self._sound_view(offer, holder)
            if view is None:
                unknown = HeldExtent(offer.extent, offer.ref, np.empty(0, np.uint8), "adopted")
                self._held.holders.add_detached(unknown, holder, offer.num_leases)
            elif self._held.holders.adopt(
                HeldExtent(offer.extent, offer.ref, view, "adopted"), holder, offer.num_leases
            ):
                with self._counting:
                    self.adopted_bytes += offer.extent.nbytes

    def _expect_more(self) -> None:
        """Give offers more time while requests may still wait: a later offer is too late."""
        now_s = self._clock()
        if now_s < self._until_s:
            self._until_s = max(self._until_s, now_s + self._wait_s)

    def _sound_view(self, offer: HeldOffer, holder: str) -> ByteArray | None:
        """Return the bytes of an offer; None if it cannot be mapped here, or is damaged."""
        try:
            view: ByteArray = get(offer.ref, ADOPTION_S)
        except ray.exceptions.RayError as error:
            logger.warning("extent %s of %s cannot be adopted: %s", offer.extent.id, holder, error)
            return None
        if self._verify and xxhash.xxh3_128_hexdigest(view.data) != offer.extent.checksum:
            self._damage.note_damage(offer.extent.id, offer.ref, f"as {holder} has it")
            return None
        return view


class DamageLog:
    """The damaged copies of extents, whose shared bytes a process changed; only the last ones by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._corrupt: deque[str] = deque(maxlen=MAX_NAMED_CORRUPT)
        self._invalidated: deque[str] = deque(maxlen=MAX_INVALIDATED)
        self.num_corrupt = 0

    @property
    def corrupt(self) -> tuple[str, ...]:
        """The ids of the extents."""
        with self._lock:
            return tuple(self._corrupt)

    @property
    def invalidated(self) -> tuple[str, ...]:
        """The names of the copies, by `copy_name`."""
        with self._lock:
            return tuple(self._invalidated)

    def note_damage(self, id_: str, ref: Any, where: str) -> None:
        """Log that the copy `ref` of an extent is damaged, and `where` it was found."""
        logger.error("extent %s was written to (%s): the next request gets a fresh copy", id_, where)
        with self._lock:
            self.num_corrupt += 1
            self._corrupt.append(id_)
            self._invalidated.append(copy_name(ref))


class Audited(Protocol):
    """Memory that is audited."""

    @property
    def residents(self) -> Residents:
        """The extents in this memory."""
        ...

    def note_damage(self, held: HeldExtent) -> None:
        """Note that the bytes of an extent do not match its checksum."""
        ...


class Audit:
    """A thread that hashes one extent of a memory after the other, at most `bytes_per_s`.

    Between two blocks it keeps no reference, so evicted extents go at once. Extents named by `look_soon` come first.
    """

    def __init__(self, memory: Audited, bytes_per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._memory = memory
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._closed = threading.Event()
        self._doubted: dict[str, None] = {}
        self.audited_bytes = 0

    def look_soon(self, id_: str) -> None:
        """Check this extent next, if it is resident: a peer got wrong bytes of it. From any thread; never blocks."""
        if self._memory.residents.held(id_) is not None:
            self._doubted[id_] = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="audit", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def round(self) -> None:
        """Check every present extent once, and before each one the doubted ones."""
        for id_ in [None, *self._memory.residents.ids()]:
            while self._doubted and not self._closed.is_set():
                self._check(self._doubted.popitem()[0])
            if self._closed.is_set():
                return
            if id_ is not None:
                self._check(id_)

    def _run(self) -> None:
        while not self._closed.wait(IDLE_S):
            try:
                self.round()
            except Exception:
                logger.exception("the audit of shared weights failed")

    def _check(self, id_: str) -> None:
        digest, offset = xxh3_128(), 0
        first = self._memory.residents.held(id_)
        while first is not None and offset < first.extent.nbytes:
            start_s = self._clock()
            block = first.view[offset : offset + BLOCK_BYTES]
            digest.update(block.data)
            offset += block.nbytes
            self.audited_bytes += block.nbytes
            same = weakref.ref(first)
            rest_s = block.nbytes / self._bytes_per_s - (self._clock() - start_s)
            del first, block
            if self._closed.wait(max(rest_s, 0.0)):
                return
            first = self._memory.residents.held(id_)
            if first is not same():
                return  # evicted and loaded again meanwhile
        if first is not None and digest.hexdigest() != first.extent.checksum:
            self._memory.note_damage(first)


class Store(Protocol):
    """A store that shares extents with other processes."""

    capacity_bytes: int

    def create_object(self, nbytes: int, used_bytes: int) -> NewObject: ...

    def populate(self) -> None: ...


class _StoreWriter:
    """The extents being written into the store, beside those held there. Thread-safe."""

    def __init__(self, store: Store, held: HeldExtents) -> None:
        self._store = store
        self._held = held
        self._counting = threading.Lock()
        self._writing_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Used bytes of the store, those being written included."""
        return self._held.residents.totals().resident_bytes + self._writing_bytes

    @contextlib.contextmanager
    def begin_writing(self, extent: ExtentRef) -> Iterator[Writing]:
        """Yield a place in the store, made when it is asked for; without a seal it is dropped at the end of the block.

        Making it raises StoreFull when the store is full and no extent may be evicted.
        """
        writing = _ObjectWriting(self, extent)
        try:
            yield writing
        finally:
            self.count_writing(-writing.reserved_bytes)

    def create_object(self, extent: ExtentRef) -> NewObject:
        """Return a place for the extent, which counts as being written."""
        found = self.with_room(extent, lambda: self._store.create_object(extent.nbytes, self.used_bytes))
        self.count_writing(found.reserved_bytes)
        return found

    def with_room(self, extent: ExtentRef, put: Callable[[], _Result]) -> _Result:
        """Call `put` and return its result; evict others until it has room."""
        while True:
            try:
                return put()
            except StoreFull as error:
                # Within the budget, but not in one piece, or other objects are in the way.
                if not self._held.shed(extent.nbytes):
                    raise StoreFull(f"{error} ({self._held.residents.holders_text()})") from None

    def count_writing(self, nbytes: int) -> None:
        """Count bytes that are in the store but not held yet."""
        with self._counting:
            self._writing_bytes += nbytes


class _ObjectWriting:
    """An extent being written into an object of the store."""

    def __init__(self, writer: _StoreWriter, extent: ExtentRef) -> None:
        self._writer = writer
        self._extent = extent
        self._object: NewObject | None = None

    @property
    def reserved_bytes(self) -> int:
        return self._object.reserved_bytes if self._object else 0

    def place(self) -> ByteArray:
        return self._get_object().out

    def seal(self) -> tuple[Any, ByteArray]:
        return self._writer.with_room(self._extent, lambda: self._get_object().seal(self._writer.used_bytes))

    def _get_object(self) -> NewObject:
        self._object = self._object or self._writer.create_object(self._extent)
        return self._object


class NodeMemory:
    """The object store of a node and the extents in it. `start` begins the watch of holders and the audit of bytes.

    `adoption_s`: the time that replicas have to offer their mapped extents. `audit_bytes_per_s` 0: no audit.
    """

    def __init__(
        self,
        store: Store,
        held: HeldExtents,
        node_id: str,
        *,
        verify: bool,
        adoption_s: float,
        audit_bytes_per_s: float,
    ) -> None:
        self.store = store
        self.held = held
        self.residents = held.residents
        self._node_id = node_id
        self._is_audited = bool(audit_bytes_per_s)
        self.writer = _StoreWriter(store, held)
        self.damage = DamageLog()
        self.adoption: Adoption = Adoption(held, self.damage, verify=verify, wait_s=adoption_s)
        self.audit: Audit = Audit(self, audit_bytes_per_s or float("inf"))

    def start(self, *, populate: bool) -> None:
        """Watch the holders, audit held extents and, with `populate`, make the store's pages, all in threads."""
        self.held.holders.watch.start()
        if self._is_audited:
            self.audit.start()
        if populate:
            threading.Thread(target=self._populate_store, name="populate", daemon=True).start()

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. Raises BudgetExceeded when the store is too small for it."""
        capacity_bytes = self.store.capacity_bytes
        largest_bytes = max_budget_bytes(capacity_bytes)
        if not 0 <= budget_bytes <= largest_bytes:
            raise BudgetExceeded(
                f"a budget of {budget_bytes} bytes: node {self._node_id} allows 0 to {largest_bytes}, "
                f"{MAX_SHARE:.0%} of its object store of {capacity_bytes}"
            )
        self.held.set_budget(budget_bytes)

    def close(self) -> None:
        """End its threads."""
        self.held.holders.watch.close()
        self.audit.close()

    def _populate_store(self) -> None:
        """Make the store's pages at the lowest priority: every process of the node starts now."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # on Linux, of this thread alone
        self.store.populate()

    def note_damage(self, held: HeldExtent) -> None:
        """Withhold a damaged copy from other holders, and log its present ones."""
        holders = [holder for found in self.residents.described([held.extent.id]) for holder in found.holders]
        if self.held.invalidate(held.extent.id, held.view):
            where = f"in shared memory, leased by {', '.join(holders) or 'nobody'}"
            self.damage.note_damage(held.extent.id, held.ref, where)
