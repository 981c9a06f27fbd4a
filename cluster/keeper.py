"""NodeKeeper: one per node. Reads extents from the store once and holds them in Ray's object store.

It owns the objects and keeps a live view of each: an object with a view is never spilled by Ray. Replicas get the
references and map the same memory. Extents with a lease stay; the others go, least recently used first, when the
byte budget needs room.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from cluster.telemetry import LoadMetrics
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.reading.extents import ByteArray, ExtentReader
from weights.reading.planning import ReadPlanner
from weights.reading.report import Stage, StageClock, StageFigures
from weights.residency import Resident, plan_eviction

STAGING_BYTES = 384 * 2**20  # six extents of 64 MiB: some are being read while others are put


@dataclass
class _Held:
    ref: ray.ObjectRef
    view: ByteArray
    last_used: int
    holders: Counter[str]


@dataclass
class _Loading:
    nbytes: int
    done: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    # Leases promised to those who wait: they hold from the first moment, so nothing can evict in between.
    holders: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class KeeperStats:
    """A snapshot of one node: bytes resident against the budget, and the reads so far.

    `read_s` is the time with at least one read in flight, `read_gbps` the rate during it (10^9 bytes per second).
    `staging_bytes` come on top of the budget; `pool_hit_rate` of the reads found a staging buffer ready.
    """

    node_id: str
    num_extents: int
    resident_bytes: int
    leased_bytes: int
    budget_bytes: int
    read_bytes: int
    read_s: float
    num_evicted: int
    read_gbps: float
    staging_bytes: int
    pool_hit_rate: float
    stages: dict[Stage, StageFigures]


class NodeKeeper:
    """The bytes of one node. Thread-safe: Ray calls it from a pool of threads.

    `staging_bytes` bounds the memory that extents pass through; a larger extent gets its own for that one time.
    Raises WeightsError when `ATELIER_READ` is malformed.
    """

    def __init__(self, packs: str, budget_bytes: int, node_id: str, staging_bytes: int = STAGING_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._node_id = node_id
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._loading: dict[str, _Loading] = {}
        self._clock = itertools.count()
        self._pool = HostBufferPool(staging_bytes)
        planner = ReadPlanner()
        self._reader = ExtentReader(Path(packs), self._pool, planner)
        num_threads = planner.plan(Path(packs).resolve()).strategy.num_threads
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="read")
        self._stages = StageClock()
        self._metrics = LoadMetrics(node_id) if ray.is_initialized() else None
        self._read_bytes, self._num_evicted = 0, 0

    def acquire(self, extents: Sequence[ExtentRef], holder: str) -> dict[str, ray.ObjectRef]:
        """References to the extents by id, each leased to `holder` once more until `release`.

        However many ask at once, an extent is read once. Raises ExtentCorrupt when the store does not have the
        bytes and BudgetExceeded when they do not fit; then nothing stays leased.
        """
        promised: list[_Held | _Loading] = []
        try:
            with self._lock:
                missing = {extent.id: extent for extent in extents if self._entry(extent.id) is None}
                # Those that are here first: making room for the others must not evict them.
                promised += [self._lease(extent.id, holder) for extent in extents if extent.id not in missing]
                self._make_room(list(missing.values()))
                for extent in missing.values():
                    self._loading[extent.id] = _Loading(extent.nbytes)
                    self._threads.submit(self._load, extent)
                promised += [self._lease(extent.id, holder) for extent in extents if extent.id in missing]
            for entry in promised:
                if isinstance(entry, _Loading):
                    entry.done.result()
        except BaseException:
            # From the entries themselves: an extent that failed may be loading anew for somebody by now.
            with self._lock:
                for entry in promised:
                    entry.holders -= Counter([holder])
            raise
        with self._lock:
            return {extent.id: self._held[extent.id].ref for extent in extents}

    def release(self, ids: Sequence[str], holder: str) -> None:
        """Give back one lease per id. Unknown ids and holders are ignored: releasing twice is not an error."""
        with self._lock:
            for id_ in ids:
                entry = self._entry(id_)
                if entry and entry.holders[holder]:
                    entry.holders -= Counter([holder])

    def stats(self) -> KeeperStats:
        stages, pool = self._stages.figures(), self._pool.stats()
        read = stages.get("read", StageFigures())
        with self._lock:
            sizes = [(held.view.nbytes, bool(held.holders)) for held in self._held.values()]
            return KeeperStats(
                node_id=self._node_id,
                num_extents=len(sizes),
                resident_bytes=sum(nbytes for nbytes, _ in sizes),
                leased_bytes=sum(nbytes for nbytes, leased in sizes if leased),
                budget_bytes=self._budget_bytes,
                read_bytes=self._read_bytes,
                read_s=read.elapsed_s,
                num_evicted=self._num_evicted,
                read_gbps=read.gbps,
                staging_bytes=pool.held_bytes,
                pool_hit_rate=pool.hit_rate,
                stages=stages,
            )

    def holders(self) -> Mapping[str, tuple[str, ...]]:
        """Who leases which extent."""
        with self._lock:
            return {id_: tuple(held.holders) for id_, held in self._held.items()}

    def _entry(self, id_: str) -> _Held | _Loading | None:
        return self._held.get(id_) or self._loading.get(id_)

    def _lease(self, id_: str, holder: str) -> _Held | _Loading:
        entry = self._held.get(id_) or self._loading[id_]
        entry.holders[holder] += 1
        if isinstance(entry, _Held):
            entry.last_used = next(self._clock)
        return entry

    def _make_room(self, extents: Sequence[ExtentRef]) -> None:
        """For all of them or none: a call that is refused leaves nothing in flight."""
        residents = [
            Resident(id_, held.view.nbytes, held.last_used, held.holders.total()) for id_, held in self._held.items()
        ]
        in_flight = sum(loading.nbytes for loading in self._loading.values())
        needed = sum(extent.nbytes for extent in extents)
        plan = plan_eviction(residents, needed + in_flight, self._budget_bytes)
        if plan.missing_bytes and extents:
            entries: list[_Held | _Loading] = [*self._held.values(), *self._loading.values()]
            holders = sorted({name for entry in entries for name in entry.holders})
            raise BudgetExceeded(
                f"{len(extents)} extents of {', '.join(sorted({extent.pack for extent in extents}))} need {needed} "
                f"bytes; {plan.missing_bytes} bytes are missing under the node's budget of {self._budget_bytes} "
                f"(leased by: {', '.join(holders) or 'nobody'})"
            )
        for id_ in plan.evict:
            del self._held[id_]
            self._num_evicted += 1

    def _load(self, extent: ExtentRef) -> None:
        """In a reader thread. Whatever happens, those who wait hear of it."""
        try:
            # A put copies, so the staging buffer is free for the next extent as soon as it returns.
            ref = self._reader.load(extent, lambda _, array: ray.put(array), self._stages)
            view = ray.get(ref)
            if self._metrics:
                self._metrics.loaded(self._stages.figures())
        except Exception as error:
            with self._lock:
                failed = self._loading.pop(extent.id)
            failed.done.set_exception(error)
            return
        with self._lock:
            loading = self._loading.pop(extent.id)
            self._held[extent.id] = _Held(ref, view, next(self._clock), loading.holders)
            self._read_bytes += extent.nbytes
        loading.done.set_result(None)


class RayExtents:
    """ExtentProvider of a replica: the node's keeper leases it the extents, Ray maps them without a copy."""

    def __init__(self, keeper: Any, holder: str) -> None:
        self._keeper = keeper
        self._holder = holder

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        """Blocks until the bytes are there; call it off the event loop. The lease lasts until `release`."""
        refs: dict[str, ray.ObjectRef] = _unwrap(self._keeper.acquire.remote(list(extents), self._holder))
        return dict(zip(refs, ray.get(list(refs.values())), strict=True))

    def release(self, extents: Sequence[ExtentRef]) -> None:
        """Fire and forget: the views stay valid as long as they are referenced, only the claim on memory ends."""
        self._keeper.release.remote([extent.id for extent in extents], self._holder)


def _unwrap(ref: ray.ObjectRef) -> Any:
    """`ray.get` that raises the actor's own exception instead of Ray's wrapper around it."""
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, Exception) else error from None
