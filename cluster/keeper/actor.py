"""NodeKeeper: one per node. Gets extents once, from storage or another node, and holds them in Ray's object store.

It owns the objects and keeps a live view of each: an object with a view is never spilled by Ray. Replicas get the
references and map the same memory. Leased and pinned extents stay; of the rest, the cheapest to do without are evicted
when the byte budget needs room. A keeper that dies loses only extents that no replica holds.

Threads read: they bring extents into the node's shared memory, from storage or another node.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import ray

from cluster.keeper.budgets import budget_within_store
from cluster.keeper.extent_book import ExtentBook
from cluster.keeper.extent_loading import ExtentLoader, LoadClock, Peers
from cluster.keeper.held_extents import MAX_WAIT_S, HeldExtents
from cluster.keeper.object_store import ObjectStore, let_go
from cluster.keeper.records import (
    Greeting,
    HeldOffer,
    KeeperStats,
    LeasedRefs,
    Recall,
    RecallAnswer,
    ResidentExtent,
    Source,
)
from cluster.keeper.shared_memory import ADOPTION_S, AUDIT_BYTES_PER_S, NodeMemory, Store
from cluster.peers.link import PeerLink, RegistryClient
from cluster.peers.server import StoredBytes
from cluster.process.logs import configure_logs
from cluster.process.processes import ProcessMark
from cluster.process.telemetry import LoadMetrics
from cluster.records.errors import KeeperFailed
from cluster.start.node_checks import running_code, why_other_code
from configs.cluster import LogFormat
from weights.memory.host_pool import ByteArray, HostBufferPool
from weights.platform.panics import as_error
from weights.reading.blocks import resolve_pack
from weights.reading.extents import ExtentReader, Resident, reading_order
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock, StageFigures
from weights.records.errors import ExtentCorrupt, StoreError
from weights.records.manifest import DELTA_KEY, DeltaRef, ExtentRef

__all__ = ["KeeperSettings", "KeeperStats", "NodeKeeper", "Reading", "keeper_class"]

logger = logging.getLogger("atelier.keeper")


class Reading:
    """The reads of one keeper. Thread-safe. Raises WeightsError when `ATELIER_READ` is malformed.

    `resident` looks up extents in the node's memory, as the base of a delta.
    """

    def __init__(
        self,
        packs: Path,
        staging_bytes: int,
        peers: Peers | None,
        metrics: LoadMetrics | None,
        *,
        verify: bool,
        resident: Resident = lambda base: None,
        node: str = "",
    ) -> None:
        self.pool = HostBufferPool(staging_bytes)
        self.stages = StageClock()
        self._packs = packs
        self._node = node
        self._verify = verify
        self._metrics = metrics
        self._planner = ReadPlanner()
        self._plan = self._planner.plan(packs.resolve())
        self._threads = concurrent.futures.ThreadPoolExecutor(
            self._plan.strategy.num_threads, thread_name_prefix="read"
        )
        self.loader = ExtentLoader(
            ExtentReader(packs, self.pool, self._planner, verify=verify, resident=resident),
            peers,
            packs=packs,
            node=node,
        )
        self._counting = threading.Lock()
        self._bytes: Counter[Source] = Counter()

    def has_storage(self) -> bool:
        """Return whether this node has the store's folder: without it, other nodes have to read."""
        return self._packs.is_dir()

    def loaded_bytes(self, source: Source) -> int:
        """Return the bytes loaded from one kind of source."""
        return self._bytes[source]

    def stored(self, delta: DeltaRef) -> StoredBytes | None:
        """Return the place of a delta in this node's store; None when its name leads out of the store."""
        try:
            return StoredBytes(resolve_pack(self._packs, delta.pack), delta.offset, delta.nbytes)
        except StoreError:
            return None

    def load(self, extents: Sequence[ExtentRef], memory: NodeMemory) -> LoadClock:
        """Begin to load extents that `memory` expects. Does not wait; `memory` gets the outcome of each."""
        clock = LoadClock(self.stages, self.pool, self._planner, self._packs, self._plan, verified=self._verify)
        self.loader.expect(reading_order(extents, self._plan.strategy), clock)
        for _ in extents:
            try:
                self._threads.submit(self._load_next, memory)
            except RuntimeError as error:  # the interpreter is ending, or has no thread to give
                if extent := self.loader.withdraw():
                    memory.held.failed(extent.id, error)
        return clock

    def _explained(self, extent: ExtentRef, error: Exception) -> Exception:
        """Return the error; for a pack missing from this node's folder, with the node's name and the likely reason."""
        if not isinstance(error, ExtentCorrupt) or extent.delta or (self._packs / extent.pack).exists():
            return error
        return ExtentCorrupt(
            f"{error}: node {self._node} has another folder there than the store, or the store has lost it; where "
            "nodes do not share the store, remove the folder, and other nodes send the weights",
            error.extent_id,
        )

    def close(self) -> None:
        """End its threads."""
        self._threads.shutdown()

    def _load_next(self, memory: NodeMemory) -> None:
        """Load one extent in a reader thread. Waiting calls are notified whatever happens."""
        try:
            loaded = self.loader.load_next(memory.writer.begin_writing)
        except BaseException as error:  # an error of a pool's thread would be lost
            logger.exception("an extent could not be loaded")
            if extent := self.loader.withdraw():
                memory.held.failed(extent.id, as_error(error))
            return
        if loaded is None:
            return
        id_, nbytes = loaded.extent.id, loaded.extent.nbytes
        if loaded.error:
            let_go(loaded.error)
            memory.held.failed(id_, self._explained(loaded.extent, loaded.error))
            return
        with self._counting:
            self._bytes[loaded.source] += nbytes
        ref, view = loaded.result
        memory.held.loaded(id_, ref, view, loaded.source)
        if self._metrics:
            self._metrics.count_loads(self.stages.figures())


