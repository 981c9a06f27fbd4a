"""Fill slots: fetch what a request lacks, its tensors onto the device, modules around them, and what that took."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cluster.records.errors import KeeperFailed
from deployments.engines.llm.engine import LLMEngine
from deployments.engines.nn.streamed_blocks import stream_blocks
from deployments.modules.builder import Builder, BuildOrder
from deployments.modules.device_tier import ArenaTier, DeviceTier, Fetched
from deployments.modules.manifest_versions import ManifestVersions
from deployments.modules.parts import Part, PartName, PartsPlanner, RequestParts, distinct_bytes
from deployments.modules.resident_modules import ResidentModules
from deployments.modules.slots import Built, ModuleSlot
from deployments.records import SwitchReport
from deployments.records.errors import CannotLoad
from deployments.records.tasks import Tasks
from weights.memory.block_stream import BlockStream
from weights.platform.panics import panics_as_errors, telling
from weights.records.errors import AdapterError, BudgetExceeded, ExtentCorrupt, WeightsError
from weights.records.manifest import Component, ExtentRef, Manifest

NOTE_EVERY_S: Final = 0.02
_OF_THE_REQUEST: Final = (AdapterError, BudgetExceeded)  # what the replica is not unable for
Report = Callable[[str, str, str | None], None]
Filling = tuple[ModuleSlot, Part]

logger = logging.getLogger("atelier.replica")


class SlotFiller:
    """Fills the slots of a request in one thread, beside running work, and notes in `modules` what came of each.

    `report` gets (model, version, error) when that cannot be loaded, and None when it can again. Lives on one event
    loop, in `tasks`.
    """

    def __init__(
        self,
        modules: ResidentModules,
        planner: PartsPlanner,
        manifests: ManifestVersions,
        tier: DeviceTier,
        builder: Builder,
        tasks: Tasks,
        report: Report,
    ) -> None:
        self._modules = modules
        self._planner = planner
        self._manifests = manifests
        self._tier = tier
        self._evicting = tier if isinstance(tier, ArenaTier) else None
        self._builder = builder
        self._tasks = tasks
        self._report = report
        self._clock = modules.table.now_s
        # By model and version the modules that could not be loaded.
        self._unable: dict[tuple[str, str], set[str]] = {}

    def start_filling(
        self, wanted: RequestParts, slots: Mapping[PartName, ModuleSlot], fresh: Collection[PartName]
    ) -> None:
        """Begin to fill the `fresh` ones of a request's slots."""
        filling = [(slots[name], part) for name, part in wanted.parts.items() if name in fresh]
        # With leases that may be called back, whoever waits for a part must not hold the others firmly: all that a
        # request needs is asked for at once.
        others = (slot.extents for name, slot in slots.items() if name not in fresh)
        beside = list(others) if self._planner.is_on_node else []
        self._tasks.run(self.fill_slots(filling, beside))

    async def fill_slots(self, filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]]) -> None:
        """Fill all slots. Extents `beside` are asked for together with theirs: their modules are here.

        What has moved since its manifest was fetched is located first: nobody looks for that on the event loop.
        """
        if await self._fill(filling, beside, asks_first=True):
            return
        try:
            with panics_as_errors():
                located = await self._locate_parts(filling)
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
        each change between them costs a wait for the interpreter lock, and on a busy machine one for a core (measured
        for 12 modules beside a loop that computes: 3 ms a module, and 47 ms with a call of the thread for each).
        """
        loop, left = asyncio.get_running_loop(), iter(filling)
        done: deque[Built | Exception] = deque()

        def fill() -> bool:
            versions = {(part.manifest.model, part.manifest.fingerprint): part.manifest for _, part in filling}
            if asks_first and any(map(self._manifests.has_moved, versions.values())):
                return False
            done.extend(self._fill_all(filling, beside))
            return True

        work = asyncio.ensure_future(asyncio.to_thread(fill))
        while not work.done() or done:
            await asyncio.wait([work], timeout=NOTE_EVERY_S)
            while done:
                loop.call_soon(self._note, *next(left), done.popleft())

        def fail_rest(error: Exception) -> None:
            for slot, part in left:
                self._note(slot, part, error)

        with telling(fail_rest):
            return work.result()
        return True

    def _note(self, slot: ModuleSlot, part: Part, found: Built | Exception) -> None:
        version = part.manifest.model, part.manifest.fingerprint
        if not isinstance(found, Exception):
            self._modules.arrive(slot, found)
            if failed := self._unable.get(version):
                failed.discard(slot.key)
                if not failed:
                    del self._unable[version]
                    self._report(*version, None)
            return
        if isinstance(found, WeightsError | KeeperFailed | CannotLoad) and not isinstance(found, _OF_THE_REQUEST):
            self._unable.setdefault(version, set()).add(slot.key)
            self._report(*version, str(found).partition("\n")[0])
        logger.info("%s of %r is not built", part.component.name, version[0], exc_info=found)
        self._modules.fail(slot, found)

    async def _locate_parts(self, filling: Sequence[Filling]) -> list[Filling]:
        """Find the bytes where they are now: a slot may be of a manifest that was fetched before they were moved."""
        located: list[Filling] = []
        found: dict[tuple[str, str], Manifest] = {}
        for slot, part in filling:
            version = part.manifest.model, part.manifest.fingerprint
            if version not in found:
                found[version] = await self._manifests.locate(part.manifest)
            manifest = found[version]
            component = manifest.components.get(part.component.name)
            if component and part.is_variant:
                component = component.model_copy(update={"parts_hash": part.component.parts_hash})
            elif component:
                component = self._planner.own_part(manifest, component)
            if manifest is not part.manifest and component and component.module_key == slot.key:
                part = replace(part, manifest=manifest, component=component)
                slot.component, slot.extents = component, part.extents
            located.append((slot, part))
        return located

    # in the thread

    def _fill_all(
        self, filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]]
    ) -> Iterator[Built | Exception]:
        """Yield the content of each slot, or the reason why it cannot be filled, one after the other. Blocking.

        A slot fails with what the tier raises, ExtentCorrupt naming the tensors, or CannotLoad.
        """
        try:
            with panics_as_errors():
                together = self._fetch_together(filling, beside)
        except Exception as error:
            yield from [error] * len(filling)
            return
        slots = [slot for slot, _ in filling]
        if self._evicting:
            self._evicting.hold([(slot, part.streamed) for slot, part in filling])
        try:
            for slot, part in filling:
                found: Built | Exception
                try:
                    with panics_as_errors():
                        found = self._fill_slot(slot, part, together, pays=slot is slots[0])
                except Exception as error:
                    found = error
                if self._evicting:  # before whoever waits is notified
                    self._evicting.end_hold([slot])
                yield found
        finally:
            if self._evicting:
                self._evicting.end_hold(slots)

    def _fetch_together(
        self, filling: Sequence[Filling], beside: Sequence[Sequence[ExtentRef]]
    ) -> _FetchedTogether | None:
        """Fetch the extents of all slots in one round trip to the keeper. Raises what the tier raises.

        Extents `beside` are asked for together with the others and released: their modules are here. None when each
        slot has to ask for itself: the tier wants it so, or damage must be found and named.
        """
        start = self._clock()
        try:
            fetched = self._tier.fetch([slot.extents for slot, _ in filling], beside)
        except ExtentCorrupt:
            return None
        return _FetchedTogether(fetched, self._clock() - start) if fetched else None

    def _fill_slot(self, slot: ModuleSlot, part: Part, together: _FetchedTogether | None, *, pays: bool) -> Built:
        """Place the tensors of a part on the device and build it; the one that `pays` carries what fetching all took.

        Raises what the tier raises, ExtentCorrupt naming the tensors, and CannotLoad.
        """
        fetched = together.fetched if together else None
        start = self._clock() - (together.fetch_s if together and pays else 0.0)
        try:
            placed = self._tier.place_component(
                part.component,
                slot.extents,
                slot.holder,
                fetched,
                part.working_bytes,
                part.workspace_bytes,
                part.streamed,
            )
            slot.is_placed = True
        except ExtentCorrupt as error:
            damaged = _names_in(part.component, error.extent_id)
            raise ExtentCorrupt(f"{error}; it holds {damaged}", error.extent_id) from error
        attached = self._clock()
        try:
            with panics_as_errors():
                thing = self._builder.build(_order(slot, part), self._planner.skeleton(part.manifest), placed.tensors)
                if placed.stream is not None:
                    _begin_streaming(thing, placed.stream)
        except Exception as error:  # of many libraries; none of it is the fault of the request that came first
            what = f"{part.component.name} of {part.manifest.model!r}"
            raise CannotLoad(f"{what} cannot be built: {error}") from error
        return Built(
            thing,
            attach_ms=(attached - start) * 1e3,
            build_ms=(self._clock() - attached) * 1e3,
            storage_bytes=placed.storage_bytes + (fetched.storage_bytes if fetched and pays else 0),
            host_bytes=placed.host_bytes,
            device_bytes=placed.device_bytes,
            reused_bytes=placed.reused_bytes,
        )


def _order(slot: ModuleSlot, part: Part) -> BuildOrder:
    """Return the order to build a part; of one that ranks divide, the component as it is stored."""
    manifest, name = part.manifest, part.component.name
    component = part.component if part.is_variant else manifest.components.get(name, part.component)
    return BuildOrder(
        manifest.model,
        manifest.fingerprint,
        manifest.skeleton,
        manifest.class_name or "",
        component,
        slot.extents,
        manifest.components.get("vae") if name != "vae" else None,
        part.working_bytes,
        part.workspace_bytes,
    )


@dataclass(frozen=True, slots=True)
class _FetchedTogether:
    """The extents that one call got for all slots of a request, and the seconds that it took."""

    fetched: Fetched
    fetch_s: float


def _begin_streaming(thing: Any, stream: BlockStream) -> None:
    if isinstance(thing, LLMEngine):
        thing.stream_layers(stream)
    else:
        stream_blocks(thing, stream)


def switch_report(
    model: str,
    switch_ms: float,
    slots: Mapping[PartName, ModuleSlot],
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


def _names_in(component: Component, extent_id: str | None) -> str:
    """Return the names of the tensors in an extent, the first of them: what its damage takes down."""
    names = [f"{component.name}.{name}" for name, ref in component.tensors.items() if ref.extent == extent_id]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")
