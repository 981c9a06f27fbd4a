"""Random events in random order: the books of a node against naive ones that count everything anew each time."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kit.waiting import wait_until

from cluster.keeper.extent_book import ExtentBook
from cluster.keeper.held_extents import HeldExtents
from cluster.keeper.records import Claim, HeldExtent
from weights.records.errors import BudgetExceeded, ExtentCorrupt
from weights.records.manifest import ExtentRef
from weights.residency.admission import PATIENCE_S
from weights.residency.contents import Entry

SIZES = {"a": 10, "b": 20, "c": 30, "d": 40, "e": 50, "f": 60}
EXTENTS = {
    id_: ExtentRef(id=id_, pack=id_, offset=0, nbytes=nbytes, checksum="0" * 32) for id_, nbytes in SIZES.items()
}
HOLDERS = "vwx"
WAIT_S = 30.0
MAX_WAITING = 6

some_ids = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True)
holders = st.sampled_from(HOLDERS)


@dataclass(eq=False)
class Asked:
    """A request: waiting, or given its claim."""

    ids: list[str]
    holder: str
    future: Future[Claim]


class Books(RuleBasedStateMachine):
    """Waiters wait in threads; after each step everybody who may go has gone."""

    @initialize(budget_bytes=st.integers(30, 220))
    def begin(self, budget_bytes: int) -> None:
        self.now_s = 1000.0
        self.held = HeldExtents(ExtentBook(budget_bytes, clock=lambda: self.now_s), max_wait_s=1e6)
        self.threads = ThreadPoolExecutor(16)
        self.waiting: list[Asked] = []  # in the order of asking
        self.loading: list[Asked] = []
        self.leases: Counter[tuple[str, str]] = Counter()  # settled ones, by holder and extent
        self.ended: set[str] = set()
        self.pinned: set[str] = set()
        self.serial = self.used_bytes = 0

    def teardown(self) -> None:
        if not hasattr(self, "held"):
            return
        self.now_s += 1e7
        self.held.holders.release([], "")  # wakes those who wait
        for asked in self.waiting:
            assert isinstance(asked.future.exception(WAIT_S), BudgetExceeded | None)
        self.threads.shutdown()

    # what happens

    @rule(ids=some_ids, holder=holders)
    def ask(self, ids: list[str], holder: str) -> None:
        if len(self.waiting) == MAX_WAITING:
            return
        future = self.threads.submit(self.held.claim, [EXTENTS[id_] for id_ in ids], holder)
        self.waiting.append(Asked(ids, holder, future))
        wait_until(self._is_known_who_waits)

    @rule(ids=some_ids, holder=holders)
    def ask_for_what_is_here(self, ids: list[str], holder: str) -> None:
        self._collect()
        here = {entry.key for entry in self._here()}
        given = self.held.lease_resident([EXTENTS[id_] for id_ in ids], holder)
        assert (given is not None) == (here.issuperset(ids) and not self.waiting)
        if given is not None:
            refs, epoch = given
            assert (refs.keys(), epoch) == (set(ids), self.held.holders.epoch(holder))
            self.leases.update((holder, id_) for id_ in ids if epoch)

    @rule(id_=st.sampled_from("abcdef"))
    def arrive(self, id_: str) -> None:
        if id_ in self.held._book.coming:
            self.held.loaded(id_, self._ref(id_), np.zeros(SIZES[id_], np.uint8), "storage")

    @rule(id_=st.sampled_from("abcdef"))
    def fail(self, id_: str) -> None:
        if id_ not in self.held._book.coming:
            return
        coming = self.held._table.entries[id_]
        self._collect()
        self.held.failed(id_, ExtentCorrupt(id_))
        for asked in [one for one in self.loading if coming in one.future.result().entries]:
            self.loading.remove(asked)
            self.held._give_back(asked.future.result(), asked.holder)

    @rule(ids=some_ids, holder=holders)
    def give(self, ids: list[str], holder: str) -> None:
        """Give back some of what was given to it, and nothing that it is waiting for; sometimes once too often."""
        loading = {id_ for asked in self.loading if asked.holder == holder for id_ in asked.ids}
        ids = [id_ for id_ in ids if id_ not in loading]
        self.held.holders.release(ids, holder)
        for id_ in ids:
            self.leases[holder, id_] = max(0, self.leases[holder, id_] - 1)

    @rule(holder=holders)
    def die(self, holder: str) -> None:
        self.held.holders.end(holder)
        self.ended.add(holder)
        self._forget_leases(holder)

    @rule(holder=holders)
    def greet(self, holder: str) -> None:
        assert self.held.holders.greet(holder) == self.held.holders.epoch(holder) > 0
        self.ended.discard(holder)

    @rule(ids=some_ids)
    def pin(self, ids: list[str]) -> None:
        self.held.set_pins(ids)
        self.pinned = set(ids)

    @rule()
    def unpin(self) -> None:
        self.held.set_pins([])
        self.pinned = set()

    @rule(ids=some_ids)
    def prefetch(self, ids: list[str]) -> None:
        before = self._used_bytes()
        taken = self.held.prefetch([EXTENTS[id_] for id_ in ids])
        assert not (taken and before > self.held.residents.budget_bytes)

    @rule(id_=st.sampled_from("abcdef"))
    def invalidate(self, id_: str) -> None:
        if (found := self.held.residents.held(id_)) is not None:
            assert self.held.invalidate(id_, found.view)
            assert not self.held.invalidate(id_, found.view)

    @rule(id_=st.sampled_from("abcdef"), holder=holders, count=st.integers(1, 2), same=st.booleans())
    def adopt(self, id_: str, holder: str, count: int, same: bool) -> None:
        here = self.held.residents.held(id_)
        ref = here.ref if here and same else self._ref(id_)
        before = self.held._table.entries.get(id_)
        copy = HeldExtent(EXTENTS[id_], ref, np.zeros(SIZES[id_], np.uint8), "adopted")
        assert self.held.holders.adopt(copy, holder, count) == (before is None)
        self.used_bytes += SIZES[id_]  # it is in memory already
        if holder not in self.ended:
            self.leases[holder, id_] += count

    @rule(ids=some_ids)
    def drop(self, ids: list[str]) -> None:
        may_go = {
            id_ for id_ in ids if (found := self.held._table.entries.get(id_)) and found.is_here and self._may_go(found)
        }
        assert set(self.held.drop(ids)) == may_go

    @rule(nbytes=st.integers(1, 100))
    def shed(self, nbytes: int) -> None:
        free_bytes = sum(found.nbytes for found in self._here() if self._may_go(found))
        assert self.held.shed(nbytes) == (free_bytes > 0)

    @rule(budget_bytes=st.integers(30, 220))
    def set_budget(self, budget_bytes: int) -> None:
        self.held.set_budget(budget_bytes)

    @rule(seconds=st.sampled_from((-5.0, 0.1, PATIENCE_S, 700.0)))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.held.holders.release([], "")  # time alone wakes nobody before its wait is over

    # what holds

    @invariant()
    def everything(self) -> None:
        if hasattr(self, "held"):
            self._collect()
            self._check_totals()
            self._check_leases()
            self._check_budget()

    def _check_totals(self) -> None:
        totals, table = self.held.residents.totals(), self.held._table
        assert totals.num_extents == len(self._here())
        assert totals.resident_bytes == _bytes(self._here())
        assert totals.leased_bytes == _bytes([found for found in self._here() if found.is_leased])
        assert totals.pinned_bytes == _bytes([found for found in self._here() if found.key in self.pinned])
        assert table.used_bytes == self._used_bytes()
        with table.order.ascending(table.rates(), table.now_s()) as evictable:
            assert set(evictable) == {found for found in self._here() if self._may_go(found)}
        by_holder: Counter[str] = Counter()
        for entry in self._entries():
            by_holder.update(dict.fromkeys(entry.held, entry.nbytes))
        assert self.held.residents.bytes_by_holder() == dict(by_holder)

    def _check_budget(self) -> None:
        """Nobody was let in over it, and what may go does until it is kept."""
        used_bytes = self._used_bytes()
        assert used_bytes <= max(self.held.residents.budget_bytes, self.used_bytes)
        assert used_bytes <= self.held.residents.budget_bytes or not any(map(self._may_go, self._here()))
        self.used_bytes = used_bytes

    def _check_leases(self) -> None:
        """None was evicted that is leased, and none is leased that should not be."""
        found: Counter[tuple[str, str]] = Counter()
        for entry in self._entries():
            found.update({(holder, entry.key): count for holder, count in entry.held.items()})
        loading: Counter[tuple[str, str]] = Counter()
        for asked in self.loading:
            if asked.future.result().epoch == self.held.holders.epoch(asked.holder) > 0:
                loading.update((asked.holder, id_) for id_ in asked.ids)
        assert found == +(self.leases + loading)

    # naive books

    def _here(self) -> list[Entry[HeldExtent]]:
        return [entry for entry in self.held._table.entries.values() if entry.is_here]

    def _entries(self) -> list[Entry[HeldExtent]]:
        return [*self.held._table.entries.values(), *self.held._table.detached]

    def _used_bytes(self) -> int:
        return _bytes(self._entries())

    def _may_go(self, found: Entry[HeldExtent]) -> bool:
        return not found.is_leased and found.key not in self.pinned

    def _may_be_given(self, place: int) -> bool:
        """Return whether the rules let the one in this place of the queue have its memory."""
        asked, first = self.waiting[place], self.waiting[0]
        missing = [id_ for id_ in asked.ids if id_ not in self.held._table.entries]
        if not missing:
            return place == 0 or any(entry.held[asked.holder] for entry in self._entries())
        kept = [entry for entry in self._entries() if entry not in self._here() or not self._may_go(entry)]
        spared = [found for found in self._here() if self._may_go(found) and found.key in asked.ids]
        needed_bytes = _bytes(kept) + _bytes(spared) + sum(SIZES[id_] for id_ in missing)
        return asked is first and needed_bytes <= self.held.residents.budget_bytes

    def _collect(self) -> None:
        """Wait until nobody waits who may go; note what they were given, or why not."""
        while True:
            wait_until(self._is_known_who_waits)
            for asked in [one for one in self.waiting if one.future.done()]:
                self.waiting.remove(asked)
                if asked.future.exception() is None:
                    self.loading.append(asked)
                else:
                    assert isinstance(asked.future.exception(), BudgetExceeded)
            may_go = [asked for place, asked in enumerate(self.waiting) if self._may_be_given(place)]
            if not may_go:
                break
            wait_until(lambda may_go=may_go: all(asked.future.done() for asked in may_go))
        for asked in list(self.loading):
            claim = asked.future.result()
            if all(arrival.done() for arrival in claim.arrivals):
                self.loading.remove(asked)
                assert self.held.settle(claim, asked.holder).keys() == set(asked.ids)
                if claim.epoch == self.held.holders.epoch(asked.holder) > 0:
                    self.leases.update((asked.holder, id_) for id_ in asked.ids)

    def _is_known_who_waits(self) -> bool:
        """Nobody is on the way into the queue, or out of it."""
        return sum(not asked.future.done() for asked in self.waiting) == self.held.residents.num_waiting

    def _forget_leases(self, holder: str) -> None:
        for id_ in SIZES:
            self.leases[holder, id_] = 0

    def _ref(self, id_: str) -> str:
        self.serial += 1
        return f"{id_}{self.serial}"


def _bytes(entries: list[Entry[HeldExtent]]) -> int:
    return sum(entry.nbytes for entry in entries)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
