"""A damaged index stops nobody: it follows from the manifests, and is made again from them."""

from __future__ import annotations

import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from weights.operations.externalize import externalize
from weights.operations.layouts import convert
from weights.operations.maintenance import gc, rebuild_index, remove_model
from weights.operations.repair import repair, verify
from weights.storage.index import StoreIndex, Unneeded
from weights.storage.store import WeightStore

HEADER_BYTES = 100  # sqlite.org/fileformat.html
PAGE_BYTES = 4096
ACTIONS: dict[str, Callable[[WeightStore, Path], Any]] = {
    "publish": lambda store, source: externalize(store, "new", source),
    "convert": lambda store, source: convert(store, "a", "separate"),
    "gc": lambda store, source: gc(store, grace_s=1e6),
    "index": lambda store, source: rebuild_index(store),
    "repair": lambda store, source: repair(store),
}
# They read all of the index, so they leave nothing damaged in it.
THOROUGH = ("gc", "index", "repair")


class Sound(NamedTuple):
    """A store with an index of many pages, a model that is not in it, and a copy to begin from again."""

    store: WeightStore
    source: Path
    copy: Path
    index: bytes

    def damage(self, place: int, value: int) -> None:
        shutil.rmtree(self.store.path)
        shutil.copytree(self.copy, self.store.path)
        damaged = bytearray(self.index)
        damaged[place] = value
        self.store.index_file.write_bytes(damaged)


@pytest.fixture
def sound(tmp_path: Path, write_model) -> Sound:
    store = WeightStore(tmp_path / "store")
    shared = {f"s{i}": torch.rand(8) for i in range(60)}
    for name in "ab":
        own = {f"o{i}": torch.rand(8) for i in range(90)}
        externalize(store, name, write_model(name, shared | own), layout="separate" if name == "b" else "combined")
    externalize(store, "gone", write_model("gone", {"g": torch.rand(8)}))
    remove_model(store, "gone")
    gc(store, grace_s=1e6)
    with store.locked():
        assert store.index.run(StoreIndex.unneeded)
    copy = tmp_path / "copy"
    shutil.copytree(store.path, copy)
    index = store.index_file.read_bytes()
    assert len(index) > 8 * PAGE_BYTES
    return Sound(store, write_model("new", shared | {"n": torch.rand(8)}), copy, index)


def random_damages(index: bytes, chance: random.Random) -> Iterator[tuple[int, int]]:
    """Yield places and other values there: of the header, of the page with the schema, of other pages."""
    schema = [place for place in range(HEADER_BYTES, PAGE_BYTES) if index[place]]
    while True:
        for place in (chance.randrange(HEADER_BYTES), chance.choice(schema), chance.randrange(PAGE_BYTES, len(index))):
            bit = index[place] ^ 1 << chance.randrange(8)
            yield place, chance.choice([bit, (index[place] + chance.randrange(1, 256)) % 256])


def act(sound: Sound, action: str) -> None:
    """Do it, and check that it was done: whatever the index said, the store is whole."""
    ACTIONS[action](sound.store, sound.source)
    if action in THOROUGH:
        sound.store.index.check()
    assert [damage for damage in verify(sound.store).damages if damage.file != "index.sqlite"] == []
    if action == "publish":
        assert sound.store.model_names() == ["a", "b", "new"]
    if action == "convert":
        assert sound.store.manifest("a").layout == "separate"


def use(index: StoreIndex, hashes: list[str], ids: list[str]) -> None:
    """Ask and change all that a writer and `gc` ask and change."""
    index.find(hashes)
    index.used_by_others(ids, "a")
    index.everything()
    clocks = index.unneeded()
    found = index.find(hashes[:3])
    index.enter("other", found.extents, [*found.extents], forgotten=ids[:1], needed_paths=["packs/x"])
    index.note_unneeded({*clocks, Unneeded("packs/y", 0, 512, 1.5)})


def test_one_changed_byte_of_the_header_stops_nobody(sound: Sound) -> None:
    """A sixth of its bytes, drawn."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    manifest = sound.store.manifest("a")
    manifests = [*sound.store.manifests().values()]
    hashes = [*manifest.components["model"].bytes_by_hash]
    for place in range(chance.randrange(6), HEADER_BYTES, 6):
        value = (sound.index[place] + chance.randrange(1, 256)) % 256
        sound.store.index_file.write_bytes(sound.index[:place] + bytes([value]) + sound.index[place + 1 :])
        with sound.store.locked():
            sound.store.index.run(lambda index: use(index, hashes, [*manifest.extents]))
            sound.store.index.run(lambda index: index.follow(manifests))


@pytest.mark.drawn
@pytest.mark.parametrize("action", [*ACTIONS])
def test_one_changed_byte_anywhere_stops_no_action(sound: Sound, action: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    damages = random_damages(sound.index, random.Random(seed))
    for _ in range(5):
        place, value = next(damages)
        print(place, value)
        sound.damage(place, value)
        act(sound, action)


@pytest.mark.drawn
@pytest.mark.parametrize("action", [*ACTIONS])
def test_a_header_or_schema_that_lies_stops_no_action(sound: Sound, action: str) -> None:
    schema = sound.index.index(b"CREATE TABLE tensors")
    # No SQLite file; "may not be written"; "of a version to come"; no text.
    for place, value in [(0, 0), (18, 9), (63, 131), (60, 1), (schema + 3, 0xFF)]:
        sound.damage(place, value)
        act(sound, action)


@pytest.mark.drawn
@pytest.mark.parametrize("action", [*ACTIONS])
def test_values_that_cannot_be_stop_no_action(sound: Sound, action: str) -> None:
    for statement in [
        "UPDATE unneeded SET since_s = 'yesterday'",
        "UPDATE unneeded SET path = CAST(path AS BLOB)",
        "UPDATE extents SET id = '../' || number",
        "UPDATE extents SET pack = CAST(x'ff' AS TEXT)",
        "UPDATE extents SET nbytes = 1 << 62",
        "UPDATE tensors SET sha256 = substr(sha256, 1, 9)",
    ]:
        sound.damage(0, sound.index[0])
        with sqlite3.connect(sound.store.index_file) as index:
            index.execute(statement)
        index.close()
        act(sound, action)


def test_a_schema_that_numbers_no_extent_is_damage(sound: Sound) -> None:
    """One changed byte makes the number a column like others, whose type has three words: it reads as NULL."""
    place = sound.index[:PAGE_BYTES].rindex(b"PRIMARY KEY, id TEXT")
    for action in THOROUGH:
        sound.damage(place, ord("Z"))
        act(sound, action)