STAGING_BYTES: Final = 384 * 2**20  # twelve reads of 32 MiB: some arrive while others are copied
CALL_THREADS: Final = 128  # each call that waits for an extent or for room holds one
CONTROL_THREADS: Final = 4  # for releases, which never wait behind those
RECALL_THREADS: Final = 128  # each listening replica holds one; leases of further replicas are never recalled
RECALL_POLL_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """The settings of a keeper. `staging_bytes` bounds the memory that extents pass through, however large they are.

    `max_wait_s`: for room that others have leased. `adoption_s`: a restarted keeper gives replicas this time to offer
    their mapped extents. `audit_bytes_per_s` 0: no audit. `populate` makes the object store's pages at start, in the
    background; otherwise the first puts pay for them. `code` is the code that its node has to run (`running_code`).
    """

    # HAZARD: first, and of words: a node with other code reads the fields of this class by their places.
    code: tuple[str, ...] = ()
    staging_bytes: int = STAGING_BYTES
    verify: bool = True
    max_wait_s: float = MAX_WAIT_S
    adoption_s: float = ADOPTION_S
    audit_bytes_per_s: float = AUDIT_BYTES_PER_S
    populate: bool = False
    log_format: LogFormat = "text"


def keeper_class() -> Any:
    """Return NodeKeeper as an actor class: calls that never wait have threads of their own, and Ray restarts it."""
    return ray.remote(
        concurrency_groups={"control": CONTROL_THREADS, "recalls": RECALL_THREADS},
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=CALL_THREADS,
    )(NodeKeeper)


_DEFAULTS: Final = KeeperSettings()


def _begin(settings: KeeperSettings) -> str:
    """Return the address where other nodes fetch extents: loopback on a private Ray, which has one node.

    Raises KeeperFailed when this node runs other code than the settings say.
    """
    host = ray.util.get_node_ip_address() if ray.is_initialized() else "127.0.0.1"
    if settings.code and (other := why_other_code(host, running_code(), settings.code)):
        raise KeeperFailed(other)
    configure_logs(settings.log_format)
    return host


class _ShownMemory:
    """The memory of a node as other nodes get it."""

    def __init__(self, memory: NodeMemory, reading: Reading) -> None:
        self._residents = memory.residents
        self._reading = reading
        self.resident_ids = memory.residents.ids
        self.look_soon = memory.audit.look_soon

    def lookup(self, id_: str) -> ByteArray | StoredBytes | None:
        """Return a resident extent, or the delta that it was stored as."""
        delta = self._residents.delta(id_) if id_.startswith(DELTA_KEY) else None
        return self._reading.stored(delta) if delta else self._residents.view(id_)


