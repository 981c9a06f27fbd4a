"""A replica's way to its node's keeper: leases through Ray, bytes without a copy, and a keeper that may die."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import ray

from cluster.keeper.mapped_leases import GivenBack, MappedLeases
from cluster.keeper.records import Greeting, LeasedRefs, Recall, RecallAnswer
from cluster.process.processes import ProcessMark
from cluster.process.ray_calls import get
from weights.memory.host_pool import ByteArray
from weights.reading.report import LoadReport
from weights.records.manifest import ExtentRef

logger = logging.getLogger("atelier.replica")

HEARTBEAT_S: Final = 1.0
RETRY_FOR_S: Final = 60.0  # a keeper that was killed is back within seconds
RETRY_PAUSE_S: Final = 0.1
GET_TIMEOUT_S: Final = 10.0
MAX_LOST: Final = 256
LOOK_S: Final = 5.0  # between two checks, while a call waits, that its keeper is still the one that it asked


class ExtentUser:
    """A user of a replica's extents, who makes modules of them. Its methods are called from other threads.

    With `keeps`, released extents stay mapped under their leases, and are used again without asking, until the keeper
    recalls them.
    """

    keeps = False

    def release_recalled(self, extents: Sequence[str], is_overdue: bool) -> None:
        """Release unused modules made of these extents, whose memory the node needs.

        With `is_overdue`, new requests must not use them.
        """

    def note_damage(self, extents: Sequence[str]) -> None:
        """Stop using modules made of these extents: this replica's copies of them were modified."""

    def find_keeper(self) -> Any:
        """Return the handle of the keeper that replaces a dead one; None if none is known.

        Blocks, and may raise.
        """
        return None


