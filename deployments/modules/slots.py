"""The modules of a replica one by one: what each is, who uses it, and what was built."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.engines.costs.memory_limits import forget_frames
from deployments.engines.llm.engine import LLMEngine
from weights.records.manifest import Component, ExtentRef
from weights.residency.contents import Entry


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
class ModuleSlot:
    """One module that is there or on its way."""

    entry: Entry[ModuleSlot]
    component: Component
    extents: tuple[ExtentRef, ...]
    serial: int
    num_running: int = 0  # of the leases: requests that have all they need, and compute
    models: set[str] = field(default_factory=set)
    built: asyncio.Future[Built | Exception] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    is_placed: bool = False
    is_adapter: bool = False
    is_damaged: bool = False  # over weights that were written to: what was computed with it is withheld

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
        return self.entry.held.total()

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
        """Return the built module, once there is one.

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
        """Return a description as JSON-able values; of a language model, the blocks of its KV cache as well."""
        described = {
            "component": self.component.name,
            "models": sorted(self.models),
            "bytes": self.nbytes,
            "leases": self.leases,
            "ready": self.result is not None,
            "damaged": self.is_damaged,
        }
        if self.result is not None and isinstance(engine := self.result.thing, LLMEngine):
            found = engine.stats()
            described["kv_blocks"] = {"used": found.num_blocks - found.num_free_blocks, "total": found.num_blocks}
        return described
