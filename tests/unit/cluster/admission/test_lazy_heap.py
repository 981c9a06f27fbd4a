"""The heap whose entries are corrected late, beside a plain look at all keys."""

from __future__ import annotations

from typing import Any

import pytest
from kit.seeding import seeded_random
from unit.counting import operations

from cluster.admission.lazy_heap import LazyHeap


class Numbers(dict[Any, int]):
    def key_of(self, item: Any) -> int | None:
        return self.get(item)


def test_the_first_is_the_least_of_all_keys_whatever_grew_shrank_came_and_went() -> None:
    rng, keys = seeded_random(), Numbers()
    heap = LazyHeap[str](keys)
    for _ in range(3000):
        item, choice = rng.choice("abcdefgh"), rng.random()
        if item not in keys or choice < 0.2:  # it may be less than before
            keys[item] = rng.randrange(100)
            heap.push(item)
        elif choice < 0.5:
            keys[item] += rng.randrange(10)
        elif choice < 0.7:
            del keys[item]
        elif choice < 0.8:
            keys.update({each: rng.randrange(100) for each in keys})
            heap.rebuild()
        elif choice < 0.9 and (taken := heap.pop()) is not None:
            assert (keys.pop(taken), taken) <= min([(key, each) for each, key in keys.items()], default=(100, ""))
        assert heap.first() == min(keys, key=lambda each: (keys[each], each), default=None)


@pytest.mark.parametrize("number", [100, 1000])
def test_what_came_and_went_unseen_is_forgotten(number: int) -> None:
    keys = Numbers({0: 0})
    heap = LazyHeap[int](keys, keys)
    for item in range(1, number):
        keys[item] = item
        heap.push(item)
        del keys[item]
    assert operations(heap.rebuild) < 2000
