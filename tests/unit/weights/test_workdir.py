"""Folders in which packs are staged: the path rule, and what becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weights.loading.loader import load_from_store
from weights.operations.externalize import externalize
from weights.records.errors import StoreError
from weights.storage.staging import _resolve_weight_dir, opened_weight_dir
from weights.storage.store import WeightStore

CWD = Path("/somewhere")


@pytest.mark.parametrize(
    ("weight_dir", "environ", "expected"),
    [
        ("/given", {"ATELIER_WORK_PATH": "/work"}, "/given"),
        ("given", {"ATELIER_WORK_PATH": "/work"}, "/somewhere/given"),
        (None, {"ATELIER_WORK_PATH": "/work"}, "/work/tmp_weight_7_s-1"),
        (None, {"ATELIER_WORK_PATH": "work"}, "/somewhere/work/tmp_weight_7_s-1"),
        (None, {"ATELIER_WORK_PATH": ""}, "/somewhere/tmp_weight_7_s-1"),
        (None, {}, "/somewhere/tmp_weight_7_s-1"),
    ],
)
def test_the_rule(weight_dir: str | None, environ: dict[str, str], expected: str) -> None:
    given = Path(weight_dir) if weight_dir else None
    assert _resolve_weight_dir(given, environ, CWD, 7, "s-1") == Path(expected)


@pytest.mark.parametrize("session", ["", "../x", "a/b", "a\0", "a b", "x" * 65])
def test_a_session_is_a_plain_name(session: str) -> None:
    with pytest.raises(StoreError, match="session"):
        _resolve_weight_dir(None, {}, CWD, 7, session)


def test_a_temporary_folder_vanishes_with_its_session(tmp_path: Path) -> None:
    environ = {"ATELIER_WORK_PATH": str(tmp_path / "work")}
    with opened_weight_dir(None, environ, tmp_path, 7, "a") as first:
        (first / "left").touch()
        with opened_weight_dir(None, environ, tmp_path, 7, "b") as second:
            assert first.is_dir()
            assert second.is_dir()
        assert not second.exists()
    assert list((tmp_path / "work").iterdir()) == []


def test_a_given_folder_stays_with_what_others_have_in_it(tmp_path: Path) -> None:
    folder = tmp_path / "given"
    with opened_weight_dir(folder, {}, tmp_path, 7, "a") as path:
        assert path == folder
        (path / "mine").touch()
    with opened_weight_dir(folder, {}, tmp_path, 7, "b"):
        pass
    assert [file.name for file in folder.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for given, environ in ((tmp_path / "file", {}), (None, {"ATELIER_WORK_PATH": str(tmp_path / "file")})):
        with (
            pytest.raises(StoreError, match=r"file: (File exists|Not a directory)"),
            opened_weight_dir(given, environ, tmp_path, 7, "a") as path,
            WeightStore(tmp_path / "store").staged("pack", path),
        ):
            pass


KILLED = """
import os, sys
from pathlib import Path
from weights.storage.store import WeightStore
from weights.storage.staging import opened_weight_dir
given = Path(sys.argv[1]) if sys.argv[1] else None
with opened_weight_dir(given, os.environ, Path.cwd(), os.getpid(), "s") as folder:
    with WeightStore(folder / "unused").staged("pack", folder) as pack:
        pack.write_bytes(bytes(1000))
        print(folder, flush=True)
        sys.stdin.read()
"""


@pytest.mark.drawn
@pytest.mark.parametrize("is_given", [True, False])
def test_a_killed_session_is_swept_by_the_next(tmp_path: Path, is_given: bool) -> None:
    given = tmp_path / "given" if is_given else None
    environ = os.environ | {"ATELIER_WORK_PATH": str(tmp_path)}
    command = [sys.executable, "-c", KILLED, str(given or "")]
    killed = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert killed.stdout
    folder = Path(killed.stdout.readline().strip())
    (tmp_path / "tmp_weight_of_somebody").mkdir()
    (tmp_path / "tmp_weight_of_somebody" / "precious").touch()
    with opened_weight_dir(given, environ, tmp_path, 1, "next"):
        assert any(folder.rglob("pack"))
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    with opened_weight_dir(given, environ, tmp_path, 1, "next"):
        assert not list(folder.rglob("pack"))
    left = {"tmp_weight_of_somebody"} | ({"given"} if is_given else set())
    assert {path.name for path in tmp_path.iterdir()} == left
    assert given is None or list(given.iterdir()) == []


def test_externalizing_through_it_leaves_a_store_with_its_own_paths(tmp_path: Path, write_model) -> None:
    store = WeightStore(tmp_path / "store")
    tensor = torch.rand(50)
    with opened_weight_dir(None, {}, tmp_path, 7, "a") as folder:
        manifest = externalize(store, "m", write_model("m", {"w": tensor}), weight_dir=folder)
    assert {extent.pack for extent in manifest.extents.values()} == {"m_weight_combined"}
    assert torch.equal(load_from_store(store.path, "m")["model"]["w"], tensor)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sources", "store"]
