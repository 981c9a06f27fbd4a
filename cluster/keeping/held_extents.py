"""Who may have which extent, and when: leases, pins and the byte budget of a node, shared by many threads. Ray-free.

Room is given in the order in which it was asked for. Who only wants what is here already passes those who wait, for
`OVERTAKE_S`; then it queues as well, or two models that do not fit together would never change places. Who has leases
always passes: the one in front may be waiting for just those.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cluster.keeper_records import ResidentExtent, Source
from cluster.keeping.refusals import describe_holders, describe_need
from cluster.keeping.residents import Coming, Held, ReloadTime, Residents
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.memory.pages import ByteArray

MAX_WAIT_S: Final = 60.0
OVERTAKE_S: Final = 2.0

# Extents that came and that went. Called with the lock held: it must be quick and must not call back.
OnChange = Callable[[Sequence[str], Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class Claim:
    """Leases on `entries`; the claimant loads `to_load` and tells `loaded` or `failed` of each."""

    entries: tuple[Held | Coming, ...]
    to_load: tuple[ExtentRef, ...]


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
        reload_s: ReloadTime = lambda extent, source: None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._on_change = on_change
        self._changed = threading.Condition()
        self._waiting: deque[_Ticket] = deque()
        self._all = Residents(clock, reload_s)

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
                    self._changed.wait(left_s)
                to_load = self._all.missing(ticket.wanted)
                self._evict(self._all.plan_room(to_load, self._budget_bytes, ticket.wanted).evict if to_load else ())
                for extent in to_load:
                    self._all.expect(extent)
                return Claim(tuple(self._all.lease(extent.id, holder) for extent in extents), tuple(to_load))
            finally:
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

    def loaded(self, id_: str, ref: Any, view: ByteArray, source: Source) -> None:
        with self._changed:
            coming = self._all.arrive(id_, ref, view, source)
            held = self._all.held[id_]
            self._on_change([id_], [])
            self._freed()
        coming.done.set_result(held)

    def failed(self, id_: str, error: Exception) -> None:
        with self._changed:
            coming = self._all.coming.pop(id_)
            self._on_change([], [id_])  # who waits for this node to have it need not
            self._freed()
        coming.done.set_exception(error)

    def adopt(self, held: Held | None, id_: str, holder: str, num_leases: int) -> bool:
        """Put `held` in place when the extent is not here, and lease it to `holder`. False: nothing was done."""
        with self._changed:
            if self._all.entry(id_) is None:
                if held is None:
                    return False
                # Over the budget too, if need be: the bytes are in memory whatever is decided here.
                self._all.held[id_] = held
                self._on_change([id_], [])
            if num_leases:
                self._all.lease(id_, holder, num_leases)
            self._freed()
            return True

    def wait_until_known(self, ids: Sequence[str], timeout_s: float) -> bool:
        """Until all of them are here or coming, and no longer than the time given. False when some are not."""
        with self._changed:
            return self._changed.wait_for(lambda: all(self._all.entry(id_) for id_ in ids), max(timeout_s, 0.0))

    def release(self, ids: Sequence[str], holder: str) -> None:
        """Give back one lease per id. Unknown ids and holders are ignored: releasing twice is not an error."""
        with self._changed:
            for id_ in ids:
                self._all.release(id_, holder)
            self._freed()

    def end_holder(self, holder: str) -> None:
        """The holder is dead: its leases end, those that are just being given too."""
        with self._changed:
            self._all.end_holder(holder)
            self._freed()

    def pin(self, ids: Sequence[str]) -> None:
        """Here or not yet: what is pinned is not evicted."""
        with self._changed:
            self._all.pinned.update(ids)

    def unpin(self, ids: Sequence[str]) -> None:
        with self._changed:
            self._all.pinned.difference_update(ids)
            self._freed()

    def set_budget(self, budget_bytes: int) -> None:
        """What is over it and may go does; the rest goes when it is given back."""
        with self._changed:
            self._budget_bytes = budget_bytes
            self._freed()

    def drop(self, ids: Sequence[str]) -> list[str]:
        """Those that went: what is leased or pinned stays."""
        with self._changed:
            held, pinned = self._all.held, self._all.pinned
            gone = [id_ for id_ in dict.fromkeys(ids) if id_ in held and not held[id_].holders and id_ not in pinned]
            self._evict(gone)
            self._changed.notify_all()
            return gone

    def shed(self, nbytes: int) -> bool:
        """Give up so many bytes of what may go, whatever the budget says. False when there is nothing."""
        with self._changed:
            used_bytes = sum(held.extent.nbytes for held in self._all.held.values()) + self._all.unmovable_bytes()
            evict = self._all.plan_shrink(used_bytes - nbytes)
            self._evict(evict)
            return bool(evict)

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

    def residents(self) -> list[ResidentExtent]:
        with self._changed:
            return [
                ResidentExtent(
                    id_, held.extent.nbytes, dict(held.holders), id_ in self._all.pinned, held.source, held.hits
                )
                for id_, held in self._all.held.items()
            ]

    def bytes_by_holder(self) -> dict[str, int]:
        with self._changed:
            return dict(self._all.bytes_by_holder())

    @property
    def resident_bytes(self) -> int:
        with self._changed:
            return sum(held.extent.nbytes for held in self._all.held.values())

    @property
    def wanted_bytes(self) -> int:
        """What the first of those who wait lacks."""
        with self._changed:
            return self._missing_bytes(self._waiting[0]) if self._waiting else 0

    def holders_text(self) -> str:
        with self._changed:
            return describe_holders(self._all)

    def _may_go(self, ticket: _Ticket, holder: str) -> bool:
        first = self._waiting[0]
        if not self._all.missing(ticket.wanted):
            overtakes = self._clock() - first.since_s < OVERTAKE_S
            return first is ticket or overtakes or any(holder in entry.holders for entry in self._all.entries())
        return first is ticket and not self._missing_bytes(ticket)

    def _missing_bytes(self, ticket: _Ticket) -> int:
        missing = self._all.missing(ticket.wanted)
        return self._all.plan_room(missing, self._budget_bytes, ticket.wanted).missing_bytes if missing else 0

    def _never_fits(self, ticket: _Ticket) -> bool:
        return self._pinned_bytes(ticket) + _total(ticket) > self._budget_bytes

    def _pinned_bytes(self, ticket: _Ticket) -> int:
        held = self._all.held
        return sum(held[id_].extent.nbytes for id_ in self._all.pinned if id_ in held and id_ not in ticket.wanted)

    def _freed(self) -> None:
        self._evict(self._all.plan_shrink(self._budget_bytes))
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
