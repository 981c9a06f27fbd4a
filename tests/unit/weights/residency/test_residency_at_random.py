"""Tables, leases and the queue in any order of events, against a naive model that counts everything anew each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weights.residency.admission import PATIENCE_S, Admission, Ticket
from weights.residency.contents import Entry, MemoryTier
from weights.residency.entry_table import EntryTable
from weights.residency.policy import NEVER_USED, Popularity, class_rate, rate_class
from weights.residency.room_plan import plan_prefetch, plan_room
from weights.residency.sizes import RemotePart, Size

PLAIN: dict[str, Size] = {"a": 0, "b": 20, "c": 30, "d": 40, "e": 50, "f": 60}
# Modules that share tensors: a part that several have counts once.
DIVIDED: dict[str, Size] = {
    "a": {"a0": 10},
    "b": {"a0": 10, "b1": 10},
    "c": {"b1": 10, "c0": 20},
    "d": {"d0": 40},
    "e": {"d0": 40, "e1": 10},
    "f": {"f0": 60},
}
# Language models whose layers are on two devices.
SPREAD: dict[str, Size] = {
    "a": {"a0": 10, RemotePart("there", "a1"): 10},
    "b": {"a0": 10, "b1": 10, RemotePart("there", "b2"): 30},
    "c": {"b1": 10, "c0": 20, RemotePart("there", "b2"): 30},
    "d": {"d0": 40},
    "e": {"d0": 40, "e1": 10, RemotePart("there", "e2"): 50},
    "f": {"f0": 60},
}
HOLDERS = "uvwxyz"

keys = st.sampled_from("abcdef")
some_keys = st.lists(keys, min_size=1, max_size=4, unique=True)
few_keys = st.lists(keys, min_size=1, max_size=2, unique=True)
holders = st.sampled_from(HOLDERS)


@dataclass(eq=False)
class Known:
    """An entry as the model knows it."""

    entry: Entry[str]
    key: str
    size: Size
    is_here: bool = False
    is_current: bool = True
    held: Counter[str] = field(default_factory=Counter)
    callable: Counter[str] = field(default_factory=Counter)
    called: set[str] = field(default_factory=set)
    popularity: Popularity = NEVER_USED
    reload_s: float | None = None
    is_announced: bool = False

    @property
    def nbytes(self) -> int:
        return distinct([self.size])

    @property
    def is_leased(self) -> bool:
        return bool(+self.held or +self.callable)


def distinct(sizes: Sequence[Size], place: str | None = None) -> int:
    """Return the bytes in the table's own memory, or in that of `place`."""
    parts: dict[str, int] = {}
    for size in sizes:
        parts |= size if not isinstance(size, int) else {}
    here = sum(nbytes for part, nbytes in parts.items() if getattr(part, "place", None) == place)
    return here + (sum(size for size in sizes if isinstance(size, int)) if place is None else 0)


@dataclass(frozen=True)
class _Told(MemoryTier):
    """Tells the model what the table tells its tier."""

    gone: Callable[[Sequence[Entry[str]]], None]
    recalled: Callable[[str, Sequence[str]], None]

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        self.gone(entries)

    def recall(self, holder: str, keys: Sequence[str]) -> None:
        self.recalled(holder, keys)


