"""The records of a keeper: its extents, and its messages with replicas."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from weights.memory.host_pool import ByteArray
from weights.reading.report import LoadReport, Stage, StageFigures
from weights.records.errors import BudgetExceeded
from weights.records.manifest import ExtentRef
from weights.residency.contents import Entry

Source = Literal["storage", "peer", "adopted"]


class StoreFull(BudgetExceeded):
    """The object store has no room in memory, whatever the budget; more evictions may help, or a wait."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class HeldExtent:
    """An extent in memory: the reference that others get, and the view that keeps Ray from spilling it."""

    extent: ExtentRef
    ref: Any
    view: ByteArray
    source: Source


@dataclass(frozen=True, slots=True)
class Claim:
    """Leases on `entries`, which arrive as `arrivals`. The claimant loads `to_load`, and tells `loaded` or `failed`.

    `epoch` is that of the holder's leases: 0 for a dead one, which got none.
    """

    entries: tuple[Entry[HeldExtent], ...]
    arrivals: tuple[concurrent.futures.Future[HeldExtent], ...]
    to_load: tuple[ExtentRef, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of resident extents at one moment; detached and arriving ones are not counted."""

    num_extents: int
    resident_bytes: int
    leased_bytes: int
    pinned_bytes: int


class HeldOffer(NamedTuple):
    """An extent that a replica has mapped: its reference, and how many leases the replica has on it."""

    extent: ExtentRef
    ref: Any
    num_leases: int


@dataclass(frozen=True, slots=True)
class LeasedRefs:
    """References by extent id; `report` of this call's loads, None when all was resident or under way.

    `generation` names an epoch of the keeper and one of the holder: the leases end with either.
    """

    refs: dict[str, Any]
    report: LoadReport | None
    generation: str


@dataclass(frozen=True, slots=True)
class Greeting:
    """A keeper's answer to a replica's heartbeat. `wanted_bytes`: requests wait for so much leased room.

    Leases of another `generation` have ended: the replica has to offer its mapped extents. `invalidated` names
    the copies, by `copy_name`, whose bytes were lately found damaged.
    """

    generation: str
    wanted_bytes: int
    invalidated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recall:
    """Extents that the node needs back. `is_overdue`: new requests must not use them before they are given back."""

    ids: tuple[str, ...] = ()
    is_overdue: bool = False


@dataclass(frozen=True, slots=True)
class RecallAnswer:
    """A replica's answer to a `Recall`: one id per lease that it gives back; it keeps the others, or has none yet.

    The leases are those of `generation`, as in `LeasedRefs`.
    """

    given_back: tuple[str, ...]
    generation: str


def copy_name(ref: Any) -> str:
    """Return the name of one copy of an extent, the same in every process: that of its reference (ray.ObjectRef)."""
    name: str = ref.hex()
    return name


@dataclass(frozen=True, slots=True)
class ResidentExtent:
    """One extent in memory; `holders` has the number of leases by holder, `hits` the leases given since it came."""

    id: str
    nbytes: int
    holders: dict[str, int]
    pinned: bool
    source: Source
    hits: int


@dataclass(frozen=True, slots=True)
class KeeperStats:
    """A snapshot of one node: bytes resident against the budget, and the sources of loaded bytes.

    `read_s` is the time with at least one read in flight, from storage or a peer, `read_gbps` the rate during it
    (10^9 bytes per second); `read_bytes` are from storage. `staging_bytes` come on top of the budget; `pool_hit_rate`
    of the reads found a staging buffer ready. Of `leased_bytes`, `callable_bytes` come back when the node needs them,
    unless they are in use just then; `num_recalled` extents did. `corrupt` names extents whose shared bytes somebody
    changed (the last ones, `num_corrupt` in all). `object_store_bytes` is 0 when unknown. `num_holders` replicas live
    that have asked for something, with leases or without. Without `has_storage` the node lacks the store's folder, and
    others read for it.
    """

    node_id: str
    num_extents: int
    resident_bytes: int
    leased_bytes: int
    callable_bytes: int
    budget_bytes: int
    read_bytes: int
    read_s: float
    num_evicted: int
    num_recalled: int
    read_gbps: float
    staging_bytes: int
    pool_hit_rate: float
    stages: dict[Stage, StageFigures]
    generation: str
    pinned_bytes: int
    peer_bytes: int
    adopted_bytes: int
    served_bytes: int
    address: str | None
    holders: dict[str, int]
    num_waiting: int
    wanted_bytes: int
    audited_bytes: int
    num_corrupt: int
    corrupt: tuple[str, ...]
    object_store_bytes: int
    num_holders: int
    has_storage: bool = True
