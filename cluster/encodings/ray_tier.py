"""The replica's client of the shared encodings: bounded waits, one call for many keys, an actor that may be gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final

import ray

from cluster.encodings.ledger import CLAIM_S
from cluster.encodings.packed import ByteArray, Layout
from cluster.encodings.records import INLINE_BYTES, Answer, SharedEncoding, SharedStats
from cluster.errors import ClusterError

ANSWER_TIMEOUT_S: Final = 2.0
WAIT_S: Final = 1.0  # in one call, so that an actor that is gone is noticed
RENEW_S: Final = CLAIM_S / 4
QUIET_S: Final = 5.0  # an actor that did not answer is not asked for so long
MAX_NOTED: Final = 1000

logger = logging.getLogger("atelier.encodings")


class RaySharedTier:
    """A client of the shared encodings. Lives on one event loop.

    Every method raises when the actor is gone or slow, and then for `quiet_s` at once. Keys that are asked for in one
    turn of the loop, all of a request say, go in one call. `connect` gives the actor's handle; it may block. `put`
    replaces Ray's.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        *,
        timeout_s: float = ANSWER_TIMEOUT_S,
        wait_s: float = WAIT_S,
        renew_s: float = RENEW_S,
        quiet_s: float = QUIET_S,
        put: Callable[[ByteArray], Any] = ray.put,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._put = put
        self._timeout_s, self._wait_s, self._renew_s, self._quiet_s = timeout_s, wait_s, renew_s, quiet_s
        self._clock = clock
        self._holder = uuid.uuid4().hex
        self._actor: Any = None
        self._quiet_until_s = -float("inf")
        self._asked: list[tuple[str, asyncio.Future[Answer[SharedEncoding]]]] = []
        self._used: set[str] = set()
        self._computing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def find_or_claim(self, digest: str) -> SharedEncoding | None:
        """Return the encoding with its bytes, or None: the caller has to compute it and publish or abandon it.

        Waits for one who computes it already, or until it is this caller's turn.
        """
        answer = await self._ask(digest)
        while answer.state == "wait":
            answer = await self._call(
                "wait", digest, self._holder, self._wait_s, timeout_s=self._wait_s + self._timeout_s
            )
        if answer.payload is None:
            self._claimed(digest)
            return None
        found = answer.payload
        if not isinstance(found.data, ray.ObjectRef):
            return found
        async with asyncio.timeout(self._timeout_s):
            return SharedEncoding(found.layout, await found.data, found.cost_s)

    async def publish(self, digest: str, layout: Layout, data: ByteArray, cost_s: float, keep: bool) -> None:
        """Send what was computed under a claim."""
        try:
            # To put 4 MiB takes milliseconds, and many of them on pages that nobody has used before.
            sent = data if data.nbytes <= INLINE_BYTES else await asyncio.to_thread(self._put, data)
            await self._call("publish", digest, layout, sent, cost_s, keep)
        finally:
            self._computing.discard(digest)

    async def abandon(self, digest: str) -> None:
        """Give up a claim."""
        self._computing.discard(digest)
        await self._call("abandon", digest, self._holder)

    async def forget_all(self) -> None:
        """Drop every encoding of the cluster."""
        await self._call("forget_all")

    def note_use(self, digest: str) -> None:
        """Note that this replica used its own copy; sent with the next question."""
        if len(self._used) < MAX_NOTED:
            self._used.add(digest)

    async def stats(self) -> SharedStats:
        """Return the actor's snapshot."""
        return await self._call("stats")

    def _ask(self, digest: str) -> Awaitable[Answer[SharedEncoding]]:
        future: asyncio.Future[Answer[SharedEncoding]] = asyncio.get_running_loop().create_future()
        self._asked.append((digest, future))
        if len(self._asked) == 1:
            task = asyncio.ensure_future(self._send_asked())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return future

    async def _send_asked(self) -> None:
        """Runs when all who were about to ask have done so: they come before it in the loop's queue."""
        asked, self._asked = self._asked, []
        used, self._used = list(self._used), set()
        try:
            answers = await self._call("find_or_claim", [digest for digest, _ in asked], self._holder, used)
        except Exception as error:
            for _, future in asked:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), answer in zip(asked, answers, strict=True):
            if not future.done():
                future.set_result(answer)

    async def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        if self._clock() < self._quiet_until_s:
            raise ClusterError("the shared encodings did not answer; they are asked again in some seconds")
        try:
            async with asyncio.timeout(timeout_s or self._timeout_s):
                if self._actor is None:
                    self._actor = await asyncio.to_thread(self._connect)
                return await getattr(self._actor, method).remote(*arguments)
        except Exception as error:
            logger.warning("the shared encodings do not answer: %s", str(error).partition("\n")[0] or "no time left")
            self._actor = None  # Ray restarts it under its handle, unless it was ended for good
            self._quiet_until_s = self._clock() + self._quiet_s
            raise

    def _claimed(self, digest: str) -> None:
        self._computing.add(digest)
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        """While something is computed here, say so: who is silent loses his claims."""
        while True:
            await asyncio.sleep(self._renew_s)
            if not self._computing:
                return
            with contextlib.suppress(Exception):  # counted where it is missed
                await self._call("renew", list(self._computing), self._holder)
