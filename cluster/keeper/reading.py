"""The reads of a node: threads that bring extents into its shared memory, from storage or another node."""

from __future__ import annotations

import concurrent.futures
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cluster.keeper.extent_loading import ExtentLoader, LoadClock, Peers
from cluster.keeper.object_store import let_go
from cluster.keeper.records import Source
from cluster.keeper.shared_memory import NodeMemory
from cluster.peers.server import StoredBytes
from cluster.telemetry import LoadMetrics
from weights.errors import ExtentCorrupt, StoreError
from weights.manifest import DeltaRef, ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.reading.blocks import resolve_pack
from weights.reading.extents import ExtentReader, Resident, reading_order
from weights.reading.planning import ReadPlanner
from weights.reading.report import StageClock


class Reading:
    """The reads of one keeper. Thread-safe. Raises WeightsError when `ATELIER_READ` is malformed.

    `resident` gives what is in the node's memory, as the base of a delta.
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
            has_storage=self.has_storage,
            node=node,
        )
        self._counting = threading.Lock()
        self._bytes: Counter[Source] = Counter()

    def has_storage(self) -> bool:
        """Return whether the store's folder is there: without it, other nodes have to read."""
        return self._packs.is_dir()

    def loaded_bytes(self, source: Source) -> int:
        """Return the bytes that have come from there."""
        return self._bytes[source]

    def stored(self, delta: DeltaRef) -> StoredBytes | None:
        """Return where this node has a delta stored; None when its name leads out of the store."""
        try:
            return StoredBytes(resolve_pack(self._packs, delta.pack), delta.offset, delta.nbytes)
        except StoreError:
            return None

    def load(self, extents: Sequence[ExtentRef], memory: NodeMemory) -> LoadClock:
        """Begin to load extents that `memory` expects. Does not wait; what becomes of each is told to `memory`."""
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
        """Return the error; of a pack that is not in this node's folder, with the node and what that may mean."""
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
        """Load one extent, in a reader thread. Whatever happens, those who wait are notified."""
        loaded = self.loader.load_next(memory.writer.begin_writing)
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
