"""A replica's way to its node's keeper: leases through Ray, bytes without a copy, and a keeper that may die."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray

from cluster.keeper.records import Greeting, HeldOffer, LeasedRefs, Recall, RecallAnswer, copy_name
from cluster.process.processes import ProcessMark
from cluster.process.ray_calls import get
from weights.memory.host_pool import ByteArray
from weights.reading.report import LoadReport
from weights.records.manifest import ExtentRef
from weights.residency.recent import Recent

logger = logging.getLogger("atelier.replica")

HEARTBEAT_S: Final = 1.0
RETRY_FOR_S: Final = 60.0  # a keeper that was killed is back within seconds
RETRY_PAUSE_S: Final = 0.1
GET_TIMEOUT_S: Final = 10.0
LOOK_S: Final = 5.0  # so often who waits for an answer looks whether its keeper is the one that was asked
MAX_REMEMBERED: Final = 65_536  # copies that this replica was given, and perhaps made something of


# Hears from another thread that the node needs these extents, and whether new requests must do without them. When it
# returns, what was made of them and is not in use has been released.
OnRecall = Callable[[Sequence[str], bool], None]


@dataclass
class _Mapped:
    """An extent that is mapped here. Reference and view keep it alive when its owner, the keeper, dies.

    `num_leases` is as the keeper counts them, `num_uses` what was fetched and not released.
    """

    extent: ExtentRef
    ref: Any
    view: ByteArray
    num_leases: int
    num_uses: int
    is_damaged: bool = False


class RayExtents:
    """ExtentProvider of a replica: the node's keeper leases it the extents, Ray maps them without a copy. Thread-safe.

    A keeper that dies is restarted by Ray, empty. It gets back what this replica has mapped, which is why the replica
    keeps that, and calls that were under way are made again. So does one that lives and took this replica for dead: its
    leases have ended, and have another generation from then on. `on_damage` gets, from another thread, the ids of
    extents of which this replica was given a copy that was written to since: what was made of it computes with wrong
    weights. The next `fetch` gets a fresh copy. `connect` gives the handle of the keeper that took the place of one
    that is gone for good; it blocks, and may raise.

    With `on_recall`, what is released stays mapped under its lease, and is there again without asking, until the keeper
    calls it back.
    """

    def __init__(
        self,
        keeper: Any,
        holder: str,
        on_damage: Callable[[Sequence[str]], None] | None = None,
        connect: Callable[[], Any] | None = None,
        on_recall: OnRecall | None = None,
    ) -> None:
        self._keeper = keeper
        self._connect = connect
        self._holder = holder
        self._on_recall = on_recall
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._meeting = threading.Lock()  # held while a restarted keeper is told what is here
        self._mapped: dict[str, _Mapped] = {}
        self._called: set[str] = set()  # wanted back as soon as they are not used
        self._uses: Counter[str] = Counter()  # since the last heartbeat, of what was kept
        self._answering = threading.local()
        self._given: Recent[str, str] = Recent(MAX_REMEMBERED)  # extent ids by copy
        self.generation = ""  # of the leases with the keeper that runs, as far as it is known here
        self._process = ProcessMark.this()
        self._heart: threading.Thread | None = None
        self._ear: threading.Thread | None = None
        self._closed = threading.Event()
        self._last_report: LoadReport | None = None

    @property
    def last_report(self) -> LoadReport | None:
        """The report of what the latest `fetch` had loaded; None when everything was resident."""
        return self._last_report

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        """Return the bytes by extent id, leased until `release`. Blocks until they are there.

        HAZARD: call it off the event loop.
        """
        if kept := self._use_kept(extents):
            self._last_report = None
            return kept
        deadline_s = time.monotonic() + RETRY_FOR_S
        while True:
            # All of them, mapped or not: whoever waits for some of what it needs must not hold the rest.
            acquired: LeasedRefs = self._ask(lambda: self._keeper.acquire.remote(list(extents), self._holder))
            self._note_given(acquired.refs)
            try:
                self._meet(acquired.generation)
                views = get(list(acquired.refs.values()), GET_TIMEOUT_S)
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
                # The keeper died between its answer and here, and the only view of the bytes with it.
                if time.monotonic() > deadline_s:
                    raise
                self._send_release([extent.id for extent in extents], acquired.generation)
                continue
            found = dict(zip(acquired.refs, views, strict=True))
            if self._keep(extents, acquired, found):
                self._last_report = acquired.report
                return found

    def release(self, extents: Sequence[ExtentRef]) -> None:
        """Fire and forget: the views stay valid as long as they are referenced, only the claim on memory ends."""
        given_back: list[str] = []
        with self._lock:
            for extent in extents:
                mapped = self._mapped.get(extent.id)
                if mapped and mapped.num_uses:
                    mapped.num_uses -= 1
                    given_back += self._surplus(mapped)
            generation = self.generation
        self._give_back(given_back, generation)

    def note_uses(self, extents: Sequence[ExtentRef]) -> None:
        """Count a use of what is fetched already, unseen by the keeper: what is popular is called back last."""
        with self._lock:
            self._uses.update(extent.id for extent in extents)

    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the node can bring them in without taking them from somebody. Blocks."""
        found: bool = self._ask(lambda: self._keeper.has_room_for.remote(list(extents)))
        return found

    def is_called_back(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the keeper waits for one of them."""
        return bool(self._called) and not self._called.isdisjoint(extent.id for extent in extents)

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Ask for them to be brought in where there is room. Fire and forget."""
        self._keeper.prefetch.remote(list(extents))

    def start_beating(self) -> None:
        """Send a heartbeat every second, by which the keeper knows that its node has a replica; until `close`."""
        with self._lock:
            if self._heart is None:
                # Not kept alive by its own thread: a provider that nobody uses any more ends it.
                beating = (weakref.ref(self), self._closed)
                self._heart = threading.Thread(target=_beat_on, args=beating, name="keeper-heartbeat", daemon=True)
                self._heart.start()
            if self._ear is None and self._on_recall:
                self._ear = threading.Thread(
                    target=_follow_recalls, args=(weakref.ref(self), self._closed), name="keeper-recalls", daemon=True
                )
                self._ear.start()

    def close(self) -> None:
        """Send no more heartbeats. Leases stay until they are released."""
        self._closed.set()

    def beat(self) -> None:
        """Send one heartbeat; learn of a keeper that was restarted, of what it wants and what it found damaged."""
        try:
            greeting = self._greet()
            self._meet(greeting.generation)
        except ray.exceptions.ActorDiedError:  # for good
            if self._connect:
                self._keeper = self._connect()
            return
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return  # not back yet
        if not greeting.wanted_bytes:
            self._called.clear()  # what was called back is not needed any more
        if damaged := self._take_given(greeting.invalidated):
            logger.error("%s was given extents that were written to since: %s", self._holder, ", ".join(damaged))
            self._let_damaged_go(damaged)
            if self._on_damage:
                self._on_damage(damaged)

    def handle_recall(self, recall: Recall) -> RecallAnswer:
        """Give back what the keeper wants and nobody uses. Returns the answer."""
        with self._lock:
            self._called.update(id_ for id_ in recall.ids if id_ in self._mapped)
            generation = self.generation
        self._answering.generation = generation
        self._answering.given_back = given_back = list[str]()  # what this thread gives back goes with the answer
        try:
            if self._on_recall:
                self._on_recall(recall.ids, recall.is_overdue)
        except Exception:
            logger.exception("what was made of extents that were called back stays")
        finally:
            del self._answering.given_back
        with self._lock:
            surplus = [id_ for mapped in map(self._mapped.get, recall.ids) if mapped for id_ in self._surplus(mapped)]
            now = self.generation
        if now == generation:
            given_back += surplus
        else:  # the keeper was restarted meanwhile
            self._send_release(surplus, now)
        return RecallAnswer(tuple(given_back), generation)

    def wait_for_recall(self, answer: RecallAnswer | None) -> Any:
        """Return the object reference of the next recall; `answer` is to the one before."""
        return self._keeper.next_recall.remote(self._holder, answer)

    def _use_kept(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray] | None:
        """Return the views, used once more; None when not all of them are here, sound and not called back."""
        if self._on_recall is None:
            return None
        with self._lock:
            mapped = [self._mapped.get(extent.id) for extent in extents]
            if not all(found and not found.is_damaged and found.extent.id not in self._called for found in mapped):
                return None
            for found in filter(None, mapped):
                found.num_uses += 1
                self._uses[found.extent.id] += 1
            return {found.extent.id: found.view for found in mapped if found}

    def _surplus(self, mapped: _Mapped) -> list[str]:
        """The ids, one per lease, of leases that are not needed. With the lock held."""
        id_ = mapped.extent.id
        is_kept = self._on_recall is not None and not mapped.is_damaged and id_ not in self._called
        needed = max(mapped.num_uses, 1 if is_kept else 0)
        num_surplus = max(0, mapped.num_leases - needed)
        mapped.num_leases -= num_surplus
        if not mapped.num_leases:
            del self._mapped[id_]
            self._called.discard(id_)
        return [id_] * num_surplus

    def _let_damaged_go(self, ids: Sequence[str]) -> None:
        given_back: list[str] = []
        with self._lock:
            for id_ in ids:
                if mapped := self._mapped.get(id_):
                    mapped.is_damaged = True
                    given_back += self._surplus(mapped)
            generation = self.generation
        self._send_release(given_back, generation)

    def _note_given(self, refs: Mapping[str, Any]) -> None:
        with self._lock:
            for id_, ref in refs.items():
                self._given.note(copy_name(ref), id_)

    def _take_given(self, copies: Sequence[str]) -> list[str]:
        """The extents of those copies that were given to this replica. Each copy is told once."""
        with self._lock:
            return [self._given.pop(copy) for copy in copies if copy in self._given]

    def _keep(self, extents: Sequence[ExtentRef], acquired: LeasedRefs, found: Mapping[str, ByteArray]) -> bool:
        """False when the keeper that gave the leases was replaced since: they are gone with it."""
        with self._lock:
            if self.generation != acquired.generation:
                return False
            surplus: list[str] = []
            for extent in extents:
                id_, before = extent.id, self._mapped.get(extent.id)
                # The newest copy: an older one may be a damaged one that the keeper has given up.
                self._mapped[id_] = mapped = _Mapped(extent, acquired.refs[id_], found[id_], 1, 1)
                if before:
                    mapped.num_leases += before.num_leases
                    mapped.num_uses += before.num_uses
                self._called.discard(id_)
                surplus += self._surplus(mapped)
        self._send_release(surplus, acquired.generation)
        return True

    def _ask(self, call: Callable[[], Any]) -> Any:
        """The answer, of a restarted keeper if need be. A call that a dying keeper was at is made again."""
        self.start_beating()
        deadline_s = time.monotonic() + RETRY_FOR_S
        while True:
            try:
                asked = self.generation
                return _answer_of(call(), asked, lambda: self.generation)
            except ray.exceptions.RayActorError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_PAUSE_S)
                self.beat()  # what is here first, so that it is not read again

    def _meet(self, generation: str) -> None:
        """Make sure that the keeper that runs now knows what this replica has leased.

        Leases are only ever recorded for the epoch that is known here, so what is offered is of epochs before.
        """
        if generation == self.generation:
            return
        with self._meeting:
            # Asked again: `generation` may be of an answer that comes late, from an epoch before the one known here.
            met = self._greet().generation
            if met == self.generation:
                return
            with self._lock:
                self.generation = ""  # an answer of the epoch before that comes now is not recorded any more
                offered = {id_: mapped.num_leases for id_, mapped in self._mapped.items()}
                offers = [HeldOffer(mapped.extent, mapped.ref, mapped.num_leases) for mapped in self._mapped.values()]
            # It may be yet another one that answers.
            generation = _answer_of(self._keeper.adopt.remote(self._holder, offers), met, lambda: _met_by(self._greet))
            with self._lock:
                self.generation = generation
                # Given back while the offer was on its way: the keeper counts those leases still.
                surplus = [
                    id_
                    for id_, count in offered.items()
                    for _ in range(count - (self._mapped[id_].num_leases if id_ in self._mapped else 0))
                ]
            self._send_release(surplus, generation)

    def _greet(self) -> Greeting:
        with self._lock:
            uses, self._uses = self._uses, Counter()
        greeting: Greeting = get(self._keeper.hello.remote(self._holder, self._process, dict(uses)), GET_TIMEOUT_S)
        return greeting

    def _give_back(self, ids: list[str], generation: str) -> None:
        given_back = getattr(self._answering, "given_back", None)
        if given_back is not None and generation == self._answering.generation:
            given_back += ids
        else:
            self._send_release(ids, generation)

    def _send_release(self, ids: Sequence[str], generation: str) -> None:
        if ids:
            self._keeper.release.remote(list(ids), self._holder, generation)


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
    """Answer what the keeper wants back, in a thread that no request stands before."""
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
    """Return the generation of the keeper that runs, as it says itself.

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
