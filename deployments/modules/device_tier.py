"""The tensors of a replica: views of the node's shared memory, or copies on a device that tensors share by hash.

`cpu` maps the keeper's extents and leases them as long as a module uses them. `cpu-private` and `cuda` upload the
tensors that are not there yet, and need the extents only while they do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final, Protocol

import torch

from deployments.modules.slots import ModuleSlot
from weights.loading.provider import ExtentProvider
from weights.loading.views import Tensors, Views, bytes_tensors, view_of
from weights.memory.arena_room import StillInUse
from weights.memory.block_plan import BlockPlan
from weights.memory.block_stream import BlockStream
from weights.memory.device_arena import DeviceArena
from weights.memory.device_space import Acquired, ArenaStats, DeviceFull
from weights.memory.forward_memory import ForwardMemory
from weights.records.manifest import Component, ExtentRef, TensorRef

MAX_LINGER_S: Final = 2.0
LINGER_POLL_S: Final = 0.005


class LeasedExtents(ExtentProvider, Protocol):
    """A provider that is notified when extents are no longer needed, or will be."""

    def release(self, extents: Sequence[ExtentRef]) -> None: ...

    def prefetch(self, extents: Sequence[ExtentRef]) -> None:
        """Into room that nobody needs, without a lease. Does not wait for it."""
        ...


class KeptExtents(LeasedExtents, Protocol):
    """A provider that keeps what is released until its node calls it back. Thread-safe."""

    def note_uses(self, extents: Sequence[ExtentRef]) -> None:
        """Count a use of what has been fetched before: what is popular is called back last."""
        ...

    def has_room_for(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the node can bring them in without taking them from somebody. Blocks."""
        ...

    def is_called_back(self, extents: Sequence[ExtentRef]) -> bool:
        """Return whether the node waits for one of them."""
        ...


