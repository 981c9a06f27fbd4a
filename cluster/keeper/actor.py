"""NodeKeeper: one per node. Gets extents once, from storage or another node, and holds them in Ray's object store.

It owns the objects and keeps a live view of each: an object with a view is never spilled by Ray. Replicas get the
references and map the same memory. What is leased or pinned stays; of the rest, what is cheapest to do without goes
when the byte budget needs room. A keeper that dies loses only what no replica holds.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import ray

from cluster.keeper.adoption import ADOPTION_S, Adoption
from cluster.keeper.audit import AUDIT_BYTES_PER_S, Audit, DamageLog
from cluster.keeper.extent_loading import ExtentLoader, LoadClock
from cluster.keeper.held_extents import MAX_WAIT_S, HeldExtents
from cluster.keeper.holder_watch import HolderWatch
from cluster.keeper.object_store import (
    MAX_SHARE,
    ObjectStore,
    budget_within_store,
    let_go,
    max_budget_bytes,
)
from cluster.keeper.records import (
    Acquired,
    Greeting,
    Held,
    HeldOffer,
    KeeperStats,
    Recall,
    RecallAnswer,
    ResidentExtent,
    Source,
)
from cluster.keeper.store_writing import Store, StoreWriter
from cluster.peers.link import PeerLink, RegistryClient
from cluster.processes import ProcessMark
from cluster.telemetry import LoadMetrics
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.memory.pages import ByteArray
from weights.reading.extents import ExtentReader, reading_order
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock, StageFigures

__all__ = ["KeeperStats", "NodeKeeper", "keeper_class"]

STAGING_BYTES: Final = 384 * 2**20  # twelve reads of 32 MiB: some arrive while others are copied
CALL_THREADS: Final = 128  # callers that wait for an extent, or for room, each hold one
CONTROL_THREADS: Final = 4  # and those that give back never wait behind them
RECALL_THREADS: Final = 128  # replicas that listen each hold one; leases of those beyond that are never called back
RECALL_POLL_S: Final = 30.0
LOWEST_PRIORITY: Final = 19


def keeper_class() -> Any:
    """Return NodeKeeper as an actor class: calls that never wait have threads of their own, and Ray restarts it."""
    return ray.remote(
        concurrency_groups={"control": CONTROL_THREADS, "recalls": RECALL_THREADS},
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=CALL_THREADS,
    )(NodeKeeper)


class NodeKeeper:
    """The bytes of one node. Thread-safe: Ray calls it from a pool of threads. Made by `keeper_class`.

    Without `budget_bytes` it keeps its share of the node's object store. `staging_bytes` bounds the memory that
    extents pass through, however large they are.
    `registry` is the name and namespace of the actor that knows the other nodes. `audit_bytes_per_s` 0: no audit.
    `populate` makes the object store's pages at start, in the background; otherwise the first puts pay for them.
    `host` is where other nodes may ask for extents; default: the node's own address.
    `store` and `directory` replace Ray's store and the registry. Raises WeightsError when `ATELIER_READ` is malformed.
    """

    def __init__(
        self,
        packs: str,
        budget_bytes: int | None,
        node_id: str,
        staging_bytes: int = STAGING_BYTES,
        *,
        verify: bool = True,
        registry: tuple[str, str] | None = None,
        max_wait_s: float = MAX_WAIT_S,
        adoption_s: float = ADOPTION_S,
        audit_bytes_per_s: float = AUDIT_BYTES_PER_S,
        populate: bool = False,
        host: str | None = None,
        store: Store | None = None,
        directory: RegistryClient | None = None,
    ) -> None:
        in_actor = ray.is_initialized()
        self.generation = uuid.uuid4().hex
        self._node_id = node_id
        self._verify = verify
        self._store: Store = store or ObjectStore(node_id)
        self._held = HeldExtents(
            budget_within_store(budget_bytes, self._store.capacity_bytes, node_id),
            max_wait_s=max_wait_s,
            on_change=self._on_change,
            reload_rate=lambda source: self._loader.reload_rate(source),
        )
        self._writer = StoreWriter(self._store, self._held)
        self._damage = DamageLog()
        self._pool = HostBufferPool(staging_bytes)
        self._planner = ReadPlanner()
        self._packs = Path(packs)
        self._plan = self._planner.plan(self._packs.resolve())
        self._threads = concurrent.futures.ThreadPoolExecutor(
            self._plan.strategy.num_threads, thread_name_prefix="read"
        )
        self._stages = StageClock()
        self._metrics = LoadMetrics(node_id) if in_actor else None
        self._counting = threading.Lock()
        self._bytes: dict[Source, int] = {"storage": 0, "peer": 0, "adopted": 0}
        self._pins: Mapping[str, Sequence[str]] = {}
        was_restarted = in_actor and store is None and ray.get_runtime_context().was_current_actor_reconstructed
        self._adoption = Adoption(self._held, self._damage, verify=verify, wait_s=adoption_s if was_restarted else 0.0)
        directory = directory or (RegistryClient(*registry) if registry else None)
        if host is None:
            host = ray.util.get_node_ip_address() if in_actor else "127.0.0.1"
        self._link = PeerLink(directory, node_id, host, self._view, self._held.ids) if directory else None
        reader = ExtentReader(self._packs, self._pool, self._planner, verify=verify)
        self._loader = ExtentLoader(reader, self._link)
        self._watch = HolderWatch(self._held.end_holder)
        self._audit = Audit(self._held.ids, self._held.held, self._condemn, audit_bytes_per_s or float("inf"))
        if audit_bytes_per_s:
            self._audit.start()
        if populate:
            threading.Thread(target=self._populate_store, name="populate", daemon=True).start()

    def acquire(self, extents: Sequence[ExtentRef], holder: str) -> Acquired:
        """Return references to the extents by id, each leased to `holder` once more until `release`.

        However many ask at once, an extent is loaded once. Waits a bounded time for room that others have leased.
        Raises ExtentCorrupt when the store does not have the bytes and BudgetExceeded when they do not fit, saying
        how much is missing and who holds it; then nothing stays leased.
        """
        self._adoption.wait_for([extent.id for extent in extents])
        claim = self._held.claim(extents, holder)
        clock = self._load_all(claim.to_load)
        refs = self._held.settle(claim, holder)
        self._watch.heard(holder)  # it may have died while it waited, and its leases have ended before these
        report = clock.report(claim.to_load) if claim.to_load else None
        return Acquired(refs, report, self._generation(claim.life))

    @ray.method(concurrency_group="control")
    def release(self, ids: Sequence[str], holder: str, generation: str | None = None) -> None:
        """Give back one lease per id. Unknown ids and holders, and leases of another life, are ignored."""
        if generation is None:
            self._held.release(ids, holder)
        elif (life := self._life(generation)) is not None:
            self._held.release(ids, holder, life)

    @ray.method(concurrency_group="recalls")
    def next_recall(self, holder: str, answer: RecallAnswer | None = None) -> Recall:
        """Wait until room is needed that `holder` has leased; empty when nothing was needed for a while.

        `answer` is to the recall before. Who calls this promises to answer within `ANSWER_WITHIN_S`, or counts as dead.
        """
        life = self._life(answer.generation) if answer else None
        return self._held.next_recall(holder, answer, life, RECALL_POLL_S)

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Bring in what has room beside everything leased, pinned or more valuable. Does not wait for it."""
        self._load_all(self._held.prefetch(extents))

    @ray.method(concurrency_group="control")
    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether they fit, now, beside all that is leased, pinned or waited for."""
        return self._held.has_room_for(extents)

    @ray.method(concurrency_group="control")
    def set_pins(self, extents_of: Mapping[str, Sequence[str]]) -> None:
        """Keep the extents of these models, and no others, once they are here, leased or not.

        All that is wanted, each time: what was pinned before and is not named is pinned no longer. Pins end with the
        keeper's process.
        """
        with self._counting:
            self._pins = dict(extents_of)
            self._held.set_pins({id_ for ids in extents_of.values() for id_ in ids})

    @ray.method(concurrency_group="control")
    def pins(self) -> Mapping[str, Sequence[str]]:
        """Return the extents by model, as `set_pins` was told last."""
        return self._pins

    @ray.method(concurrency_group="control")
    def drop(self, ids: Sequence[str]) -> list[str]:
        """Free those that are neither leased nor pinned, and return them."""
        return self._held.drop(ids)

    @ray.method(concurrency_group="control")
    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget: what may go goes at once, the rest later.

        Raises BudgetExceeded when Ray's store is too small for it.
        """
        capacity_bytes = self._store.capacity_bytes
        largest_bytes = max_budget_bytes(capacity_bytes)
        if not 0 <= budget_bytes <= largest_bytes:
            raise BudgetExceeded(
                f"a budget of {budget_bytes} bytes: node {self._node_id} allows 0 to {largest_bytes}, "
                f"{MAX_SHARE:.0%} of its object store of {capacity_bytes}"
            )
        self._held.set_budget(budget_bytes)

    @ray.method(concurrency_group="control")
    def hello(
        self, holder: str, process: ProcessMark | None = None, uses: Mapping[str, int] = MappingProxyType({})
    ) -> Greeting:
        """Note a replica's heartbeat; by the answer it knows a keeper that has forgotten it, and damaged copies.

        The holder's leases end with `process`, or when it is not heard of for a minute. `uses` counts, by extent id,
        how often it has used since the last time what it kept.
        """
        self._watch.heard(holder, process)
        if uses:
            self._held.note_uses(uses)
        condemned = self._damage.condemned
        return Greeting(self._generation(self._held.greet(holder)), self._held.wanted_bytes, condemned)

    @ray.method(concurrency_group="control")
    def adopt(self, holder: str, offers: Sequence[HeldOffer]) -> str:
        """Take over what a replica has mapped, and its leases. Returns the generation that did.

        What is damaged, or cannot be mapped here, nobody else gets: it will be read when somebody asks.
        HAZARD: a handle of the replica must not come with this. Opening one imports its class, for seconds, while
        others wait for what is adopted here.
        """
        generation = self._generation(self._held.life(holder))
        self._count("adopted", self._adoption.take_offers(holder, offers))
        return generation

    @ray.method(concurrency_group="control")
    def residents(self, ids: Sequence[str] | None = None) -> list[ResidentExtent]:
        """Return those of `ids` that are here; without them, all."""
        return self._held.residents(ids)

    @ray.method(concurrency_group="control")
    def holders(self) -> Mapping[str, tuple[str, ...]]:
        """Return the holders of leases, by extent id."""
        return {found.id: tuple(found.holders) for found in self._held.residents()}

    @ray.method(concurrency_group="control")
    def stats(self) -> KeeperStats:
        stages, pool, totals = self._stages.figures(), self._pool.stats(), self._held.totals()
        read = stages.get("read", StageFigures())
        return KeeperStats(
            node_id=self._node_id,
            num_extents=totals.num_extents,
            resident_bytes=totals.resident_bytes,
            leased_bytes=totals.leased_bytes,
            callable_bytes=self._held.callable_bytes,
            budget_bytes=self._held.budget_bytes,
            read_bytes=self._bytes["storage"],
            read_s=read.elapsed_s,
            num_evicted=self._held.num_evicted,
            num_recalled=self._held.num_recalled,
            read_gbps=read.gbps,
            staging_bytes=pool.held_bytes,
            pool_hit_rate=pool.hit_rate,
            stages=stages,
            generation=self.generation,
            pinned_bytes=totals.pinned_bytes,
            peer_bytes=self._bytes["peer"],
            adopted_bytes=self._bytes["adopted"],
            served_bytes=self._link.served_bytes if self._link else 0,
            address=self._link.address if self._link else None,
            holders=self._held.bytes_by_holder(),
            num_waiting=self._held.num_waiting,
            wanted_bytes=self._held.wanted_bytes,
            audited_bytes=self._audit.audited_bytes,
            num_corrupt=self._damage.num_corrupt,
            corrupt=self._damage.corrupt,
            object_store_bytes=self._store.capacity_bytes,
            num_holders=self._watch.num_holders,
        )

    def close(self) -> None:
        """End its threads; for one that is no actor."""
        self._watch.close()
        self._audit.close()
        self._threads.shutdown()
        if self._link:
            self._link.close()

    def _load_all(self, extents: Sequence[ExtentRef]) -> LoadClock:
        clock = LoadClock(self._stages, self._pool, self._planner, self._packs, self._plan, verified=self._verify)
        self._loader.expect(reading_order(extents, self._plan.strategy), clock)
        for _ in extents:
            try:
                self._threads.submit(self._load_next)
            except RuntimeError as error:  # the interpreter is ending, or has no thread to give
                if extent := self._loader.withdraw():
                    self._held.failed(extent.id, error)
        return clock

    def _load_next(self) -> None:
        """Load one extent, in a reader thread. Whatever happens, those who wait hear of it."""
        loaded = self._loader.load_next(self._writer.begin_writing)
        if loaded is None:
            return
        id_, nbytes = loaded.extent.id, loaded.extent.nbytes
        if loaded.error:
            let_go(loaded.error)
            self._held.failed(id_, loaded.error)
            return
        self._count(loaded.source, nbytes)
        ref, view = loaded.result
        self._held.loaded(id_, ref, view, loaded.source)
        if self._metrics:
            self._metrics.count_loads(self._stages.figures())

    def _populate_store(self) -> None:
        """Make the store's pages in the time that others leave: every process of the node starts now."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)  # on Linux, of this thread alone
        self._store.populate()

    def _view(self, id_: str) -> ByteArray | None:
        held = self._held.held(id_)
        return held.view if held else None

    def _on_change(self, added: Sequence[str], removed: Sequence[str]) -> None:
        if self._link:
            self._link.changed(added, removed)

    def _condemn(self, held: Held) -> None:
        holders = [holder for found in self._held.residents([held.extent.id]) for holder in found.holders]
        if self._held.condemn(held.extent.id, held.view):
            where = f"in shared memory, leased by {', '.join(holders) or 'nobody'}"
            self._damage.note_damage(held.extent.id, held.ref, where)

    def _generation(self, life: int) -> str:
        """Return the name of the leases of one life of a holder."""
        return f"{self.generation}-{life}"

    def _life(self, generation: str) -> int | None:
        """Return the life that a generation names; None for one of another keeper process."""
        life = generation.removeprefix(f"{self.generation}-")
        return int(life) if life.isdecimal() else None

    def _count(self, source: Source, nbytes: int) -> None:
        with self._counting:
            self._bytes[source] += nbytes
