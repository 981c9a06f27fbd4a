"""The reporter's side of the controller: one task reports, another applies its decisions.

While the controller is away nothing changes here: a worker keeps what it has, a queue's placement ends by itself, and
the next controller gets all reports anew. One of several ingresses reports the slots that it has and wants, and takes
its part. It keeps its slots meanwhile: no other ingress gets them. An ingress that stood still for so long
that they may be another's starts no request before the controller has answered.

At rest, an unchanged report is repeated only after some seconds. The listening task notices a new controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from ray.exceptions import RayActorError

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.outcomes import EndedRequests
from cluster.admission.records import AdmissionSnapshot, Placement
from cluster.placement.reports import SlotReport, WorkerReport
from cluster.placement.serving.actor import Controller
from cluster.placement.slot_book import SLOT_REST_S, lease_s
from cluster.placement.state import STALE_S
from cluster.process.processes import ProcessMark
from cluster.process.ray_calls import NamedActor, call_actor
from cluster.records.errors import ClusterError
from configs.admission import AdmissionConfig

CALL_S: Final = 5.0
# A placement is renewed, and a listener shows a sign of life, this often: twice before it would count as stale.
LISTEN_S: Final = STALE_S / 2
REST_S: Final = 5.0  # between two reports at rest that differ only in fields of time
PAUSE_S: Final = 0.2
GAP_S: Final = 0.01  # between two reports, whatever happens

# Of an ingress among several, whose slots the others wait for.
SLOT_REPORT_S: Final = 0.25  # between two reports, where nothing happens
SLOT_CALL_S: Final = 0.6  # two that fail take less than `SILENT_S`
SLOT_LISTEN_S: Final = SLOT_REST_S
SLOT_ASK_S: Final = 5.0
SLOT_PAUSE_S: Final = 0.05
SLOT_GAP_S: Final = 0.003  # between two reports, whatever happens

logger = logging.getLogger("atelier.controller")


P = ParamSpec("P")
R = TypeVar("R")


class Link:
    """A link of one reporter, by its name. Lives on one event loop.

    A report goes out to the `controller` every `tick_s`, and at once when `changed` is set, but not within `gap_s` of
    the last one; after one that fails there is a pause. At rest a known report is repeated only after `rest_s`: the
    listening task confirms it.
    """

    gap_s = GAP_S
    pause_s = PAUSE_S
    rest_s = REST_S

    def __init__(self, name: str, controller: NamedActor, changed: asyncio.Event, tick_s: float) -> None:
        self.name = name
        self._controller = controller
        self._changed = changed
        self._tick_s = tick_s
        self._tasks: list[asyncio.Task[None]] = []
        self._reported: object = None  # at rest, and known to the controller; or the mark of one that is under way
        self._reported_s = -math.inf

    def start(self) -> None:
        """Report and listen from now on. Has to be called on the event loop."""
        # HAZARD: the tasks' calls must not be of the context of a request: Ray cancels those when that is.
        for work in (self._tell, self._listen):
            task = asyncio.get_running_loop().create_task(self._lasting(work), context=contextvars.Context())
            self._tasks.append(task)

    def close(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()

    async def _report(self) -> WorkerReport | AdmissionSnapshot | SlotReport:
        """Return the report of this moment."""
        raise NotImplementedError

    async def _send(self, report: Any) -> None:
        """Send a report, and take in the answer."""
        raise NotImplementedError

    async def _receive_once(self) -> None:
        """Wait for the controller's decision, and apply it."""
        raise NotImplementedError

    async def _lasting(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # any error: it blocks no request, and the next round may succeed
                logger.warning("the controller does not answer: %s", str(error).partition("\n")[0])
                self._controller.note_failure(error)
            await asyncio.sleep(self.pause_s)

    async def _tell(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._changed.wait()
            self._changed.clear()
            async with asyncio.timeout(CALL_S):
                await self._report_once()
            await asyncio.sleep(self.gap_s)

    async def _listen(self) -> None:
        while True:
            try:
                async with asyncio.timeout(CALL_S):
                    await self._receive_once()
            except BaseException:  # the next controller needs a full report
                self._reported = None
                raise

    async def _report_once(self) -> None:
        report, now_s = await self._report(), asyncio.get_running_loop().time()
        if report.is_at_rest and now_s < self._reported_s + self.rest_s and report.lasting == self._reported:
            return
        self._reported = under_way = object()
        await self._send(report)
        if self._reported is under_way:  # otherwise the controller may have ended since it began
            self._reported, self._reported_s = report.lasting if report.is_at_rest else None, now_s


Decision = TypeVar("Decision", contravariant=True)


class Reporter(Protocol[Decision]):
    """A reporter to the controller that carries out its decisions: a worker's models, or a queue."""

    @property
    def changed(self) -> asyncio.Event:
        """Set when a report is due at once."""
        ...

    async def report(self) -> WorkerReport | AdmissionSnapshot:
        """Return the state that the controller decides by."""
        ...

    def apply(self, decision: Decision, /) -> None:
        """Take in a decision. Most of them come repeatedly."""
        ...


class ControllerLink(Link):
    """The link of a worker, or the placement's link of a queue.

    `tick_s` holds until the controller sends another one.
    """

    def __init__(self, name: str, controller: NamedActor, reporter: Reporter[Any], tick_s: float) -> None:
        super().__init__(name, controller, reporter.changed, tick_s)
        self._reporter = reporter
        self._revision = ""

    async def _report(self) -> WorkerReport | AdmissionSnapshot:
        return await self._reporter.report()

    async def _send(self, report: WorkerReport | AdmissionSnapshot) -> None:
        await call_actor(await self._controller.handle(), Controller.report, self.name, report)

    async def _receive_once(self) -> None:
        """Wait for a decision and apply it."""
        update = await call_actor(
            await self._controller.handle(), Controller.receive, self.name, self._revision, LISTEN_S
        )
        if self._revision and not update.revision:  # a new controller, which began between two calls
            self._reported = None
        self._revision, self._tick_s = update.revision, update.tick_s
        if update.content is not None:
            self._reporter.apply(update.content)


class _PlacedQueue:
    """An admission queue, which starts requests where the controller lets them."""

    def __init__(self, queue: Dispatcher) -> None:
        self.changed = queue.changed
        self._queue = queue

    async def report(self) -> AdmissionSnapshot:
        return await self._queue.snapshot()

    def apply(self, placement: Placement) -> None:
        self._queue.set_placement(placement)


def link_queue(name: str, queue: Dispatcher, controller: NamedActor, tick_s: float) -> ControllerLink:
    """Return the link of an admission queue."""
    return ControllerLink(name, controller, _PlacedQueue(queue), tick_s)


class QueuesAway(ClusterError):
    """The controller, which knows the queues of all ingresses, is restarting or out of reach."""


class SlotLink(Link):
    """The link of one ingress, and the queues of all of them together. Arguments are those of `Link`."""

    gap_s = SLOT_GAP_S
    pause_s = SLOT_PAUSE_S
    rest_s = SLOT_REST_S

    def __init__(
        self,
        name: str,
        queue: Dispatcher,
        controller: NamedActor,
        process: ProcessMark | None = None,
    ) -> None:
        super().__init__(name, controller, queue.parts_changed, SLOT_REPORT_S)
        self._queue = queue
        self._process = process or ProcessMark.this()
        self._session = ""
        self._revision = 0
        self._settings = ""
        self._num_reports = 0
        self._num_failed = 0
        self._next_ended = 0
        self._ended_s = -math.inf

    @property
    def config(self) -> AdmissionConfig:
        """Bounds and weights in force here."""
        return self._queue.config

    async def retune(self, config: AdmissionConfig) -> None:
        """Use other bounds and weights from now on, in all ingresses. Raises QueuesAway."""
        await self._ask(Controller.retune_queues, config)
        await self._queue.retune(config)

    async def snapshot(self) -> AdmissionSnapshot:
        """Return the state of all queues by their ingresses' last reports. Raises QueuesAway."""
        return await self._ask(Controller.queues)

    async def ended_requests(self, number: int | None) -> EndedRequests:
        """Return the requests of all ingresses that have ended, from a number on. Raises QueuesAway."""
        return await self._ask(Controller.ended_requests, number)

    async def _send(self, report: SlotReport) -> None:
        """Send a report. Two failures in a row mark the controller as away."""
        began_s = self._queue.now_s()
        try:
            async with asyncio.timeout(SLOT_CALL_S):
                answer = await call_actor(await self._controller.handle(), Controller.report_slots, self.name, report)
        except Exception:
            self._num_failed += 1
            if self._num_failed > 1:
                self._hold(math.inf)
            raise
        self._num_failed = 0
        self._next_ended = self._next_ended if answer.next_ended is None else answer.next_ended
        if answer.session != self._session:
            self._session, self._revision = answer.session, 0
            if not answer.keeps:
                self._queue.parts.drop(self._queue.now_s())
            self._queue.parts_changed.set()  # it joins by the next report
        self._hold(began_s + lease_s(report))

    async def _receive_once(self) -> None:
        """Wait for news, and apply them."""
        session = self._session
        update = await call_actor(
            await self._controller.handle(),
            Controller.receive_slots,
            self.name,
            session,
            self._revision,
            self._settings,
            SLOT_LISTEN_S,
        )
        if update.config is not None:
            await self._queue.retune(update.config)
            self._queue.parts_changed.set()  # their setter waits for this
        self._settings = update.settings
        split = update.split
        if split is not None and split.session == self._session and split.revision > self._revision:
            self._revision = split.revision
            self._queue.parts.set_parts(split.pools, split.bound_part, self._queue.now_s())
            self._queue.pump()
            self._queue.parts_changed.set()  # others get the slots lost here once they are told

    def _hold(self, until_s: float) -> None:
        self._queue.parts.hold(until_s)
        self._queue.pump()

    async def _report(self) -> SlotReport:
        now_s = self._queue.now_s()
        self._num_reports += 1
        ended: EndedRequests | None = None
        if now_s - self._ended_s >= SLOT_REPORT_S:  # no reader waits for them
            self._ended_s = now_s
            ended = await self._queue.ended_requests(self._next_ended)
        return SlotReport(
            self._num_reports,
            self._session,
            self._revision,
            self._process,
            self._queue.parts.claims(now_s),
            self._queue.arrivals.per_s(now_s)[0],
            self._queue.config.max_overtakes,
            self._settings,
            ended if ended and ended.requests else None,
        )

    async def _ask(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            async with asyncio.timeout(SLOT_ASK_S):
                return await call_actor(await self._controller.handle(), method, *args, **kwargs)
        except (RayActorError, TimeoutError):
            raise QueuesAway("the controller is restarting; try again") from None