class Tier(RuleBasedStateMachine):
    sizes = PLAIN
    elsewhere: Mapping[str, int] = {}

    def _over(self, sizes: Sequence[Size]) -> int:
        """Return the bytes beyond the budgets; 0 or less: all fits."""
        own = distinct(sizes) - self.table.budget_bytes
        beyond = [distinct(sizes, place) - budget for place, budget in self.elsewhere.items()]
        return own if max(beyond, default=0) <= 0 else max(0, own) + sum(max(0, one) for one in beyond)

    @initialize(
        budget_bytes=st.integers(60, 110),
        asked=st.lists(st.tuples(few_keys, holders), min_size=4, max_size=8),
        pause_s=st.sampled_from((0.0, PATIENCE_S)),
    )
    def begin(self, budget_bytes: int, asked: list[tuple[list[str], str]], pause_s: float) -> None:
        """Begin with requests, so that most of what follows happens while somebody waits."""
        self.now_s = 1000.0
        self.known: list[Known] = []
        self.waiting: list[Ticket[str]] = []
        self.granted: list[Ticket[str]] = []
        self.pinned: set[str] = set()
        self.passed: dict[Ticket[str], set[str]] = {}  # after its patience had ended
        self.uses: dict[str, Popularity] = {}
        self.table: EntryTable[str] = EntryTable(
            budget_bytes,
            lambda: self.now_s,
            _Told(self._gone, self._recalled),
            elsewhere=self.elsewhere,
        )
        self.admission = Admission(self.table, "the test")
        for wanted, holder in asked:
            self.ask(wanted, holder)
        self.now_s += pause_s

    # what the core tells

    def _gone(self, entries: Sequence[Entry[str]]) -> None:
        for entry in entries:
            known = self._of(entry)
            assert known.is_here
            assert not known.is_leased, "a leased entry went"
            assert not (known.is_current and known.key in self.pinned), "a pinned entry went"
            assert entry.thing is not None
            self.known.remove(known)
            if known.is_current:
                self.uses[known.key] = known.popularity

    def _recalled(self, holder: str, asked: Sequence[str]) -> None:
        for key in asked:
            known = self._current(key)
            assert known
            assert known.callable[holder]
            assert holder not in known.called
            assert self._may_go(known)
            known.called.add(holder)

    def _settled(self, ticket: Ticket[str]) -> None:
        if ticket.entries is None:
            together = self.sizes_of({*ticket.wanted, *self._pinned_here()})
            assert self._over(together) > 0, "refused although it could fit one day"
        else:
            older = [other for other in self.waiting if other is not ticket and other.is_waiting]
            older = [other for other in older if other.since_s <= ticket.since_s]
            if older and older[0].since_s < ticket.since_s:
                self._check_overtaking(ticket, older[0])
            for entry in ticket.fresh:
                known = Known(entry, entry.key, self.sizes[entry.key])
                known.popularity = self.uses.get(entry.key, NEVER_USED)
                self.known.append(known)
            for entry in ticket.entries:
                self._lease(self._of(entry), ticket.holder, 1)
            self.granted.append(ticket)
        if ticket in self.waiting:
            self.waiting.remove(ticket)

    def _check_overtaking(self, ticket: Ticket[str], first: Ticket[str]) -> None:
        assert not ticket.fresh, "what needs room waits for its turn"
        if self._is_late(first) or self._is_any_called(ticket):
            has_firm = any(known.held[ticket.holder] and ticket.holder not in known.called for known in self.known)
            passed = self.passed.setdefault(first, set())
            together = self.sizes_of({*ticket.wanted, *first.wanted, *passed, *self._pinned_here()})
            assert has_firm or self._over(together) <= 0, "the first could wait for ever"
            if not has_firm:
                passed |= ticket.wanted.keys()

    # what happens

    @rule(wanted=some_keys, holder=holders)
    def ask(self, wanted: list[str], holder: str) -> None:
        self.now_s += 1e-3  # so that no two ask at the same time
        ticket = self.admission.ask("it", {key: self.sizes[key] for key in wanted}, holder, self._settled)
        if ticket.is_waiting:
            self.waiting.append(ticket)

    @rule(key=keys, holder=holders)
    def ask_for_one(self, key: str, holder: str) -> None:
        self.ask([key], holder)

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        if self.waiting:
            ticket = self.waiting.pop(number % len(self.waiting))
            self.admission.end_ticket(ticket)
            assert " are missing (" in (ticket.refusal or "")

    @rule(number=st.integers(0, 9))
    def finish(self, number: int) -> None:
        if self.granted:
            ticket = self.granted.pop(number % len(self.granted))
            for entry in ticket.entries or ():
                if (known := self._find(entry)) is not None:
                    self._unlease(known, ticket.holder)
            self.admission.end_ticket(ticket)
            self.admission.end_ticket(ticket)

    @rule(number=st.integers(0, 9), reload_s=st.none() | st.floats(0.01, 10))
    def arrive(self, number: int, reload_s: float | None) -> None:
        if coming := [known for known in self.known if not known.is_here]:
            self._arrive(coming[number % len(coming)], reload_s)
            self.admission.serve()

    @rule(number=st.integers(0, 9))
    def fail(self, number: int) -> None:
        if coming := [known for known in self.known if not known.is_here]:
            known = coming[number % len(coming)]
            self.known.remove(known)
            self.table.fail(known.entry)
            if known.is_current:
                self.uses[known.key] = known.popularity
            self.admission.serve()

    @rule(key=keys, holder=holders, reload_s=st.none() | st.floats(0.01, 10))
    def adopt(self, key: str, holder: str, reload_s: float | None) -> None:
        if self._current(key) is None:
            entry = self.table.adopt(key, self.sizes[key], "thing", self._origin(key, reload_s))
            self.known.append(known := Known(entry, key, self.sizes[key], is_here=True, reload_s=reload_s))
            known.popularity = self.uses.get(key, NEVER_USED)
        else:
            entry = self.table.add_detached(key, self.sizes[key], "copy", holder)
            nbytes = Known(entry, key, self.sizes[key]).nbytes
            self.known.append(known := Known(entry, key, nbytes, is_here=True, is_current=False))
            self._lease(known, holder, 1)
        self.admission.serve()

    @rule(wanted=some_keys)
    def prefetch(self, wanted: list[str]) -> None:
        if self.admission.waiting:
            return
        take, evict = plan_prefetch(self.table, {key: self.sizes[key] for key in wanted})
        assert not {entry.key for entry in evict} & {*wanted, *self.pinned}
        for entry in evict:
            assert not self._of(entry).is_leased
        self.table.evict(evict)
        for key in take:
            entry = self.table.expect(key, self.sizes[key], prefetched=True)
            self.known.append(known := Known(entry, key, self.sizes[key]))
            known.popularity = self.uses.get(key, NEVER_USED)
            self._use(known)
            known.is_announced = True
        if take:
            assert self._over([known.size for known in self.known]) <= 0
        else:
            assert not evict

    @rule(number=st.integers(0, 99))
    def lend(self, number: int) -> None:
        """A granted request keeps what it has, and lets the table ask for it."""
        if self.granted:
            ticket = self.granted.pop(number % len(self.granted))
            for entry in ticket.entries or ():
                if (known := self._find(entry)) is not None and known.held[ticket.holder]:
                    known.held[ticket.holder] -= 1
                    if not known.callable[ticket.holder]:
                        known.called.discard(ticket.holder)
                    known.callable[ticket.holder] += 1
                    self.table.mark_recallable(entry, ticket.holder)
            self.admission.serve()

    @rule(number=st.integers(0, 99), gives=st.booleans())
    def answer(self, number: int, gives: bool) -> None:
        asked = [(known, holder) for known in self.known for holder in sorted(self._asked_of(known))]
        if asked:
            known, holder = asked[number % len(asked)]
            self._answer(holder, known, gives)
            self.admission.serve()

    @rule(key=keys, holder=holders)
    def need_again(self, key: str, holder: str) -> None:
        if (known := self._current(key)) is not None:
            self._answer(holder, known, gives=False)
            self.admission.serve()

    @rule(holder=holders)
    def die(self, holder: str) -> None:
        """Its tickets go with it, as with a replica."""
        for known in self.known:
            known.held.pop(holder, None)
            known.callable.pop(holder, None)
            known.called.discard(holder)
        self.granted = [ticket for ticket in self.granted if ticket.holder != holder]
        self.table.end_holder(holder)
        for ticket in [one for one in self.waiting if one.holder == holder]:
            if ticket in self.waiting:
                self.waiting.remove(ticket)
                self.admission.end_ticket(ticket)
        self.admission.serve()

    @rule(some=some_keys)
    def pin(self, some: list[str]) -> None:
        self.pinned |= set(some)
        self.table.pin(some)
        self.admission.serve()

    @rule(some=some_keys)
    def unpin(self, some: list[str]) -> None:
        self.pinned -= set(some)
        self.table.unpin(some)
        self.admission.serve()

    @rule(key=keys)
    def invalidate(self, key: str) -> None:
        if (known := self._current(key)) is not None:
            known.is_current = False
            own = {RemotePart(place, f"own {id(known)}"): distinct([known.size], place) for place in self.elsewhere}
            known.size = {f"own {id(known)}": known.nbytes, **own}
            self.uses[key] = known.popularity
            self.table.invalidate(known.entry)
            self.admission.serve()

    @rule(budget_bytes=st.integers(0, 160))
    def set_budget(self, budget_bytes: int) -> None:
        self.table.budget_bytes = budget_bytes
        self.admission.serve()

    @rule(some=some_keys)
    def drop(self, some: list[str]) -> None:
        found = [known for key in some if (known := self._current(key)) and self._may_go(known) and not known.is_leased]
        self.table.evict([known.entry for known in found])
        self.admission.serve()

    @rule(pause_s=st.sampled_from((0.01, 0.3, PATIENCE_S, 60.0, 900.0)))
    def pass_time(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.admission.serve()

    @rule(nbytes=st.integers(1, 200), spare=st.lists(keys, max_size=2, unique=True))
    def plan(self, nbytes: int, spare: list[str]) -> None:
        """A plan is the naive one: in order of value, nothing that need not go."""
        may_go = [known for known in self.known if self._may_go(known) and known.key not in spare]
        values = self._values()
        victims: list[Known] = []
        for known in sorted(may_go, key=lambda known: (values[known], known.entry.last_used)):
            if self._over(self._without(victims, nbytes)) <= 0:
                break
            victims.append(known)
        plan = plan_room(self.table, {key: self.sizes[key] for key in spare if self._current(key)} | {"new": nbytes})
        missing_bytes = self._over(self._without(victims, nbytes))
        if missing_bytes > 0:
            assert (plan.missing_bytes, plan.evict, plan.recall) == (missing_bytes, (), ())
            return
        for victim in reversed(list(victims)):
            fewer = [other for other in victims if other is not victim]
            if self._over(self._without(fewer, nbytes)) <= 0:
                victims = fewer
        chosen = {*plan.evict, *plan.recall}
        assert sorted(values[self._of(entry)] for entry in chosen) == pytest.approx(
            sorted(values[victim] for victim in victims)
        )
        assert all(self._of(entry).is_leased for entry in plan.recall)
        assert not any(self._of(entry).is_leased for entry in plan.evict)

    # what always holds

    @invariant()
    def the_books_are_right(self) -> None:
        if not hasattr(self, "table"):
            return
        here = [known for known in self.known if known.is_here and known.is_current]
        assert self.table.used_bytes == distinct([known.size for known in self.known])
        for place in self.elsewhere:
            assert self.table.used.elsewhere[place] == distinct([known.size for known in self.known], place)
        assert self.table.here.total == sum(known.nbytes for known in here)
        assert self.table.here.leased == sum(known.nbytes for known in here if known.is_leased)
        assert self.table.here.pinned == sum(known.nbytes for known in here if known.key in self.pinned)
        assert set(self.table.entries.values()) == {known.entry for known in self.known if known.is_current}
        assert set(self.table.detached) == {known.entry for known in self.known if not known.is_current}
        by_holder = Counter[str]()
        for known in self.known:
            assert (known.entry.held, known.entry.recallable) == (+known.held, +known.callable)
            assert known.entry.recall_requested == known.called or not known.is_current
            for holder in +known.held + known.callable:
                by_holder[holder] += known.nbytes
        assert self.table.bytes_by_holder() == dict(by_holder)
        for known in self.known:
            assert known.popularity == known.entry.popularity
            assert known.entry.is_movable == self._may_go(known)
        with self.table.order.ascending(self.table.rates(), self.now_s) as evictable:
            assert set(evictable) == {known.entry for known in self.known if self._may_go(known)}
        assert self.table.movable_bytes == sum(known.nbytes for known in self.known if self._may_go(known))

    @invariant()
    def nobody_waits_who_need_not(self) -> None:
        if not hasattr(self, "table"):
            return
        assert len(self.admission.waiting) == len(self.waiting) == sum(ticket.is_waiting for ticket in self.waiting)
        if self._over([known.size for known in self.known]) > 0:
            idle = [known for known in self.known if self._may_go(known) and not known.is_leased]
            asked = [known for known in self.known if self._is_called(known)]
            over_bytes = self._over([known.size for known in self.known])
            without_bytes = self._over([known.size for known in self.known if known not in idle])
            assert without_bytes == over_bytes or asked, "over the budget with something that may go"
        if not self.waiting:
            return
        first = self.waiting[0]
        assert not first.wanted.keys() <= self.table.entries.keys()
        staying = [known for known in self.known if not self._may_go(known) or known.key in first.wanted]
        wanted = [size for key, size in first.wanted.items() if self._current(key) is None]
        over_bytes = self._over([known.size for known in staying] + wanted)
        asked = [known for known in self.known if self._is_called(known)]
        assert over_bytes > 0 or asked, "the first waits for room that could be made"
        for ticket in self.waiting[1:]:
            is_here = ticket.wanted.keys() <= self.table.entries.keys()
            assert not is_here or self._is_late(first) or self._is_any_called(ticket), "it need not wait"

    def teardown(self) -> None:
        """Nobody is left waiting when everything ends that can end."""
        if not hasattr(self, "table"):
            return
        self.unpin(list("abcdef"))
        self.table.budget_bytes = 10**6
        self.table.elsewhere = self.elsewhere = dict.fromkeys(self.elsewhere, 10**6)
        for _ in range(100):
            if not (self.granted or self.waiting) and all(known.is_here for known in self.known):
                break
            for ticket in list(self.granted):
                self.granted.remove(ticket)
                for entry in ticket.entries or ():
                    if (known := self._find(entry)) is not None:
                        self._unlease(known, ticket.holder)
                self.admission.end_ticket(ticket)
            for known in [known for known in self.known if not known.is_here]:
                self._arrive(known, None)
            self.admission.serve()
        assert not self.waiting
        for holder in HOLDERS:
            self.die(holder)
        self.the_books_are_right()
        assert self.table.detached == []
        assert self.table.bytes_by_holder() == {}

    # the model

    def sizes_of(self, wanted: set[str]) -> list[Size]:
        return [self.sizes[key] for key in wanted]

    def _without(self, victims: Sequence[Known], nbytes: int) -> list[Size]:
        return [*(known.size for known in self.known if known not in victims), nbytes]

    def _pinned_here(self) -> set[str]:
        return {known.key for known in self.known if known.is_current and known.key in self.pinned}

    def _may_go(self, known: Known) -> bool:
        return known.is_here and known.is_current and not +known.held and known.key not in self.pinned

    def _asked_of(self, known: Known) -> set[str]:
        """The holders whose answer is due."""
        return known.called & (+known.callable).keys() if known.is_current else set()

    def _is_called(self, known: Known) -> bool:
        return bool(self._asked_of(known))

    def _is_any_called(self, ticket: Ticket[str]) -> bool:
        return any(known.called for key in ticket.wanted if (known := self._current(key)))

    def _is_late(self, first: Ticket[str]) -> bool:
        return self.now_s - first.since_s >= PATIENCE_S

    def _values(self) -> dict[Known, float]:
        measured = [known for known in self.known if known.is_here and known.is_current and known.reload_s is not None]
        rates = {known: class_rate(rate_class(known.reload_s or 0.0, known.nbytes)) or 0.0 for known in measured}
        measured_bytes = sum(known.nbytes for known in measured)
        usual = sum(rates[known] * known.nbytes for known in measured) / measured_bytes if measured_bytes else 1.0
        return {known: known.popularity.value(self.now_s) * rates.get(known, usual) for known in self.known}

    def _of(self, entry: Entry[str]) -> Known:
        return next(known for known in self.known if known.entry is entry)

    def _find(self, entry: Entry[str]) -> Known | None:
        return next((known for known in self.known if known.entry is entry), None)

    def _current(self, key: str) -> Known | None:
        return next((known for known in self.known if known.key == key and known.is_current), None)

    def _origin(self, key: str, reload_s: float | None) -> int | None:
        size = self.sizes[key]
        nbytes = size if isinstance(size, int) else sum(size.values())
        return None if reload_s is None else rate_class(reload_s, nbytes)

    def _lease(self, known: Known, holder: str, count: int) -> None:
        known.held[holder] += count
        self._use(known)

    def _use(self, known: Known) -> None:
        """A prefetch counts the use that it announces."""
        if not known.is_announced:
            known.popularity = known.popularity.touch(self.now_s)
        known.is_announced = False

    def _unlease(self, known: Known, holder: str) -> None:
        if known.held[holder]:
            known.held[holder] -= 1
        elif known.callable[holder]:
            known.callable[holder] -= 1
        if not (known.held[holder] or known.callable[holder]):
            known.called.discard(holder)

    def _arrive(self, known: Known, reload_s: float | None) -> None:
        known.is_here, known.reload_s = True, reload_s if known.is_current else None
        self.table.arrive(known.entry, "thing", self._origin(known.key, reload_s))

    def _answer(self, holder: str, known: Known, gives: bool) -> None:
        if gives:
            count = known.held[holder] + known.callable[holder]
            for _ in range(count):
                self._unlease(known, holder)
            self.table.unlease(known.entry, holder, count)
        else:
            known.held[holder] += known.callable.pop(holder, 0)
            self.table.make_held(known.entry, holder)


class DividedTier(Tier):
    sizes = DIVIDED


class SpreadTier(Tier):
    sizes = SPREAD
    elsewhere: Mapping[str, int] = {"there": 60}


TestEntriesOfTheirOwn = Tier.TestCase
TestEntriesThatShareParts = DividedTier.TestCase
TestEntriesInTwoPlaces = SpreadTier.TestCase
TestEntriesOfTheirOwn.settings = TestEntriesThatShareParts.settings = TestEntriesInTwoPlaces.settings = settings(
    max_examples=25, stateful_step_count=50, deadline=None
)
