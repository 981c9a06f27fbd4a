"""Who may have which extent, and when: leases, pins and the byte budget of a node, shared by many threads. Ray-free.

The lock is held for as long as it takes to look at what is asked for, not at all that is here.

Room is given in the order in which it was asked for. Who only wants what is here already passes those who wait, for
`OVERTAKE_S`; then it queues as well, or two models that do not fit together would never change places. Who has leases
always passes: the one in front may be waiting for just those. Not so who gives back what it keeps when it is asked
to: that has no firm lease while it waits. What is called back for the one in front, nobody takes before it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.keeper.recalls import CHECK_S, Recalls
from cluster.keeper.records import Recall, RecallAnswer, ResidentExtent, Source
from cluster.keeper.refusals import describe_holders, describe_need
from cluster.keeper.residents import Coming, Held, ReloadRate, Residents
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray

MAX_WAIT_S: Final = 60.0
OVERTAKE_S: Final = 2.0
# So long a request for what is being used may join, once somebody waits for its room.
PATIENCE_S: Final = 0.3

logger = logging.getLogger("atelier.keeper")

# Extents that came and that went. Called with the lock held: it must be quick and must not call back.
OnChange = Callable[[Sequence[str], Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class Claim:
    """Leases on `entries`; the claimant loads `to_load` and tells `loaded` or `failed` of each.

    `life` is that of the holder's leases: 0 for a dead one, which got none.
    """

    entries: tuple[Held | Coming, ...]
    to_load: tuple[ExtentRef, ...]
    life: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What is here at one moment; what is set apart or on its way is not counted."""

    num_extents: int
    resident_bytes: int
    leased_bytes: int
    pinned_bytes: int
    callable_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    since_s: float
    wanted: Mapping[str, ExtentRef]


