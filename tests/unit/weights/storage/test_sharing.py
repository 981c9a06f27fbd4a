"""Tensors are shared when they are worth the extent they are in."""

from __future__ import annotations

import hashlib

import pytest
from kit.seeding import seeded_random

from weights.records.manifest import ExtentRef
from weights.storage.index import StoreMeta
from weights.storage.packs import MIN_WANTED_PART, _shared_extents


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def meta_with(**extents: dict[str, int]) -> StoreMeta:
    """Extents of tensors (blocks of 512 bytes by name), one after another."""
    meta = StoreMeta()
    for id_, tensors in extents.items():
        ref = ExtentRef(id=id_, pack=id_, offset=0, nbytes=512 * sum(tensors.values()), checksum="0" * 32)
        meta.add_extent(ref, {sha(name): 0 for name in tensors})
    return meta


def shared(meta: StoreMeta, **wanted: int) -> dict[str, str]:
    found = _shared_extents({sha(name): 512 * blocks for name, blocks in wanted.items()}, meta)
    return {name: found[sha(name)] for name in wanted if sha(name) in found}


@pytest.mark.parametrize(("blocks", "is_shared"), [(24, False), (25, True), (100, True)])
def test_a_quarter_is_enough(blocks: int, is_shared: bool) -> None:
    meta = meta_with(x={"a": blocks, "rest": 100 - blocks})
    assert shared(meta, a=blocks) == ({"a": "x"} if is_shared else {})


@pytest.mark.parametrize("nbytes", [1, 24, 511])
def test_what_takes_more_room_than_it_has_bytes_is_shared_all_the_same(nbytes: int) -> None:
    """An extent of nothing but tiny tensors is padding for the most part."""
    names = [sha(f"t{i}") for i in range(10)]
    ref = ExtentRef(id="x", pack="x", offset=0, nbytes=9 * 512 + nbytes, checksum="0" * 32)
    meta = StoreMeta()
    meta.add_extent(ref, {name: 512 * i for i, name in enumerate(names)})
    assert _shared_extents(dict.fromkeys(names, nbytes), meta) == dict.fromkeys(names, "x")
    assert _shared_extents(dict.fromkeys(names[:2], nbytes), meta) == {}


def test_an_extent_is_shared_for_all_that_is_wanted_of_it() -> None:
    meta = meta_with(x={"a": 10, "b": 10, "c": 10, "rest": 70})
    assert shared(meta, a=10, b=10) == {}
    assert shared(meta, a=10, b=10, c=10) == dict.fromkeys("abc", "x")


def test_no_second_extent_for_a_crumb() -> None:
    """Both hold what is wanted; the second would be read for `d` alone."""
    meta = meta_with(x={"a": 40, "b": 40, "c": 20}, y={"b": 40, "c": 20, "d": 1})
    assert shared(meta, a=40, b=40, c=20, d=1) == dict.fromkeys("abc", "x")


def test_a_copy_of_its_own_size_is_taken() -> None:
    """A model that was refused the large extent wrote a small one: the next finds that."""
    meta = meta_with(large={"tiny": 1, "rest": 999}, small={"tiny": 1})
    assert shared(meta, tiny=1) == {"tiny": "small"}


def test_empty_tensors_are_somewhere() -> None:
    assert shared(meta_with(x={"e": 0}), e=0) == {"e": "x"}
    assert shared(meta_with(x={"e": 0, "rest": 5}), e=0) == {}


def test_every_choice_keeps_the_rule() -> None:
    chance = seeded_random()
    names = {f"t{i}": chance.choice([0, 1, 5, 50, 500]) for i in range(40)}
    extents = {
        f"x{i}": {name: names[name] for name in chance.sample([*names], chance.randint(1, 15))} for i in range(30)
    }
    meta = meta_with(**extents)
    wanted = {name: names[name] for name in chance.sample([*names], 20)}
    found = shared(meta, **wanted)
    for id_ in set(found.values()):
        taken = sum(names[name] for name, where in found.items() if where == id_)
        assert taken >= MIN_WANTED_PART * sum(extents[id_].values())
        assert all(name in extents[id_] for name, where in found.items() if where == id_)
    for tensors in extents.values():  # nothing was left out that the rule allows
        left = {name for name in tensors if name in wanted and name not in found}
        assert not left or sum(names[name] for name in left) < MIN_WANTED_PART * sum(tensors.values())
