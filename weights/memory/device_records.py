"""Records of the device arena: identities of device tensors, host views, reports, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class DeviceKey(Protocol):
    """The identity of a tensor on a device. A TensorRef is one; equal hashes mean equal bytes."""

    @property
    def sha256(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


# Host tensors by name, or what fetches those of the given names: only what is missing on the device is asked for.
HostViews = Mapping[str, torch.Tensor] | Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """A report of one acquire or prefetch. Equal tensors count once.

    `reused_bytes` were there, or on their way for somebody else; `added_bytes` came for this call. What neither
    counts had no room (prefetch only). `moved_bytes` were copied: those added, or none on "cpu". `evicted` are hashes.
    """

    wanted_bytes: int
    reused_bytes: int
    added_bytes: int
    moved_bytes: int
    wall_s: float
    evicted: tuple[str, ...]


class Acquired(NamedTuple):
    """Leased tensors by name, and what it took."""

    tensors: dict[str, torch.Tensor]
    report: ArenaReport


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A snapshot. Tensors count as much as the device's allocator takes for them, but in `moved_bytes`.

    `arriving_bytes` are part of `resident_bytes`. `lingering_bytes` were evicted, but somebody without a lease still
    uses them, so they occupy the device and count against the budget. `kernel_bytes` are what the device's libraries
    keep beside tensors and beside the budget.
    """

    device: str
    budget_bytes: int
    num_tensors: int
    resident_bytes: int
    leased_bytes: int
    pinned_bytes: int
    arriving_bytes: int
    lingering_bytes: int
    moved_bytes: int
    num_evicted: int
    kernel_bytes: int = 0
