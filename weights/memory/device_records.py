"""What goes into a device arena and what it says: identities of device tensors, reports, snapshots."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from weights.dtypes import tensor_nbytes
from weights.errors import WeightsError


class DeviceKey(Protocol):
    """What a tensor on a device is known by. A TensorRef is one; equal hashes mean equal bytes."""

    @property
    def sha256(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A private delta: what a transform makes of a stored tensor. Shared by all who derive it in the same way."""

    sha256: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


def derived_hash(sha256: str, transform: str) -> str:
    """Identity of what `transform` makes of the tensor `sha256`, known without making it.

    HAZARD: `transform` must name everything that the result depends on, such as the hashes and the scale of a LoRA.
    """
    return hashlib.sha256(f"{sha256}\0{transform}".encode()).hexdigest()


def derive(
    key: DeviceKey, transform: str, *, dtype: str | None = None, shape: Sequence[int] | None = None
) -> DerivedTensor:
    """The key of a merged, cast or quantized tensor; what is not given stays as it is. Raises WeightsError."""
    new_dtype, new_shape = dtype or key.dtype, key.shape if shape is None else tuple(shape)
    try:
        nbytes = tensor_nbytes(new_dtype, new_shape)
    except ValueError as error:
        raise WeightsError(f"{transform} of {key.sha256}: {error}") from None
    return DerivedTensor(derived_hash(key.sha256, transform), nbytes, new_dtype, new_shape)


# Host tensors by name, or what fetches those of the given names: only what is missing on the device is asked for.
HostViews = Mapping[str, torch.Tensor] | Callable[[Sequence[str]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """One acquire or prefetch. Equal tensors count once.

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
    """Tensors by name, leased."""

    tensors: dict[str, torch.Tensor]
    report: ArenaReport


@dataclass(frozen=True, slots=True)
class ArenaStats:
    """A snapshot. `arriving_bytes` are part of `resident_bytes`. `lingering_bytes` were evicted, but somebody without
    a lease still uses them, so they occupy the device and count against the budget."""

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
