"""The extents that a node wants and does not have yet: which is next, and where it comes from. Pure: no clock, no I/O.

Each node fetches what peers have in an order of its own, so that nodes that start together soon have different extents
for each other. An extent that no node has is read from storage by the node that gets the registry's claim; the others
wait for it, and fetch other extents meanwhile.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.peers.known_sources import KnownSources
from cluster.peers.protocol import MAX_TRANSFERS, Located, PeerOffer, Question
from cluster.peers.sources import (
    MAX_OFFERS,
    AllBusy,
    FetchOutcome,
    FromPeers,
    FromStorage,
    NobodyLeft,
    ask_again_s,
    patience_s,
)

MAX_FETCHES: Final = MAX_TRANSFERS  # at once: a node that fetches no more than it serves finds a slot
WINDOW: Final = 32  # extents in one question
GIVE_UP_S: Final = 120.0  # without a single extent, where only others can read


@dataclass(frozen=True, slots=True)
class Fetch:
    """A step: fetch the extent from peers, as `plan` says."""

    id: str
    plan: FromPeers


@dataclass(frozen=True, slots=True)
class Read:
    """A step: read the extent from storage."""

    id: str


@dataclass(frozen=True, slots=True)
class AskRegistry:
    """A step: ask the registry."""

    question: Question


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A step: end the extent with an error. This node cannot read it, and for too long no other node has given any."""

    id: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A step: wait until `until_s` or the next change of the queue; `inf` while another thread is asking."""

    until_s: float


class FetchQueue:
    """The queue of a node's missing extents. Not thread-safe.

    Each extent that `next_step` gives out must be ended by `end_fetch`, `end_refused_fetch` or `end_read`. With
    `is_alone` there are no peers, and extents come in the order in which they were added. `can_read` is False while
    this node has no way to storage.
    """

    def __init__(self, chance: random.Random, max_claims: int, *, is_alone: bool = False) -> None:
        self._chance = chance
        self._max_claims = max_claims
        self._is_alone = is_alone
        self.can_read = True
        self.sources = KnownSources(chance)
        self._sizes: dict[str, int] = {}  # in bytes, by id
        # Each of these that is not on its way is in one of the following.
        self._unknown: dict[str, None] = {}
        self._offered: dict[str, Sequence[PeerOffer]] = {}
        self._mine: dict[str, None] = {}  # to read from storage
        self._waiting: dict[str, None] = {}
        self._lost: dict[str, None] = {}  # every peer that is said to have it has failed
        self._fetching: set[str] = set()
        self._reading: set[str] = set()
        self._asked_twice: set[str] = set()  # because the first that were offered had all failed
        self._refused_s: dict[str, float] = {}  # by id: since when peers that have it do not give it
        self._num_at_start: dict[str, int] = {}  # of those: how many there were when it began
        self._is_asking = False
        self._has_gained = True
        self._num_in_vain = 0
        self._ask_at_s = -math.inf
        self._gained_s = -math.inf

    def add_extents(self, sizes: Mapping[str, int], now_s: float) -> None:
        """Add missing extents: sizes in bytes by id."""
        if not self._sizes:
            self._gained_s = now_s
        self._sizes.update(sizes)
        ids = tuple(sizes)
        start = self._chance.randrange(len(ids)) if ids and not self._is_alone else 0
        self._unknown.update(dict.fromkeys(ids[start:] + ids[:start]))

    @property
    def num_waiting(self) -> int:
        """The number of extents that no thread is fetching or reading."""
        return len(self._sizes) - len(self._fetching) - len(self._reading)

    def withdraw_extent(self) -> str | None:
        """Remove an extent that no thread is fetching or reading. Return its id, or None without one."""
        for state in (self._unknown, self._waiting, self._lost, self._offered, self._mine):
            if state:
                id_ = next(iter(state))
                state.pop(id_)
                self._forget(id_)
                return id_
        return None

    def next_step(self, now_s: float) -> Fetch | Read | AskRegistry | GiveUp | Wait:
        """Return the next step of an idle thread."""
        if self._mine:
            return self._read(next(iter(self._mine)))
        if not self.can_read and now_s - self._gained_s > GIVE_UP_S and (self._waiting or self._unknown):
            id_ = next(iter(self._waiting or self._unknown))
            self._move([id_], {})
            self._started(id_, self._reading)
            return GiveUp(id_)
        step = self._from_offers(now_s)
        if not isinstance(step, Wait) or self._is_asking:
            return step
        return self._ask(now_s) or (Wait(min(step.until_s, self._ask_at_s)) if self._waiting else step)

    def apply_answer(self, question: Question, answer: Located | None, now_s: float) -> list[str]:
        """Take in the answer to a question. Return the claims in it that this node has no use for any more.

        None: the registry cannot be asked, so the extents are read from storage. An answer may come late: what was
        given up or withdrawn meanwhile stays so.
        """
        self._is_asking = False
        self._num_in_vain = 0 if self._has_gained else self._num_in_vain + 1
        self._has_gained = False
        self._ask_at_s = now_s + ask_again_s(self._num_in_vain, self._chance.random())
        asked = [
            id_ for id_ in question.ids if any(id_ in state for state in (self._unknown, self._waiting, self._lost))
        ]
        if answer is None:
            self._move(asked, self._mine if self.can_read else self._waiting)
            return []
        if not self.can_read:
            self._move(asked, self._waiting)  # those that nobody has are asked for again after a pause
        self._move([id_ for id_ in asked if id_ in answer.claimed], self._mine)
        for id_ in asked:
            if id_ in answer.offers:
                self._move([id_], self._offered, answer.offers[id_])
        read_elsewhere = [id_ for id_ in asked if id_ in answer.reading]
        self._move(read_elsewhere, self._mine if self.sources.is_storage_best(now_s) else self._waiting)
        return [id_ for id_ in answer.claimed if id_ not in self._mine]

    def end_fetch(self, id_: str, fetched: FetchOutcome, now_s: float) -> None:
        """End a fetch that brought the extent."""
        self._learn(id_, fetched, now_s)
        self._gain(id_, now_s)

    def end_refused_fetch(self, id_: str, fetched: FetchOutcome, now_s: float) -> None:
        """End a fetch in which no peer gave the extent: it is still wanted."""
        self._learn(id_, fetched, now_s)
        self._refused_s.setdefault(id_, now_s)
        (self._waiting if fetched.busy else self._unknown)[id_] = None

    def end_read(self, id_: str, seconds: float | None, now_s: float) -> None:
        """End a read from storage. `seconds` is None when the extent cannot be had at all."""
        num_sharing = self._ended(id_)
        if seconds is None:
            self._forget(id_)
            return
        self.sources.note_read(self._sizes[id_], seconds, num_sharing)
        self._gain(id_, now_s)

    def _from_offers(self, now_s: float) -> Fetch | Read | Wait:
        """Return the next step from the known offers, the rarest extent first: more copies of it serve all nodes."""
        until_s = math.inf
        if len(self._fetching) >= MAX_FETCHES:
            return Wait(until_s)
        for id_ in sorted(self._offered, key=lambda id_: len(self._offered[id_])):
            offers, nbytes = self._offered[id_], self._sizes[id_]
            num_sharing = max(len(self._fetching) + 1, MAX_TRANSFERS)
            match choice := self.sources.choose(id_, nbytes, offers, num_sharing, now_s):
                case FromPeers():
                    del self._offered[id_]
                    self._started(id_, self._fetching)
                    return Fetch(id_, choice)
                case FromStorage():
                    return self._read(id_)
                case AllBusy():
                    until_s = min(until_s, choice.until_s)
                case NobodyLeft() if len(offers) < MAX_OFFERS or id_ in self._asked_twice:
                    self._move([id_], self._lost)
                case NobodyLeft():  # the registry offered only some of many: others may be alive
                    self._asked_twice.add(id_)
                    self._move([id_], self._waiting)
        return Wait(until_s)

    def _ask(self, now_s: float) -> AskRegistry | None:
        is_due = now_s >= self._ask_at_s
        if not self.can_read:  # it may still come from a node that can
            self._move(tuple(self._lost), self._waiting)
        insist = next(iter(self._lost), None)
        if insist is None and is_due and self.can_read:
            insist = self._starved(now_s)
        ids = itertools.islice(itertools.chain(self._unknown, self._waiting if is_due else ()), WINDOW)
        wanted = tuple(dict.fromkeys([*([insist] if insist else ()), *ids]))
        if not wanted:
            return None
        self._is_asking = True
        return AskRegistry(Question(wanted, self._max_claims if self.can_read else 0, insist))

    def _starved(self, now_s: float) -> str | None:
        """Return an extent that peers have and do not give, when nothing else arrived for too long either."""
        for id_, refused_s in self._refused_s.items():
            if id_ in self._waiting:
                is_over = now_s - max(refused_s, self._gained_s) > patience_s(self._sizes[id_], self.sources.storage)
                return id_ if is_over else None
        return None

    def _read(self, id_: str) -> Read:
        self._mine.pop(id_, None)
        self._offered.pop(id_, None)
        self._started(id_, self._reading)
        return Read(id_)

    def _learn(self, id_: str, fetched: FetchOutcome, now_s: float) -> None:
        self.sources.note_fetch(id_, fetched, self._ended(id_), now_s)

    def _started(self, id_: str, kind: set[str]) -> None:
        kind.add(id_)
        self._num_at_start[id_] = len(self._fetching) + len(self._reading)

    def _ended(self, id_: str) -> float:
        """Return the number of transfers on the node's link, this one included: the mean of its begin and end."""
        num_at_end = len(self._fetching) + len(self._reading)
        self._fetching.discard(id_)
        self._reading.discard(id_)
        return (self._num_at_start.pop(id_) + num_at_end) / 2

    def _gain(self, id_: str, now_s: float) -> None:
        self._forget(id_)
        self._has_gained = True
        self._gained_s = now_s

    def _forget(self, id_: str) -> None:
        del self._sizes[id_]
        self._refused_s.pop(id_, None)
        self.sources.forget(id_)
        self._asked_twice.discard(id_)

    def _move(self, ids: Iterable[str], to: dict[str, Any], value: Any = None) -> None:
        for id_ in ids:
            for state in (self._unknown, self._offered, self._mine, self._waiting, self._lost):
                state.pop(id_, None)
            to[id_] = value
