"""Every extent in memory is looked at again, at a bounded rate, and nothing is kept from being freed."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from kit.seeding import seeded_rng

from cluster.keeper.records import HeldExtent
from cluster.keeper.shared_memory import BLOCK_BYTES, Audit
from weights.records.manifest import ExtentRef


class Node:
    """Extents by id, and what the audit says of them. Time passes only while the audit pauses."""

    def __init__(self, bytes_per_s: float = 1e12) -> None:
        self.extents: dict[str, HeldExtent] = {}
        self.damaged: list[str] = []
        self.pauses_s: list[float] = []
        self.during_pause: Any = lambda: None
        self.residents: Any = SimpleNamespace(ids=lambda: list(self.extents), held=self.extents.get)
        self.audit = Audit(self, bytes_per_s, clock=lambda: 0.0)
        self.audit._closed.wait = self._pause  # type: ignore[method-assign]

    def put(self, id_: str, nbytes: int) -> HeldExtent:
        view = seeded_rng().integers(0, 256, nbytes, np.uint8)
        ref = ExtentRef(id=id_, pack=id_, offset=0, nbytes=nbytes, checksum=xxhash.xxh3_128_hexdigest(view))
        self.extents[id_] = HeldExtent(ref, None, view, "storage")
        return self.extents[id_]

    def note_damage(self, held: HeldExtent) -> None:
        self.damaged.append(held.extent.id)

    def _pause(self, seconds: float) -> bool:
        self.pauses_s.append(seconds)
        self.during_pause()
        return False


def test_only_what_was_written_to_is_named() -> None:
    node = Node()
    for id_, nbytes in {"a": 100, "b": BLOCK_BYTES + 1, "c": 3 * BLOCK_BYTES}.items():
        node.put(id_, nbytes)
    node.audit.round()
    assert node.damaged == []
    node.extents["b"].view[-1] ^= 1
    node.audit.round()
    assert node.damaged == ["b"]
    assert node.audit.audited_bytes == 2 * (100 + BLOCK_BYTES + 1 + 3 * BLOCK_BYTES)


def test_what_somebody_got_other_bytes_of_comes_first() -> None:
    node = Node()
    for id_ in "abc":
        node.put(id_, 100).view[0] ^= 1
    node.audit.look_soon("c")
    node.audit.look_soon("gone")
    node.audit.round()
    assert node.damaged == ["c", "a", "b", "c"]


def test_the_rate_is_bounded() -> None:
    node = Node(bytes_per_s=BLOCK_BYTES / 2)
    node.put("a", 2 * BLOCK_BYTES + BLOCK_BYTES // 2)
    node.audit.round()
    assert node.pauses_s == pytest.approx([2.0, 2.0, 1.0])


def test_what_is_evicted_during_a_pause_is_freed_and_forgotten() -> None:
    node = Node()
    gone = weakref.ref(node.put("a", 2 * BLOCK_BYTES))
    freed: list[bool] = []

    def evict() -> None:
        node.extents.pop("a", None)
        gc.collect()
        freed.append(gone() is None)

    node.during_pause = evict
    node.audit.round()
    assert freed == [True]
    assert node.damaged == []


def test_a_fresh_copy_is_not_judged_by_half_of_the_old_one() -> None:
    node = Node()
    node.put("a", 2 * BLOCK_BYTES)
    node.during_pause = lambda: node.put("a", 2 * BLOCK_BYTES)
    node.audit.round()
    assert node.damaged == []