class RayExtents:
    """ExtentProvider of a replica: the node's keeper leases it the extents, Ray maps them without a copy. Thread-safe.

    A keeper that dies is restarted by Ray, empty. It gets back this replica's mapped extents, which is why the replica
    keeps them, and calls under way are made again. So does a living keeper that took this replica for dead: its
    leases have ended, and have a new generation from then on. After a copy was found damaged, the next `fetch` gets a
    fresh one.
    """

    def __init__(self, keeper: Any, holder: str, user: ExtentUser | None = None) -> None:
        self._keeper = keeper
        self._holder = holder
        self._user = user or ExtentUser()
        self._leases = MappedLeases(keeps=self._user.keeps)
        self._meeting = threading.Lock()  # held while a restarted keeper gets the offer
        self._answering = threading.local()
        self._process = ProcessMark.this()
        self._starting = threading.Lock()
        self._heart: threading.Thread | None = None
        self._ear: threading.Thread | None = None
        self._closed = threading.Event()
        self._last_report: LoadReport | None = None
        self._lost: deque[tuple[Any, Sequence[str]]] = deque(maxlen=MAX_LOST)  # calls that were made again

    @property
    def generation(self) -> str:
        """The generation of the leases with the present keeper, as known here."""
        return self._leases.generation

    @property
    def last_report(self) -> LoadReport | None:
        """The report of the loads of the latest `fetch`; None when everything was resident."""
        return self._last_report

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        """Return the bytes by extent id, leased until `release`. Blocks until they are there.

        HAZARD: call it off the event loop.
        """
        if kept := self._leases.use_kept(extents):
            self._last_report = None
            return kept
        deadline_s = time.monotonic() + RETRY_FOR_S
        while True:
            # All of them, mapped or not: a request that waits for some extents must not hold the rest.
            ids = [extent.id for extent in extents]
            acquired: LeasedRefs = self._ask(lambda: self._keeper.acquire.remote(list(extents), self._holder), ids)
            self._leases.note_given(acquired.refs)
            try:
                self._meet(acquired.generation)
                views = get(list(acquired.refs.values()), GET_TIMEOUT_S)
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
                # The keeper died between its answer and here, and the only view of the bytes with it.
                if time.monotonic() > deadline_s:
                    raise
                self._send_release(GivenBack(ids, acquired.generation))
                continue
            found = dict(zip(acquired.refs, views, strict=True))
            if surplus := self._leases.keep(extents, acquired, found):
                self._send_release(surplus)
                self._last_report = acquired.report
                return found

    def release(self, extents: Sequence[ExtentRef]) -> None:
        """Fire and forget: the views stay valid as long as they are referenced, only the claim on memory ends."""
        self._give_back(self._leases.release(extents))

    def note_uses(self, extents: Sequence[ExtentRef]) -> None:
        """Count a use of fetched extents, unseen by the keeper: popular ones are recalled last."""
        self._leases.note_uses(extents)

    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the node can load the extents without a recall. Blocks."""
        found: bool = self._ask(lambda: self._keeper.has_room_for.remote(list(extents)))
        return found

    def is_called_back(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the keeper has recalled one of them."""
        return self._leases.is_called_back(extents)

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Ask the keeper to load the extents if there is room. Fire and forget."""
        self._keeper.prefetch.remote(list(extents))

    def start_beating(self) -> None:
        """Send a heartbeat every second until `close`, so that the keeper knows of this replica."""
        with self._starting:
            if self._heart is None:
                # The thread does not keep the provider alive: an unused provider ends it.
                beating = (weakref.ref(self), self._closed)
                self._heart = threading.Thread(target=_beat_on, args=beating, name="keeper-heartbeat", daemon=True)
                self._heart.start()
            if self._ear is None and self._user.keeps:
                self._ear = threading.Thread(
                    target=_follow_recalls, args=(weakref.ref(self), self._closed), name="keeper-recalls", daemon=True
                )
                self._ear.start()

    def close(self) -> None:
        """Send no more heartbeats. Leases stay until they are released."""
        self._closed.set()

    def beat(self) -> None:
        """Send one heartbeat; learn of a restarted keeper, of its need for room and of damaged copies."""
        try:
            greeting = self._greet()
            self._meet(greeting.generation)
        except ray.exceptions.ActorDiedError:  # for good
            self._keeper = self._user.find_keeper() or self._keeper
            return
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return  # not back yet
        self._give_lost_back()
        if not greeting.wanted_bytes:
            self._leases.forget_calls()
        damaged, given_back = self._leases.note_damage(greeting.invalidated)
        if damaged:
            logger.error("%s was given extents that were written to since: %s", self._holder, ", ".join(damaged))
            self._send_release(given_back)
            self._user.note_damage(damaged)

    def handle_recall(self, recall: Recall) -> RecallAnswer:
        """Give back the recalled extents that are unused. Return the answer."""
        generation = self._leases.call_back(recall.ids)
        self._answering.generation = generation
        self._answering.given_back = given_back = list[str]()  # leases released in this thread go with the answer
        try:
            self._user.release_recalled(recall.ids, recall.is_overdue)
        except Exception:
            logger.exception("modules of recalled extents were not released")
        finally:
            del self._answering.given_back
        surplus = self._leases.surplus_of(recall.ids)
        if surplus.generation == generation:
            given_back += surplus.ids
        else:  # the keeper was restarted meanwhile
            self._send_release(surplus)
        return RecallAnswer(tuple(given_back), generation)

    def wait_for_recall(self, answer: RecallAnswer | None) -> Any:
        """Return the object reference of the next recall; `answer` is to the last one."""
        return self._keeper.next_recall.remote(self._holder, answer)

    def _ask(self, call: Callable[[], Any], leased: Sequence[str] = ()) -> Any:
        """The answer, of a restarted keeper if need be. A call that a dying keeper was at is made again.

        It gives leases on `leased`. HAZARD: a call that was made again may have been for the keeper that is there now.
        """
        self.start_beating()
        deadline_s = time.monotonic() + RETRY_FOR_S
        while True:
            answer = None
            try:
                asked, answer = self.generation, call()
                return _answer_of(answer, asked, lambda: self.generation)
            except ray.exceptions.RayActorError:
                if leased and answer is not None:
                    self._lost.append((answer, leased))
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_PAUSE_S)
                self.beat()  # offer the mapped extents first, so that they are not read again

    def _meet(self, generation: str) -> None:
        """Make sure that the present keeper knows this replica's leases.

        Leases are only recorded for the epoch known here, so the offered ones are of earlier epochs.
        """
        if generation == self.generation:
            return
        with self._meeting:
            # Asked again: `generation` may be of an answer that comes late, from an epoch before the one known here.
            met = self._greet().generation
            if met == self.generation:
                return
            offers = self._leases.begin_offer()
            # Yet another keeper may answer.
            generation = _answer_of(self._keeper.adopt.remote(self._holder, offers), met, lambda: _met_by(self._greet))
            self._send_release(self._leases.end_offer(generation))

    def _greet(self) -> Greeting:
        uses = self._leases.take_uses()
        greeting: Greeting = get(self._keeper.hello.remote(self._holder, self._process, uses), GET_TIMEOUT_S)
        return greeting

    def _give_back(self, leases: GivenBack) -> None:
        given_back = getattr(self._answering, "given_back", None)
        if given_back is not None and leases.generation == self._answering.generation:
            given_back += leases.ids
        else:
            self._send_release(leases)

    def _give_lost_back(self) -> None:
        """Give back the leases of repeated calls that have an answer by now."""
        unanswered = list[tuple[Any, Sequence[str]]]()
        # HAZARD: the heartbeat's thread and fetching ones may be here at once, and each takes what is left.
        with contextlib.suppress(IndexError):
            while True:
                answer, leased = self._lost.popleft()
                with contextlib.suppress(Exception):  # the call has failed: it has no leases
                    try:
                        acquired: LeasedRefs = get(answer, 0)
                    except ray.exceptions.GetTimeoutError:
                        unanswered.append((answer, leased))
                        continue
                    self._send_release(GivenBack(list(leased), acquired.generation))
        self._lost.extend(unanswered)

    def _send_release(self, leases: GivenBack) -> None:
        if leases.ids:
            self._keeper.release.remote(leases.ids, self._holder, leases.generation)


def _beat_on(found: weakref.ref[RayExtents], closed: threading.Event) -> None:
    while not closed.wait(HEARTBEAT_S):
        extents = found()
        if extents is None or not ray.is_initialized():
            return
        try:
            extents.beat()
        except Exception as error:  # the process is ending, or Ray is
            logger.debug("no heartbeat for the keeper: %s", error)
        del extents


def _follow_recalls(found: weakref.ref[RayExtents], closed: threading.Event) -> None:
    """Answer the keeper's recalls, in a thread that no request blocks."""
    answer: RecallAnswer | None = None
    while not closed.is_set():
        extents = found()
        if extents is None or not ray.is_initialized():
            return
        try:
            generation, asked = extents.generation, extents.wait_for_recall(answer)
            del extents
            answer = None
            answer = _answer(found, _answer_of(asked, generation, lambda: _generation_of(found)))
        except ray.exceptions.RayActorError:  # it is being restarted; the next heartbeat finds the one after it
            closed.wait(RETRY_PAUSE_S)
        except Exception as error:  # the process is ending, or Ray is
            logger.debug("the recalls of the keeper could not be fetched: %s", error)
            closed.wait(RETRY_PAUSE_S)


