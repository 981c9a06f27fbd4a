"""From a component to the thing that runs: its tensors onto the device, the module around them, and what that took."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.errors import ModelUnavailable
from deployments.modules.built_modules import Built, Part, PartName, Slot, distinct_bytes
from deployments.modules.device_tier import DeviceTier, Fetched, Tensors
from deployments.records import SwitchReport
from weights.errors import ExtentCorrupt
from weights.manifest import Component, ExtentRef

# Component, its skeleton folder, its tensors (HAZARD: maybe views on shared memory) -> the thing that runs.
Builder = Callable[[Component, Path, Tensors], Any]


Filling = tuple[Slot, Part]


@dataclass(frozen=True, slots=True)
class FetchedTogether:
    """The extents that one call got for all slots of a request, and its cost, which the first of them carries."""

    fetched: Fetched
    first: Slot
    fetch_s: float


def fetch_together(
    filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]], tier: DeviceTier, clock: Callable[[], float]
) -> FetchedTogether | None:
    """One round trip to the keeper instead of one per component. Blocking. Raises what `tier` raises.

    Extents `beside` are asked for together with the others and released: their modules are here. None when each slot
    has to ask for itself: the tier wants it so, or damage must be found and named.
    """
    start = clock()
    try:
        fetched = tier.fetch([slot.extents for slot, _ in filling], beside)
    except ExtentCorrupt:
        return None
    return FetchedTogether(fetched, filling[0][0], clock() - start) if fetched else None


def fill_slot(
    slot: Slot,
    part: Part,
    tier: DeviceTier,
    together: FetchedTogether | None,
    build: Builder,
    skeleton: Path,
    clock: Callable[[], float],
) -> Built:
    """Blocking. Raises what `tier` raises, ExtentCorrupt naming the tensors, and ModelUnavailable."""
    pays = together is not None and together.first is slot
    start = clock() - (together.fetch_s if together and pays else 0.0)
    try:
        placed = tier.place(part.component, slot.extents, slot.holder, together.fetched if together else None)
        slot.is_placed = True
    except ExtentCorrupt as error:
        damaged = _tensor_names(part.component, slot.extents, str(error))
        raise ExtentCorrupt(f"{error}; it holds {damaged}") from error
    attached = clock()
    try:
        thing = build(part.component, skeleton, placed.tensors)
    except Exception as error:  # of many libraries; none of it is the fault of the request that came first
        raise ModelUnavailable(f"{part.component.name} of {part.manifest.model!r} cannot be built: {error}") from error
    return Built(
        thing,
        attach_ms=(attached - start) * 1e3,
        build_ms=(clock() - attached) * 1e3,
        storage_bytes=placed.storage_bytes + (together.fetched.storage_bytes if together and pays else 0),
        host_bytes=placed.host_bytes,
        device_bytes=placed.device_bytes,
        reused_bytes=placed.reused_bytes,
    )


def switch_report(
    model: str,
    switch_ms: float,
    slots: Mapping[PartName, Slot],
    fresh: Collection[PartName],
    built: Mapping[PartName, Built],
) -> SwitchReport:
    """`fresh` names those of `slots` that were built for this switch."""
    new = [built[name] for name in slots if name in fresh]
    kept_bytes = distinct_bytes(*(slot.tensors for name, slot in slots.items() if name not in fresh))
    return SwitchReport(
        model=model,
        switch_ms=switch_ms,
        attach_ms=sum(one.attach_ms for one in new),
        build_ms=sum(one.build_ms for one in new),
        attached_bytes=sum(slots[name].nbytes for name in fresh),
        built=tuple(name.name for name in slots if name in fresh),
        reused=tuple(name.name for name in slots if name not in fresh),
        storage_bytes=sum(one.storage_bytes for one in new),
        host_bytes=sum(one.host_bytes for one in new),
        device_bytes=sum(one.device_bytes for one in new),
        reused_bytes=kept_bytes + sum(one.reused_bytes for one in new),
    )


def _tensor_names(component: Component, extents: Sequence[ExtentRef], message: str) -> str:
    """The tensors of the extents that `message` names: what the damage takes down."""
    named = {extent.id for extent in extents if extent.id in message}
    names = [f"{component.name}.{name}" for name, ref in component.tensors.items() if ref.extent in named]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")
