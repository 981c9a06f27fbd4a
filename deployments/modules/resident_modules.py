"""The books of a replica: which modules are there or on their way, who uses them, and who waits for their room."""

from __future__ import annotations

import asyncio
import copy
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from deployments.engines.costs.memory_limits import forget_frames
from deployments.engines.llm.engine import LLMEngine
from deployments.modules.parts import HOST, Part, PartName, RequestParts, distinct_bytes
from weights.records.errors import BudgetExceeded
from weights.records.manifest import Component, ExtentRef
from weights.residency.admission import Admission, Ticket
from weights.residency.entry_table import Entry, EntryTable
from weights.residency.policy import rate_class
from weights.residency.room_plan import fits_beside_pins, plan_room, plan_shrink
from weights.residency.sizes import DistinctBytes, bytes_of, shown_bytes


@dataclass(frozen=True, slots=True)
class Built:
    """The thing that runs; milliseconds, and bytes by tier as in `SwitchReport`."""

    thing: Any
    attach_ms: float
    build_ms: float
    storage_bytes: int
    host_bytes: int
    device_bytes: int
    reused_bytes: int

    @property
    def reload_s(self) -> float:
        return (self.attach_ms + self.build_ms) / 1e3


@dataclass(eq=False)
class ModuleSlot:
    """One module that is there or on its way."""

    entry: Entry[ModuleSlot]
    component: Component
    extents: tuple[ExtentRef, ...]
    serial: int
    num_running: int = 0  # of the leases: requests that have all they need, and compute
    models: set[str] = field(default_factory=set)
    built: asyncio.Future[Built | Exception] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_placed: bool = False
    is_adapter: bool = False
    is_damaged: bool = False  # over weights that were written to: what was computed with it is withheld

    @property
    def tensors(self) -> Mapping[str, int]:
        """Return the bytes of its tensors, by hash. What nobody new may have is there beside the next of its kind."""
        by_hash = self.component.bytes_by_hash
        if self.entry.is_current:
            return by_hash
        return {f"{name}#{self.serial}": count for name, count in by_hash.items()}

    @property
    def leases(self) -> int:
        """Requests that have a lease on it."""
        return self.entry.held.total()

    @property
    def is_needed(self) -> bool:
        """Leased, or on its way."""
        return self.entry.is_leased or not self.entry.is_here

    @property
    def key(self) -> str:
        return self.component.module_key

    @property
    def nbytes(self) -> int:
        return self.component.nbytes

    @property
    def holder(self) -> str:
        """Its name in the books of the device."""
        return f"{self.component.name}#{self.serial}"

    @property
    def result(self) -> Built | None:
        """The built thing and its figures; None while it is on its way, or when that failed."""
        found = self.built.result() if self.built.done() and not self.built.cancelled() else None
        return found if isinstance(found, Built) else None

    @property
    def thing(self) -> Any:
        """The thing that was built, of a slot that is ready."""
        assert self.result
        return self.result.thing

    def outcome(self) -> Built:
        """Return what was built, once it is.

        Raises what `fail` was told: a copy, because whoever waits adds its own frames, and they know this slot.
        """
        found = self.built.result()
        if isinstance(found, Exception):
            raise copy.copy(found)
        return found

    def fail(self, error: Exception) -> None:
        """Tell all who wait the error, without the frames that it came through."""
        forget_frames(error)
        self.built.set_result(error)

    def describe(self) -> dict[str, Any]:
        """Return a description as JSON-able values; of a language model, the blocks of its KV cache as well."""
        described = {
            "component": self.component.name,
            "models": sorted(self.models),
            "bytes": self.nbytes,
            "leases": self.leases,
            "ready": self.result is not None,
            "damaged": self.is_damaged,
        }
        if self.result is not None and isinstance(engine := self.result.thing, LLMEngine):
            found = engine.stats()
            described["kv_blocks"] = {"used": found.num_blocks - found.num_free_blocks, "total": found.num_blocks}
        return described


