"""Which extents of the store a component takes its tensors from, and which tensors are written again."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from weights.manifest import TENSOR_ALIGNMENT
from weights.storage.meta import StoreMeta

# An extent is read, leased and evicted as a whole: who wants less than this part of it has a copy of its own.
MIN_WANTED_PART: Final = 0.25


def shared_extents(wanted: Mapping[str, int], meta: StoreMeta) -> dict[str, str]:
    """The extent of `meta` that each tensor is taken from; tensors that are missing here are to be written.

    `wanted` has the bytes of the component's tensors by sha256. The extent that has most of what is still wanted
    comes first; one of which less than MIN_WANTED_PART is still wanted is not shared.
    """
    inside: dict[str, dict[str, int]] = defaultdict(dict)
    for sha256, nbytes in wanted.items():
        for id_ in meta.tensors.get(sha256, ()):
            # With its padding: a bias of 24 bytes takes 512, and an extent of such is wanted whole.
            inside[id_][sha256] = nbytes + -nbytes % TENSOR_ALIGNMENT
    shared: dict[str, str] = {}
    best_first = [(-sum(tensors.values()), id_) for id_, tensors in inside.items()]
    heapq.heapify(best_first)
    while best_first:
        promised_bytes, id_ = heapq.heappop(best_first)
        left = {sha256: nbytes for sha256, nbytes in inside[id_].items() if sha256 not in shared}
        left_bytes = sum(left.values())
        if left_bytes != -promised_bytes:  # others took of it meanwhile
            if left:
                heapq.heappush(best_first, (-left_bytes, id_))
        elif left and left_bytes >= MIN_WANTED_PART * meta.extents[id_].nbytes:
            shared |= dict.fromkeys(left, id_)
    return shared
