"""The records of a replica: slots of built modules, requests for them, and their past."""

from __future__ import annotations

import asyncio
import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from deployments.engines.memory_limits import forget_frames
from deployments.modules.room import merged
from weights.manifest import Component, ExtentRef, Manifest
from weights.residency import Popularity

HALF_LIFE_S: Final = 600.0
MAX_REMEMBERED: Final = 4096  # modules that are gone and whose past is still known


class PartName(NamedTuple):
    """An adapter may have the name of a component without being one."""

    name: str
    is_adapter: bool = False


# What a component counts against a replica's budget: bytes by name, those of one name once.
Footprint = Callable[[Component], Mapping[str, int]]

# What a tensor costs a replica that maps its bytes: Python's objects for it and its share of the module's.
OBJECT_BYTES: Final = 8 * 2**10


def tensor_footprint(component: Component) -> Mapping[str, int]:
    """Return the bytes of every distinct tensor, by hash."""
    return component.bytes_by_hash


def object_footprint(component: Component) -> Mapping[str, int]:
    """Return what a module costs whose tensors are views of the node's shared memory: its Python objects."""
    return {component.module_key: OBJECT_BYTES * len(component.tensors)}


@dataclass(frozen=True, slots=True)
class Part:
    """A component of a manifest. `footprint` is what it counts against the replica's budget."""

    manifest: Manifest
    component: Component
    footprint: Mapping[str, int]

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
    def keys(self) -> set[str]:
        return {part.component.module_key for part in self.parts.values()}

    @property
    def footprint(self) -> dict[str, int]:
        """Return what counts against the budget, bytes by name."""
        return merged(part.footprint for part in self.parts.values())

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

    component: Component
    extents: tuple[ExtentRef, ...]
    serial: int
    footprint: Mapping[str, int]
    last_used: int = 0
    leases: int = 0
    num_running: int = 0  # of the leases: requests that have all they need, and compute
    models: set[str] = field(default_factory=set)
    built: asyncio.Future[Built | Exception] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_placed: bool = False
    is_adapter: bool = False
    is_condemned: bool = False  # over weights that were written to: nobody new may have it
    is_closed: bool = False  # called back while it was used: nobody new may have it
    is_gone: bool = False  # given back: those who wait for it must take it anew

    @property
    def tensors(self) -> Mapping[str, int]:
        """Return the bytes of its tensors, by hash."""
        return self._apart(self.component.bytes_by_hash)

    @property
    def charges(self) -> Mapping[str, int]:
        """Return what counts against the budget, bytes by name."""
        return self._apart(self.footprint)

    def _apart(self, nbytes: Mapping[str, int]) -> Mapping[str, int]:
        """What nobody new may have is there beside the next one of its kind."""
        if self.is_condemned or self.is_closed:
            return {f"{name}#{self.serial}": count for name, count in nbytes.items()}
        return nbytes

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
        """None while it is on its way, or when that failed."""
        found = self.built.result() if self.built.done() and not self.built.cancelled() else None
        return found if isinstance(found, Built) else None

    @property
    def thing(self) -> Any:
        """The thing that was built, of a slot that is ready."""
        assert self.result
        return self.result.thing

    async def ready(self) -> Built:
        """Raises what `fail` was told: a copy, because whoever waits adds its own frames, and they know this slot."""
        found = await asyncio.shield(self.built)
        if isinstance(found, Exception):
            raise copy.copy(found)
        return found

    def fail(self, error: Exception) -> None:
        """Whoever asked is told this, without the frames that it came through."""
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


class ModulePast:
    """The popularity of modules and what they took the last time, by key: a module that comes back keeps its past."""

    def __init__(self) -> None:
        self._popularity: OrderedDict[str, Popularity] = OrderedDict()
        self._reload_s: dict[str, float] = {}

    def touch(self, key: str, now_s: float) -> None:
        self._popularity[key] = self._popularity.get(key, Popularity(HALF_LIFE_S)).touch(now_s)
        self._popularity.move_to_end(key)
        while len(self._popularity) > MAX_REMEMBERED:
            gone, _ = self._popularity.popitem(last=False)
            self._reload_s.pop(gone, None)

    def took(self, key: str, reload_s: float) -> None:
        self._reload_s[key] = reload_s

    def popularity(self, key: str, now_s: float) -> float:
        found = self._popularity.get(key)
        return found.value(now_s) if found else 0.0

    def reload_s(self, key: str) -> float | None:
        return self._reload_s.get(key)
