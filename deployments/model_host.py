"""The models that one replica has built, under a byte budget: lease what a request needs, build what is missing.

Modules are keyed by what they are (class, config, weights), not by the model that asked first: two pipelines that
share a VAE share the built module. A leased module is never evicted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from deployments.errors import ModelUnavailable
from deployments.records import SwitchReport
from weights.errors import BudgetExceeded, ExtentCorrupt
from weights.loader import attach
from weights.manifest import Component, ExtentRef, Manifest
from weights.provider import ExtentProvider
from weights.residency import Resident, plan_eviction

Tensors = dict[str, torch.Tensor]
# Component, its skeleton folder, its tensors (views on shared memory) -> the thing that runs.
Builder = Callable[[Component, Path, Tensors], Any]
MAX_WAIT_FOR_ROOM_S = 60.0


class LeasedExtents(ExtentProvider, Protocol):
    """A provider that wants to hear when extents are no longer needed."""

    def release(self, extents: Sequence[ExtentRef]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Built:
    thing: Any
    attach_ms: float
    build_ms: float


@dataclass
class _Slot:
    nbytes: int
    extents: tuple[ExtentRef, ...]
    serial: int
    last_used: int = 0
    leases: int = 0
    built: asyncio.Future[_Built] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    bound: dict[tuple[int, ...], Any] = field(default_factory=dict)
    fetched: bool = False


class _PartName(NamedTuple):
    """An adapter may have the name of a component without being one."""

    name: str
    is_adapter: bool = False


@dataclass(frozen=True, slots=True)
class _Part:
    manifest: Manifest
    component: Component


class Lease:
    """The built components of a model and the adapters asked for, held until the `async with` ends."""

    def __init__(
        self,
        host: ModelHost,
        manifest: Manifest,
        skeleton: Path,
        slots: Mapping[_PartName, _Slot],
        report: SwitchReport,
    ) -> None:
        self.manifest = manifest
        self.skeleton = skeleton
        self.report = report
        self._host = host
        self._slots = {part.name: slot for part, slot in slots.items() if not part.is_adapter}
        self._adapters = {part.name: slot for part, slot in slots.items() if part.is_adapter}

    @property
    def modules(self) -> dict[str, Any]:
        return {name: slot.built.result().thing for name, slot in self._slots.items()}

    @property
    def adapters(self) -> dict[str, Any]:
        return {name: slot.built.result().thing for name, slot in self._adapters.items()}

    def bound(self, make: Callable[[], Any]) -> Any:
        """A pipeline over exactly these modules (not the adapters): made once, kept as long as all of them stay."""
        serials = tuple(slot.serial for slot in self._slots.values())
        first = next(iter(self._slots.values()))
        alive = self._host.serials()
        first.bound = {key: thing for key, thing in first.bound.items() if alive.issuperset(key)}
        if serials not in first.bound:
            first.bound[serials] = make()
        return first.bound[serials]


class ModelHost:
    """Lives on one event loop. Attaching and building run in threads, so running work goes on meanwhile."""

    def __init__(
        self,
        fetch_manifest: Callable[[str], Awaitable[Manifest]],
        provider: LeasedExtents,
        models: Path,
        budget_bytes: int,
        build: Builder,
        report: Callable[[str, str | None], None] = lambda model, error: None,
    ) -> None:
        """`report` hears (model, error) when weights cannot be attached, and (model, None) when they can again."""
        self._fetch_manifest = fetch_manifest
        self._provider = provider
        self._models = models
        self._budget_bytes = budget_bytes
        self._build = build
        self._report = report
        self._damaged: set[str] = set()
        self._manifests: dict[str, Manifest] = {}
        self._slots: dict[str, _Slot] = {}
        self._clock = itertools.count(1)
        self._room = asyncio.Condition()
        self._fills: set[asyncio.Task[None]] = set()

    async def manifest(self, model: str) -> Manifest:
        if model not in self._manifests:
            self._manifests[model] = await self._fetch_manifest(model)
        return self._manifests[model]

    @contextlib.asynccontextmanager
    async def lease(
        self, model: str, wanted: Callable[[Component], bool], adapters: Sequence[str] = ()
    ) -> AsyncIterator[Lease]:
        """The components of `model` that are `wanted`, and the adapters, built and held.

        Raises what the registry, the provider and the builder raise, and BudgetExceeded when the room does not
        become free within MAX_WAIT_FOR_ROOM_S.
        """
        start = time.perf_counter()
        manifest = await self.manifest(model)
        parts = {_PartName(c.name): _Part(manifest, c) for c in manifest.components.values() if wanted(c)}
        for adapter in adapters:
            adapter_manifest = await self.manifest(adapter)
            (component,) = adapter_manifest.components.values()
            parts[_PartName(adapter, is_adapter=True)] = _Part(adapter_manifest, component)
        slots, fresh = await self._reserve(parts)
        try:
            for name in fresh:
                slots[name].leases += 1  # the fill's own: what is being built stays, even when nobody waits any more
                self._fills.add(task := asyncio.ensure_future(self._fill(slots[name], parts[name])))
                task.add_done_callback(self._fills.discard)
            built = {name: await asyncio.shield(slot.built) for name, slot in slots.items()}
            report = SwitchReport(
                model=model,
                switch_ms=(time.perf_counter() - start) * 1e3,
                attach_ms=sum(built[name].attach_ms for name in fresh),
                build_ms=sum(built[name].build_ms for name in fresh),
                attached_bytes=sum(slots[name].nbytes for name in fresh),
                built=tuple(part.name for part in slots if part in fresh),
                reused=tuple(part.name for part in slots if part not in fresh),
            )
            yield Lease(self, manifest, self._models / manifest.skeleton, slots, report)
        finally:
            await self._release(slots.values())

    async def _reserve(self, parts: Mapping[_PartName, _Part]) -> tuple[dict[_PartName, _Slot], set[_PartName]]:
        """Lease every slot or none: two requests that each hold half of what they need would wait for ever."""
        deadline = time.monotonic() + MAX_WAIT_FOR_ROOM_S
        needed = sum({p.component.module_key: p.component.nbytes for p in parts.values()}.values())
        async with self._room:
            while True:
                no_room = self._try_room([part.component for part in parts.values()])
                if no_room is None:
                    return self._take(parts)
                if needed > self._budget_bytes or not any(slot.leases for slot in self._slots.values()):
                    raise no_room
                try:
                    async with asyncio.timeout(deadline - time.monotonic()):
                        await self._room.wait()
                except TimeoutError:
                    raise no_room from None

    def _try_room(self, components: list[Component]) -> BudgetExceeded | None:
        keys = {component.module_key for component in components}
        missing = {c.module_key: c.nbytes for c in components if c.module_key not in self._slots}
        residents = [
            Resident(key, slot.nbytes, slot.last_used, slot.leases + (key in keys)) for key, slot in self._slots.items()
        ]
        plan = plan_eviction(residents, sum(missing.values()), self._budget_bytes)
        if plan.missing_bytes:
            return BudgetExceeded(
                f"{', '.join(c.name for c in components)} need {sum(c.nbytes for c in components)} bytes; "
                f"{plan.missing_bytes} bytes are missing under this replica's budget of {self._budget_bytes}"
            )
        for key in plan.evict:
            self._drop(key)
        return None

    def _take(self, parts: Mapping[_PartName, _Part]) -> tuple[dict[_PartName, _Slot], set[_PartName]]:
        slots: dict[_PartName, _Slot] = {}
        fresh: set[_PartName] = set()
        for name, part in parts.items():
            key = part.component.module_key
            if key not in self._slots:
                extents = part.manifest.extents_of([part.component.name])
                self._slots[key] = _Slot(part.component.nbytes, extents, serial=next(self._clock))
                fresh.add(name)
            slot = self._slots[key]
            slot.leases += 1
            slot.last_used = next(self._clock)
            slots[name] = slot
        return slots, fresh

    async def _fill(self, slot: _Slot, part: _Part) -> None:
        try:
            slot.built.set_result(await asyncio.to_thread(self._attach_and_build, slot, part))
            if part.manifest.model in self._damaged:
                self._damaged.remove(part.manifest.model)
                self._report(part.manifest.model, None)
        except Exception as error:
            if isinstance(error, ExtentCorrupt | ModelUnavailable):
                self._damaged.add(part.manifest.model)
                self._report(part.manifest.model, str(error))
            self._drop(part.component.module_key)
            slot.built.set_exception(error)
            slot.built.exception()  # marked as seen: the request that asked may have been cancelled meanwhile
        finally:
            await self._release([slot])

    def _attach_and_build(self, slot: _Slot, part: _Part) -> _Built:
        start = time.perf_counter()
        try:
            buffers = self._provider.fetch(slot.extents)
            slot.fetched = True
        except ExtentCorrupt as error:
            damaged = _tensor_names(part.component, slot.extents, str(error))
            raise ExtentCorrupt(f"{error}; it holds {damaged}") from error
        tensors = attach(part.component, buffers)
        attached = time.perf_counter()
        try:
            thing = self._build(part.component, self._models / part.manifest.skeleton, tensors)
        except Exception as error:  # of many libraries; none of it is the fault of the request that came first
            raise ModelUnavailable(
                f"{part.component.name} of {part.manifest.model!r} cannot be built: {error}"
            ) from error
        return _Built(thing, (attached - start) * 1e3, (time.perf_counter() - attached) * 1e3)

    def _drop(self, key: str) -> None:
        slot = self._slots.pop(key, None)
        if slot and slot.fetched:  # a fetch that failed leased nothing, and another slot may lease the same extents
            self._provider.release(slot.extents)

    async def _release(self, slots: Iterable[_Slot]) -> None:
        for slot in slots:
            slot.leases -= 1
        async with self._room:
            self._room.notify_all()

    def serials(self) -> set[int]:
        """Of all that is resident; a rebuilt module has a new one."""
        return {slot.serial for slot in self._slots.values()}

    def has_room_for(self, manifest: Manifest, wanted: Callable[[Component], bool]) -> bool:
        """Whether the wanted components fit beside all that is resident."""
        missing = {c.module_key: c.nbytes for c in manifest.components.values() if wanted(c)}
        return sum((self.resident() | missing).values()) <= self._budget_bytes

    def holds(self, model: str) -> bool:
        """Whether anything of `model` is resident."""
        manifest = self._manifests.get(model)
        return manifest is not None and any(c.module_key in self._slots for c in manifest.components.values())

    def resident(self) -> dict[str, int]:
        """Bytes by module key of what is built."""
        return {key: slot.nbytes for key, slot in self._slots.items()}


def _tensor_names(component: Component, extents: Sequence[ExtentRef], message: str) -> str:
    """The tensors of the extents that `message` names: what the damage takes down."""
    named = {extent.id for extent in extents if extent.id in message}
    names = [f"{component.name}.{name}" for name, ref in component.tensors.items() if ref.extent in named]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more tensors" if len(names) > 4 else "")
