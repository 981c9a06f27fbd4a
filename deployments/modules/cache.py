"""The models that one replica has built, under a byte budget: lease what a request needs, build what is missing.

Modules are keyed by what they are (class, config, weights), not by the model that asked first: two pipelines that
share a VAE share the built module. A leased module is never evicted, nor is a pinned one; of the others those go
whose bytes save the least time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deployments.modules.bound_pipelines import BoundPipelines
from deployments.modules.budget import ModuleBudget
from deployments.modules.builder import Builder
from deployments.modules.device_tier import DeviceTier, KeptExtents, LeasedExtents, open_tier
from deployments.modules.draft_parts import with_draft_parts
from deployments.modules.filling import Report, SlotFiller, switch_report
from deployments.modules.forwards import Forwards
from deployments.modules.manifest_versions import FetchManifest, ManifestVersions
from deployments.modules.parts import (
    WHOLE,
    WORKSPACE_PART,
    Fitting,
    Merging,
    PartName,
    PartsPlanner,
    RequestParts,
    Wants,
)
from deployments.modules.pins import Pins
from deployments.modules.resident_modules import Occupancy, ResidentModules, SlotLease
from deployments.modules.slots import Built, ModuleSlot
from deployments.modules.stock_parts import with_stock_parts
from deployments.modules.switches import SwitchLog
from deployments.records import SwitchReport
from deployments.records.errors import ModelUnavailable
from deployments.records.tasks import Tasks, in_thread
from weights.records.errors import BudgetExceeded
from weights.records.manifest import ExtentRef, Manifest

MAX_WAIT_FOR_ROOM_S = 60.0

logger = logging.getLogger("atelier.replica")


class Lease:
    """The built components of a model and the adapters asked for, held until the `async with` ends."""

    def __init__(
        self,
        pipelines: BoundPipelines,
        manifest: Manifest,
        skeleton: Path,
        slots: Mapping[PartName, ModuleSlot],
        report: SwitchReport,
    ) -> None:
        self.manifest = manifest
        self.skeleton = skeleton
        self.report = report
        self._pipelines = pipelines
        self._slots = {part.name: slot for part, slot in slots.items() if not part.is_adapter}
        self._adapters = {part.name: slot for part, slot in slots.items() if part.is_adapter}

    @property
    def modules(self) -> dict[str, Any]:
        return {name: slot.thing for name, slot in self._slots.items()}

    @property
    def adapters(self) -> dict[str, Any]:
        return {name: slot.thing for name, slot in self._adapters.items()}

    @property
    def adapter_keys(self) -> dict[str, str]:
        """Return the identities of the adapters by name, as `Component.module_key`."""
        return {name: slot.key for name, slot in self._adapters.items()}

    def bound(self, make: Callable[[], Any], settings: str = "") -> Any:
        """Return the pipeline over exactly these modules (not the adapters): made once, kept while all of them stay.

        `settings` is the identity of what `make` depends on beside them: models may share all modules and no solver.
        """
        return self._pipelines.bound(settings, tuple(self._slots.values()), make)


class ModuleCache:
    """A cache of built modules. Lives on one event loop; attaching and building run in threads, beside running work."""

    def __init__(
        self,
        fetch_manifest: FetchManifest,
        provider: LeasedExtents,
        models: Path,
        budget: ModuleBudget,
        builder: Builder,
        *,
        report: Report = lambda model, version, error: None,
        kept: KeptExtents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`report` gets (model, version, error) when that cannot be loaded, and None when it can again.

        With `kept`, which is `provider`, weights stay in the node's shared memory until the node calls them back by
        `release_recalled`, and the budget only bounds Python's objects and working memory; else the device's weights
        as well.
        Raises WeightsError for a device that is not there.
        """

        async def fetch(model: str, version: str | None) -> Manifest:
            found = with_draft_parts(await fetch_manifest(model, version))
            return await in_thread(with_stock_parts, found)  # may read a class's source

        self._loop: asyncio.AbstractEventLoop | None = None
        self.manifests = ManifestVersions(fetch, models)
        self._provider = provider
        self._kept = kept
        self.clock = clock
        self._device = budget.device
        self._tier: DeviceTier = open_tier(budget.device, provider, budget.nbytes, budget.others)
        self.planner = PartsPlanner(budget, builder, self._tier, models, is_on_node=kept is not None)
        self.forwards = Forwards(self.planner, builder, self._tier)
        self._tasks = Tasks()
        self._modules = ResidentModules(budget, builder, self._tier, kept, clock)
        self._filler = SlotFiller(self._modules, self.planner, self.manifests, self._tier, builder, self._tasks, report)
        self._pins = Pins(self._modules, self.planner, self.manifests, self._tier)
        self.switches = SwitchLog()

    def skeleton(self, manifest: Manifest) -> Path:
        """Return the folder with everything of it but the weights."""
        return self.planner.skeleton(manifest)

    @contextlib.asynccontextmanager
    async def lease(
        self,
        model: str,
        wanted: Wants,
        adapters: Sequence[str] = (),
        *,
        version: str | None = None,
        adapter_versions: Mapping[str, str] | None = None,
        fitting: Fitting = WHOLE,
        max_wait_s: float | None = None,
    ) -> AsyncIterator[Lease]:
        """Lease the components of `model` that are `wanted`, and the adapters that are, built.

        `fitting` has the merging that `choose_merging` returned, and no other.
        Raises what the registry, the provider and the builder raise, and BudgetExceeded when the room does not
        become free within `max_wait_s`, MAX_WAIT_FOR_ROOM_S unless it is given. Raises ModelUnavailable at its end when
        the weights turned out to be damaged meanwhile: nobody knows since when, so what was computed is not to be
        trusted.
        """
        start = self.clock()
        manifest = await self.manifests.find_version(model, version)
        if self._pins.is_outdated(manifest):  # perhaps this version is the one that is served now
            self._tasks.run(self._pins.renew(model))
        versions = adapter_versions or {}
        others = {name: await self.manifests.find_version(name, versions.get(name)) for name in adapters}
        parts = self.planner.plan(manifest, wanted, others, fitting)
        taken, built = await self._take_built(RequestParts(model, parts), max_wait_s or MAX_WAIT_FOR_ROOM_S)
        slots = {name: slot for name, slot in taken.slots.items() if name != WORKSPACE_PART}
        fresh = {*taken.fresh} - {WORKSPACE_PART}
        try:
            report = switch_report(model, (self.clock() - start) * 1e3, slots, fresh, built)
            if fresh:
                nbytes = sum(sum(parts[name].footprint.values()) for name in fresh)
                self.switches.note(model, nbytes, report, self.clock() - taken.at_s)
            yield Lease(self._modules.pipelines, manifest, self.skeleton(manifest), slots, report)
            if damaged := [name.name for name, slot in slots.items() if slot.is_damaged]:
                raise ModelUnavailable(
                    f"the weights of {model!r} ({', '.join(damaged)}) were damaged in memory while this request ran: "
                    "its answer is withheld; try again",
                    "model",
                )
        finally:
            taken.stop_computing()
            taken.give_back()

    async def prefetch(self, model: str, wanted: Wants) -> None:
        """Build it where that evicts nothing and nobody waits for the room; else bring it as near as there is room."""
        manifest = await self.manifests.newest(model)
        if await self.has_room_for(manifest, wanted) and not self._modules.num_waiting:
            async with self.lease(model, wanted, version=manifest.fingerprint):
                return
        for part in self.planner.plan(manifest, wanted).values():
            if part.streamed is not None:
                await asyncio.to_thread(self._provider.prefetch, part.extents)
            elif part.component.module_key not in self._modules.slots:
                await asyncio.to_thread(self._tier.prefetch, part.component, part.extents)

    async def pin(self, model: str, wanted: Wants) -> None:
        """Never evict the version that is served, nor when it comes only later, nor the ones after it.

        Raises BudgetExceeded when the pinned ones do not fit.
        """
        self._pins.pin(await self.manifests.newest(model), wanted)

    def unpin(self, model: str) -> None:
        """Let it be evicted again. What another model pins stays pinned."""
        self._pins.unpin(model)

    def evict(self, model: str, keep: Collection[str] = ()) -> list[str]:
        """Let go of what is here for this model alone, but for the keys to `keep`. Returns what is leased or pinned."""
        return self._modules.evict(model, keep)

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. Raises BudgetExceeded when more is leased or pinned; then the budget stays."""
        self._modules.set_budget(budget_bytes)
        self.planner.budget_bytes = budget_bytes

    def release_recalled(self, extents: Collection[str], is_overdue: bool) -> None:
        """Let go of what is over these extents and only kept for later: the node needs them. Thread-safe.

        What is in use goes when its requests have ended; `is_overdue`: no new request joins them.
        """
        self._modules.release_recalled(extents, is_overdue)
        if self._loop and self._modules.num_waiting:
            self._loop.call_soon_threadsafe(self._modules.serve)

    def invalidate(self, extents: Collection[str]) -> None:
        """Build anew what was made of these extents, whose copies were written to: it serves no new request."""
        hashes = self._tier.invalidate(extents)
        for slot in self._modules.invalidate(extents, hashes):
            logger.error("%s of %s is built anew: its weights were damaged", slot.component.name, sorted(slot.models))

    async def has_room_for(self, manifest: Manifest, wanted: Wants) -> bool:
        """Return whether the wanted components fit beside all that is resident, here and on the node."""
        parts = self.planner.plan(manifest, wanted)
        if not self._modules.fits_beside(RequestParts(manifest.model, parts)):
            return False
        extents = {extent.id: extent for part in parts.values() for extent in part.extents}
        return self._kept is None or await asyncio.to_thread(self._kept.has_room_for, list(extents.values()))

    def choose_merging(
        self, manifest: Manifest, wanted: Wants, adapters: Mapping[str, Manifest], merging: Merging
    ) -> Merging | None:
        """Return the adapters of a request that are merged, if they can be and have room beside pinned modules.

        Who else is here does not matter, since an image changes by rounding with the form of its LoRA.
        """
        parts = self.planner.plan(manifest, wanted, adapters, Fitting(merging))
        is_merged = any(part.is_variant and name.is_adapter for name, part in parts.items())
        return merging if is_merged and self._modules.can_hold(RequestParts(manifest.model, parts)) else None

    def can_hold(
        self, manifest: Manifest, wanted: Wants, adapters: Mapping[str, Manifest], merging: Merging | None = None
    ) -> bool:
        """Return whether the budget has room for these together, beside what is pinned."""
        if self._kept:  # the weights are the node's
            return True
        parts = self.planner.plan(manifest, wanted, adapters, Fitting(merging))
        return self._modules.can_hold(RequestParts(manifest.model, parts))

    def holds(self, model: str) -> bool:
        """Return whether anything of `model` is resident."""
        return any(model in slot.models for slot in self._modules.slots.values())

    def resident(self) -> dict[str, int]:
        """Return bytes by module key of what is built."""
        return {key: slot.nbytes for key, slot in self._modules.slots.items()}

    def occupancy(self) -> Occupancy:
        """Return the occupants of the budget."""
        return self._modules.occupancy()

    def describe(self) -> dict[str, Any]:
        """Return a snapshot as JSON-able values: what is here, for whom, who uses it, and the last switches."""
        arenas = [asdict(arena) for arena in self._tier.stats()]
        return self._modules.describe() | {
            "device": self._device,
            "pinned_models": self._pins.models,
            "num_waiting": self._modules.num_waiting,
            "arena": arenas[0] if arenas else None,
            "other_arenas": arenas[1:],
            **self.switches.describe(),
        }

    # leases

    async def _take_built(self, wanted: RequestParts, max_wait_s: float) -> tuple[SlotLease, dict[PartName, Built]]:
        """Lease all parts, wait until they are built, and start.

        What is found damaged while it is being built, or has been given up while another part was waited for, is taken
        once more.
        """
        self._loop = asyncio.get_running_loop()
        while True:
            taken = self._modules.take(wanted, self._filler)
            if taken.ticket.is_waiting:
                self.fetch_ahead(wanted)
                await taken.wait_for_room(max_wait_s)
            if taken.ticket.refusal:
                raise BudgetExceeded(taken.ticket.refusal)
            try:
                built: dict[PartName, Built] = {}
                for name, slot in taken.slots.items():
                    await asyncio.shield(slot.built)  # others wait for it too, when this request is cancelled
                    built[name] = slot.outcome()
            except BaseException:
                taken.give_back()
                raise
            if taken.start_computing():
                self._note_uses(taken)
                return taken, built
            taken.give_back()

    def fetch_ahead(self, wanted: RequestParts) -> None:
        """Bring what a request lacks into the node's memory while it waits for room on the device."""
        here = {hash_ for slot in self._modules.slots.values() for hash_ in slot.tensors}
        lacking: dict[str, ExtentRef] = {}
        for part in wanted.parts.values():
            ids = {ref.extent for ref in part.component.tensors.values() if ref.sha256 not in here}
            lacking |= {id_: part.manifest.extents[id_] for id_ in ids}
        if lacking:
            self._tasks.run(asyncio.to_thread(self._provider.prefetch, list(lacking.values())))

    def _note_uses(self, taken: SlotLease) -> None:
        """Tell the node of uses that it did not see: those of modules that were here."""
        if self._kept and len(taken.fresh) < len(taken.slots):
            here = [slot for name, slot in taken.slots.items() if name not in taken.fresh]
            self._kept.note_uses([extent for slot in here for extent in slot.extents])
