"""The records of a replica: slots of built modules, requests for them, and their past."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from deployments.engines.memory_limits import forget_frames
from weights.manifest import Component, ExtentRef, Manifest
from weights.memory.block_plan import BlockPlan
from weights.residency.leases import Entry


class PartName(NamedTuple):
    """An adapter may have the name of a component without being one."""

    name: str
    is_adapter: bool = False


# The bytes of the device that what is built of a component and its skeleton folder allocates itself: a KV cache.
WorkingMemory = Callable[[Component, Path], int]


def no_working_memory(component: Component, skeleton: Path) -> int:
    """Return 0: the built thing allocates nothing that lasts."""
    return 0


# What a tensor costs a replica that maps its bytes: Python's objects for it and its share of the module's.
OBJECT_BYTES: Final = 8 * 2**10


def object_footprint(component: Component, working_bytes: int, budget_bytes: int) -> Mapping[str, int]:
    """Return what a module costs whose tensors are views of the node's shared memory: its Python objects, and what it
    allocates itself. One that allocates always fits, with adapters beside it: the budget is of what is kept, too.
    """
    nbytes = OBJECT_BYTES * len(component.tensors)
    return {component.module_key: max(nbytes, min(nbytes + working_bytes, beside_adapters(budget_bytes)))}


def beside_adapters(budget_bytes: int) -> int:
    """Return what a language model may take of a budget and leave room for its requests' adapters."""
    return budget_bytes - budget_bytes // 16


def device_footprint(component: Component, size_of: Callable[[int], int], working_bytes: int) -> Mapping[str, int]:
    """Return what every distinct tensor takes on the device, by hash, and what the built thing allocates there."""
    footprint = {hash_: size_of(nbytes) for hash_, nbytes in component.bytes_by_hash.items()}
    return footprint | ({f"memory of {component.module_key}": working_bytes} if working_bytes else {})


def streamed_footprint(component: Component, size_of: Callable[[int], int], plan: BlockPlan) -> Mapping[str, int]:
    """Return what a component takes on the device whose blocks come one after the other."""
    staying = [ref for name, ref in component.tensors.items() if name not in plan.streamed]
    return {ref.sha256: size_of(ref.nbytes) for ref in staying} | {
        f"memory of {component.module_key}": 2 * size_of(plan.buffer_bytes)
    }


def distinct_bytes(*sizes: Mapping[str, int]) -> int:
    """Return the bytes of all names, those of one name once."""
    found: dict[str, int] = {}
    for size in sizes:
        found.update(size)  # not entry by entry: each request asks, of thousands of tensors
    return sum(found.values())


@dataclass(frozen=True, slots=True)
class Part:
    """A component of a manifest. `footprint` is what it counts against the replica's budget."""

    manifest: Manifest
    component: Component
    footprint: Mapping[str, int]
    working_bytes: int = 0  # of the device, that the built thing allocates itself; part of the footprint
    streamed: BlockPlan | None = None  # of a component that is larger than the budget
    is_variant: bool = False  # its component is that of the manifest with a `parts_hash` of its own

    @property
    def extents(self) -> tuple[ExtentRef, ...]:
        """The extents that hold it."""
        return self.manifest.extents_of([self.component.name])


@dataclass(frozen=True, slots=True)
class Wanted:
    """The parts that a request needs, taken all at once: two that each hold half of theirs would wait for ever."""

    model: str
    parts: Mapping[PartName, Part]

    @property
    def sizes(self) -> dict[str, Mapping[str, int]]:
        """Return what each counts against the budget, by module key."""
        return {part.component.module_key: part.footprint for part in self.parts.values()}

    def __str__(self) -> str:
        return f"{', '.join(name.name for name in self.parts)} of {self.model!r}"


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
class Slot:
    """One module that is there or on its way."""

    entry: Entry[Slot]
    component: Component
    extents: tuple[ExtentRef, ...]
    serial: int
    num_running: int = 0  # of the leases: requests that have all they need, and compute
    models: set[str] = field(default_factory=set)
    built: asyncio.Future[Built | Exception] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_placed: bool = False
    is_adapter: bool = False
    is_condemned: bool = False  # over weights that were written to: what was computed with it is withheld

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
        return self.entry.firm.total()

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
        """Return a description as JSON-able values."""
        return {
            "component": self.component.name,
            "models": sorted(self.models),
            "bytes": self.nbytes,
            "leases": self.leases,
            "ready": self.result is not None,
            "condemned": self.is_condemned,
        }
