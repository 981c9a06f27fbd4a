"""The books of a replica: which modules are there or on their way, who uses them, what goes when room is needed."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from deployments.modules.built_modules import ModulePast, Part, PartName, Slot, Wanted
from deployments.modules.room import Holding, TensorBytes, Waiter, distinct_bytes, merged, plan_room
from weights.errors import BudgetExceeded
from weights.manifest import ExtentRef
from weights.residency import Resident

# All slots, and the names of those that are new and must be filled for this request.
Taken = tuple[dict[PartName, Slot], set[PartName]]
# So long may requests for what is resident go before somebody who waits for its room: that saves switches.
PATIENCE_S: Final = 1.0


P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def _locked(
    method: Callable[Concatenate[ResidentModules, P], ResultT],
) -> Callable[Concatenate[ResidentModules, P], ResultT]:
    """Hold the books' lock during the call."""

    def locked(self: ResidentModules, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        with self._lock:
            return method(self, *args, **kwargs)

    locked.__doc__ = method.__doc__
    return locked


class ResidentModules:
    """The modules that are here, under a byte budget that counts what they share once.

    Lives on one event loop, but `give_up` comes from another thread. `let_go` hears of the slots that are
    dropped, once nothing knows them any more. `is_called_back` says whether the node waits for some of these extents.
    """

    def __init__(
        self,
        budget_bytes: int,
        let_go: Callable[[Sequence[Slot]], None],
        clock: Callable[[], float],
        is_called_back: Callable[[Sequence[ExtentRef]], bool] = lambda extents: False,
    ) -> None:
        self._lock = threading.RLock()
        self.slots: dict[str, Slot] = {}
        self._leaving: list[Slot] = []  # condemned or closed, and leased still
        self._is_called_back = is_called_back
        self.pins: dict[str, dict[str, Part]] = {}
        self.past = ModulePast()
        self.budget_bytes = budget_bytes
        self._let_go = let_go
        self._clock = clock
        self._serials = itertools.count(1)
        self._bound: dict[tuple[str, tuple[int, ...]], Any] = {}

    @_locked
    def take(self, wanted: Wanted) -> Taken:
        """Lease every slot or none; a new one is leased once more, for the one who fills it. Raises BudgetExceeded."""
        if not wanted.keys <= self.slots.keys():
            self._make_room(wanted)
        slots: dict[PartName, Slot] = {}
        fresh: set[PartName] = set()
        for name, part in wanted.parts.items():
            key = part.component.module_key
            if key not in self.slots:
                self.slots[key] = Slot(
                    part.component, part.extents, next(self._serials), part.footprint, is_adapter=name.is_adapter
                )
                self.slots[key].leases += 1  # what is being built stays, even when nobody waits any more
                fresh.add(name)
            slots[name] = slot = self.slots[key]
            slot.leases += 1
            slot.last_used = next(self._serials)
            slot.models.add(part.manifest.model)
            self.past.touch(key, self._clock())
        return slots, fresh

    @_locked
    def start(self, slots: Collection[Slot]) -> bool:
        """Count one more request that computes with them: they are not given up meanwhile.

        False when one of them was condemned or given up since it was taken.
        """
        if any(slot.is_condemned or slot.is_gone for slot in slots):
            return False
        for slot in slots:
            slot.num_running += 1
        return True

    @_locked
    def stop(self, slots: Iterable[Slot]) -> None:
        """End what `start` began."""
        for slot in slots:
            slot.num_running -= 1

    @_locked
    def end_leases(self, slots: Iterable[Slot]) -> None:
        """What nobody leases any more and the node waits for goes at once."""
        for slot in slots:
            slot.leases -= 1
            if not slot.leases and self._is_called_back(slot.extents):
                self._give_up_slot(slot)
        self.bury()

    @_locked
    def give_up(self, extents: Collection[str], is_overdue: bool) -> None:
        """Drop what is over these extents, unless it is leased or pinned. Thread-safe.

        `is_overdue`: then what is leased goes too where nobody computes with it yet, and nobody new gets the rest.
        """
        for slot in [slot for slot in self.slots.values() if slot.result and _is_over(slot, extents, ())]:
            if not slot.leases or (is_overdue and not slot.num_running):
                self._give_up_slot(slot)
            elif is_overdue and slot.key not in self._pinned_keys():
                slot.is_closed = True
                del self.slots[slot.key]
                self._leaving.append(slot)

    def _give_up_slot(self, slot: Slot) -> None:
        if self.slots.get(slot.key) is slot and slot.key not in self._pinned_keys():
            slot.is_gone = True
            self.drop([slot.key])

    @_locked
    def is_hopeless(self, wanted: Wanted) -> bool:
        """No lease ends that could make room."""
        too_large = distinct_bytes(wanted.footprint, *self._pinned_charges()) > self.budget_bytes
        return too_large or not (self._leaving or any(slot.leases for slot in self.slots.values()))

    @_locked
    def may_pass(self, wanted: Wanted, first: Waiter[Wanted, Taken]) -> bool:
        """What is resident need not wait for its turn, until that would keep the first in line waiting for ever.

        From then on only as much as fits beside it goes past: when all older leases have ended, there is room.
        """
        if not wanted.keys <= self.slots.keys():
            return False
        if self._clock() - first.since_s < PATIENCE_S:
            return True
        passed = merged((first.passed, wanted.footprint))
        if distinct_bytes(first.wanted.footprint, passed, *self._pinned_charges()) > self.budget_bytes:
            return False
        first.passed = passed
        return True

    @_locked
    def fits_beside(self, wanted: Wanted) -> bool:
        """Return whether there is room without evicting anything."""
        return distinct_bytes(wanted.footprint, *self._charges()) <= self.budget_bytes

    @_locked
    def shrink(self, budget_bytes: int) -> None:
        """Evict what is too much for that budget. Raises BudgetExceeded when too much is leased or pinned."""
        plan = plan_room(self._holdings(), {}, budget_bytes)
        if plan.missing_bytes:
            raise BudgetExceeded(
                f"a budget of {budget_bytes} bytes is {plan.missing_bytes} bytes less than what is leased or pinned"
            )
        self.drop(plan.evict)

    @_locked
    def evict(self, model: str) -> list[str]:
        """Drop what only `model` has used. Returns the components that stay: leased, or pinned."""
        pinned = self._pinned_keys()
        stays: list[str] = []
        gone: list[str] = []
        for slot in self._all():
            if model in slot.models:
                if slot.leases or slot.key in pinned:
                    stays.append(slot.component.name)
                elif len(slot.models) == 1:
                    gone.append(slot.key)
                else:
                    slot.models.discard(model)
        self.drop(gone)
        return stays

    @_locked
    def condemn(self, extents: Collection[str], hashes: Collection[str]) -> list[Slot]:
        """No new lease gets what was built over these extents or tensors; returns it. What is leased goes when its
        leases have ended."""
        found = [slot for slot in self.slots.values() if _is_over(slot, extents, hashes)]
        for slot in found:
            slot.is_condemned = True
            del self.slots[slot.key]
        self._leaving += found
        self.bury()
        return found

    @_locked
    def bury(self) -> None:
        """Let go of those condemned that nobody leases any more."""
        if gone := [slot for slot in self._leaving if not slot.leases]:
            self._leaving = [slot for slot in self._leaving if slot.leases]
            for slot in gone:
                self._unbind(slot)
            self._let_go(gone)

    @_locked
    def serials(self) -> set[int]:
        """Return the numbers of all that is here, for somebody at least; a rebuilt module has a new one."""
        return {slot.serial for slot in self._all()}

    @_locked
    def drop(self, keys: Iterable[str]) -> None:
        """Drop these modules. Unknown ones are ignored."""
        gone = [self.slots.pop(key) for key in keys if key in self.slots]
        for slot in gone:
            self._unbind(slot)
        if gone:
            self._let_go(gone)

    @_locked
    def pin(self, model: str, parts: Iterable[Part]) -> None:
        """Raises BudgetExceeded when the pinned ones do not fit; then nothing changes."""
        pins = {part.component.module_key: part for part in parts}
        others = [part for name, known in self.pins.items() if name != model for part in known.values()]
        needed_bytes = distinct_bytes(*(part.footprint for part in (*pins.values(), *others)))
        if needed_bytes > self.budget_bytes:
            raise BudgetExceeded(
                f"{model!r} cannot be pinned: {needed_bytes} bytes would be, under this replica's budget of "
                f"{self.budget_bytes} (pinned: {', '.join(self.pins) or 'nothing'})"
            )
        self.pins[model] = pins

    def bound(self, settings: str, serials: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """Return what was made with these settings over the modules of these numbers; it goes when one of them does."""
        key = (settings, serials)
        if key not in self._bound:
            self._bound[key] = make()
        return self._bound[key]

    @_locked
    def describe(self) -> dict[str, Any]:
        """Return a description as JSON-able values."""
        pinned = self._pinned_keys()
        return {
            "budget_bytes": self.budget_bytes,
            "charged_bytes": distinct_bytes(*self._charges()),
            "resident_bytes": distinct_bytes(*(slot.tensors for slot in self._all())),
            "leased_bytes": distinct_bytes(*(slot.tensors for slot in self._all() if slot.leases)),
            "modules": [slot.describe() | {"pinned": slot.key in pinned} for slot in self._all()],
            "pinned_models": sorted(self.pins),
        }

    def _make_room(self, wanted: Wanted) -> None:
        plan = plan_room(self._holdings(staying=wanted.keys), wanted.footprint, self.budget_bytes)
        if plan.missing_bytes:
            raise BudgetExceeded(
                f"{wanted} need {distinct_bytes(wanted.footprint)} bytes; {plan.missing_bytes} bytes are missing under "
                f"this replica's budget of {self.budget_bytes}"
            )
        self.drop(plan.evict)

    def _holdings(self, staying: Iterable[str] = ()) -> list[Holding]:
        now_s, pinned = self._clock(), self._pinned_keys() | set(staying)
        return [
            Holding(
                Resident(
                    slot.key,
                    sum(slot.footprint.values()),
                    slot.last_used,
                    slot.leases,
                    self.past.reload_s(slot.key),
                    self.past.popularity(slot.key, now_s),
                    slot.key in pinned,
                ),
                slot.charges,
            )
            for slot in self._all()
        ]

    def _unbind(self, gone: Slot) -> None:
        """Forget what was made over it. A pipeline may also know an adapter: then those go that nobody uses now."""
        in_use = {slot.serial for slot in self._all() if slot.leases}
        self._bound = {
            (settings, serials): thing
            for (settings, serials), thing in self._bound.items()
            if gone.serial not in serials and (not gone.is_adapter or in_use.issuperset(serials))
        }

    def _all(self) -> Iterable[Slot]:
        return (*self.slots.values(), *self._leaving)

    def _charges(self) -> Iterable[TensorBytes]:
        return (slot.charges for slot in self._all())

    def _pinned_keys(self) -> set[str]:
        return {key for pins in self.pins.values() for key in pins}

    def _pinned_charges(self) -> Iterable[Mapping[str, int]]:
        pinned = self._pinned_keys()
        return (slot.charges for key, slot in self.slots.items() if key in pinned)


def _is_over(slot: Slot, extents: Collection[str], hashes: Collection[str]) -> bool:
    if any(extent.id in extents for extent in slot.extents):
        return True
    return any(hash_ in slot.component.bytes_by_hash for hash_ in hashes)
