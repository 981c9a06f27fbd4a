"""A replica's way to its node's keeper: leases through Ray, bytes without a copy, and a keeper that may die."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ray

from cluster.keeper.holder_watch import HolderProcess
from cluster.keeper.records import Acquired, Greeting, HeldOffer, copy_name
from cluster.ray_calls import get
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray
from weights.reading.report import LoadReport

logger = logging.getLogger("atelier.replica")

HEARTBEAT_S: Final = 1.0
RETRY_FOR_S: Final = 60.0  # a keeper that was killed is back within seconds
RETRY_PAUSE_S: Final = 0.1
GET_TIMEOUT_S: Final = 10.0
MAX_REMEMBERED: Final = 65_536  # copies that this replica was given, and perhaps made something of


@dataclass
class _Leased:
    """Reference and view keep the object alive when its owner, the keeper, dies."""

    extent: ExtentRef
    ref: Any
    view: ByteArray
    count: int = 0


class RayExtents:
    """ExtentProvider of a replica: the node's keeper leases it the extents, Ray maps them without a copy.

    A keeper that dies is restarted by Ray, empty. It gets back what this replica has leased, which is why the
    replica keeps that, and calls that were under way are made again. So does one that lives and took this replica for
    dead: its leases have ended, and have another generation from then on. `on_pressure` hears, from another thread, how
    many leased bytes somebody waits for: leases that are only kept for later should be released then. `on_damage`
    hears, from there as well, the ids of extents of which this replica was given a copy that was written to since: what
    was made of it computes with wrong weights. The next `fetch` gets a fresh copy. `connect` gives the handle of the
    keeper that took the place of one that is gone for good; it blocks, and may raise. Thread-safe.
    """

    def __init__(
        self,
        keeper: Any,
        holder: str,
        on_pressure: Callable[[int], None] | None = None,
        on_damage: Callable[[Sequence[str]], None] | None = None,
        connect: Callable[[], Any] | None = None,
    ) -> None:
        self._keeper = keeper
        self._connect = connect
        self._holder = holder
        self._on_pressure = on_pressure
        self._on_damage = on_damage
        self._lock = threading.Lock()
        self._meeting = threading.Lock()  # held while a restarted keeper is told what is here
        self._leased: dict[str, _Leased] = {}
        self._given: OrderedDict[str, str] = OrderedDict()  # extent ids by copy
        self._generation = ""
        self._process = HolderProcess.this()
        self._heart: threading.Thread | None = None
        self._closed = threading.Event()
        self._last_report: LoadReport | None = None

    @property
    def last_report(self) -> LoadReport | None:
        """What the latest `fetch` had loaded; None when everything was resident."""
        return self._last_report

    def fetch(self, extents: Sequence[ExtentRef]) -> Mapping[str, ByteArray]:
        """Blocks until the bytes are there; call it off the event loop. The lease lasts until `release`."""
        deadline_s = time.monotonic() + RETRY_FOR_S
        while True:
            acquired: Acquired = self._ask(lambda: self._keeper.acquire.remote(list(extents), self._holder))
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
        given_back = []
        with self._lock:
            for extent in extents:
                leased = self._leased.get(extent.id)
                if leased is None:
                    continue
                given_back.append(extent.id)
                leased.count -= 1
                if leased.count == 0:
                    del self._leased[extent.id]
            generation = self._generation
        self._send_release(given_back, generation)

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Ask for them to be brought in where there is room. Fire and forget."""
        self._keeper.prefetch.remote(list(extents))

    def start_beating(self) -> None:
        """Give a sign of life every second, by which the keeper knows that its node has a replica; until `close`."""
        with self._lock:
            if self._heart is None:
                # Not kept alive by its own thread: a provider that nobody uses any more ends it.
                beating = (weakref.ref(self), self._closed)
                self._heart = threading.Thread(target=_beat_on, args=beating, name="keeper-heartbeat", daemon=True)
                self._heart.start()

    def close(self) -> None:
        """No more signs of life. Leases stay until they are released."""
        self._closed.set()

    def beat(self) -> None:
        """One sign of life: notices a keeper that was restarted, what it wants, and what it has found damaged."""
        try:
            greeting = self._greet()
            self._meet(greeting.generation)
        except ray.exceptions.ActorDiedError:  # for good
            if self._connect:
                self._keeper = self._connect()
            return
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return  # not back yet
        if greeting.wanted_bytes and self._on_pressure:
            self._on_pressure(greeting.wanted_bytes)
        damaged = self._take_given(greeting.condemned)
        if damaged and self._on_damage:
            logger.error("%s was given extents that were written to since: %s", self._holder, ", ".join(damaged))
            self._on_damage(damaged)

    def _note_given(self, refs: Mapping[str, Any]) -> None:
        with self._lock:
            for id_, ref in refs.items():
                self._given[copy_name(ref)] = id_
                self._given.move_to_end(copy_name(ref))
            while len(self._given) > MAX_REMEMBERED:
                self._given.popitem(last=False)

    def _take_given(self, copies: Sequence[str]) -> list[str]:
        """The extents of those copies that were given to this replica. Each copy is told once."""
        with self._lock:
            return [self._given.pop(copy) for copy in copies if copy in self._given]

    def _keep(self, extents: Sequence[ExtentRef], acquired: Acquired, found: Mapping[str, ByteArray]) -> bool:
        """False when the keeper that gave the leases was replaced since: they are gone with it."""
        with self._lock:
            if self._generation != acquired.generation:
                return False
            for extent in extents:
                id_ = extent.id
                count = self._leased[id_].count if id_ in self._leased else 0
                # The newest copy: an older one may be a damaged one that the keeper has given up.
                self._leased[id_] = _Leased(extent, acquired.refs[id_], found[id_], count + 1)
            return True

    def _ask(self, call: Callable[[], Any]) -> Any:
        """The answer, of a restarted keeper if need be. A call that a dying keeper was at is made again."""
        self.start_beating()
        deadline_s = time.monotonic() + RETRY_FOR_S
        while True:
            try:
                return get(call())
            except ray.exceptions.RayActorError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(RETRY_PAUSE_S)
                self.beat()  # what is here first, so that it is not read again

    def _meet(self, generation: str) -> None:
        """Make sure that the keeper's present life knows what this replica has leased.

        Leases are only ever recorded for the life that is known here, so what is offered is of lives before.
        """
        if generation == self._generation:
            return
        with self._meeting:
            # Asked again: `generation` may be of an answer that comes late, from a life before the one known here.
            if self._greet(timeout_s=None).generation == self._generation:
                return
            with self._lock:
                self._generation = ""  # an answer of the life before that comes now is not recorded any more
                offered = {id_: leased.count for id_, leased in self._leased.items()}
                offers = [HeldOffer(leased.extent, leased.ref, leased.count) for leased in self._leased.values()]
            # It may be yet another life that answers.
            generation = get(self._keeper.adopt.remote(self._holder, offers))
            with self._lock:
                self._generation = generation
                # Given back while the offer was on its way: the keeper counts those leases still.
                surplus = [
                    id_
                    for id_, count in offered.items()
                    for _ in range(count - (self._leased[id_].count if id_ in self._leased else 0))
                ]
            self._send_release(surplus, generation)

    def _greet(self, timeout_s: float | None = GET_TIMEOUT_S) -> Greeting:
        greeting: Greeting = get(self._keeper.hello.remote(self._holder, self._process), timeout_s)
        return greeting

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
            logger.debug("no sign of life for the keeper: %s", error)
        del extents