class HeldExtents:
    """Thread-safe. A request for room that others have leased waits at most `max_wait_s` for it."""

    def __init__(
        self,
        budget_bytes: int,
        *,
        max_wait_s: float = MAX_WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        on_change: OnChange = lambda added, removed: None,
        reload_rate: ReloadRate = lambda source: None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._on_change = on_change
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: deque[_Ticket] = deque()
        self._all = Residents(clock, reload_rate)
        self._recalls = Recalls(clock)
        self._called: set[str] = set()  # for the first who waits
        self._urged_s = clock()
        self.num_recalled = 0

    @property
    def budget_bytes(self) -> int:
        return self._budget_bytes

    @property
    def num_evicted(self) -> int:
        return self._all.num_evicted

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def claim(self, extents: Sequence[ExtentRef], holder: str) -> Claim:
        """One lease for each of the extents, for all of them or none.

        Raises BudgetExceeded at once when they cannot fit beside what is pinned, and after the wait when others
        still have the room.
        """
        ticket = _Ticket(self._clock(), {extent.id: extent for extent in extents})
        with self._changed:
            self._waiting.append(ticket)
            try:
                while not self._may_go(ticket, holder):
                    left_s = ticket.since_s + self._max_wait_s - self._clock()
                    if left_s <= 0 or self._never_fits(ticket):
                        raise BudgetExceeded(self._refusal(ticket))
                    is_waiting_for_answers = self._waiting[0] is ticket and self._call_back(ticket)
                    self._changed.wait(min(left_s, CHECK_S) if is_waiting_for_answers else left_s)
                to_load = self._all.missing(ticket.wanted)
                self._evict(self._all.plan_room(to_load, self._budget_bytes, ticket.wanted).evict if to_load else ())
                for extent in to_load:
                    self._all.expect(extent)
                entries = tuple(entry for extent in extents if (entry := self._all.entry(extent.id)))
                for entry in entries:
                    self._all.lease(entry, holder)
                return Claim(entries, tuple(to_load), self._all.life(holder))
            finally:
                if self._waiting[0] is ticket:
                    self._called.clear()
                    self._all.forget_declined()
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def settle(self, claim: Claim, holder: str) -> dict[str, Any]:
        """References by id, once all of the claim is here. Raises what loading raised; then its leases are gone."""
        try:
            return {
                entry.extent.id: (entry.done.result() if isinstance(entry, Coming) else entry).ref
                for entry in claim.entries
            }
        except BaseException:
            self.give_back(claim, holder)
            raise

    def give_back(self, claim: Claim, holder: str) -> None:
        """The leases of a claim that came to nothing."""
        # From the entries themselves: an extent that failed may be loading anew for somebody by now.
        with self._changed:
            for entry in claim.entries:
                self._all.unlease(entry, holder)
            self._freed()

    def prefetch(self, extents: Sequence[ExtentRef]) -> list[ExtentRef]:
        """The caller loads these. They have no lease, and take no room that anything more valuable has."""
        with self._changed:
            if self._waiting:
                return []  # who waits for room comes first
            missing = self._all.missing({extent.id: extent for extent in extents})
            take, evict = self._all.plan_prefetch(missing, self._budget_bytes)
            self._evict(evict)
            for extent in take:
                self._all.expect(extent)
            return take

    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether they fit, now, without calling anything back."""
        with self._changed:
            wanted = {extent.id: extent for extent in extents}
            return not self._waiting and not self._all.missing_bytes(wanted, self._budget_bytes)

    def loaded(self, id_: str, ref: Any, view: ByteArray, source: Source) -> None:
        with self._changed:
            coming = self._all.arrive(id_, ref, view, source)
            held = self._all.held[id_]
            self._on_change([id_], [])
            self._freed()
        coming.done.set_result(held)

    def failed(self, id_: str, error: Exception) -> None:
        with self._changed:
            coming = self._all.fail(id_)
            self._on_change([], [id_])  # who waits for this node to have it need not
            self._freed()
        coming.done.set_exception(error)

    def lease_same(self, id_: str, ref: Any, holder: str, num_leases: int) -> bool:
        """Lease that very copy. False: it is not the one that is here, and nothing was done."""
        with self._changed:
            held = self._all.held.get(id_)
            if held is None or held.ref != ref:
                return False
            self._all.lease(held, holder, num_leases)
            self._changed.notify_all()  # who has leases need not wait for what is here
            return True

    def adopt(self, held: Held, holder: str, num_leases: int) -> bool:
        """Lease `held` to the holder that has it mapped. False when it is not what others get: another copy is here.

        Over the budget, too, if need be: the bytes are in memory whatever is decided here.
        """
        with self._changed:
            if is_new := self._all.entry(held.extent.id) is None:
                self._all.adopt(held)
                self._on_change([held.extent.id], [])
                self._all.lease(held, holder, num_leases)
            elif not self.lease_same(held.extent.id, held.ref, holder, num_leases):
                self._set_apart(held, holder, num_leases)
            self._freed()
            return is_new

    def set_apart(self, held: Held, holder: str, num_leases: int) -> None:
        """A copy that `holder` has mapped and that nobody else may get: its bytes count until it gives it back."""
        with self._changed:
            self._set_apart(held, holder, num_leases)
            self._freed()

    def wait_until_known(self, ids: Sequence[str], timeout_s: float) -> bool:
        """Until all of them are here or coming, and no longer than the time given. False when some are not."""
        with self._changed:
            return self._changed.wait_for(lambda: all(self._all.entry(id_) for id_ in ids), max(timeout_s, 0.0))

    def release(self, ids: Sequence[str], holder: str, life: int | None = None) -> None:
        """Give back one lease per id, of that life or whichever. Unknown ids and holders are ignored: releasing twice
        is not an error."""
        with self._changed:
            if life is None or self._all.is_of(life, holder):
                for id_ in ids:
                    self._all.release(id_, holder)
            self._freed()

    def next_recall(self, holder: str, answer: RecallAnswer | None, life: int | None, timeout_s: float) -> Recall:
        """Wait until something is wanted back from the holder. Empty after the time, or when it counts as dead.

        `answer` is to the recall before, `life` the one of its leases; None for leases of another keeper. From the
        first call on, the holder's leases may be called back.
        """
        with self._changed:
            heard = threading.Condition(self._lock)
            number, asked = self._recalls.open_poll(holder, heard.notify_all)
            self._all.make_callable(holder)
            if answer and life is not None and self._all.is_of(life, holder):
                for id_ in answer.given_back:
                    self._all.release(id_, holder)
                for id_ in asked.intersection(answer.kept):
                    self._all.decline(id_, holder)
                self.num_recalled += len(asked.difference(answer.kept))
            self._freed()
            heard.wait_for(lambda: not self._recalls.is_open(holder, number), timeout_s)
            return self._recalls.take_recall(holder, number)

    def note_uses(self, uses: Mapping[str, int]) -> None:
        """Count uses, by extent id, of what holders keep and have used without a new lease."""
        with self._changed:
            self._all.note_uses(uses)

    def greet(self, holder: str) -> int:
        """The holder lives, whatever was thought of it. Returns the life of its leases."""
        with self._changed:
            return self._all.revive(holder)

    def life(self, holder: str) -> int:
        """Of its leases; 0 for one that counts as dead."""
        with self._changed:
            return self._all.life(holder)

    def end_holder(self, holder: str) -> None:
        """The holder is dead: its leases end, those that are just being given too."""
        with self._changed:
            self._end_holder(holder)
            self._freed()

    def pin(self, ids: Iterable[str]) -> None:
        """These and no others, here or not yet: what is pinned is not evicted."""
        with self._changed:
            self._all.pin(ids)
            self._freed()

    def set_budget(self, budget_bytes: int) -> None:
        """What is over it and may go does; the rest goes when it is given back."""
        with self._changed:
            self._budget_bytes = budget_bytes
            self._freed()

    def drop(self, ids: Sequence[str]) -> list[str]:
        """Those that went: what is leased or pinned stays. What is only kept for later is called back."""
        with self._changed:
            if not self._waiting:
                self._all.forget_declined()
            self._call(id_ for id_ in ids if self._all.may_be_called(id_))
            held, pinned = self._all.held, self._all.pinned
            gone = [id_ for id_ in dict.fromkeys(ids) if id_ in held and not held[id_].holders and id_ not in pinned]
            self._evict(gone)
            self._changed.notify_all()
            return gone

    def shed(self, nbytes: int) -> bool:
        """Give up so many bytes of what may go, whatever the budget says. False when there is nothing."""
        with self._changed:
            while True:
                evict = self._all.plan_shrink(self._all.used_bytes - nbytes)
                if evict:
                    self._evict(evict)
                    return True
                self._call(self._all.plan_recall((), self._all.used_bytes - nbytes, as_far_as_possible=True))
                self._end_silent()
                if not self._recalls.is_waiting:
                    return bool(self._all.plan_shrink(self._all.used_bytes - nbytes))
                self._changed.wait(CHECK_S)

    def condemn(self, id_: str, view: ByteArray) -> bool:
        """The bytes of `view` are not the extent's any more: who asks next gets a fresh copy. False if it is gone."""
        with self._changed:
            held = self._all.held.get(id_)
            if held is None or held.view is not view:
                return False
            self._all.condemn(id_)
            self._on_change([], [id_])
            self._changed.notify_all()
            return True

    def held(self, id_: str) -> Held | None:
        with self._changed:
            return self._all.held.get(id_)

    def ids(self) -> list[str]:
        with self._changed:
            return list(self._all.held)

    def residents(self, ids: Iterable[str] | None = None) -> list[ResidentExtent]:
        """Those of `ids` that are here; without them, all: that takes as long as there are many."""
        with self._changed:
            held, pinned = self._all.held, self._all.pinned
            chosen = held.values() if ids is None else [held[id_] for id_ in dict.fromkeys(ids) if id_ in held]
            return [
                ResidentExtent(
                    found.extent.id,
                    found.extent.nbytes,
                    dict(found.holders),
                    found.extent.id in pinned,
                    found.source,
                    found.hits,
                )
                for found in chosen
            ]

    def totals(self) -> Totals:
        with self._changed:
            found = self._all
            return Totals(
                len(found.held), found.resident_bytes, found.leased_bytes, found.pinned_bytes, found.callable_bytes
            )

    def bytes_by_holder(self) -> dict[str, int]:
        with self._changed:
            return self._all.bytes_by_holder()

    @property
    def wanted_bytes(self) -> int:
        """What the first of those who wait lacks, or what is over the budget."""
        with self._changed:
            over_bytes = max(0, self._all.used_bytes - self._budget_bytes)
            return self._missing_bytes(self._waiting[0]) if self._waiting else over_bytes

    def holders_text(self) -> str:
        with self._changed:
            return describe_holders(self._all)

    def _may_go(self, ticket: _Ticket, holder: str) -> bool:
        first = self._waiting[0]
        if not self._all.missing(ticket.wanted):
            overtakes = self._clock() - first.since_s < OVERTAKE_S and self._called.isdisjoint(ticket.wanted)
            is_never_called = self._all.has_leases(holder) and holder not in self._recalls
            return first is ticket or overtakes or is_never_called
        return first is ticket and not self._missing_bytes(ticket)

    def _call_back(self, ticket: _Ticket) -> bool:
        """Ask for the room that the first ticket lacks. Returns whether somebody may have to be asked again soon."""
        self._end_silent()
        if missing := self._all.missing(ticket.wanted):
            called = self._all.plan_recall(missing, self._budget_bytes, ticket.wanted)
            self._call(called)
            self._called.update(called)
            now_s = self._clock()
            if min(now_s - ticket.since_s, now_s - self._urged_s) >= PATIENCE_S:
                self._urged_s = now_s
                for id_, holder in self._all.declined():
                    if id_ not in ticket.wanted:
                        self._called.add(id_)
                        self._recalls.call(id_, [holder], is_overdue=True)
        return bool(self._all.callable)

    def _call(self, ids: Iterable[str]) -> None:
        for id_ in ids:
            self._recalls.call(id_, self._all.held[id_].holders)

    def _end_silent(self) -> None:
        for holder in self._recalls.silent():
            logger.warning("%s does not answer: it counts as dead until it is heard of", holder)
            self._end_holder(holder)
            self._freed()

    def _end_holder(self, holder: str) -> None:
        self._recalls.end(holder)
        self._all.end_holder(holder)

    def _missing_bytes(self, ticket: _Ticket) -> int:
        return self._all.missing_bytes(ticket.wanted, self._budget_bytes) if self._all.missing(ticket.wanted) else 0

    def _never_fits(self, ticket: _Ticket) -> bool:
        return self._pinned_bytes(ticket) + _total(ticket) > self._budget_bytes

    def _pinned_bytes(self, ticket: _Ticket) -> int:
        """Of what is here and not wanted by the ticket."""
        held, pinned = self._all.held, self._all.pinned
        wanted_bytes = sum(extent.nbytes for id_, extent in ticket.wanted.items() if id_ in held and id_ in pinned)
        return self._all.pinned_bytes - wanted_bytes

    def _set_apart(self, held: Held, holder: str, num_leases: int) -> None:
        if self._all.life(holder):  # the dead give nothing back
            self._all.set_apart(held)
            self._all.lease(held, holder, num_leases)

    def _freed(self) -> None:
        self._evict(self._all.plan_shrink(self._budget_bytes))
        if self._all.used_bytes > self._budget_bytes:
            self._call(self._all.plan_recall((), self._budget_bytes, as_far_as_possible=True))
        self._changed.notify_all()

    def _evict(self, ids: Sequence[str]) -> None:
        self._all.evict(ids)
        if ids:
            self._on_change([], ids)

    def _refusal(self, ticket: _Ticket) -> str:
        missing = self._all.missing(ticket.wanted)
        if self._never_fits(ticket):
            lacking_bytes = self._pinned_bytes(ticket) + _total(ticket) - self._budget_bytes
            reason = f"{_total(ticket)} bytes at once can never fit"
        else:
            lacking_bytes = self._missing_bytes(ticket)
            reason = f"waited {self._clock() - ticket.since_s:.1f} s"
        return (
            f"{describe_need(missing)}; {lacking_bytes} bytes are missing under the node's budget of "
            f"{self._budget_bytes} ({reason}; {describe_holders(self._all)})"
        )


def _total(ticket: _Ticket) -> int:
    return sum(extent.nbytes for extent in ticket.wanted.values())
