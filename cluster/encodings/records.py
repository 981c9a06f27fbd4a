"""Records of the shared tier of text encodings. Loads neither Ray nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

from cluster.encodings.packed import Layout

INLINE_BYTES: Final = 64 * 2**10  # encodings up to here travel in messages, larger ones as objects of Ray's

Payload = TypeVar("Payload")
State = Literal["found", "yours", "wait"]


@dataclass(frozen=True, slots=True)
class Answer(Generic[Payload]):
    """The answer for one encoding. `found`: here it is. `yours`: the asker computes it, and publishes or abandons it.
    `wait`: another does.
    """

    state: State
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class SharedEncoding:
    """An encoding: its tensors in one array of bytes, `data`, or Ray's reference to that array.

    `cost_s` is what it took to compute. A copy may be kept as long as `generation` is the tier's.
    """

    layout: Layout
    data: Any
    cost_s: float
    generation: str


@dataclass(frozen=True, slots=True)
class Publication:
    """An encoding that was computed, but for its bytes, which travel beside it. The fields are those of the others."""

    digest: str
    layout: Layout
    cost_s: float
    keep: bool


@dataclass(frozen=True, slots=True)
class SharedStats:
    """A snapshot. Counts are of this life of the actor, which begins empty.

    `claimed`: answers that made somebody compute, `lost_claims` of which were passed on because nothing was heard of
    the one who had it. `waits`: callers that waited for another's computation. `refused`: encodings that were handed
    to who waited but not kept: too large, worth less than the rest, or without room in Ray's store.
    """

    hits: int
    claimed: int
    waits: int
    published: int
    abandoned: int
    lost_claims: int
    refused: int
    evicted: int
    waiting: int
    in_flight: int
    entries: int
    kept: int
    nbytes: int
    kept_bytes: int
    max_bytes: int
    entries_per_gib: float


def entries_per_gib(entries: int, nbytes: int) -> float:
    """Return how many such entries a GiB holds; 0 for none."""
    return entries * 2**30 / nbytes if nbytes else 0.0
