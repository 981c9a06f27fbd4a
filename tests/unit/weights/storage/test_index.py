"""The index: what is entered is found, whatever else is there, and at a cost that does not grow with the store."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.seeding import seeded_random

from weights.operations.externalize import externalize
from weights.operations.layouts import convert
from weights.operations.maintenance import remove_model
from weights.operations.repair import verify
from weights.records.errors import StoreError
from weights.storage.index import MAX_PLACES, IndexDamaged, StoredExtent, StoreIndex, StoreMeta, Unneeded, remove_index
from weights.storage.store import WeightStore


def sha(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def stored(*names: object, pack: str = "p", nbytes: int = 10**9) -> StoredExtent:
    tensors = {sha(name): 512 * i for i, name in enumerate(names)}
    return StoredExtent(pack=pack, offset=0, nbytes=nbytes, checksum=sha(pack)[:32], tensors=tensors)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


def test_what_is_entered_is_found_by_the_next_connection(path: Path) -> None:
    chance = seeded_random()
    names = [chance.random() for _ in range(60)]
    extents = {f"x{i}": stored(*chance.sample(names, 9), pack=f"p{i}") for i in range(20)}
    with StoreIndex.opened(path, list) as index:
        index.enter("m", extents, [*extents][:7])
        index.enter("n", {}, [*extents][5:9])
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]  # no log is left
    with StoreIndex.opened(path) as index:
        index.check()
        assert index.everything() == StoreMeta(extents=extents)
        assert index.num_tensors() == len({sha256 for extent in extents.values() for sha256 in extent.tensors})
        wanted = {sha(name) for name in chance.sample(names, 5)}
        found = index.find(wanted)
        assert set(found.tensors) == wanted & index.everything().tensors.keys()
        for id_, extent in found.extents.items():
            expected = {sha256: place for sha256, place in extents[id_].tensors.items() if sha256 in wanted}
            assert extent == extents[id_].model_copy(update={"tensors": expected})
        assert index.used_by_others(extents, "n") == {*[*extents][:7]}
        assert index.used_by_others(extents, "x") == {*[*extents][:9]}


def test_what_is_forgotten_can_be_entered_again(path: Path) -> None:
    with StoreIndex.opened(path, list) as index:
        index.enter("m", {"x": stored("a", "b"), "y": stored("a")}, ["x", "y"])
        index.enter("n", {"x": stored("a", "b", pack="q")}, ["x"], forgotten=["x", "unknown"])
        assert index.find([sha("a")]).extents.keys() == {"x", "y"}
        assert index.everything().extents["x"].pack == "q"
        assert index.used_by_others(["x", "y"], "n") == {"y"}


def test_a_place_is_forgotten_but_not_another_of_the_same_extent(path: Path) -> None:
    with StoreIndex.opened(path, list) as index:
        index.enter("m", {"x": stored("a"), "y": stored("b")}, [])
        x, y = (index.everything().extent(id_) for id_ in "xy")
        index.forget_extents([x, y.model_copy(update={"pack": "q"}), y.model_copy(update={"id": "z"})])
        assert index.everything() == StoreMeta(extents={"y": stored("b")})


def test_of_a_tensor_that_is_everywhere_only_some_places_are_looked_at(path: Path) -> None:
    with StoreIndex.opened(path, list) as index:
        index.enter("m", {f"x{i}": stored("zeros", i) for i in range(50)}, [])
        assert len(index.find([sha("zeros")]).extents) == MAX_PLACES
        found = index.find([sha("zeros"), sha(3)])
        assert found.extents["x3"].tensors.keys() == {sha("zeros"), sha(3)}


def test_a_change_that_fails_changes_nothing(path: Path) -> None:
    with StoreIndex.opened(path, list) as index:
        index.enter("m", {"x": stored("a")}, ["x"])
        index.note_unneeded([Unneeded("packs/q", 0, 9, 1.5)])
        before = index.everything(), index.unneeded()
        with pytest.raises(ValueError, match="hexadecimal"):
            index.enter("m", {"y": stored("b"), "z": stored("c").model_copy(update={"checksum": "none"})}, ["x"])
        assert (index.everything(), index.unneeded()) == before


def test_an_index_that_is_missing_or_none_is_damaged(path: Path) -> None:
    with pytest.raises(IndexDamaged, match="missing"), StoreIndex.opened(path):
        pass
    for content in (b"", b"x" * 10_000):
        path.write_bytes(content)
        with pytest.raises(IndexDamaged, match=r"index\.sqlite: damaged"), StoreIndex.opened(path):
            pass


def test_a_full_disk_is_said(path: Path) -> None:
    with StoreIndex.opened(path, list) as index:
        index._connection.execute("PRAGMA max_page_count = 20")
        with pytest.raises(sqlite3.OperationalError, match="full"):
            index.enter("m", {f"x{i}": stored(i) for i in range(10_000)}, [])
        assert index.everything() == StoreMeta()

    def fill() -> None:
        with StoreIndex.opened(path) as index:
            index._connection.execute("PRAGMA max_page_count = 20")
            index.enter("m", {f"x{i}": stored(i) for i in range(10_000)}, [])

    with pytest.raises(StoreError, match=r"index\.sqlite: database or disk is full"):
        fill()


def test_where_nothing_can_be_written_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreIndex.opened(path, list) as index:
        index.enter("m", {"x": stored("a")}, ["x"])
        expected = index.everything()
    monkeypatch.setattr(os, "access", lambda *_: False)
    with StoreIndex.opened(path) as first, StoreIndex.opened(path) as second:  # no lock is taken
        assert first.everything() == second.everything() == expected
        first.check()
    with pytest.raises(StoreError, match=r"index\.sqlite: attempt to write a readonly database"):
        enter(path, "n")
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def enter(path: Path, model: str, *extents: str) -> None:
    with StoreIndex.opened(path, list) as index:
        index.enter(model, {id_: stored(id_) for id_ in extents}, extents)


@pytest.mark.parametrize("num_kills", [4, pytest.param(80, marks=pytest.mark.long)])
def test_killed_at_any_instruction_it_has_all_of_a_change_or_nothing(
    path: Path, tmp_path: Path, num_kills: int
) -> None:
    """A kill also while it is made, and while a kill before is recovered from."""
    chance = seeded_random()
    entered: set[str] = set()
    for number in range(num_kills):
        if chance.random() < 0.2:
            remove_index(path)
            entered = set()
        extents = {f"{number}-{i}" for i in range(chance.randint(1, 30))}
        left = chance.randint(0, 600)

        def count() -> int:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return 0

        class Deadly(sqlite3.Connection):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.set_progress_handler(count, 1)

        child = os.fork()
        if child == 0:
            sqlite3.connect = functools.partial(sqlite3.connect, factory=Deadly)  # type: ignore[assignment]
            enter(path, "m", *extents)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with StoreIndex.opened(path, list) as index:
            index.check()
            found = set(index.everything().extents)
        assert found == entered | extents or (os.WIFSIGNALED(status) and found == entered)
        entered = found


class Counts:
    """The costs of a step: instructions of sqlite (each row that is touched takes some), looks at files, bytes."""

    def __init__(self) -> None:
        self.steps = self.stats = self.nbytes = 0

    def __enter__(self) -> Counts:
        counts, self._patch = self, pytest.MonkeyPatch()

        class Counted(sqlite3.Connection):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                self.set_progress_handler(counts._step, 1)

        self._patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Counted))
        for name in ("stat", "lstat", "scandir", "listdir"):
            self._patch.setattr(os, name, functools.partial(self._look, getattr(os, name)))
        self._before = self._written()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = self._written() - self._before
        self._patch.undo()

    def _step(self) -> int:
        self.steps += 1
        return 0

    def _look(self, function: Any, *args: Any, **options: Any) -> Any:
        self.stats += 1
        return function(*args, **options)

    @staticmethod
    def _written() -> int:
        (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("wchar"))
        return int(line.split()[1])


@pytest.mark.drawn
@pytest.mark.parametrize("action", ["publish", "convert", "remove"])
def test_what_a_publish_costs_does_not_grow_with_the_store(tmp_path: Path, write_model, action: str) -> None:
    """Ten times as many models: as many rows and files are looked at, and about as many bytes written."""
    shared = {f"s{i}": torch.rand(64) for i in range(30)}
    zeros = hashlib.sha256(bytes(256)).hexdigest()
    found = []
    for num_models in (60, 600):
        store = WeightStore(tmp_path / f"store{num_models}")
        externalize(store, "base", write_model("base", shared | {"more": torch.rand(200)}))

        def fill(index: StoreIndex, num_models: int = num_models) -> None:
            for model in range(num_models):
                extent = stored(*(f"{model}.{i}" for i in range(50)), pack=f"{model}_weight_combined")
                extent.tensors[zeros] = 512 * 50  # a tensor that all have
                index.enter(f"model-{model}", {f"x{model}": extent}, [f"x{model}"])

        with store.locked():
            store.index.run(fill)
        for model in range(num_models):
            (store.models / f"model-{model}").mkdir()
            (store.models / f"model-{model}" / "manifest.json").touch()
        own = {f"o{i}": torch.rand(64) for i in range(30)} | {"zeros": torch.zeros(64)}
        source = write_model(f"new{num_models}", shared | own)
        if action != "publish":
            externalize(store, "new", source)
        with Counts() as counts:
            if action == "remove":
                remove_model(store, "new")
            else:
                externalize(store, "new", source) if action == "publish" else convert(store, "new", "separate")
        if action != "remove":
            assert verify(store, "new", deep=True).damages == ()
            assert (counts.steps > 500, counts.nbytes > 30 * 256) == (True, True)
        assert counts.stats > 1
        found.append(counts)
    small, large = found
    assert large.stats <= 1.1 * small.stats
    assert large.steps <= 1.2 * small.steps
    # More than as many: keys are hashes, and among few rows several of them fall on one page that is written.
    assert large.nbytes <= 3 * small.nbytes
