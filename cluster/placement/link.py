"""The reporter's side of the controller: one task reports, another applies what it decides.

While the controller is away nothing changes here: a worker keeps what it has, a queue's placement ends by itself, and
the next controller gets all reports anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from ray.exceptions import RayActorError

from cluster.admission.dispatcher import Dispatcher
from cluster.admission.records import AdmissionSnapshot, Placement
from cluster.placement.actor import PLAN_LIVES_S, Controller
from cluster.placement.reports import WorkerReport
from cluster.ray_calls import call_actor

CALL_S: Final = 5.0
LISTEN_S: Final = PLAN_LIVES_S / 3  # a placement is renewed so often
PAUSE_S: Final = 0.2
GAP_S: Final = 0.01  # between two reports, whatever happens

logger = logging.getLogger("atelier.controller")


class Link:
    """A link of one reporter, by its name. Lives on one event loop.

    `connect` returns a handle of the controller, and may block. A report goes out every `tick_s`, and at once when
    `changed` is set, but not within `gap_s` of the last one; after one that fails there is a pause.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        changed: asyncio.Event,
        tick_s: float,
        gap_s: float = GAP_S,
        pause_s: float | None = None,
    ) -> None:
        self.name = name
        self._connect = connect
        self._changed = changed
        self._tick_s = tick_s
        self._gap_s = gap_s
        self._pause_s = PAUSE_S if pause_s is None else pause_s
        self._actor: Any = None
        self._connecting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

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

    async def report_once(self) -> None:
        """Report, and take in the answer."""
        raise NotImplementedError

    async def receive_once(self) -> None:
        """Wait for what the controller decides, and apply it."""
        raise NotImplementedError

    async def handle(self) -> Any:
        """Return the controller's handle."""
        async with self._connecting:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._connect)
            return self._actor

    async def _lasting(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # whatever it is: nobody is held up by it, and the next round may do better
                logger.warning("the controller does not answer: %s", str(error).partition("\n")[0])
                if isinstance(error, RayActorError):
                    self._actor = None  # Ray restarts it under its name, unless it was ended for good
            await asyncio.sleep(self._pause_s)

    async def _tell(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._changed.wait()
            self._changed.clear()
            async with asyncio.timeout(CALL_S):
                await self.report_once()
            await asyncio.sleep(self._gap_s)

    async def _listen(self) -> None:
        while True:
            async with asyncio.timeout(CALL_S):
                await self.receive_once()


class ControllerLink(Link):
    """The link of a worker, or of a queue as far as placement goes.

    `apply` gets every decision, most of them again and again. `tick_s` holds until the controller says another one.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        report: Callable[[], Awaitable[WorkerReport | AdmissionSnapshot]],
        apply: Callable[[Any], None],
        changed: asyncio.Event,
        tick_s: float,
    ) -> None:
        super().__init__(name, connect, changed, tick_s)
        self._report = report
        self._apply = apply
        self._revision = ""

    async def report_once(self) -> None:
        """Report."""
        await call_actor(await self.handle(), Controller.report, self.name, await self._report())

    async def receive_once(self) -> None:
        """Wait for a decision, and apply it."""
        update = await call_actor(await self.handle(), Controller.receive, self.name, self._revision, LISTEN_S)
        self._revision, self._tick_s = update.revision, update.tick_s
        if update.content is not None:
            self._apply(update.content)


def link_queue(name: str, queue: Dispatcher, connect: Callable[[], Any], tick_s: float) -> ControllerLink:
    """Return the link of an admission queue: it starts requests where the controller lets them."""

    def apply(placement: Placement) -> None:
        queue.set_placement(placement)

    return ControllerLink(name, connect, queue.snapshot, apply, queue.changed, tick_s)
