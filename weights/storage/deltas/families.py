"""Families of components, and the base of each: who is stored plain, and who as a difference from it. Pure."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from weights.memory.pages import ByteArray
from weights.storage.deltas.codec import encode_chunk

# A delta that is not smaller than this part of its extent is not worth decoding: the plain bytes stay.
MAX_RATIO: Final = 0.9
# Bits of weights that have nothing to do with each other agree here and there: that makes no family.
_MAX_OF_ALONE: Final = 0.97
Sample = Sequence[tuple[int, ByteArray]]  # bytes of an item, and some items, of the same tensors in all members
Member = TypeVar("Member")


def choose_bases(samples: Mapping[Member, Sample], fixed: Collection[Member] = ()) -> dict[Member, Member]:
    """Return the base of each member that is to be a delta. One hop: a base is in no delta itself.

    Members have one structure. `fixed` are bases already, and stay. Of the others each joins the nearest of these that
    it is near to; then medoids become bases, each of those that are near, until nobody is left.
    """

    @functools.cache
    def distance(one: Member, other: Member) -> float:
        return bit_distance(samples[one], samples[other])

    bases: dict[Member, Member] = {}
    free = [member for member in samples if member not in fixed]
    for member in free:
        nearest = min(fixed, key=functools.partial(distance, member), default=None)
        if nearest is not None and is_near(samples[member], samples[nearest]):
            bases[member] = nearest
    left = [member for member in free if member not in bases]
    while len(left) > 1:
        sums = {base: sum(distance(base, member) for member in left) for base in left}
        medoid = min(left, key=sums.__getitem__)
        joined = [m for m in left if m != medoid and is_near(samples[m], samples[medoid])]
        bases |= dict.fromkeys(joined, medoid)
        left = [member for member in left if member not in (medoid, *joined)]
    return bases


def bit_distance(sample: Sample, other: Sample) -> float:
    """Return the part of the bits that differ, 0 to 1."""
    num_bytes = sum(items.nbytes for _, items in sample)
    num_bits = sum(int(np.bitwise_count(a ^ b).sum()) for (_, a), (_, b) in zip(sample, other, strict=True))
    return num_bits / (8 * num_bytes) if num_bytes else 0.0


def is_near(sample: Sample, base: Sample) -> bool:
    """Return whether the sample is well stored as a difference, and better so than through the same codec alone."""
    num_bytes = sum(items.nbytes for _, items in sample)
    alone = sum(len(encode_chunk(items, size, None)) for size, items in sample)
    encoded = sum(len(encode_chunk(a, size, b)) for (size, a), (_, b) in zip(sample, base, strict=True))
    return encoded < MAX_RATIO * num_bytes and encoded < _MAX_OF_ALONE * alone
