"""The books of a replica: which modules are there or on their way, who uses them, what goes when room is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from deployments.modules.built_modules import ModulePast, PartName, Slot, Wanted
from deployments.modules.module_room import Holding, TensorBytes, distinct_bytes, merged, plan_room
from deployments.modules.room_queue import Waiter
from weights.errors import BudgetExceeded
from weights.manifest import Component
from weights.residency import Resident, keep_values

# All slots, and the names of those that are new and must be filled for this request.
Taken = tuple[dict[PartName, Slot], set[PartName]]
# So long may requests for what is resident go before somebody who waits for its room: that saves switches.
PATIENCE_S: Final = 1.0


class ResidentModules:
    """Under a byte budget, counted in distinct tensors. Lives on one event loop.

    `let_go` hears of the slots that are dropped, once nothing knows them any more.
    """

    def __init__(self, budget_bytes: int, let_go: Callable[[Sequence[Slot]], None], clock: Callable[[], float]) -> None:
        self.slots: dict[str, Slot] = {}
        self._condemned: list[Slot] = []  # those that are leased still
        self.pins: dict[str, dict[str, Component]] = {}
        self.past = ModulePast()
        self.budget_bytes = budget_bytes
        self._let_go = let_go
        self._clock = clock
        self._serials = itertools.count(1)
        self._bound: dict[tuple[str, tuple[int, ...]], Any] = {}

    def take(self, wanted: Wanted) -> Taken:
        """Lease every slot or none; a new one is leased once more, for the one who fills it. Raises BudgetExceeded."""
        if not wanted.keys <= self.slots.keys():
            self._make_room(wanted)
        slots: dict[PartName, Slot] = {}
        fresh: set[PartName] = set()
        for name, part in wanted.parts.items():
            key = part.component.module_key
            if key not in self.slots:
                self.slots[key] = Slot(part.component, part.extents, next(self._serials), is_adapter=name.is_adapter)
                self.slots[key].leases += 1  # what is being built stays, even when nobody waits any more
                fresh.add(name)
            slots[name] = slot = self.slots[key]
            slot.leases += 1
            slot.last_used = next(self._serials)
            slot.models.add(part.manifest.model)
            self.past.touch(key, self._clock())
        return slots, fresh

    def is_hopeless(self, wanted: Wanted) -> bool:
        """No lease ends that could make room."""
        too_large = distinct_bytes(wanted.tensors, *self._pinned_tensors()) > self.budget_bytes
        return too_large or not (self._condemned or any(slot.leases for slot in self.slots.values()))

    def may_pass(self, wanted: Wanted, first: Waiter[Wanted, Taken]) -> bool:
        """What is resident need not wait for its turn, until that would keep the first in line waiting for ever.

        From then on only as much as fits beside it goes past: when all older leases have ended, there is room.
        """
        if not wanted.keys <= self.slots.keys():
            return False
        if self._clock() - first.since_s < PATIENCE_S:
            return True
        passed = merged((first.passed, wanted.tensors))
        if distinct_bytes(first.wanted.tensors, passed, *self._pinned_tensors()) > self.budget_bytes:
            return False
        first.passed = passed
        return True

    def fits_beside(self, wanted: Wanted) -> bool:
        """Whether there is room without evicting anything."""
        return distinct_bytes(wanted.tensors, *self._tensors()) <= self.budget_bytes

    def shrink(self, budget_bytes: int) -> None:
        """Evict what is too much for that budget. Raises BudgetExceeded when too much is leased or pinned."""
        plan = plan_room(self._holdings(), {}, budget_bytes)
        if plan.missing_bytes:
            raise BudgetExceeded(
                f"a budget of {budget_bytes} bytes is {plan.missing_bytes} bytes less than what is leased or pinned"
            )
        self.drop(plan.evict)

    def shed(self, nbytes: int) -> None:
        """Drop what is only kept for later, the least valuable first, until `nbytes` are gone or nothing is left."""
        holdings = [holding for holding in self._holdings() if not holding.stays]
        values = keep_values([holding.resident for holding in holdings])
        gone: list[str] = []
        for holding in sorted(holdings, key=lambda holding: values[holding.resident.key]):
            if nbytes <= 0:
                break
            nbytes -= holding.resident.nbytes
            gone.append(holding.resident.key)
        self.drop(gone)

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

    def condemn(self, extents: Collection[str], hashes: Collection[str]) -> list[Slot]:
        """No new lease gets what was built over these extents or tensors; returns it. What is leased goes when its
        leases have ended."""
        found = [slot for slot in self.slots.values() if _is_over(slot, extents, hashes)]
        for slot in found:
            slot.is_condemned = True
            del self.slots[slot.key]
        self._condemned += found
        self.bury()
        return found

    def bury(self) -> None:
        """Let go of those condemned that nobody leases any more."""
        if gone := [slot for slot in self._condemned if not slot.leases]:
            self._condemned = [slot for slot in self._condemned if slot.leases]
            for slot in gone:
                self._unbind(slot)
            self._let_go(gone)

    def serials(self) -> set[int]:
        """Of all that is here, for somebody at least; a rebuilt module has a new one."""
        return {slot.serial for slot in self._all()}

    def drop(self, keys: Iterable[str]) -> None:
        """Unknown ones are ignored."""
        gone = [self.slots.pop(key) for key in keys if key in self.slots]
        for slot in gone:
            self._unbind(slot)
        if gone:
            self._let_go(gone)

    def pin(self, model: str, components: Iterable[Component]) -> None:
        """Raises BudgetExceeded when the pinned ones do not fit; then nothing changes."""
        pins = {component.module_key: component for component in components}
        others = [component for name, known in self.pins.items() if name != model for component in known.values()]
        needed_bytes = distinct_bytes(*(component.bytes_by_hash for component in (*pins.values(), *others)))
        if needed_bytes > self.budget_bytes:
            raise BudgetExceeded(
                f"{model!r} cannot be pinned: {needed_bytes} bytes would be, under this replica's budget of "
                f"{self.budget_bytes} (pinned: {', '.join(self.pins) or 'nothing'})"
            )
        self.pins[model] = pins

    def bound(self, settings: str, serials: tuple[int, ...], make: Callable[[], Any]) -> Any:
        """What was made with these settings over the modules of these numbers; it goes when one of them does."""
        key = (settings, serials)
        if key not in self._bound:
            self._bound[key] = make()
        return self._bound[key]

    def describe(self) -> dict[str, Any]:
        """As JSON-able values."""
        pinned = self._pinned_keys()
        return {
            "budget_bytes": self.budget_bytes,
            "resident_bytes": distinct_bytes(*self._tensors()),
            "leased_bytes": distinct_bytes(*(slot.tensors for slot in self._all() if slot.leases)),
            "modules": [slot.describe() | {"pinned": slot.key in pinned} for slot in self._all()],
            "pinned_models": sorted(self.pins),
        }

    def _make_room(self, wanted: Wanted) -> None:
        plan = plan_room(self._holdings(staying=wanted.keys), wanted.tensors, self.budget_bytes)
        if plan.missing_bytes:
            raise BudgetExceeded(
                f"{wanted} need {distinct_bytes(wanted.tensors)} bytes; {plan.missing_bytes} bytes are missing under "
                f"this replica's budget of {self.budget_bytes}"
            )
        self.drop(plan.evict)

    def _holdings(self, staying: Iterable[str] = ()) -> list[Holding]:
        now_s, pinned = self._clock(), self._pinned_keys() | set(staying)
        return [
            Holding(
                Resident(
                    slot.key,
                    slot.nbytes,
                    slot.last_used,
                    slot.leases,
                    self.past.reload_s(slot.key),
                    self.past.popularity(slot.key, now_s),
                    slot.key in pinned,
                ),
                slot.tensors,
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
        return (*self.slots.values(), *self._condemned)

    def _tensors(self) -> Iterable[TensorBytes]:
        return (slot.tensors for slot in self._all())

    def _pinned_keys(self) -> set[str]:
        return {key for pins in self.pins.values() for key in pins}

    def _pinned_tensors(self) -> Iterable[Mapping[str, int]]:
        pinned = self._pinned_keys()
        return (slot.tensors for key, slot in self.slots.items() if key in pinned)


def _is_over(slot: Slot, extents: Collection[str], hashes: Collection[str]) -> bool:
    if any(extent.id in extents for extent in slot.extents):
        return True
    return any(hash_ in slot.component.bytes_by_hash for hash_ in hashes)
