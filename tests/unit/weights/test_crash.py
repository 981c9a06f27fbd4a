"""Many writers at once, and writers that are killed: what was published is there, and the rest can be cleaned away."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.seeding import seeded_random
from safetensors.torch import load_file

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.operations.maintenance import gc
from weights.operations.repair import verify
from weights.records.manifest import Layout
from weights.storage.store import WeightStore

pytestmark = pytest.mark.slow

LAYOUTS: tuple[Layout, ...] = ("combined", "separate", "inline")
NUM_WRITERS = 4

WRITER = """
import sys
from pathlib import Path
from weights.operations.externalize import externalize
from weights.operations.layouts import convert
from weights.operations.maintenance import gc
from weights.storage.store import WeightStore
store = WeightStore(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
for job in sys.argv[2:]:
    what, source, layout = job.split(":")
    if what == "externalize":
        externalize(store, Path(source).name, Path(source), layout=layout)
    elif what == "convert":
        convert(store, source, layout)
    else:
        gc(store)
    print("done", flush=True)
"""


def start(store: WeightStore, *jobs: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(store.path), *jobs]
    environment = os.environ | {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(writer: subprocess.Popen[str]) -> None:
    """Past the imports, which are no business of the store's."""
    assert writer.stdout
    assert writer.stdin
    assert writer.stdout.readline() == "ready\n"
    writer.stdin.write("\n")
    writer.stdin.flush()


def assert_whole(store: WeightStore, sources: dict[str, Path]) -> None:
    store.index.check()
    assert verify(store, deep=True).damages == ()
    for name in store.model_names():
        loaded = load_from_store(store.path, name)["model"]
        for tensor, expected in load_file(sources[name] / "model.safetensors").items():
            assert torch.equal(loaded[tensor], expected)


def test_many_writers_at_once_store_everything_once(tmp_path: Path, write_model) -> None:
    store = WeightStore(tmp_path / "store")
    shared = {f"s{i}": torch.rand(3000) for i in range(4)}
    sources = {name: write_model(name, shared | {"own": torch.rand(50 + i)}) for i, name in enumerate("abcd")}
    for name in "xy":
        sources[name] = write_model(name, shared)
    writers = []
    for number in range(NUM_WRITERS):
        names = ["abcd", "dcba", "cdab", "bcda"][number % 4]
        layout = ["combined", "separate"][number % 2]
        jobs = [f"externalize:{sources[name]}:{layout}" for name in names]
        inline = "xy"[number % 2]
        writers.append(start(store, *jobs, f"externalize:{sources[inline]}:inline"))
    for writer in writers:
        go(writer)
    assert [(writer.communicate(timeout=60)[0], writer.returncode) for writer in writers] == [
        ("done\n" * 5, 0)
    ] * NUM_WRITERS
    assert store.model_names() == [*"abcd", "x", "y"]
    assert_whole(store, sources)
    assert len(store.index.read_meta().tensors) == 8
    names = [pack.name for pack in store.packs.iterdir()]
    assert sorted(name for name in names if "inline" in name) == ["x_inline", "y_inline"]
    stored = sum(pack.stat().st_size for pack in store.packs.iterdir() if pack.is_file())
    assert stored < 2 * sum(tensor.nbytes for tensor in shared.values())
    assert not list(store.path.glob(".staged*"))


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.long)])
def test_killed_at_any_moment_the_store_is_whole(tmp_path: Path, write_model, num_kills: int) -> None:
    """Moments are drawn anew in each run; the jobs go on until the kill."""
    chance = seeded_random()
    store = WeightStore(tmp_path / "store")
    shared = {f"s{i}": torch.rand(20_000) for i in range(8)}
    sources = {name: write_model(name, shared | {"own": torch.rand(30_000)}) for name in "kabc"}
    externalize(store, "k", sources["k"])
    for _ in range(num_kills):
        names = [chance.choice("abc") for _ in range(40)]
        jobs = [f"externalize:{sources[name]}:{chance.choice(LAYOUTS)}" for name in names]
        jobs = [job for first in jobs for job in (first, f"convert:k:{chance.choice(LAYOUTS)}", "gc::")]
        writer = start(store, *jobs)
        go(writer)
        time.sleep(chance.random() * 0.4)  # the moment of the kill is what the test is about
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        published = store.model_names()
        assert "k" in published
        assert_whole(store, sources)
        gc(store)
        assert store.model_names() == published
        assert_whole(store, sources)
        assert not list(store.path.glob(".staged*"))
        name, layout = chance.choice("abc"), chance.choice(LAYOUTS)
        externalize(store, name, sources[name], layout=layout)
        assert store.manifest(name).layout == layout
        assert_whole(store, sources)


@pytest.mark.drawn
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_between_any_two_steps_the_store_is_whole(
    tmp_path: Path, write_model, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """Every state on disk that a kill can leave behind: a copy is taken before each flush and each statement that the
    index is given, which come at every step."""
    store = WeightStore(tmp_path / "store")
    shared = torch.rand(500)
    sources = {name: write_model(name, {"s": shared, "own": torch.rand(300)}) for name in "ab"}
    externalize(store, "a", sources["a"])
    copies: list[WeightStore] = []

    def copy(_: object) -> None:
        copies.append(WeightStore(tmp_path / f"copy{len(copies)}"))
        shutil.copytree(store.path, copies[-1].path)

    class Watched(sqlite3.Connection):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.set_trace_callback(copy)

    with monkeypatch.context() as patch:
        patch.setattr("weights.storage.packs.WRITE_THREADS", 1)
        patch.setattr(os, "fsync", copy)
        patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Watched))
        externalize(store, "b", sources["b"], layout=layout)
    assert len(copies) > 12
    for copied in copies:
        assert_whole(copied, sources)
        assert "a" in copied.model_names()
        gc(copied)
        assert_whole(copied, sources)
        assert not list(copied.path.glob(".staged*"))
        externalize(copied, "b", sources["b"], layout=layout)
        assert copied.model_names() == ["a", "b"]
        assert_whole(copied, sources)
        assert gc(copied).removed == ()