def _answer_of(ref: Any, asked: str, now: Callable[[], str]) -> Any:
    """Return the answer to a call of the keeper with the generation `asked`; `now` is that of the one that runs.

    Raises RayActorError when the keeper dies, or another one is in its place.
    HAZARD: Ray's timers go by the wall clock. Where that was set back they stand still, and Ray does not say of a call
    that it died with its actor: for minutes after the clock is right again, or for as long as it was set back.
    """
    while True:
        try:
            return get(ref, LOOK_S)
        except ray.exceptions.GetTimeoutError:
            known = now()
            if asked and known and known != asked:
                raise ray.exceptions.ActorUnavailableError("another keeper is in its place", None) from None
            asked = asked or known


def _met_by(greet: Callable[[], Greeting]) -> str:
    """Return the generation that the present keeper reports.

    HAZARD: a busy one is waited for, for a minute: leases that it adopts just now would be offered a second time.
    """
    deadline_s = time.monotonic() + RETRY_FOR_S
    while True:
        try:
            return greet().generation
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() > deadline_s:
                raise


def _generation_of(found: weakref.ref[RayExtents]) -> str:
    extents = found()
    return extents.generation if extents else ""


def _answer(found: weakref.ref[RayExtents], recall: Recall) -> RecallAnswer | None:
    extents = found()
    return extents.handle_recall(recall) if extents and recall.ids else None
