"""The news that clients with a websocket get of their prompts, on whichever ingress those run.

A prompt that runs in this process tells its steps itself (`runs.py`). What it cannot tell, that its result is kept,
and what happens elsewhere, is looked up here: once for all sockets of a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cluster.jobs.records import Job
from deployments.ingress.access.callers import Caller, acting_for, current_key
from deployments.ingress.comfy.prompts import Prompts, prompt_id_of
from deployments.ingress.comfy.sockets import Socket, Sockets, event_text
from deployments.records.tasks import shared_task
from weights.residency.recent import Recent

LOOK_S: Final = 1.0  # between two looks at prompts, while there may be news that nobody here tells
_MAX_KNOWN: Final = 4096
_ENDS: Final = ("execution_success", "execution_error", "execution_interrupted")

logger = logging.getLogger("atelier.ingress")


class Watches:
    """The prompts that this ingress's sockets wait for. Lives on one event loop.

    `is_alone`: there is no other ingress, on which prompts could begin.
    """

    def __init__(self, prompts: Prompts, sockets: Sockets, *, is_alone: bool) -> None:
        self.prompts = prompts
        self.sockets = sockets
        self.told = Recent[str, bool](_MAX_KNOWN)  # by job: its begin was told, and whether its outcome was
        self._is_alone = is_alone
        self._of_key: dict[str, _Watch] = {}

    @contextlib.contextmanager
    def opened(self, caller: Caller | None, client: str) -> Iterator[Socket]:
        """Yield a new socket of the current key, which gets all news of its client's prompts. Raises RateLimited."""
        key = current_key()
        with self.sockets.opened(key, client) as socket:
            watch = self._of_key.get(key)
            if watch is None:
                watch = self._of_key[key] = _Watch(self, caller, self._is_alone)
            watch.add(socket)
            try:
                yield socket
            finally:
                watch.remove(socket)
                if not watch.sockets:
                    del self._of_key[key]
                    watch.close()

    def begun(self, job: Job) -> None:
        """Take in that a prompt of the current key was kept."""
        if watch := self._of_key.get(current_key()):
            watch.follow(job)
            watch.look()


class _Watch:
    """The prompts of one key."""

    def __init__(self, watches: Watches, caller: Caller | None, is_alone: bool) -> None:
        self.sockets: set[Socket] = set()
        self._new: set[Socket] = set()  # those that wait for their first message
        self._watches = watches
        self._caller = caller
        self._is_alone = is_alone
        self._num_left = 0
        self._known = Recent[str, bool](_MAX_KNOWN)  # jobs that were followed, or are too old for it
        self._following: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._task = shared_task(self._look_on())

    def add(self, socket: Socket) -> None:
        """Tell a socket all from now on.

        HAZARD: some clients take its first message, if no prompt is left in that, for the end of theirs.
        """
        self.sockets.add(socket)
        self._new.add(socket)
        self.look()

    def remove(self, socket: Socket) -> None:
        """Forget a socket."""
        self.sockets.discard(socket)
        self._new.discard(socket)

    def close(self) -> None:
        """End all work."""
        for task in (self._task, *self._following.values()):
            task.cancel()

    def look(self) -> None:
        """Look at the prompts now."""
        self._news.set()

    def follow(self, job: Job) -> None:
        """Tell a prompt's client of it from now on, if that is here."""
        client = job.facts.get("client_id")
        if self._known.get(job.id) is None and any(socket.client == client for socket in self.sockets):
            self._known.note(job.id, True)
            self._following[job.id] = task = shared_task(self._follow(job))
            task.add_done_callback(lambda _: self._following.pop(job.id, None))

    def _status(self) -> dict[str, Any]:
        return {"status": {"exec_info": {"queue_remaining": self._num_left}}}

    async def _look_on(self) -> None:
        with acting_for(self._caller):
            is_first = True
            while True:
                self._news.clear()
                new = set(self._new)  # who comes meanwhile may have sent a prompt that this look does not see
                if self._caller is not None and not self._caller.holds:
                    for socket in self.sockets:
                        socket.end()
                try:
                    jobs = await self._watches.prompts.newest()
                except Exception as error:  # whatever it is, the next look may do better
                    logger.warning("prompts cannot be looked at now: %s", str(error).partition("\n")[0])
                else:
                    self._take_in(jobs, new, is_first=is_first)
                    is_first = False
                is_quiet = self._is_alone and not self._num_left and not is_first
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if is_quiet else LOOK_S):
                        await self._news.wait()

    def _take_in(self, jobs: list[Job], new: set[Socket], *, is_first: bool) -> None:
        for job in jobs:
            if not (is_first and job.has_ended):
                self.follow(job)
            if job.has_ended:  # whoever comes later did not wait for it
                self._known.note(job.id, True)
        before, self._num_left = self._num_left, sum(not job.has_ended for job in jobs)
        for socket in self.sockets:
            if socket in new:
                socket.greet(event_text("status", self._status() | {"sid": socket.client}))
            elif socket not in self._new and before != self._num_left:
                socket.put(event_text("status", self._status()))
        self._new -= new

    async def _follow(self, first: Job) -> None:
        """Tell a client what a run in this process does not tell."""
        told, job = self._watches.told, first
        with acting_for(self._caller):
            try:
                async for job in self._watches.prompts.desk.changes(first):
                    if job.started_s is not None and told.get(job.id) is None:
                        told.note(job.id, False)
                        self._send(job, "execution_start", {"timestamp": int((job.started_s or 0) * 1000)})
                        self._send(job, "execution_cached", {"nodes": []})
                if job.has_ended and not told.get(job.id):
                    self._tell_end(job, await self._watches.prompts.entry(job))
            except Exception as error:  # it runs on: the next look follows it again
                logger.warning("job %s cannot be followed now: %s", job.id, str(error).partition("\n")[0])
                self._known.pop(job.id, None)
                return
        self._send(job, "executing", {"node": None, "display_node": None})
        self.look()

    def _tell_end(self, job: Job, entry: Mapping[str, Any]) -> None:
        for node, output in entry["outputs"].items():
            self._send(job, "executed", {"node": node, "display_node": node, "output": output})
        for name, data in entry["status"]["messages"]:
            if name in _ENDS:
                self._send(job, name, data)

    def _send(self, job: Job, type_: str, data: Mapping[str, Any]) -> None:
        facts = {**data, "prompt_id": prompt_id_of(job)}
        self._watches.sockets.send(job.key, job.facts.get("client_id"), type_, facts)