class Holding(Protocol):
    """A component that is placed, over its extents, by the name of its lease."""

    @property
    def component(self) -> Component: ...

    @property
    def extents(self) -> Sequence[ExtentRef]: ...

    @property
    def holder(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PlacedTensors:
    """The tensors of a component on their device, and the bytes that it took: read from storage or a peer for this
    call, newly mapped from the node's memory, copied to the device; `reused_bytes` were there. With a `stream`, the
    tensors of its blocks are only the places where they will be, unless the host has them."""

    tensors: Mapping[str, torch.Tensor]
    storage_bytes: int
    host_bytes: int
    device_bytes: int
    reused_bytes: int
    stream: BlockStream | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Host memory leased for several components in one call, and what that call had to load."""

    buffers: Mapping[str, torch.Tensor]
    storage_bytes: int


class SharedTier:
    """The views are the device's tensors; the store has equal tensors once, so extents are what is shared. Thread-safe.

    What is bound is leased, and so stays: there is nothing to evict. Its methods are described in `ArenaTier`, which
    decides itself what its device keeps, and has more.
    """

    def __init__(self, provider: LeasedExtents) -> None:
        self._provider = provider
        self._lock = threading.Lock()
        self._leases: Counter[str] = Counter()

    def fetch(self, wants: Sequence[Sequence[ExtentRef]], beside: Sequence[Sequence[ExtentRef]] = ()) -> Fetched:
        """Ask once for all that several components need; each must be placed with it.

        What is `beside` is asked for in the same call, and not leased when it returns.
        """
        others = [extent for extents in beside for extent in extents]
        buffers = self._provider.fetch([*(extent for extents in wants for extent in extents), *others])
        if others:
            self._provider.release(others)
        own = {extent.id: buffers[extent.id] for extents in wants for extent in extents}
        return Fetched(bytes_tensors(own), _loaded_bytes(self._provider))

    def place_component(
        self,
        component: Component,
        extents: Sequence[ExtentRef],
        holder: str,
        fetched: Fetched | None = None,
        working_bytes: int = 0,
        workspace_bytes: int = 0,
        streamed: BlockPlan | None = None,
    ) -> PlacedTensors:
        own = fetched or self.fetch([extents])
        with self._lock:
            fresh = {extent.id for extent in extents if not self._leases[extent.id]}
            self._leases.update(extent.id for extent in extents)
        reused: dict[str, int] = {}
        if len(fresh) < len(extents):
            reused = {ref.sha256: ref.nbytes for ref in component.tensors.values() if ref.extent not in fresh}
        return PlacedTensors(
            tensors=Views(component, {extent.id: own.buffers[extent.id] for extent in extents}),
            storage_bytes=0 if fetched else own.storage_bytes,
            host_bytes=sum(extent.nbytes for extent in extents if extent.id in fresh),
            device_bytes=0,
            reused_bytes=sum(reused.values()),
        )

    def release(self, slots: Sequence[Holding]) -> None:
        extents = [extent for slot in slots for extent in slot.extents]
        with self._lock:
            self._leases -= Counter(extent.id for extent in extents)
        self._provider.release(extents)

    def prefetch(self, component: Component, extents: Sequence[ExtentRef]) -> None:
        self._provider.prefetch(extents)

    def invalidate(self, extents: Collection[str]) -> list[str]:
        """Name no tensors: what is placed says which extents it lies in, and the provider gives fresh ones."""
        return []

    def size_of(self, nbytes: int) -> int:
        return nbytes

    def stats(self) -> list[ArenaStats]:
        return []


class ArenaTier:
    """Copies by hash. A component that is released stays until its room is needed, tensor by tensor. Thread-safe.

    `extents` are those that hold the component; `holder` names the lease.
    """

    def __init__(
        self, provider: LeasedExtents, arena: DeviceArena, others: Mapping[str, DeviceArena] = MappingProxyType({})
    ) -> None:
        """`others` are the arenas of the devices that have layers of language models only, by name."""
        self._provider = provider
        self._arena, self._others = arena, others
        self._arenas = (arena, *others.values())
        self._device = arena.stats().device
        self._streaming: dict[str, _Uploads] = {}  # by holder, what streams from the host's memory

    def fetch(self, wants: Sequence[Sequence[ExtentRef]], beside: Sequence[Sequence[ExtentRef]] = ()) -> None:
        """Fetch nothing: what is on the device already needs no host memory, and `place_component` finds out."""

    def place_component(
        self,
        component: Component,
        extents: Sequence[ExtentRef],
        holder: str,
        fetched: Fetched | None = None,
        working_bytes: int = 0,
        workspace_bytes: int = 0,
        streamed: BlockPlan | None = None,
    ) -> PlacedTensors:
        """Lease the component until `release`. Raises what the provider raises, and BudgetExceeded: nothing is leased.

        There is room for `working_bytes` more then, which count, and for the workspace of a forward. What `fetched` had
        to load is not in the answer. Blocks that are `streamed`, or stay with the host, are in extents that stay
        leased; who made `PlacedTensors.stream` work closes it before the release.
        """
        uploads = _Uploads(self._provider, component, extents)
        if streamed is not None:
            return self._place_streamed(component, uploads, holder, streamed, working_bytes, workspace_bytes)
        acquire = partial(self._acquire, uploads=uploads, holder=holder)
        try:
            tensors, report = acquire(self._arena, component.tensors, working_bytes, workspace_bytes)
        finally:
            uploads.release()
        return PlacedTensors(
            tensors, uploads.storage_bytes, uploads.host_bytes, report.moved_bytes, report.reused_bytes
        )

    def _place_streamed(
        self,
        component: Component,
        uploads: _Uploads,
        holder: str,
        plan: BlockPlan,
        working_bytes: int,
        workspace_bytes: int,
    ) -> PlacedTensors:
        refs, away = component.tensors, plan.staying_away
        acquire = partial(self._acquire, uploads=uploads, holder=holder)
        working_bytes += 2 * self._arena.size_of(plan.buffer_bytes)
        staying = {name: ref for name, ref in refs.items() if name not in away}
        host_uploads = uploads.again()
        try:
            try:
                found = [acquire(self._arena, staying, working_bytes, workspace_bytes)]
                for device, share in plan.shares.items():
                    wanted = {name: refs[name] for name in share.names}
                    found.append(acquire(self._others[device], wanted, share.working_bytes))
            finally:
                uploads.release()
            hosts = host_uploads.views([name for name in refs if name in plan.streamed or name in plan.hosts])
            stream = self._arena.open_stream(plan, hosts) if plan.blocks else None
        except BaseException:
            host_uploads.release()
            self._release(component, holder)
            raise
        self._streaming[holder] = host_uploads
        coming = stream.first_tensors() if stream and plan.streamed else {}
        placed = {name: tensor for tensors, _ in found for name, tensor in tensors.items()}
        return PlacedTensors(
            placed | {name: hosts[name] for name in plan.hosts} | coming,
            uploads.storage_bytes + host_uploads.storage_bytes,
            uploads.host_bytes + host_uploads.host_bytes,
            sum(report.moved_bytes for _, report in found),
            sum(report.reused_bytes for _, report in found),
            stream,
        )

    def hold(self, filling: Sequence[tuple[ModuleSlot, BlockPlan | None]]) -> None:
        """Hold all resident parts of one request until `end_hold`: placing one part may not evict the next.

        Tensors that the plan keeps off the device may go.
        """
        for slot, plan in filling:
            refs, away = slot.component.tensors, plan.staying_away if plan else frozenset()
            self._arena.hold([ref.sha256 for name, ref in refs.items() if name not in away], f"{slot.holder}, soon")
            for device, share in plan.shares.items() if plan else ():
                self._others[device].hold([refs[name].sha256 for name in share.names], f"{slot.holder}, soon")

    def end_hold(self, slots: Sequence[ModuleSlot]) -> None:
        """End what `hold` began: they are placed, or will not be."""
        for slot in slots:
            for arena in self._arenas:
                arena.end_holder(f"{slot.holder}, soon")

    def release(self, slots: Sequence[Holding]) -> None:
        """End the leases of all at once, since each call to the keeper takes a millisecond."""
        for slot in slots:
            self._release(slot.component, slot.holder)
            if (streamed_uploads := self._streaming.pop(slot.holder, None)) is not None:
                streamed_uploads.release()

    def _release(self, component: Component, holder: str) -> None:
        for arena in self._arenas:
            arena.release([ref.sha256 for ref in component.tensors.values()], holder)

    def prefetch(self, component: Component, extents: Sequence[ExtentRef]) -> None:
        """Bring it as near as there is room that costs nothing leased, pinned or more valuable."""
        uploads = _Uploads(self._provider, component, extents)
        try:
            self._arena.prefetch(component.tensors, uploads.views)
        finally:
            uploads.release()

    def _acquire(
        self,
        arena: DeviceArena,
        wanted: Mapping[str, TensorRef],
        working_bytes: int,
        workspace_bytes: int = 0,
        *,
        uploads: _Uploads,
        holder: str,
    ) -> Acquired:
        """Acquire the tensors, again for a moment: a frame or event that is just ending may refer to evicted ones."""
        deadline_s = time.monotonic() + MAX_LINGER_S
        while True:
            try:
                return arena.acquire(wanted, uploads.views, holder, working_bytes, workspace_bytes)
            except (DeviceFull, StillInUse):
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(LINGER_POLL_S)

    def pin(self, component: Component) -> None:
        """Never evict its tensors, nor when they come only later."""
        for arena in self._arenas:
            arena.pin(ref.sha256 for ref in component.tensors.values())

    def unpin(self, component: Component) -> None:
        for arena in self._arenas:
            arena.unpin(ref.sha256 for ref in component.tensors.values())

    def invalidate(self, extents: Collection[str]) -> list[str]:
        """Return the hashes of tensors that are on the device, or on their way, as damaged copies of these extents had
        them. The next `place_component` gets fresh ones; what is placed keeps what it has.
        """
        found = (arena.invalidate(lambda key: getattr(key, "extent", None) in extents) for arena in self._arenas)
        return [hash_ for hashes in found for hash_ in hashes]

    @property
    def forward_memory(self) -> ForwardMemory | None:
        """The books that forwards are counted in; None on the host."""
        return None if self._device.startswith("cpu") else self._arena.forwards

    def resize(self, budget_bytes: int) -> None:
        for arena in self._arenas:
            arena.resize(budget_bytes)

    def size_of(self, nbytes: int) -> int:
        """Return the bytes that a tensor of `nbytes` bytes counts against the budget."""
        return self._arena.size_of(nbytes)

    def stats(self) -> list[ArenaStats]:
        """Return a snapshot of each device, the replica's main one first."""
        return [arena.stats() for arena in self._arenas]


DeviceTier = SharedTier | ArenaTier


def open_tier(device: str, provider: LeasedExtents, budget_bytes: int, others: Sequence[str] = ()) -> DeviceTier:
    """Return the tier of a device (cpu, cpu-private, cuda, cuda:<n>) and of others beside it, each with that budget.

    Raises WeightsError for one that is not there.
    """
    if device == "cpu":
        return SharedTier(provider)
    return ArenaTier(
        provider, DeviceArena(device, budget_bytes), {name: DeviceArena(name, budget_bytes) for name in others}
    )


class _Uploads:
    """The extents that one upload needs, and no others, leased until it is done."""

    def __init__(self, provider: LeasedExtents, component: Component, extents: Sequence[ExtentRef]) -> None:
        self._provider = provider
        self._component = component
        self._extents = {extent.id: extent for extent in extents}
        self._leased: list[ExtentRef] = []
        self.storage_bytes = 0

    def again(self) -> _Uploads:
        """Return the uploads of the same component with no extents yet."""
        return _Uploads(self._provider, self._component, tuple(self._extents.values()))

    @property
    def host_bytes(self) -> int:
        return sum(extent.nbytes for extent in self._leased)

    def views(self, names: Sequence[str]) -> Tensors:
        refs = {name: self._component.tensors[name] for name in names}
        needed = [self._extents[id_] for id_ in sorted({ref.extent for ref in refs.values()})]
        buffers = self._provider.fetch(needed)
        self._leased += needed
        self.storage_bytes += _loaded_bytes(self._provider)
        bases = bytes_tensors(buffers)
        return {name: view_of(bases[ref.extent], ref) for name, ref in refs.items()}

    def release(self) -> None:
        if self._leased:
            self._provider.release(self._leased)


def _loaded_bytes(provider: ExtentProvider) -> int:
    """Return the bytes that the provider's latest fetch had to load, if it tells. Fetches side by side may mix."""
    report = getattr(provider, "last_report", None)
    return report.nbytes if report else 0
