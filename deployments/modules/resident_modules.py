"""The books of a replica: which modules are there or on their way, who uses them, and who waits for their room."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from deployments.modules.built_modules import Built, Part, PartName, Slot, Wanted, distinct_bytes
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.residency.admission import Admission, Ticket
from weights.residency.entries import Book
from weights.residency.leases import Entry
from weights.residency.policy import rate_class
from weights.residency.sizes import bytes_of


@dataclass(eq=False, slots=True)
class Taken:
    """All slots of a request, leased until `give_back`; none while it waits for room, or when it is refused."""

    wanted: Wanted
    settled: asyncio.Future[tuple[dict[PartName, Slot], float]]
    ticket: Ticket[Slot]

    @property
    def slots(self) -> Mapping[PartName, Slot]:
        return self.settled.result()[0]

    @property
    def at_s(self) -> float:
        """Return since when it has them."""
        return self.settled.result()[1]

    @property
    def fresh(self) -> Collection[PartName]:
        """Return the names of the slots that are built for it."""
        return _names_of(self.wanted, self.ticket.fresh)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The modules that occupy the budget, in bytes by module key: ready ones, and those on their way.

    Each counts whole, and `budget_bytes` is so much larger than the budget as they share: what fits can be told by
    adding up. `leased` and `pinned` ones stay.
    """

    budget_bytes: int
    ready: Mapping[str, int]
    coming: Mapping[str, int]
    leased: frozenset[str]
    pinned: frozenset[str]


P = ParamSpec("P")
_ResultT = TypeVar("_ResultT")


def _locked(
    method: Callable[Concatenate[ResidentModules, P], _ResultT],
) -> Callable[Concatenate[ResidentModules, P], _ResultT]:
    """Hold the books' lock during the call."""

    def locked(self: ResidentModules, /, *args: P.args, **kwargs: P.kwargs) -> _ResultT:
        with self._lock:
            return method(self, *args, **kwargs)

    locked.__doc__ = method.__doc__
    return locked