class NodeKeeper:
    """The bytes of one node. Thread-safe: Ray calls it from a pool of threads. Made by `keeper_class`.

    Without `budget_bytes` it keeps its share of the node's object store. `registry` is the name and namespace of the
    actor that knows the other nodes.
    `store` and `directory` replace Ray's store and the registry. Raises WeightsError when `ATELIER_READ` is malformed,
    KeeperFailed on a node with other code than the registry's.
    """

    def __init__(
        self,
        packs: str,
        budget_bytes: int | None,
        node_id: str,
        settings: KeeperSettings = _DEFAULTS,
        *,
        registry: tuple[str, str] | None = None,
        store: Store | None = None,
        directory: RegistryClient | None = None,
    ) -> None:
        host, in_actor = _begin(settings), ray.is_initialized()
        was_restarted = in_actor and store is None and ray.get_runtime_context().was_current_actor_reconstructed
        directory = directory or (RegistryClient(*registry) if registry else None)
        metrics = LoadMetrics(node_id) if in_actor else None
        self.generation = uuid.uuid4().hex
        self._node_id = node_id
        self._pinning = threading.Lock()
        self._pins: Mapping[str, Sequence[str]] = {}
        self.peering = PeerLink(directory, node_id, host) if directory else None
        # A view in use keeps its bytes even if its extent is evicted meanwhile.
        self.reading = Reading(
            Path(packs),
            settings.staging_bytes,
            self.peering,
            metrics,
            verify=settings.verify,
            resident=lambda base: self._residents.view(base.id),
            node=host,
        )
        store = store or ObjectStore(node_id)
        budget_bytes = budget_within_store(budget_bytes, store.capacity_bytes, node_id)
        book = ExtentBook(budget_bytes, neighbours=self.peering, rates=self.reading.loader)
        self._held = HeldExtents(book, max_wait_s=settings.max_wait_s)
        self._residents, self._holders = self._held.residents, self._held.holders
        self.memory = NodeMemory(
            store,
            self._held,
            node_id,
            verify=settings.verify,
            adoption_s=settings.adoption_s if was_restarted else 0.0,
            audit_bytes_per_s=settings.audit_bytes_per_s,
        )
        self.memory.start(populate=settings.populate)
        if self.peering:
            self.peering.start(_ShownMemory(self.memory, self.reading))

    def acquire(self, extents: Sequence[ExtentRef], holder: str) -> LeasedRefs:
        """Return references to the extents by id, each leased to `holder` once more until `release`.

        An extent is loaded once, however many calls ask at once. Waits a bounded time for room that others have leased.
        Raises ExtentCorrupt when the stored bytes are wrong, and BudgetExceeded when they do not fit, saying
        how much is missing and who holds it; then nothing stays leased.
        """
        if resident := self._held.lease_resident(extents, holder):
            refs, epoch = resident
            return LeasedRefs(refs, None, self._generation(epoch))
        self.memory.adoption.wait_for([extent.id for extent in extents])
        claim, refs, clock = self._held.lease_loaded(extents, holder, lambda some: self.reading.load(some, self.memory))
        report = clock.report(claim.to_load) if claim.to_load else None
        return LeasedRefs(refs, report, self._generation(claim.epoch))

    @ray.method(concurrency_group="control")
    def release(self, ids: Sequence[str], holder: str, generation: str | None = None) -> None:
        """Give back one lease per id. Unknown ids and holders, and leases of another epoch, are ignored."""
        if generation is None:
            self._holders.release(ids, holder)
        elif (epoch := self._epoch(generation)) is not None:
            self._holders.release(ids, holder, epoch)

    @ray.method(concurrency_group="recalls")
    def next_recall(self, holder: str, answer: RecallAnswer | None = None) -> Recall:
        """Wait for a recall of leases of `holder`; empty if none came for a while.

        `answer` is to the last recall. The caller promises to answer within `ANSWER_WITHIN_S`; else room is made
        of others' leases, and of its own once its process is gone.
        """
        epoch = self._epoch(answer.generation) if answer else None
        return self._holders.next_recall(holder, answer, epoch, RECALL_POLL_S)

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Load extents that have room beside everything leased, pinned or more valuable. Does not wait."""
        self.reading.load(self._held.prefetch(extents), self.memory)

    @ray.method(concurrency_group="control")
    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the extents fit now, beside all leased, pinned or awaited ones."""
        return self._held.has_room_for(extents)

    @ray.method(concurrency_group="control")
    def set_pins(self, extents_of: Mapping[str, Sequence[str]]) -> None:
        """Pin the extents of these models, and no others, here or not yet.

        Each call replaces all earlier pins. Pins end with the
        keeper's process.
        """
        with self._pinning:
            self._pins = dict(extents_of)
            self._held.set_pins({id_ for ids in extents_of.values() for id_ in ids})

    @ray.method(concurrency_group="control")
    def pins(self) -> Mapping[str, Sequence[str]]:
        """Return the pinned extents by model, as last set by `set_pins`."""
        return self._pins

    @ray.method(concurrency_group="control")
    def drop(self, ids: Sequence[str]) -> list[str]:
        """Evict the given extents that are neither leased nor pinned, and return them."""
        return self._held.drop(ids)

    @ray.method(concurrency_group="control")
    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget: evictable extents above it go at once, the rest later.

        Raises BudgetExceeded when Ray's store is too small for it.
        """
        self.memory.set_budget(budget_bytes)

    @ray.method(concurrency_group="control")
    def hello(
        self, holder: str, process: ProcessMark | None = None, uses: Mapping[str, int] = MappingProxyType({})
    ) -> Greeting:
        """Note a replica's heartbeat. The answer shows it a restarted keeper, and damaged copies.

        The holder's leases end with `process`, or when it gives no sign for a minute. `uses` counts, by extent id,
        the uses of kept extents since the last heartbeat.
        """
        epoch = self._holders.greet(holder, process)
        if uses:
            self._holders.note_uses(uses)
        return Greeting(self._generation(epoch), self._residents.wanted_bytes, self.memory.damage.invalidated)

    @ray.method(concurrency_group="control")
    def adopt(self, holder: str, offers: Sequence[HeldOffer]) -> str:
        """Adopt a replica's mapped extents and its leases. Return the generation of the leases.

        Damaged extents, and those that cannot be mapped here, go to no other holder: the next request reads them anew.
        HAZARD: a handle of the replica must not come with this. Opening one imports its class, for seconds, while
        others wait for the extents adopted here.
        """
        generation = self._generation(self._holders.epoch(holder))
        self.memory.adoption.take_offers(holder, offers)
        return generation

    @ray.method(concurrency_group="control")
    def residents(self, ids: Sequence[str] | None = None) -> list[ResidentExtent]:
        """Return the resident extents among `ids`; without `ids`, all."""
        return self._residents.described(ids)

    @ray.method(concurrency_group="control")
    def holders(self) -> Mapping[str, tuple[str, ...]]:
        """Return the holders of leases, by extent id."""
        return {found.id: tuple(found.holders) for found in self._residents.described()}

    @ray.method(concurrency_group="control")
    def stats(self) -> KeeperStats:
        totals, stages, pool = self._residents.totals(), self.reading.stages.figures(), self.reading.pool.stats()
        damage = self.memory.damage
        read = stages.get("read", StageFigures())
        return KeeperStats(
            node_id=self._node_id,
            num_extents=totals.num_extents,
            resident_bytes=totals.resident_bytes,
            leased_bytes=totals.leased_bytes,
            callable_bytes=self._residents.callable_bytes,
            budget_bytes=self._residents.budget_bytes,
            read_bytes=self.reading.loaded_bytes("storage"),
            read_s=read.elapsed_s,
            num_evicted=self._residents.num_evicted,
            num_recalled=self._residents.num_recalled,
            read_gbps=read.gbps,
            staging_bytes=pool.held_bytes,
            pool_hit_rate=pool.hit_rate,
            stages=stages,
            generation=self.generation,
            pinned_bytes=totals.pinned_bytes,
            peer_bytes=self.reading.loaded_bytes("peer"),
            adopted_bytes=self.memory.adoption.adopted_bytes,
            served_bytes=self.peering.served_bytes if self.peering else 0,
            address=self.peering.address if self.peering else None,
            holders=self._residents.bytes_by_holder(),
            num_waiting=self._residents.num_waiting,
            wanted_bytes=self._residents.wanted_bytes,
            audited_bytes=self.memory.audit.audited_bytes,
            num_corrupt=damage.num_corrupt,
            corrupt=damage.corrupt,
            object_store_bytes=self.memory.store.capacity_bytes,
            num_holders=self._holders.watch.num_holders,
            has_storage=self.reading.has_storage(),
        )

    def close(self) -> None:
        """End its threads; for one that is no actor."""
        self.memory.close()
        self.reading.close()
        if self.peering:
            self.peering.close()

    def _generation(self, epoch: int) -> str:
        """Return the generation of the leases of one epoch of a holder."""
        return f"{self.generation}-{epoch}"

    def _epoch(self, generation: str) -> int | None:
        """Return the epoch that a generation names; None for one of another keeper process."""
        epoch = generation.removeprefix(f"{self.generation}-")
        return int(epoch) if epoch.isdecimal() else None
