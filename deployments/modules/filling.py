"""Fill slots: fetch what a request lacks, its tensors onto the device, modules around them, and what that took."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from deployments.engines.nn.streamed_blocks import stream_blocks
from deployments.errors import ModelUnavailable
from deployments.modules.built_modules import Built, Part, PartName, Slot, distinct_bytes
from deployments.modules.device_tier import DeviceTier, Fetched
from deployments.modules.loading import Builder
from deployments.modules.manifest_versions import ManifestVersions
from deployments.modules.resident_modules import ResidentModules
from deployments.records import SwitchReport
from weights.errors import ExtentCorrupt
from weights.manifest import Component, ExtentRef, Manifest

NOTE_EVERY_S: Final = 0.02
Filling = tuple[Slot, Part]

logger = logging.getLogger("atelier.replica")


class SlotFiller:
    """Fills the slots of a request in one thread, beside running work, and notes in `modules` what came of each.

    `report` hears (model, error) when weights cannot be attached, and (model, None) when they can again. `skeleton`
    returns the folder of a manifest. Lives on one event loop.
    """

    def __init__(
        self,
        modules: ResidentModules,
        manifests: ManifestVersions,
        tier: DeviceTier,
        build: Builder,
        skeleton: Callable[[Manifest], Path],
        report: Callable[[str, str | None], None],
        clock: Callable[[], float],
    ) -> None:
        self._modules = modules
        self._manifests = manifests
        self._tier = tier
        self._build = build
        self._skeleton = skeleton
        self._report = report
        self._clock = clock
        self._damaged: set[str] = set()  # models whose weights could not be attached

    async def fill_slots(self, filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]]) -> None:
        """Fill all slots. Extents `beside` are asked for together with theirs: their modules are here.

        What has moved since its manifest was fetched is located first: nobody looks for that on the event loop.
        """
        if await self._fill(filling, beside, asks_first=True):
            return
        try:
            located = await _locate_parts(filling, self._manifests)
        except Exception as error:
            for slot, part in filling:
                self._note(slot, part, error)
        else:
            await self._fill(located, beside)

    async def _fill(
        self, filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]], asks_first: bool = False
    ) -> bool:
        """Fill the slots in a thread, and note those that are done every few milliseconds.

        Return False, with nothing done, when it `asks_first` and bytes have moved. The thread does not call the loop:
        each change between them costs a wait for the interpreter lock, and on a busy machine one for a core.
        """
        loop, left = asyncio.get_running_loop(), iter(filling)
        done: deque[Built | Exception] = deque()

        def fill() -> bool:
            versions = {(part.manifest.model, part.manifest.fingerprint): part.manifest for _, part in filling}
            if asks_first and any(map(self._manifests.has_moved, versions.values())):
                return False
            done.extend(_fill_all(filling, beside, self._tier, self._build, self._skeleton, self._clock))
            return True

        work = asyncio.ensure_future(asyncio.to_thread(fill))
        while not work.done() or done:
            await asyncio.wait([work], timeout=NOTE_EVERY_S)
            while done:
                loop.call_soon(self._note, *next(left), done.popleft())
        return await work

    def _note(self, slot: Slot, part: Part, found: Built | Exception) -> None:
        model = part.manifest.model
        if not isinstance(found, Exception):
            self._modules.arrive(slot, found)
            if model in self._damaged:
                self._damaged.remove(model)
                self._report(model, None)
            return
        if isinstance(found, ExtentCorrupt | ModelUnavailable):
            self._damaged.add(model)
            self._report(model, str(found))
        logger.info("%s of %r is not built", part.component.name, model, exc_info=found)
        self._modules.fail(slot, found)


def _fill_all(
    filling: Sequence[Filling],
    beside: Sequence[Sequence[ExtentRef]],
    tier: DeviceTier,
    build: Builder,
    skeleton: Callable[[Manifest], Path],
    clock: Callable[[], float],
) -> Iterator[Built | Exception]:
    """Yield what each slot is filled with, or why it cannot be, one after the other. Blocking.

    Extents `beside` are asked for together with the others and released: their modules are here. `skeleton` returns the
    folder of a manifest. A slot fails with what `tier` raises, ExtentCorrupt naming the tensors, or ModelUnavailable.
    """
    try:
        together = _fetch_together(filling, beside, tier, clock)
    except Exception as error:
        yield from [error] * len(filling)
        return
    slots = [slot for slot, _ in filling]
    tier.hold(slots)
    try:
        for slot, part in filling:
            found: Built | Exception
            try:
                found = _fill_slot(slot, part, tier, together, build, skeleton(part.manifest), clock)
            except Exception as error:
                found = error
            tier.end_hold([slot])  # before whoever waits hears of it
            yield found
    finally:
        tier.end_hold(slots)


@dataclass(frozen=True, slots=True)
class _FetchedTogether:
    """The extents that one call got for all slots of a request, and its cost, which the first of them carries."""

    fetched: Fetched
    first: Slot
    fetch_s: float


async def _locate_parts(filling: Sequence[Filling], manifests: ManifestVersions) -> list[Filling]:
    """Find the bytes where they are now: a slot may be of a manifest that was fetched before they were moved."""
    located: list[Filling] = []
    found: dict[tuple[str, str], Manifest] = {}
    for slot, part in filling:
        version = part.manifest.model, part.manifest.fingerprint
        if version not in found:
            found[version] = await manifests.locate(part.manifest)
        manifest = found[version]
        component = manifest.components.get(part.component.name)
        if component and part.is_variant:
            component = component.model_copy(update={"parts_hash": part.component.parts_hash})
        if manifest is not part.manifest and component and component.module_key == slot.key:
            part = replace(part, manifest=manifest, component=component)
            slot.component, slot.extents = component, part.extents
        located.append((slot, part))
    return located


def _fetch_together(
    filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]], tier: DeviceTier, clock: Callable[[], float]
) -> _FetchedTogether | None:
    """Fetch the extents of all slots in one round trip to the keeper. Blocking. Raises what `tier` raises.

    Extents `beside` are asked for together with the others and released: their modules are here. None when each slot
    has to ask for itself: the tier wants it so, or damage must be found and named.
    """
    start = clock()
    try:
        fetched = tier.fetch([slot.extents for slot, _ in filling], beside)
    except ExtentCorrupt:
        return None
    return _FetchedTogether(fetched, filling[0][0], clock() - start) if fetched else None


def _fill_slot(
    slot: Slot,
    part: Part,
    tier: DeviceTier,
    together: _FetchedTogether | None,
    build: Builder,
    skeleton: Path,
    clock: Callable[[], float],
) -> Built:
    """Place the tensors of a part on the device and build it. Blocking.

    Raises what `tier` raises, ExtentCorrupt naming the tensors, and ModelUnavailable.
    """
    pays = together is not None and together.first is slot
    start = clock() - (together.fetch_s if together and pays else 0.0)
    try:
        placed = tier.place_component(
            part.component,
            slot.extents,
            slot.holder,
            together.fetched if together else None,
            part.working_bytes,
            part.streamed,
        )
        slot.is_placed = True
    except ExtentCorrupt as error:
        damaged = _tensor_names(part.component, slot.extents, str(error))
        raise ExtentCorrupt(f"{error}; it holds {damaged}") from error
    attached = clock()
    try:
        thing = build(part.component, skeleton, placed.tensors)
        if placed.stream is not None:
            stream_blocks(thing, placed.stream)
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
    """Sum up a switch; `fresh` names those of `slots` that were built for it."""
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