class ResidentModules:
    """The modules that are here, under a byte budget that counts what they share once, and the queue for its room.

    Lives on one event loop, but `give_up` comes from another thread. `fill` is told of the slots that are new for a
    request, with all that it takes; `let_go`, of those that are dropped. `is_called_back` says whether the node waits
    for some of these extents.
    """

    def __init__(
        self,
        budget_bytes: int,
        fill: Callable[[Wanted, Mapping[PartName, Slot], Collection[PartName]], None],
        let_go: Callable[[Sequence[Slot]], None],
        clock: Callable[[], float],
        is_called_back: Callable[[Sequence[ExtentRef]], bool] = lambda extents: False,
    ) -> None:
        self._lock = threading.RLock()
        self._fill = fill
        self._let_go = let_go
        self._clock = clock
        self._is_called_back = is_called_back
        self._book: Book[Slot] = Book(budget_bytes, clock, on_gone=self._gone)
        self._queue = Admission(self._book, clock, "this replica")
        self._pins: dict[str, dict[str, Part]] = {}  # by model and key
        self._serials = itertools.count(1)
        self._bound: dict[tuple[str, tuple[int, ...]], Any] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._queue)

    @property
    @_locked
    def slots(self) -> dict[str, Slot]:
        """The modules that the next request gets, built or not yet, by key."""
        return {key: entry.thing for key, entry in self._book.entries.items() if entry.thing}

    # requests

    @_locked
    def take(self, wanted: Wanted) -> Taken:
        """Lease every slot or none. The ticket says whether it is refused, or has to `wait_for_room`."""
        settled: asyncio.Future[tuple[dict[PartName, Slot], float]] = asyncio.get_running_loop().create_future()
        holder = f"{wanted.model}#{next(self._serials)}"
        ticket = self._queue.ask(str(wanted), wanted.sizes, holder, partial(self._settle, wanted, settled))
        return Taken(wanted, settled, ticket)

    async def wait_for_room(self, taken: Taken, max_wait_s: float) -> None:
        """Return when it has its slots; it is refused when there is no room in time."""
        try:
            await asyncio.wait([taken.settled], timeout=max_wait_s)
        except asyncio.CancelledError:
            self._end(taken.ticket)
            raise
        if taken.ticket.is_waiting:
            self._end(taken.ticket)

    @_locked
    def start_computing(self, slots: Collection[Slot]) -> bool:
        """Count one more request that computes with them: they are not given up meanwhile.

        False when one of them was condemned or given up since it was taken.
        """
        if any(slot.is_condemned or slot.entry.is_gone for slot in slots):
            return False
        for slot in slots:
            slot.num_running += 1
        return True

    @_locked
    def stop_computing(self, slots: Iterable[Slot]) -> None:
        """End what `start_computing` began."""
        for slot in slots:
            slot.num_running -= 1

    def give_back(self, taken: Taken) -> None:
        """Give the leases back. What nobody leases any more and the node waits for goes at once."""
        self._end(taken.ticket)

    @_locked
    def serve(self) -> None:
        """Let those go on that wait for what became free."""
        self._queue.serve()

    # building

    @_locked
    def arrive(self, slot: Slot, built: Built) -> None:
        """Note that it is built. It may go at once, when nobody wants it any more."""
        slot.built.set_result(built)
        self._book.arrive(slot.entry, slot, rate_class(built.reload_s, slot.entry.nbytes))
        self._give_up_called([slot.entry])
        self._queue.serve()

    @_locked
    def fail(self, slot: Slot, error: Exception) -> None:
        """Drop what could not be built, and tell all who wait for it."""
        self._book.fail(slot.entry)
        self._let_go([slot])
        slot.fail(error)
        self._queue.serve()

    # what goes

    @_locked
    def give_up(self, extents: Collection[str], is_overdue: bool) -> None:
        """Drop what is over these extents, unless it is leased or pinned. Thread-safe.

        `is_overdue`: then what is leased goes too where nobody computes with it yet, and nobody new gets the rest.
        """
        for entry, slot in self._current():
            if not entry.is_here or entry.key in self._book.pinned or not _is_over(slot, extents, ()):
                continue
            if not entry.is_leased:
                self._book.evict([entry])
            elif is_overdue:
                self._book.condemn(entry)
                if not slot.num_running:
                    for holder in list(entry.firm):
                        self._book.unlease(entry, holder)

    @_locked
    def condemn(self, extents: Collection[str], hashes: Collection[str]) -> list[Slot]:
        """Give nobody new what was built over these extents or tensors; return it. It goes with its last lease."""
        found = [(entry, slot) for entry, slot in self._current() if _is_over(slot, extents, hashes)]
        for entry, slot in found:
            slot.is_condemned = True
            self._book.condemn(entry)
        self._queue.serve()
        return [slot for _, slot in found]

    @_locked
    def evict(self, model: str, keep: Collection[str] = ()) -> list[str]:
        """Drop what only `model` has used, but for the keys to `keep`.

        Returns the components that could not go: leased, on their way, or pinned.
        """
        stays: list[str] = []
        gone: list[Entry[Slot]] = []
        for entry, slot in self._all():
            if model in slot.models:
                if slot.is_needed or entry.key in self._book.pinned:
                    stays.append(slot.component.name)
                elif len(slot.models) == 1 and entry.key not in keep:
                    gone.append(entry)
                else:
                    slot.models.discard(model)
        self._book.evict(gone)
        self._queue.serve()
        return stays

    @_locked
    def set_budget(self, budget_bytes: int, resize: Callable[[int], None]) -> None:
        """Evict what is too much for that budget, then let the device `resize`.

        Raises BudgetExceeded when too much is leased or pinned; then the budget stays.
        """
        before, self._book.budget_bytes = self._book.budget_bytes, budget_bytes
        try:
            plan = self._book.plan_shrink()
            if plan.missing_bytes:
                raise BudgetExceeded(
                    f"a budget of {budget_bytes} bytes is {plan.missing_bytes} bytes less than what is leased or pinned"
                )
            self._book.evict(plan.evict)
            resize(budget_bytes)
        except BaseException:
            self._book.budget_bytes = before
            raise
        self._queue.serve()

    # pins

    @_locked
    def pin(self, model: str, parts: Iterable[Part]) -> Collection[Part]:
        """Never evict these, nor when they come only later. Return what was pinned for the model before.

        Raises BudgetExceeded when the pinned ones do not fit; then nothing changes.
        """
        pins = {part.component.module_key: part for part in parts}
        others = [part for name, known in self._pins.items() if name != model for part in known.values()]
        needed_bytes = distinct_bytes(*(part.footprint for part in (*pins.values(), *others)))
        if needed_bytes > self._book.budget_bytes:
            raise BudgetExceeded(
                f"{model!r} cannot be pinned: {needed_bytes} bytes would be, under this replica's budget of "
                f"{self._book.budget_bytes} (pinned: {', '.join(self._pins) or 'nothing'})"
            )
        before = self._pins.get(model, {})
        self._pins[model] = pins
        self._pins_changed()
        return before.values()

    @_locked
    def unpin(self, model: str) -> Collection[Part]:
        """Let it be evicted, but for what another model pins. Return what was pinned for it."""
        before = self._pins.pop(model, {})
        self._pins_changed()
        return before.values()

    @_locked
    def pinned_parts(self) -> list[Part]:
        """Return what is pinned, here or not."""
        return [part for pins in self._pins.values() for part in pins.values()]

    # what is here

    @_locked
    def fits_beside(self, wanted: Wanted) -> bool:
        """Return whether there is room without evicting anything."""
        plan = self._book.plan_room(wanted.sizes)
        return not plan.evict and not plan.missing_bytes

    @_locked
    def can_hold(self, wanted: Wanted) -> bool:
        """Return whether there is room beside what is pinned, once all else is gone."""
        return self._book.bytes_beside_pins(wanted.sizes) <= self._book.budget_bytes

    @_locked
    def occupancy(self) -> Occupancy:
        """Return what occupies the budget."""
        sizes = {key: bytes_of(entry.size) for key, entry in self._book.entries.items()}
        slots = dict(self.slots)
        ready = {key for key, slot in slots.items() if slot.result is not None and not slot.is_condemned}
        return Occupancy(
            max(0, self._book.budget_bytes + sum(sizes.values()) - self._book.used_bytes),
            {key: nbytes for key, nbytes in sizes.items() if key in ready},
            {key: nbytes for key, nbytes in sizes.items() if key not in ready},
            frozenset(key for key, slot in slots.items() if slot.leases),
            frozenset(self._book.pinned),
        )

    def bound(self, settings: str, serials: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """Return what was made with these settings over the modules of these numbers; it goes when one of them does."""
        key = (settings, serials)
        if key not in self._bound:
            self._bound[key] = make()
        return self._bound[key]

    @_locked
    def describe(self) -> dict[str, Any]:
        """Return a description as JSON-able values."""
        slots = [slot for _, slot in self._all()]
        return {
            "budget_bytes": self._book.budget_bytes,
            "charged_bytes": self._book.used_bytes,
            "resident_bytes": distinct_bytes(*(slot.tensors for slot in slots)),
            "leased_bytes": distinct_bytes(*(slot.tensors for slot in slots if slot.is_needed)),
            "modules": [slot.describe() | {"key": slot.key, "pinned": slot.key in self._book.pinned} for slot in slots],
            "pinned_models": sorted(self._pins),
        }

    # inside

    def _settle(
        self, wanted: Wanted, settled: asyncio.Future[tuple[dict[PartName, Slot], float]], ticket: Ticket[Slot]
    ) -> None:
        """Begin to build what is new, at once: whoever asked may be cancelled before it hears of it."""
        slots: dict[PartName, Slot] = {}
        for name, part in wanted.parts.items() if ticket.entries else ():
            entry = self._book.entries[part.component.module_key]
            if entry.thing is None:
                entry.thing = Slot(entry, part.component, part.extents, next(self._serials), is_adapter=name.is_adapter)
            slots[name] = entry.thing
            entry.thing.models.add(part.manifest.model)
        if ticket.fresh:
            self._fill(wanted, slots, _names_of(wanted, ticket.fresh))
        settled.set_result((slots, self._clock()))

    @_locked
    def _end(self, ticket: Ticket[Slot]) -> None:
        entries = ticket.entries or ()
        self._book.end_holder(ticket.holder)
        self._give_up_called(entries)
        self._queue.end_ticket(ticket)

    def _give_up_called(self, entries: Iterable[Entry[Slot]]) -> None:
        """Drop those that nobody leases and the node waits for, before somebody leases them again."""
        for entry in entries:
            may_go = entry.is_here and not entry.is_gone and not entry.is_leased and entry.key not in self._book.pinned
            if may_go and entry.thing and self._is_called_back(entry.thing.extents):
                self._book.evict([entry])

    def _pins_changed(self) -> None:
        pinned = {key for pins in self._pins.values() for key in pins}
        self._book.unpin(set(self._book.pinned) - pinned)
        self._book.pin(pinned)

    def _gone(self, entries: Sequence[Entry[Slot]]) -> None:
        slots = [entry.thing for entry in entries if entry.thing]
        for slot in slots:
            self._unbind(slot)
        self._let_go(slots)

    def _unbind(self, gone: Slot) -> None:
        """Forget what was made over it. A pipeline may also know an adapter: then those go that nobody uses now."""
        in_use = {slot.serial for _, slot in self._all() if slot.is_needed}
        self._bound = {
            (settings, serials): thing
            for (settings, serials), thing in self._bound.items()
            if gone.serial not in serials and (not gone.is_adapter or in_use.issuperset(serials))
        }

    def _current(self) -> list[tuple[Entry[Slot], Slot]]:
        return [(entry, entry.thing) for entry in self._book.entries.values() if entry.thing]

    def _all(self) -> list[tuple[Entry[Slot], Slot]]:
        return [*self._current(), *((entry, entry.thing) for entry in self._book.apart if entry.thing)]


def _names_of(wanted: Wanted, entries: Iterable[Entry[Slot]]) -> Collection[PartName]:
    """Return the first part of the request for each entry: equal parts are built once."""
    by_key: dict[str, PartName] = {}
    for name, part in wanted.parts.items():
        by_key.setdefault(part.component.module_key, name)
    return {by_key[entry.key] for entry in entries}


def _is_over(slot: Slot, extents: Collection[str], hashes: Collection[str]) -> bool:
    if any(extent.id in extents for extent in slot.extents):
        return True
    return any(hash_ in slot.component.bytes_by_hash for hash_ in hashes)
