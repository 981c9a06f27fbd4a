"""What one call had loaded, and how long each stage took, beside the figures of the node."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from cluster.keeper.records import Source
from weights.errors import StoreError
from weights.manifest import ExtentRef
from weights.memory.host_pool import HostBufferPool
from weights.reading.blocks import resolve_pack
from weights.reading.planning import ReadPlan, ReadPlanner
from weights.reading.report import LoadReport, Stage, StageClock


class LoadClock(StageClock):
    """Measures for this call and for the node at once. `plan` is what the report says when storage was not read."""

    def __init__(
        self,
        node: StageClock,
        pool: HostBufferPool,
        planner: ReadPlanner,
        packs: Path,
        plan: ReadPlan,
        *,
        verified: bool,
    ) -> None:
        super().__init__(node.now_s)
        self._node = node
        self._pool = pool
        self._planner = planner
        self._packs = packs
        self._plan = plan
        self._verified = verified
        self._start_s = node.now_s()
        self._counting = threading.Lock()
        self._sources: Counter[Source] = Counter()

    @contextlib.contextmanager
    def measure(self, stage: Stage, nbytes: int = 0) -> Iterator[None]:
        with self._node.measure(stage, nbytes), super().measure(stage, nbytes):
            yield

    def add_bytes(self, stage: Stage, nbytes: int) -> None:
        self._node.add_bytes(stage, nbytes)
        super().add_bytes(stage, nbytes)

    def came_from(self, source: Source, nbytes: int) -> None:
        with self._counting:
            self._sources[source] += nbytes

    def report(self, extents: Sequence[ExtentRef]) -> LoadReport:
        """Of the extents, now that they are here."""
        plan = self._plan_of(extents) if self._sources["storage"] else self._plan
        return LoadReport(
            what="",
            nbytes=sum(extent.nbytes for extent in extents),
            wall_s=self.now_s() - self._start_s,
            stages=self.figures(),
            medium=plan.medium,
            strategy=plan.strategy,
            verified=self._verified,
            peak_gbps=plan.probe.peak_gbps if plan.probe else None,
            pool=self._pool.stats(),
            advice=plan.advice,
            sources={str(source): nbytes for source, nbytes in self._sources.items()},
        )

    def _plan_of(self, extents: Sequence[ExtentRef]) -> ReadPlan:
        largest = max(extents, key=lambda extent: extent.nbytes)
        with contextlib.suppress(StoreError):
            return self._planner.plan(resolve_pack(self._packs, largest.pack))
        return self._plan
