"""An ingress among several: it reports to the controller what slots it has and wants, and takes what it may have.

While the controller is away the ingress keeps the slots that it has: nobody gives them to another one. One that stood
still for so long that they may be another's starts nothing before the controller has answered.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from ray.exceptions import RayActorError

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.ended_requests import EndedRequests
from cluster.admission.records import AdmissionSnapshot
from cluster.errors import ClusterError
from cluster.placement.actor import Controller
from cluster.placement.link import Link
from cluster.placement.reports import SlotReport
from cluster.placement.slot_book import SILENT_S
from cluster.processes import ProcessMark
from cluster.ray_calls import call_actor
from configs.admission import AdmissionConfig

REPORT_S: Final = 0.25  # between two reports, where nothing happens
CALL_S: Final = 0.6  # two that fail take less than `SILENT_S`
LISTEN_S: Final = 1.0
ASK_S: Final = 5.0
PAUSE_S: Final = 0.05
GAP_S: Final = 0.003  # between two reports, whatever happens

P = ParamSpec("P")
R = TypeVar("R")


class QueuesAway(ClusterError):
    """The controller, which knows the queues of all ingresses, is restarting or out of reach."""


class SlotLink(Link):
    """The link of one ingress, and the queues of all of them together. Arguments are those of `Link`.

    `clock` is the queue's.
    """

    def __init__(
        self,
        name: str,
        queue: Dispatcher,
        connect: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
        process: ProcessMark | None = None,
    ) -> None:
        super().__init__(name, connect, queue.slots_changed, REPORT_S, GAP_S, PAUSE_S)
        self._queue = queue
        self._clock = clock
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
        """Return the state of all queues, each as its ingress has last reported. Raises QueuesAway."""
        return await self._ask(Controller.queues)

    async def ended_requests(self, number: int | None) -> EndedRequests:
        """Return the requests of all ingresses that have ended, from a number on. Raises QueuesAway."""
        return await self._ask(Controller.ended_requests, number)

    async def report_once(self) -> None:
        """Tell what is here. Two in a row that fail show that the controller is away."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(CALL_S):
                actor, report = await self.handle(), await self._report(began_s)
                answer = await call_actor(actor, Controller.report_slots, self.name, report)
        except Exception:
            self._num_failed += 1
            if self._num_failed > 1:
                self._queue.hold_slots(math.inf)
            raise
        self._num_failed = 0
        self._next_ended = self._next_ended if answer.next_ended is None else answer.next_ended
        if answer.session != self._session:
            self._session, self._revision = answer.session, 0
            if not answer.keeps:
                self._queue.drop_slots()
            self._queue.slots_changed.set()  # it joins by the next report
        self._queue.hold_slots(began_s + SILENT_S)

    async def receive_once(self) -> None:
        """Wait for news, and apply them."""
        session = self._session
        update = await call_actor(
            await self.handle(),
            Controller.receive_slots,
            self.name,
            session,
            self._revision,
            self._settings,
            LISTEN_S,
        )
        if update.config is not None:
            await self._queue.retune(update.config)
            self._queue.slots_changed.set()  # who has set them waits for that
        self._settings = update.settings
        split = update.split
        if split is not None and split.session == self._session and split.revision > self._revision:
            self._revision = split.revision
            self._queue.set_parts(split.pools, split.bound_part)
            self._queue.slots_changed.set()  # others may get what this one has no more

    async def _report(self, now_s: float) -> SlotReport:
        self._num_reports += 1
        ended: EndedRequests | None = None
        if now_s - self._ended_s >= REPORT_S:  # nobody waits for them
            self._ended_s = now_s
            ended = await self._queue.ended_requests(self._next_ended)
        return SlotReport(
            self._num_reports,
            self._session,
            self._revision,
            self._process,
            self._queue.claims(),
            self._queue.requests_per_s(),
            self._queue.config.max_overtakes,
            self._settings,
            ended if ended and ended.requests else None,
        )

    async def _ask(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            async with asyncio.timeout(ASK_S):
                return await call_actor(await self.handle(), method, *args, **kwargs)
        except (RayActorError, TimeoutError):
            raise QueuesAway("the controller is restarting; try again") from None
