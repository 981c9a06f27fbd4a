"""Loads extents from the fastest source: a node that has them, one that will have them soon, or storage."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from cluster.keeper.records import Source
from cluster.peers.client import FetchFailed, PeerClient
from cluster.peers.fetch_queue import GIVE_UP_S, AskRegistry, Fetch, FetchQueue, GiveUp, Read, Wait
from cluster.peers.protocol import Located, Question
from cluster.peers.sources import FetchOutcome, FromPeers
from cluster.records.errors import PeerUnavailable
from weights.memory.host_pool import ByteArray, HostBufferPool
from weights.platform.panics import as_error
from weights.reading.blocks import resolve_pack
from weights.reading.extents import ExtentReader
from weights.reading.planning import ReadPlan, ReadPlanner
from weights.reading.report import LoadReport, Stage, StageClock
from weights.records.errors import ExtentCorrupt, StoreError
from weights.records.manifest import ExtentRef

Pause = Callable[[threading.Condition, float], object]

MAX_CLAIMS: Final = 16  # extents to read after one question to the registry: a lone node asks seldom
LOOK_AGAIN_S: Final = 1.0  # even when nothing has changed

logger = logging.getLogger("atelier.keeper")


class LoadClock(StageClock):
    """The clock of one call's loads, stage by stage, which counts for the node at the same time.

    `plan` is the report's plan when storage was not read.
    """

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
        """Count bytes by their source."""
        with self._counting:
            self._sources[source] += nbytes

    def report(self, extents: Sequence[ExtentRef]) -> LoadReport:
        """Return the report on these extents, now that they are here."""
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


class Peers(Protocol):
    """The other nodes, as far as this one can reach them."""

    def client(self) -> PeerClient | None:
        """Return the client of other nodes' servers; None as long as the cluster's secret is not known."""
        ...

    def locate(self, question: Question) -> Located | None:
        """Return the nodes that have the extents or will read them; None when the registry is away. May block."""
        ...

    def changed(self, added: Sequence[str], removed: Sequence[str]) -> None:
        """Report extents that came and went, and claims that will not be used. Never blocks."""
        ...


class Writing(Protocol):
    """An extent being written to its place in memory."""

    def place(self) -> ByteArray:
        """Return the memory. The first call makes it, and may raise."""
        ...

    def seal(self) -> Any:
        """End the writing. Return the handle of the extent. May raise."""
        ...


# An unsealed `Writing` is dropped at the end of the block.
Begin = Callable[[ExtentRef], contextlib.AbstractContextManager[Writing]]


class _MeasuredPlace:
    """The place of an extent being written, made at the first call."""

    def __init__(self, writing: Writing, extent: ExtentRef, stages: LoadClock) -> None:
        self._writing = writing
        self._extent = extent
        self._stages = stages
        self.seconds = 0.0  # spent making the place
        self.has_failed = False

    def __call__(self) -> ByteArray:
        begin_s, self.has_failed = self._stages.now_s(), True
        with self._stages.measure("put", self._extent.nbytes):
            out = self._writing.place()
        self.seconds, self.has_failed = self._stages.now_s() - begin_s, False
        return out


@dataclass(frozen=True, slots=True)
class Loaded:
    """A sealed extent and the source of its bytes, or its error."""

    extent: ExtentRef
    result: Any = None
    source: Source = "storage"
    error: Exception | None = None


class ExtentLoader:
    """The loads of one keeper, from storage and from peers. Thread-safe.

    After a peer that fails or gives wrong bytes, the extent is read from storage.

    On a node without the store's folder other nodes read for it: `expect` checks whether `packs` is there. `node`
    is its address, for error messages.

    `expect` names the wanted extents; each of them takes one call of `load_next`, from any thread. No thread waits for
    one extent while another one can be had.
    """

    def __init__(
        self,
        reader: ExtentReader,
        peers: Peers | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause: Pause = threading.Condition.wait,
        chance: random.Random | None = None,
        packs: Path | None = None,
        node: str = "",
    ) -> None:
        self._reader = reader
        self._node = node
        self._packs = packs
        self._peers = peers
        self._clock = clock
        self._pause = pause
        self._changed = threading.Condition()
        self._queue = FetchQueue(chance or random.Random(), MAX_CLAIMS, is_alone=peers is None)
        self._wanted: dict[str, tuple[ExtentRef, LoadClock]] = {}

    def expect(self, extents: Sequence[ExtentRef], stages: LoadClock) -> None:
        can_read = self._peers is None or self._packs is None or self._packs.is_dir()
        with self._changed:
            self._queue.can_read = can_read
            self._wanted.update((extent.id, (extent, stages)) for extent in extents)
            self._queue.add_extents({extent.id: extent.nbytes for extent in extents}, self._clock())
            self._changed.notify_all()

    def load_next(self, begin: Begin) -> Loaded | None:
        """Load the extent that is available first; None when other threads load the last ones.

        Errors of ExtentReader.read_into and of `begin` are in the answer.
        """
        while step := self._next():
            match step:
                case AskRegistry():
                    self._ask(step.question)
                case Read():
                    return self._read(*self._wanted[step.id], begin)
                case GiveUp():
                    return self._give_up(step.id)
                case Fetch():
                    if loaded := self._fetch(*self._wanted[step.id], step.plan, begin):
                        return loaded
        return None

    def withdraw(self) -> ExtentRef | None:
        """Give up an extent for lack of a thread, and return it; None when all have been begun."""
        with self._notifying():
            id_ = self._queue.withdraw_extent()
            return self._wanted.pop(id_)[0] if id_ else None

    def reload_rate(self, source: Source) -> float | None:
        """Return the seconds to load one byte again, alone; None before a measurement.

        A peer gives once more.
        """
        with self._changed:
            known = self._queue.sources
            gbps = max(known.storage.gbps or 0.0, known.best_peer_gbps if source == "peer" else 0.0)
        return 1 / (gbps * 1e9) if gbps else None

    def _next(self) -> AskRegistry | Read | Fetch | GiveUp | None:
        with self._changed:
            while self._queue.num_waiting:
                step = self._queue.next_step(now_s := self._clock())
                if not isinstance(step, Wait):
                    return step
                self._pause(self._changed, min(step.until_s - now_s, LOOK_AGAIN_S))
            return None

    def _ask(self, question: Question) -> None:
        answer: Located | None = None
        if not question.max_claims:
            with self._changed:
                question = question._replace(
                    unreadable=tuple(self._wanted[id_][0] for id_ in question.ids if id_ in self._wanted)
                )
        try:
            if self._peers:
                answer = self._peers.locate(question)
        except Exception:
            logger.exception("no node is known that has an extent")
        finally:  # after any error: while one thread asks, the others wait
            with self._notifying():
                unused = self._queue.apply_answer(question, answer, self._clock())
        if unused and self._peers:
            self._peers.changed([], unused)

    def _give_up(self, id_: str) -> Loaded:
        with self._notifying():
            extent, _ = self._wanted.pop(id_)
            self._queue.end_read(id_, None, self._clock())
        reason = (
            f"node {self._node} has not the store's folder, and for {GIVE_UP_S:.0f} s no other node has given it any "
            "weights: is there a node that has the folder, and can this one reach it?"
        )
        return Loaded(extent, error=StoreError(f"{extent.pack}: {reason}"))

    def _fetch(self, extent: ExtentRef, stages: LoadClock, plan: FromPeers, begin: Begin) -> Loaded | None:
        """Return the extent from a peer; None when no peer gave it."""
        fetched = FetchOutcome()
        try:
            with begin(extent) as writing:
                fetched, is_here = self._fetch_into(writing, extent, plan, stages)
                if not is_here:
                    with self._notifying():
                        self._queue.end_refused_fetch(extent.id, fetched, self._clock())
                    return None
                loaded = Loaded(extent, writing.seal(), "peer")
            stages.came_from("peer", extent.nbytes)
        except BaseException as error:  # a pool's thread: whoever waits for the extent is told
            loaded = Loaded(extent, error=as_error(error))
        with self._notifying():
            del self._wanted[extent.id]
            self._queue.end_fetch(extent.id, fetched, self._clock())
        return loaded

    def _fetch_into(
        self, writing: Writing, extent: ExtentRef, plan: FromPeers, stages: LoadClock
    ) -> tuple[FetchOutcome, bool]:
        """Return the peers' outcome, and whether the extent is here. Raises only the errors of making the place."""
        client = self._peers.client() if self._peers else None
        if client and (fetched := self._fetch_delta(client, writing, extent, plan, stages)):
            return fetched, True
        place, reading = _MeasuredPlace(writing, extent, stages), contextlib.ExitStack()

        def begin_reading() -> ByteArray:
            out = place()
            reading.enter_context(stages.measure("read", extent.nbytes))
            return out

        try:
            if client:
                with reading:
                    return client.fetch_extent(plan.addresses, extent, begin_reading, min_gbps=plan.min_gbps), True
        except FetchFailed as error:
            if error.fetched.failed or error.fetched.corrupt:
                logger.warning("peer fetch failed, reading storage: %s", error)
            return error.fetched, False
        except Exception as error:
            if place.has_failed:
                raise
            log = logger.warning if isinstance(error, ExtentCorrupt) else logger.exception
            log("peer fetch failed, reading storage: %s", error)
        return FetchOutcome(failed=list(plan.addresses)), False

    def _fetch_delta(
        self, client: PeerClient, writing: Writing, extent: ExtentRef, plan: FromPeers, stages: LoadClock
    ) -> FetchOutcome | None:
        """Return the outcome of the peers that gave the delta; None when the plain bytes are to be fetched.

        Raises only the errors of making the place.
        """
        with self._changed:
            gbps = self._queue.sources.peer_gbps(plan.addresses[0])
        delta = extent.delta
        if delta is None or not self._reader.prefers_sent_delta(extent, gbps * 1e9 if gbps else None):
            return None
        fetched: list[FetchOutcome] = []

        def fetch(out: ByteArray) -> None:
            with stages.measure("read", out.nbytes):
                stored = delta.stored(delta.key)
                fetched.append(client.fetch_extent(plan.addresses, stored, lambda: out, min_gbps=plan.min_gbps))

        try:
            self._reader.from_delta(extent, fetch, _MeasuredPlace(writing, extent, stages), stages)
        except (PeerUnavailable, ExtentCorrupt) as error:
            logger.info("peers do not give the delta: %s", error)
            return None
        return fetched[0]

    def _read(self, extent: ExtentRef, stages: LoadClock, begin: Begin) -> Loaded:
        read_s = None
        start_s = stages.now_s()
        try:
            with begin(extent) as writing:
                place = _MeasuredPlace(writing, extent, stages)
                self._reader.read_into(extent, place, stages)
                elapsed_s = stages.now_s() - start_s - place.seconds  # the making of the place is not the reading
                loaded = Loaded(extent, writing.seal())
            read_s = elapsed_s
            stages.came_from("storage", extent.nbytes)
        except BaseException as error:  # a pool's thread: whoever waits for the extent is told
            loaded = Loaded(extent, error=as_error(error))
        with self._notifying():
            del self._wanted[extent.id]
            self._queue.end_read(extent.id, read_s, self._clock())
        return loaded

    @contextlib.contextmanager
    def _notifying(self) -> Iterator[None]:
        """Change the queue, and wake the threads that wait for it."""
        with self._changed:
            yield
            self._changed.notify_all()