@dataclass(eq=False, slots=True)
class SlotLease:
    """All slots of a request, leased until `give_back`; none while it waits for room, or when it is refused."""

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

    Lives on one event loop, but `release_recalled` comes from another thread. `fill` gets the slots that are new for a
    request, with all that it takes; `let_go`, those that are dropped. `is_called_back` says whether the node waits for
    some of these extents.
    """

    def __init__(
        self,
        budget_bytes: int,
        fill: Callable[[RequestParts, Mapping[PartName, ModuleSlot], Collection[PartName]], None],
        let_go: Callable[[Sequence[ModuleSlot]], None],
        clock: Callable[[], float],
        is_called_back: Callable[[Sequence[ExtentRef]], bool] = lambda extents: False,
        budget_name: str = "this replica's budget",
        *,
        devices: Collection[str] = (),
        host_bytes: int = 0,
    ) -> None:
        """Each of the other `devices` has the same budget for layers of language models, and the host `host_bytes` for
        the KV caches of those that it computes.
        """
        self._devices = devices
        self._budget_name = budget_name
        self._lock = threading.RLock()
        self._fill = fill
        self._let_go = let_go
        self._clock = clock
        self._is_called_back = is_called_back
        elsewhere = {HOST: host_bytes, **dict.fromkeys(devices, budget_bytes)}
        self._table: EntryTable[ModuleSlot] = EntryTable(budget_bytes, clock, on_gone=self._gone, elsewhere=elsewhere)
        self._queue = Admission(self._table, clock, budget_name)
        self._pins: dict[str, dict[str, Part]] = {}  # by model and key
        self._serials = itertools.count(1)
        self._bound: dict[tuple[str, tuple[int, ...]], Any] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room."""
        return len(self._queue.waiting)

    @property
    @_locked
    def slots(self) -> dict[str, ModuleSlot]:
        """The modules that the next request gets, built or not yet, by key."""
        return {key: entry.thing for key, entry in self._table.entries.items() if entry.thing}

    # requests

    @_locked
    def take(self, wanted: RequestParts) -> SlotLease:
        """Lease every slot or none. The ticket says whether it is refused, or has to `wait_for_room`."""
        settled: asyncio.Future[tuple[dict[PartName, ModuleSlot], float]] = asyncio.get_running_loop().create_future()
        holder = f"{wanted.model}#{next(self._serials)}"
        ticket = self._queue.ask(str(wanted), wanted.sizes, holder, partial(self._settle, wanted, settled))
        return SlotLease(wanted, settled, ticket)

    async def wait_for_room(self, taken: SlotLease, max_wait_s: float) -> None:
        """Return when it has its slots; it is refused when there is no room in time."""
        try:
            await asyncio.wait([taken.settled], timeout=max_wait_s)
        except asyncio.CancelledError:
            self._end(taken.ticket)
            raise
        if taken.ticket.is_waiting:
            self._end(taken.ticket)

    @_locked
    def start_computing(self, slots: Collection[ModuleSlot]) -> bool:
        """Count one more request that computes with them: they are not given up meanwhile.

        False when one of them was invalidated or given up since it was taken.
        """
        if any(slot.is_damaged or slot.entry.is_gone for slot in slots):
            return False
        for slot in slots:
            slot.num_running += 1
        return True

    @_locked
    def stop_computing(self, slots: Iterable[ModuleSlot]) -> None:
        """End what `start_computing` began."""
        for slot in slots:
            slot.num_running -= 1

    def give_back(self, taken: SlotLease) -> None:
        """Give the leases back. What nobody leases any more and the node waits for goes at once."""
        self._end(taken.ticket)

    @_locked
    def serve(self) -> None:
        """Let those go on that wait for what became free."""
        self._queue.serve()

    # building

    @_locked
    def arrive(self, slot: ModuleSlot, built: Built) -> None:
        """Note that it is built. It may go at once, when nobody wants it any more."""
        slot.built.set_result(built)
        self._table.arrive(slot.entry, slot, rate_class(built.reload_s, slot.entry.nbytes))
        self._release_requested([slot.entry])
        self._queue.serve()

    @_locked
    def fail(self, slot: ModuleSlot, error: Exception) -> None:
        """Drop what could not be built, and tell all who wait for it."""
        self._table.fail(slot.entry)
        self._let_go([slot])
        slot.fail(error)
        self._queue.serve()

    # what goes

    @_locked
    def release_recalled(self, extents: Collection[str], is_overdue: bool) -> None:
        """Drop what is over these extents, unless it is leased or pinned. Thread-safe.

        `is_overdue`: then what is leased goes too where nobody computes with it yet, and nobody new gets the rest.
        """
        for entry, slot in self._current():
            if not entry.is_here or entry.key in self._table.pinned or not _is_over(slot, extents, ()):
                continue
            if not entry.is_leased:
                self._table.evict([entry])
            elif is_overdue:
                self._table.invalidate(entry)
                if not slot.num_running:
                    for holder in list(entry.held):
                        self._table.unlease(entry, holder)

    @_locked
    def invalidate(self, extents: Collection[str], hashes: Collection[str]) -> list[ModuleSlot]:
        """Give nobody new what was built over these extents or tensors; return it. It goes with its last lease."""
        found = [(entry, slot) for entry, slot in self._current() if _is_over(slot, extents, hashes)]
        for entry, slot in found:
            slot.is_damaged = True
            self._table.invalidate(entry)
        self._queue.serve()
        return [slot for _, slot in found]

    @_locked
    def evict(self, model: str, keep: Collection[str] = ()) -> list[str]:
        """Drop what only `model` has used, but for the keys to `keep`.

        Returns the components that could not go: leased, on their way, or pinned.
        """
        stays: list[str] = []
        gone: list[Entry[ModuleSlot]] = []
        for entry, slot in self._all():
            if model in slot.models:
                if slot.is_needed or entry.key in self._table.pinned:
                    stays.append(slot.component.name)
                elif len(slot.models) == 1 and entry.key not in keep:
                    gone.append(entry)
                else:
                    slot.models.discard(model)
        self._table.evict(gone)
        self._queue.serve()
        return stays

    @_locked
    def set_budget(self, budget_bytes: int, resize: Callable[[int], None]) -> None:
        """Evict what is too much for that budget, then let the device `resize`.

        Raises BudgetExceeded when too much is leased or pinned; then the budget stays.
        """
        before = self._table.elsewhere
        self._table.elsewhere = {**before, **dict.fromkeys(self._devices, budget_bytes)}
        plan = plan_shrink(self._table, budget_bytes)
        if plan.missing_bytes:
            self._table.elsewhere = before
            missing = shown_bytes(plan.missing_bytes)
            raise BudgetExceeded(f"{shown_bytes(budget_bytes)} are {missing} less than what is leased or pinned")
        self._table.evict(plan.evict)
        resize(budget_bytes)
        self._table.budget_bytes = budget_bytes
        self._queue.serve()

    # pins

    @_locked
    def pin(self, model: str, parts: Iterable[Part]) -> Collection[Part]:
        """Never evict these, nor when they come only later. Return what was pinned for the model before.

        Raises BudgetExceeded when the pinned ones do not fit; then nothing changes.
        """
        pins = {part.component.module_key: part for part in parts}
        others = [part for name, known in self._pins.items() if name != model for part in known.values()]
        needed = DistinctBytes()
        for part in (*pins.values(), *others):
            needed.add(part.footprint)
        if needed.over(self._table.budget_bytes, self._table.elsewhere) > 0:
            beside = "".join(f", {shown_bytes(nbytes)} of {place}" for place, nbytes in needed.elsewhere.items())
            raise BudgetExceeded(
                f"{model!r} cannot be pinned: {self._budget_name} is {shown_bytes(self._table.budget_bytes)}, and "
                f"{shown_bytes(needed.total)}{beside} would be pinned (now: {', '.join(self._pins) or 'nothing'})"
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
    def fits_beside(self, wanted: RequestParts) -> bool:
        """Return whether there is room without evicting anything."""
        plan = plan_room(self._table, wanted.sizes)
        return not plan.evict and not plan.missing_bytes

    @_locked
    def can_hold(self, wanted: RequestParts) -> bool:
        """Return whether there is room beside what is pinned, once all else is gone."""
        return fits_beside_pins(self._table, wanted.sizes)

    @_locked
    def occupancy(self) -> Occupancy:
        """Return what occupies the budget."""
        sizes = {key: bytes_of(entry.size) for key, entry in self._table.entries.items()}
        slots = dict(self.slots)
        ready = {key for key, slot in slots.items() if slot.result is not None and not slot.is_damaged}
        return Occupancy(
            max(0, self._table.budget_bytes + sum(sizes.values()) - self._table.used_bytes),
            {key: nbytes for key, nbytes in sizes.items() if key in ready},
            {key: nbytes for key, nbytes in sizes.items() if key not in ready},
            frozenset(key for key, slot in slots.items() if slot.leases),
            frozenset(self._table.pinned),
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
            "budget_bytes": self._table.budget_bytes,
            "charged_bytes": self._table.used_bytes,
            "resident_bytes": distinct_bytes(*(slot.tensors for slot in slots)),
            "leased_bytes": distinct_bytes(*(slot.tensors for slot in slots if slot.is_needed)),
            "modules": [
                slot.describe() | {"key": slot.key, "pinned": slot.key in self._table.pinned} for slot in slots
            ],
            "pinned_models": sorted(self._pins),
            "elsewhere": {
                place: {"budget_bytes": budget_bytes, "charged_bytes": self._table.used.elsewhere[place]}
                for place, budget_bytes in self._table.elsewhere.items()
                if budget_bytes
            },
        }

    # inside

    def _settle(
        self,
        wanted: RequestParts,
        settled: asyncio.Future[tuple[dict[PartName, ModuleSlot], float]],
        ticket: Ticket[ModuleSlot],
    ) -> None:
        """Begin to build what is new, at once: whoever asked may be cancelled before it is notified."""
        slots: dict[PartName, ModuleSlot] = {}
        for name, part in wanted.parts.items() if ticket.entries else ():
            entry = self._table.entries[part.component.module_key]
            if entry.thing is None:
                entry.thing = ModuleSlot(
                    entry, part.component, part.extents, next(self._serials), is_adapter=name.is_adapter
                )
            slots[name] = entry.thing
            entry.thing.models.add(part.manifest.model)
        if ticket.fresh:
            self._fill(wanted, slots, _names_of(wanted, ticket.fresh))
        settled.set_result((slots, self._clock()))

    @_locked
    def _end(self, ticket: Ticket[ModuleSlot]) -> None:
        entries = ticket.entries or ()
        self._table.end_holder(ticket.holder)
        self._release_requested(entries)
        self._queue.end_ticket(ticket)

    def _release_requested(self, entries: Iterable[Entry[ModuleSlot]]) -> None:
        """Drop those that nobody leases and the node waits for, before somebody leases them again."""
        for entry in entries:
            may_go = entry.is_here and not entry.is_gone and not entry.is_leased and entry.key not in self._table.pinned
            if may_go and entry.thing and self._is_called_back(entry.thing.extents):
                self._table.evict([entry])

    def _pins_changed(self) -> None:
        pinned = {key for pins in self._pins.values() for key in pins}
        self._table.unpin(set(self._table.pinned) - pinned)
        self._table.pin(pinned)

    def _gone(self, entries: Sequence[Entry[ModuleSlot]]) -> None:
        slots = [entry.thing for entry in entries if entry.thing]
        for slot in slots:
            self._unbind(slot)
        self._let_go(slots)

    def _unbind(self, gone: ModuleSlot) -> None:
        """Forget what was made over it. A pipeline may also know an adapter: then those go that nobody uses now.

        None knows a part that is room alone.
        """
        in_use = {slot.serial for _, slot in self._all() if slot.is_needed}
        self._bound = {
            (settings, serials): thing
            for (settings, serials), thing in self._bound.items()
            if gone.serial not in serials
            and (not gone.is_adapter or not gone.component.tensors or in_use.issuperset(serials))
        }

    def _current(self) -> list[tuple[Entry[ModuleSlot], ModuleSlot]]:
        return [(entry, entry.thing) for entry in self._table.entries.values() if entry.thing]

    def _all(self) -> list[tuple[Entry[ModuleSlot], ModuleSlot]]:
        return [*self._current(), *((entry, entry.thing) for entry in self._table.detached if entry.thing)]


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
