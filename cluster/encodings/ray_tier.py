"""The replica's client of the shared encodings: bounded waits, one call for many keys, an actor that may be gone."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Final

import ray

from cluster.encodings.ledger import CLAIM_S
from cluster.encodings.packed import ByteArray
from cluster.encodings.records import INLINE_BYTES, Answer, Publication, SharedEncoding, SharedStats
from cluster.errors import ClusterError

ANSWER_TIMEOUT_S: Final = 2.0
WAIT_S: Final = 1.0  # in one call, so that an actor that is gone is noticed
RENEW_S: Final = CLAIM_S / 4
QUIET_S: Final = 5.0  # an actor that did not answer is not asked for so long
MAX_NOTED: Final = 1000
WATCH_S: Final = 30.0  # of one standing question for the generation
PUBLISH_EVERY_S: Final = 0.25  # what nobody waits for

logger = logging.getLogger("atelier.encodings")


class RaySharedTier:
    """A client of the shared encodings. Lives on one event loop.

    Whatever asks raises when the actor is gone or slow, and then for `quiet_s` at once. Whatever tells returns at once:
    nobody has to wait until the actor knows, and `num_untold` counts what it did not hear. `generation` is the actor's,
    None before its first answer: a standing question brings the next one as soon as everything is forgotten.
    `connect` gives the actor's handle; it may block. `put` replaces Ray's.
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
        self._used: set[str] = set()
        self._computing: set[str] = set()
        self._unpublished: list[tuple[Publication, ByteArray]] = []
        self._publishing: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self.num_untold = 0
        self.generation: str | None = None

    async def find_or_claim(self, digests: Sequence[str]) -> list[Answer[SharedEncoding]]:
        """Ask for all in one call. The caller computes what is "yours", and publishes or abandons it."""
        used, self._used = list(self._used), set()
        answers: list[Answer[SharedEncoding]] = await self._call("find_or_claim", digests, self._holder, used)
        self._watching = self._watching or asyncio.ensure_future(self._watch_generation())
        for digest, answer in zip(digests, answers, strict=True):
            self._note_answer(digest, answer)
        return answers

    async def receive(self, digest: str, answer: Answer[SharedEncoding]) -> SharedEncoding | None:
        """Return the encoding with its bytes here; None when the caller has to compute it, after all.

        Waits as long as somebody else computes it.
        """
        while answer.state == "wait":
            answer = await self._call(
                "wait", digest, self._holder, self._wait_s, timeout_s=self._wait_s + self._timeout_s
            )
            self._note_answer(digest, answer)
        found = answer.payload
        if found is None or not isinstance(found.data, ray.ObjectRef):
            return found
        async with asyncio.timeout(self._timeout_s):
            return replace(found, data=await found.data)

    def publish(self, publications: Sequence[Publication], arrays: Sequence[ByteArray]) -> None:
        """Give encodings, and their bytes, to all who want them, in one call: a call costs as much as some texts do.

        Those that the actor was never asked for go later, with others: nobody can wait for them.
        """
        is_quiet = self._clock() < self._quiet_until_s  # the call says so
        now: list[tuple[Publication, ByteArray]] = []
        for one, data in zip(publications, arrays, strict=True):
            can_wait = one.digest not in self._computing and data.nbytes <= INLINE_BYTES and not is_quiet
            (self._unpublished if can_wait else now).append((one, data))
        if self._unpublished and (self._publishing is None or self._publishing.done()):
            self._publishing = asyncio.ensure_future(self._publish_soon())
        if now:
            self._tell(self._publish_now(now))

    def abandon(self, digests: Sequence[str]) -> None:
        """Pass claims on that cannot be computed here."""
        self._computing.difference_update(digests)
        self._tell(self._call("abandon", digests, self._holder))

    def forget_all(self) -> None:
        """Drop everything, and every replica's copies of it."""
        self._unpublished.clear()
        self._tell(self._call("forget_all"))

    def note_use(self, digest: str) -> None:
        """Note that this replica used its own copy; the actor hears of it with the next question."""
        if len(self._used) < MAX_NOTED:
            self._used.add(digest)

    async def stats(self) -> SharedStats:
        """Return the actor's snapshot."""
        return await self._call("stats")

    def _tell(self, telling: Coroutine[Any, Any, None]) -> None:
        # In no request's context: Ray cancels the calls that were made in one when Serve cancels the request.
        task = asyncio.get_running_loop().create_task(telling, context=contextvars.Context())
        self._telling.add(task)
        task.add_done_callback(self._note_told)

    def _note_told(self, task: asyncio.Task[None]) -> None:
        self._telling.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.num_untold += 1
            logger.debug("the shared encodings could not be told: %r", error)

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

    async def _publish_now(self, encodings: Sequence[tuple[Publication, ByteArray]]) -> None:
        try:
            # To put 4 MiB takes milliseconds, and many of them on pages that nobody has used before.
            sent = [
                data if data.nbytes <= INLINE_BYTES else await asyncio.to_thread(self._put, data)
                for _, data in encodings
            ]
            await self._call("publish", [one for one, _ in encodings], *sent)
        finally:
            self._computing.difference_update(one.digest for one, _ in encodings)

    async def _publish_soon(self) -> None:
        await asyncio.sleep(PUBLISH_EVERY_S)
        encodings, self._unpublished = self._unpublished, []
        if encodings:
            with contextlib.suppress(Exception):  # somebody will compute them anew
                await self._publish_now(encodings)

    def _note_answer(self, digest: str, answer: Answer[SharedEncoding]) -> None:
        if answer.payload and self.generation is None:
            self.generation = answer.payload.generation
        if answer.state == "yours":
            self._computing.add(digest)
            if self._renewing is None or self._renewing.done():
                self._renewing = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        """Keep the claims alive while something is computed here: a silent holder loses them."""
        while True:
            await asyncio.sleep(self._renew_s)
            if not self._computing:
                return
            with contextlib.suppress(Exception):  # counted where it is missed
                await self._call("renew", list(self._computing), self._holder)

    async def _watch_generation(self) -> None:
        """Hear at once when everything is forgotten. An actor that started anew has another generation, too."""
        while True:
            actor = self._actor
            try:
                if actor is not None:
                    async with asyncio.timeout(WATCH_S + self._timeout_s):
                        generation = await actor.next_generation.remote(self.generation, WATCH_S)
                    if generation != self.generation:
                        self._unpublished.clear()
                    self.generation = generation
                    continue
            except Exception as error:
                logger.debug("the shared encodings do not tell their generation: %r", error)
            await asyncio.sleep(self._wait_s)
