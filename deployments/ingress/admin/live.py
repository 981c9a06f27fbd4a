"""GET /admin/live: the changes of the cluster as server-sent events. One look a second serves all watchers.

Watchers have no queues of their own: one that missed a change on a slow connection gets the whole
picture again in place of the changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Final

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import Response

from cluster.placement.serving.link import QueuesAway
from deployments.ingress.admin.picture import MAX_REQUESTS, Chronicle, Picture, changes_of, nearness_of, picture_of
from deployments.ingress.admin.routes import ControllerCalls
from deployments.ingress.messages.responses import EventStream, documented, event_of
from deployments.ingress.service.model_answers import Nearness
from deployments.ingress.service.operations import Operations, Page
from deployments.ingress.service.queues import Queues
from deployments.records.errors import Overloaded, ServiceError
from deployments.records.tasks import shared_task

PERIOD_S: Final = 1.0
MAX_VIEWERS: Final = 32
NUM_DECISIONS: Final = 50
_FRESH_S: Final = 2.0  # the greatest age of a picture for callers that do not watch

logger = logging.getLogger("atelier.ingress")


class ClusterView:
    """The view of the cluster that an ingress replica shares among its readers. Lives on one event loop."""

    def __init__(
        self,
        operations: Operations,
        queues: Queues,
        controller: ControllerCalls,
        period_s: float = PERIOD_S,
    ) -> None:
        self._operations = operations
        self._queues = queues
        self._controller = controller
        self._period_s = period_s
        self._chronicle = Chronicle()
        self._next_request = 0
        self._is_new = True  # True if there was no watcher for a while
        self._picture: Picture = {}
        self._whole = ""  # the event of the whole picture, made on demand
        self._change = ""
        self._number = 0  # of the picture
        self._changed = asyncio.Event()
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None
        self._near: tuple[float, dict[str, Nearness]] = (float("-inf"), {})
        self._asking: asyncio.Task[dict[str, Nearness]] | None = None

    def watch(self) -> AsyncGenerator[str]:
        """Return the events: the whole picture, then its changes. Raises Overloaded when too many watch."""
        if self._num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} watch the cluster already, the maximum")
        return self._events()

    async def nearness(self) -> dict[str, Nearness]:
        """Return the nearness of each model, at most a moment old."""
        found_s, found = self._near
        if time.monotonic() - found_s < _FRESH_S:
            return found
        if self._asking is None or self._asking.done():
            self._asking = shared_task(self._ask_nearness())
        return await asyncio.shield(self._asking)

    async def _ask_nearness(self) -> dict[str, Nearness]:
        cluster, decisions = await self._described()
        near = nearness_of(cluster, decisions)
        self._near = time.monotonic(), near
        return near

    async def _events(self) -> AsyncGenerator[str]:
        self._num_viewers += 1
        try:
            if self._task is None or self._task.done():
                self._task = shared_task(self._look_on())
                await self._changed.wait()  # the last picture is as old as the last watcher
            seen = 0
            while True:
                if seen != self._number:
                    event = self._change if seen == self._number - 1 and seen else self._whole_event()
                    seen = self._number
                    yield event
                    continue
                await self._changed.wait()
        finally:
            self._num_viewers -= 1

    def _whole_event(self) -> str:
        if not self._whole:
            self._whole = event_of(to_json(self._picture).decode(), "picture")
        return self._whole

    async def _look_on(self) -> None:
        """Look every period while there are watchers. After a failed look the last picture stays."""
        self._is_new = True
        self._chronicle.begin()
        while self._num_viewers:
            began_s = time.monotonic()
            try:
                await self._look()
            except Exception:  # whatever does not answer, watchers wait for the next look
                logger.exception("no look at the cluster")
            await asyncio.sleep(max(self._period_s / 2, self._period_s - (time.monotonic() - began_s)))

    async def _look(self) -> None:
        cluster, decisions = await self._described()
        now_s = time.time()
        near = nearness_of(cluster, decisions)
        self._near = time.monotonic(), near
        self._chronicle.note_replicas((one for one in cluster["workers"] if "unreachable" not in one), now_s)
        with contextlib.suppress(QueuesAway):
            await self._note_requests(now_s)
        picture = picture_of(cluster, decisions, near, self._chronicle, now_s)
        changes = changes_of(self._picture, picture)
        self._picture, self._whole = picture, ""
        self._change = event_of(to_json(changes).decode(), "change")
        self._number += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def _note_requests(self, now_s: float) -> None:
        if self._is_new:  # most requests that ended meanwhile would be forgotten again
            newest = await self._queues.ended_requests(None)
            self._next_request = max(self._next_request, newest.next_number - MAX_REQUESTS)
            self._is_new = False
        found = await self._queues.ended_requests(self._next_request)
        first = found.next_number - len(found.requests)
        self._chronicle.note_requests(found.requests, first, now_s - found.now_s)
        self._next_request = found.next_number

    async def _described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        cluster, decisions = await asyncio.gather(self._operations.describe_cluster(Page()), self._known_decisions())
        return cluster.model_dump(mode="json", exclude_unset=True), decisions

    async def _known_decisions(self) -> dict[str, Any]:
        try:
            return await self._controller.decisions(NUM_DECISIONS)
        except ServiceError:  # the controller restarts: the rest is shown without it
            return {}


def create_live_router(view: ClusterView) -> APIRouter:
    """Return the route."""
    router = APIRouter(tags=["operations"])

    @router.get(
        "/admin/live",
        response_class=Response,
        responses=documented(_503="too many watch already") | {200: {"content": {"text/event-stream": {}}}},
    )
    async def live() -> Response:
        """Show the cluster as it changes, once a second: the event `picture`, then `change`, a JSON Merge Patch of it.

        Nodes, workers and what they hold, models, queues, decisions, switches and requests that have ended, by name.
        """
        events = view.watch()
        return EventStream(events, events)

    return router
