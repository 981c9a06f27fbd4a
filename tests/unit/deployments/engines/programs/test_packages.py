"""Packages of compiled programs without a compiler: what is kept, what is compiled anew, and why one is not there."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.engines.programs import compiling
from deployments.engines.programs.compiling import NotCompiled

COMPONENT: Any = SimpleNamespace(config_hash="c" * 64, model_dump_json=lambda: '{"a": 1}')


def write_package(package: Path, content: bytes = b"made") -> None:
    package.write_bytes(content)
    package.with_suffix(".sha256").write_text(hashlib.sha256(content).hexdigest())


def test_a_package_is_compiled_once_and_again_where_its_bytes_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []

    def compile_it(component: Any, folder: Path, target: Path) -> None:
        with (target.parent / "lock").open() as lock, pytest.raises(BlockingIOError):  # one at a time on a node
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_package(target)
        os.utime(target, (1e9, 1e9))
        compiled.append(target)

    monkeypatch.setattr(compiling, "_run_compiler", compile_it)
    packages = tmp_path / "packages"
    found = compiling._find_package(COMPONENT, tmp_path, packages)
    assert (found.parent, found.suffix, len(found.stem)) == (packages, ".pt2", 32)
    assert found.stat().st_mtime > 1e9  # used just now
    assert compiling._find_package(COMPONENT, tmp_path, packages) == found
    assert compiled == [found]
    found.write_bytes(b"damaged")
    compiling._find_package(COMPONENT, tmp_path, packages)
    found.with_suffix(".sha256").unlink()
    compiling._find_package(COMPONENT, tmp_path, packages)
    assert compiled == [found] * 3
    another = SimpleNamespace(config_hash="d" * 64)
    assert compiling._find_package(another, tmp_path, packages) != found  # type: ignore[arg-type]


def test_packages_that_were_used_last_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "MAX_PACKAGES", 2)
    for age, name in enumerate("abcd"):
        write_package(tmp_path / f"{name}.pt2")
        os.utime(tmp_path / f"{name}.pt2", (1e9 - age, 1e9 - age))
    (tmp_path / "d.sha256").unlink()
    compiling._remove_oldest(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.pt2", "a.sha256", "b.pt2", "b.sha256"]


@pytest.mark.parametrize(("named", "there", "words"), [
    ("", "", "none of .* is on the PATH"),
    ("my-cxx -O3", "g++", "none of my-cxx is on the PATH"),
    ("", "g++", ""),
    ("my-cxx -O3", "my-cxx", ""),
])  # fmt: skip
def test_a_compiler_must_be_there(named: str, there: str, words: str, tmp_path: Path, monkeypatch: Any) -> None:
    if there:
        (tmp_path / there).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", named)
    if words:
        with pytest.raises(NotCompiled, match=f"no C\\+\\+ compiler: {words}"):
            compiling._check_compiler()
    else:
        compiling._check_compiler()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Have a shell's lines in the place of the compiling process; `$4` describes the component, `$6` is to be made."""
    monkeypatch.setattr(compiling, "_check_compiler", lambda: None)

    def of(lines: str) -> Path:
        script, target = tmp_path / "python", tmp_path / "packages" / "t.pt2"
        script.write_text(f"#!/bin/sh\n{lines}\n")
        script.chmod(stat.S_IRWXU)
        target.parent.mkdir()
        monkeypatch.setattr(sys, "executable", str(script))
        compiling._run_compiler(COMPONENT, tmp_path, target)
        return target

    return of


def test_nothing_is_begun_without_a_compiler(run: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NotCompiled("no compiler")

    monkeypatch.setattr(compiling, "_check_compiler", fail)
    with pytest.raises(NotCompiled, match="no compiler"):
        run('cp "$4" "$6"')


def test_what_was_compiled_is_kept_with_its_digest(run: Callable[[str], Path]) -> None:
    target = run('cp "$4" "$6"')
    assert target.read_text() == '{"a": 1}'
    assert compiling._is_whole(target)
    assert sorted(file.name for file in target.parent.iterdir()) == ["t.pt2", "t.sha256"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("echo first >&2; echo 'NotCompiled: why' >&2; exit 1", "^NotCompiled: why$"),
        ("exit 3", "^the compiling process ended with 3$"),
        ("exit 0", "^the compiling process ended with 0$"),
        ("echo begun >&2; exit 0", "^begun$"),
        ("echo begun >&2; kill -9 $$", "^the compiling process ended with -9$"),
        ('cp "$4" "$6"; echo late >&2; exit 1', "^late$"),
        ("sleep 60", r"^it took more than 0\.2 s$"),
    ],
)
def test_a_compiling_process_that_fails_says_why(
    lines: str, words: str, run: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "COMPILE_TIMEOUT_S", 0.2 if "sleep" in lines else 30)
    with pytest.raises(NotCompiled, match=words):
        run(lines.replace("sleep", "exec sleep"))


def test_the_compiling_process_ends_with_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(compiling, "_end_with_stdin", lambda: calls.append("watch"))
    monkeypatch.setattr(os, "nice", lambda by: calls.append(by))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: calls.append(f"{number} threads"))
    monkeypatch.setattr(compiling.Component, "model_validate_json", lambda text: text)
    (tmp_path / "described").write_text("component")
    given = str(tmp_path / "described"), "folder", "made", "3", "19"
    monkeypatch.setattr(compiling, "_compile_here", lambda *arguments: calls.append(arguments))
    compiling._main(*given)
    assert calls == ["watch", 19, "3 threads", ("component", Path("folder"), Path("made"))]

    def fail(*_: Any) -> None:
        raise RuntimeError("a \n long" + "x" * 300)

    monkeypatch.setattr(compiling, "_compile_here", fail)
    with pytest.raises(SystemExit) as caught:
        compiling._main(*given)
    assert caught.value.code == f"RuntimeError: a long{'x' * 274}"


def test_results_are_compared_at_both_ends_of_each_range() -> None:
    most = compiling._TRIED_SIZE
    ranges = {"rows": (1, 4), "long": (2, 10 * most), "one": (3, 3)}
    found = list(compiling._trial_sizes(SimpleNamespace(ranges=ranges)))  # type: ignore[arg-type]
    assert [sizes["rows"] for sizes in found] == [1, 1, 4]
    assert [sizes["long"] for sizes in found] == [2, 2 + int(0.3 * (most - 2)), most]
    assert [sizes["one"] for sizes in found] == [3, 3, 3]


def test_made_up_values_are_small_or_within_their_table() -> None:
    numbers = compiling._random(torch.empty(1000), 1)
    assert 0.01 <= float(numbers.min()) <= float(numbers.max()) <= 0.1
    ids = compiling._random(torch.empty(1000, dtype=torch.int64), 3)
    assert ids.unique().tolist() == [0, 1, 2]
    assert compiling._random(torch.zeros(4, dtype=torch.bool), 1).all()
