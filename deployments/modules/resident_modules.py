"""The books of a replica: which modules are there or on their way, who uses them, and who waits for their room."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from deployments.modules.bound_pipelines import BoundPipelines
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from deployments.modules.device_tier import ArenaTier, DeviceTier, KeptExtents
from deployments.modules.parts import HOST, Part, PartName, RequestParts, distinct_bytes
from deployments.modules.slots import Built, ModuleSlot
from weights.records.errors import BudgetExceeded
from weights.residency.admission import Admission, Ticket
from weights.residency.contents import Entry, MemoryTier
from weights.residency.entry_table import EntryTable
from weights.residency.policy import rate_class
from weights.residency.room_plan import fits_beside_pins, plan_room, plan_shrink
from weights.residency.sizes import DistinctBytes, bytes_of, shown_bytes


class Filler(Protocol):
    """Builds what is new for a request."""

    def start_filling(
        self, wanted: RequestParts, slots: Mapping[PartName, ModuleSlot], fresh: Collection[PartName]
    ) -> None:
        """Begin to build the `fresh` ones of its slots. Must not wait, nor call back."""
        ...


@dataclass(eq=False, slots=True)
class SlotLease:
    """All slots of a request, leased until `give_back`; none while it waits for room, or when it is refused."""

    modules: ResidentModules
    wanted: RequestParts
    settled: asyncio.Future[tuple[dict[PartName, ModuleSlot], float]]
    ticket: Ticket[ModuleSlot]

    @property
    def slots(self) -> Mapping[PartName, ModuleSlot]:
        return self.settled.result()[0]

    @property
    def at_s(self) -> float:
        """Return since when it has them."""
        return self.settled.result()[1]

    @property
    def fresh(self) -> Collection[PartName]:
        """Return the names of the slots that are built for it."""
        return _names_of(self.wanted, self.ticket.fresh)

    async def wait_for_room(self, max_wait_s: float) -> None:
        """Return when it has its slots; it is refused when there is no room in time."""
        try:
            await asyncio.wait([self.settled], timeout=max_wait_s)
        except asyncio.CancelledError:
            self.give_back()
            raise
        if self.ticket.is_waiting:
            self.give_back()

    def start_computing(self) -> bool:
        """Count one more request that computes with the slots: they are not given up meanwhile.

        False when one of them was invalidated or given up since it was taken.
        """
        slots = self.slots.values()
        with self.modules.lock:
            if any(slot.is_damaged or slot.entry.is_gone for slot in slots):
                return False
            for slot in slots:
                slot.num_running += 1
            return True

    def stop_computing(self) -> None:
        """End what `start_computing` began."""
        with self.modules.lock:
            for slot in self.slots.values():
                slot.num_running -= 1

    def give_back(self) -> None:
        """Give the leases back. What nobody leases any more and the node waits for goes at once."""
        with self.modules.lock:
            entries = self.ticket.entries or ()
            self.modules.table.end_holder(self.ticket.holder)
            self.modules.release_requested(entries)
            self.modules.queue.end_ticket(self.ticket)


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
    """Hold the books' lock during the call: the node's answer does not wait for the event loop, which may be busy."""

    def locked(self: ResidentModules, /, *args: P.args, **kwargs: P.kwargs) -> _ResultT:
        with self.lock:
            return method(self, *args, **kwargs)

    locked.__doc__ = method.__doc__
    return locked


class ResidentModules(MemoryTier):
    """The modules that are here, under a byte budget that counts what they share once, and the queue for its room.

    Lives on one event loop, but `release_recalled` comes from another thread. What is dropped is taken back by
    `builder` and released by `tier`. `kept` are the extents that the node may call back, None where it calls back none.

    `table`, `queue` and `lock` are for leases on slots, and nobody else.
    """

    def __init__(
        self,
        budget: ModuleBudget,
        builder: Builder,
        tier: DeviceTier,
        kept: KeptExtents | None,
        clock: Callable[[], float],
    ) -> None:
        """Each of the budget's other devices has the same budget for layers of language models, and the host its own
        for the KV caches of those that it computes.
        """
        self.lock = threading.RLock()
        self.pipelines = BoundPipelines()
        self._budget = budget
        self._builder = builder
        self._tier = tier
        self._kept = kept
        host_bytes = 0 if budget.is_host else budget.host_bytes or 0
        elsewhere = {HOST: host_bytes, **dict.fromkeys(budget.others, budget.nbytes)}
        self.table: EntryTable[ModuleSlot] = EntryTable(budget.nbytes, clock, self, elsewhere=elsewhere)
        self.queue = Admission(self.table, budget.name)
        self._serials = itertools.count(1)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self.queue.waiting)

    @property
    @_locked
    def slots(self) -> dict[str, ModuleSlot]:
        """The modules that the next request gets, built or not yet, by key."""
        return {key: entry.thing for key, entry in self.table.entries.items() if entry.thing}

    # requests

    @_locked
    def take(self, wanted: RequestParts, filler: Filler) -> SlotLease:
        """Lease every slot or none. The ticket says whether it is refused, or has to `wait_for_room`."""
        settled: asyncio.Future[tuple[dict[PartName, ModuleSlot], float]] = asyncio.get_running_loop().create_future()
        table, serials = self.table, self._serials

        def settle(ticket: Ticket[ModuleSlot]) -> None:
            """Begin to build what is new, at once: whoever asked may be cancelled before it is notified."""
            slots = _slots_of(wanted, table, serials) if ticket.entries else {}
            if ticket.fresh:
                filler.start_filling(wanted, slots, _names_of(wanted, ticket.fresh))
            settled.set_result((slots, table.now_s()))

        holder = f"{wanted.model}#{next(serials)}"
        return SlotLease(self, wanted, settled, self.queue.ask(str(wanted), wanted.sizes, holder, settle))

    @_locked
    def serve(self) -> None:
        """Let those go on that wait for what became free."""
        self.queue.serve()

    # building

    @_locked
    def arrive(self, slot: ModuleSlot, built: Built) -> None:
        """Note that it is built. It may go at once, when nobody wants it any more."""
        slot.built.set_result(built)
        self.table.arrive(slot.entry, slot, rate_class(built.reload_s, slot.entry.nbytes))
        self.release_requested([slot.entry])
        self.queue.serve()

    @_locked
    def fail(self, slot: ModuleSlot, error: Exception) -> None:
        """Drop what could not be built, and tell all who wait for it."""
        self.table.fail(slot.entry)
        self._let_go([slot])
        slot.fail(error)
        self.queue.serve()

    # what goes

    @_locked
    def release_recalled(self, extents: Collection[str], is_overdue: bool) -> None:
        """Drop what is over these extents, unless it is leased or pinned. Thread-safe.

        `is_overdue`: then what is leased goes too where nobody computes with it yet, and nobody new gets the rest.
        """
        for slot in self.slots.values():
            entry = slot.entry
            if not entry.is_here or entry.key in self.table.pinned or not _is_over(slot, extents, ()):
                continue
            if not entry.is_leased:
                self.table.evict([entry])
            elif is_overdue:
                self.table.invalidate(entry)
                if not slot.num_running:
                    for holder in list(entry.held):
                        self.table.unlease(entry, holder)

    @_locked
    def invalidate(self, extents: Collection[str], hashes: Collection[str]) -> list[ModuleSlot]:
        """Give nobody new what was built over these extents or tensors; return it. It goes with its last lease."""
        found = [slot for slot in self.slots.values() if _is_over(slot, extents, hashes)]
        for slot in found:
            slot.is_damaged = True
            self.table.invalidate(slot.entry)
        self.queue.serve()
        return found

    @_locked
    def evict(self, model: str, keep: Collection[str] = ()) -> list[str]:
        """Drop what only `model` has used, but for the keys to `keep`.

        Returns the components that could not go: leased, on their way, or pinned.
        """
        stays: list[str] = []
        gone: list[Entry[ModuleSlot]] = []
        for slot in self._all():
            if model in slot.models:
                if slot.is_needed or slot.key in self.table.pinned:
                    stays.append(slot.component.name)
                elif len(slot.models) == 1 and slot.key not in keep:
                    gone.append(slot.entry)
                else:
                    slot.models.discard(model)
        self.table.evict(gone)
        self.queue.serve()
        return stays

    @_locked
    def set_budget(self, budget_bytes: int) -> None:
        """Evict what is too much for that budget, here and on the device.

        Raises BudgetExceeded when too much is leased or pinned; then the budget stays.
        """
        before = self.table.elsewhere
        self.table.elsewhere = {**before, **dict.fromkeys(self._budget.others, budget_bytes)}
        plan = plan_shrink(self.table, budget_bytes)
        if plan.missing_bytes:
            self.table.elsewhere = before
            missing = shown_bytes(plan.missing_bytes)
            raise BudgetExceeded(f"{shown_bytes(budget_bytes)} are {missing} less than the leased and pinned bytes")
        self.table.evict(plan.evict)
        if isinstance(self._tier, ArenaTier):
            self._tier.resize(budget_bytes)
        self.table.budget_bytes = budget_bytes
        self.queue.serve()

    @_locked
    def pin_only(self, parts: Collection[Part]) -> None:
        """Never evict these, nor when they come only later. All that was pinned before and is not among them may go.

        Raises BudgetExceeded when more than before are to be pinned and they do not fit; then nothing changes.
        """
        pinned, needed = {part.component.module_key for part in parts}, DistinctBytes()
        for part in parts:
            needed.add(part.footprint)
        if not pinned <= set(self.table.pinned) and needed.over(self.table.budget_bytes, self.table.elsewhere) > 0:
            beside = "".join(f", {shown_bytes(nbytes)} of {place}" for place, nbytes in needed.elsewhere.items())
            raise BudgetExceeded(
                f"{self._budget.name} is {shown_bytes(self.table.budget_bytes)}, and "
                f"{shown_bytes(needed.total)}{beside} would be pinned"
            )
        self.table.unpin(set(self.table.pinned) - pinned)
        self.table.pin(pinned)

    # what is here

    @_locked
    def fits_beside(self, wanted: RequestParts) -> bool:
        """Return whether there is room without evicting anything."""
        plan = plan_room(self.table, wanted.sizes)
        return not plan.evict and not plan.missing_bytes

    @_locked
    def can_hold(self, wanted: RequestParts) -> bool:
        """Return whether there is room beside what is pinned, once all else is gone."""
        return fits_beside_pins(self.table, wanted.sizes)

    @_locked
    def occupancy(self) -> Occupancy:
        """Return the occupants of the budget."""
        sizes = {key: bytes_of(entry.size) for key, entry in self.table.entries.items()}
        slots = dict(self.slots)
        ready = {key for key, slot in slots.items() if slot.result is not None and not slot.is_damaged}
        return Occupancy(
            max(0, self.table.budget_bytes + sum(sizes.values()) - self.table.used_bytes),
            {key: nbytes for key, nbytes in sizes.items() if key in ready},
            {key: nbytes for key, nbytes in sizes.items() if key not in ready},
            frozenset(key for key, slot in slots.items() if slot.leases),
            frozenset(self.table.pinned),
        )

    @_locked
    def describe(self) -> dict[str, Any]:
        """Return a description as JSON-able values."""
        slots = self._all()
        return {
            "budget_bytes": self.table.budget_bytes,
            "charged_bytes": self.table.used_bytes,
            "resident_bytes": distinct_bytes(*(slot.tensors for slot in slots)),
            "leased_bytes": distinct_bytes(*(slot.tensors for slot in slots if slot.is_needed)),
            "modules": [slot.describe() | {"key": slot.key, "pinned": slot.key in self.table.pinned} for slot in slots],
            "elsewhere": {
                place: {"budget_bytes": budget_bytes, "charged_bytes": self.table.used.elsewhere[place]}
                for place, budget_bytes in self.table.elsewhere.items()
                if budget_bytes
            },
        }

    # inside

    def release_requested(self, entries: Iterable[Entry[ModuleSlot]]) -> None:
        """Drop those that nobody leases and the node waits for, before somebody leases them again."""
        for entry in entries:
            may_go = entry.is_here and not entry.is_gone and not entry.is_leased and entry.key not in self.table.pinned
            if may_go and self._kept and entry.thing and self._kept.is_called_back(entry.thing.extents):
                self.table.evict([entry])

    def entries_gone(self, entries: Sequence[Entry[Any]]) -> None:
        """Take back what was built, and forget what was made over it."""
        slots = [entry.thing for entry in entries if entry.thing]
        for slot in slots:
            self.pipelines.forget(slot, {other.serial for other in self._all() if other.is_needed})
        self._let_go(slots)

    def _let_go(self, slots: Sequence[ModuleSlot]) -> None:
        for slot in slots:
            if slot.result:
                self._builder.retire(slot.result.thing)
        # A fetch that failed leased nothing, and another slot may lease the same extents.
        self._tier.release([slot for slot in slots if slot.is_placed])

    def _all(self) -> list[ModuleSlot]:
        """Return also those that nobody new gets."""
        return [*self.slots.values(), *(entry.thing for entry in self.table.detached if entry.thing)]


def _slots_of(
    wanted: RequestParts, table: EntryTable[ModuleSlot], serials: Iterator[int]
) -> dict[PartName, ModuleSlot]:
    """Return the slots of a request whose entries are in the table; those that are new have none yet."""
    slots: dict[PartName, ModuleSlot] = {}
    for name, part in wanted.parts.items():
        entry = table.entries[part.component.module_key]
        if entry.thing is None:
            entry.thing = ModuleSlot(entry, part.component, part.extents, next(serials), is_adapter=name.is_adapter)
        slots[name] = entry.thing
        entry.thing.models.add(part.manifest.model)
    return slots


def _names_of(wanted: RequestParts, entries: Iterable[Entry[ModuleSlot]]) -> Collection[PartName]:
    """Return the first part of the request for each entry: equal parts are built once."""
    by_key: dict[str, PartName] = {}
    for name, part in wanted.parts.items():
        by_key.setdefault(part.component.module_key, name)
    return {by_key[entry.key] for entry in entries}


def _is_over(slot: ModuleSlot, extents: Collection[str], hashes: Collection[str]) -> bool:
    if any(extent.id in extents for extent in slot.extents):
        return True
    return any(hash_ in slot.component.bytes_by_hash for hash_ in hashes)
