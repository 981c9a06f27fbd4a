"""The reporter's side of the controller: one task tells it what is, another hears what it decides.

While the controller is away nothing changes here: a worker keeps what it has, a queue's placement ends by itself, and
the next controller hears all of it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from ray.exceptions import RayActorError

from cluster.control.admission_records import AdmissionSnapshot, Placement
from cluster.control.dispatcher import Dispatcher
from cluster.controller.actor import PLAN_LIVES_S, Controller
from cluster.controller.reports import WorkerReport
from cluster.ray_calls import call_actor

CALL_S: Final = 5.0
LISTEN_S: Final = PLAN_LIVES_S / 3  # a placement is renewed so often
PAUSE_S: Final = 0.2
GAP_S: Final = 0.01  # between two reports, whatever happens

logger = logging.getLogger("atelier.controller")


class ControllerLink:
    """The link of one reporter, a worker or a queue, by its name. Lives on one event loop.

    `connect` returns a handle of the controller, and may block. A report goes out every `tick_s`, and at once when
    `news` is set. `obey` gets every decision, most of them again and again.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        report: Callable[[], Awaitable[WorkerReport | AdmissionSnapshot]],
        obey: Callable[[Any], None],
        news: asyncio.Event,
        tick_s: float,
    ) -> None:
        self._name = name
        self._connect = connect
        self._report = report
        self._obey = obey
        self._news = news
        self._tick_s = tick_s
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

    async def _lasting(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work()
            except Exception as error:  # whatever it is: nobody is held up by it, and the next round may do better
                logger.warning("the controller does not answer: %s", str(error).partition("\n")[0])
                if isinstance(error, RayActorError):
                    self._actor = None  # Ray restarts it under its name, unless it was ended for good
            await asyncio.sleep(PAUSE_S)

    async def _tell(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._tick_s):
                    await self._news.wait()
            self._news.clear()
            async with asyncio.timeout(CALL_S):
                await call_actor(await self._handle(), Controller.report, self._name, await self._report())
            await asyncio.sleep(GAP_S)

    async def _listen(self) -> None:
        revision = ""
        while True:
            async with asyncio.timeout(CALL_S):
                actor = await self._handle()
                news = await call_actor(actor, Controller.receive, self._name, revision, LISTEN_S)
            revision = news.revision
            if news.content is not None:
                self._obey(news.content)

    async def _handle(self) -> Any:
        async with self._connecting:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._connect)
            return self._actor


def link_queue(name: str, queue: Dispatcher, connect: Callable[[], Any], tick_s: float) -> ControllerLink:
    """Return the link of an admission queue: it starts requests where the controller lets them."""

    def obey(placement: Placement) -> None:
        queue.set_placement(placement)

    return ControllerLink(name, connect, queue.snapshot, obey, queue.news, tick_s)
