"""The compiled kernels are found again: compiling them takes half a minute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.engines.native import building


@pytest.mark.slow
def test_every_process_looks_for_the_same_file() -> None:
    code = "from deployments.engines.native.building import library_name; print(library_name())"
    names = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2", "3")
    }
    assert len(names) == 1


def _fake_compiler(folder: Path) -> Path:
    """Write a compiler that notes its calls, and makes of any source a file of 64 KiB."""
    compiler = folder / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho call >> {folder}/calls\nfor last; do :; done\nhead -c 65536 /dev/zero > "$last"\n'
    )
    compiler.chmod(0o755)
    return compiler


@pytest.mark.parametrize("damage", ["cut short", "empty", "one byte changed"])
def test_a_damaged_library_in_the_cache_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("CXX", str(_fake_compiler(tmp_path)))
    monkeypatch.setattr(building, "SOURCE", _source(tmp_path))
    library = building.built_library(tmp_path / "cache")
    whole, num_calls = library.read_bytes(), len((tmp_path / "calls").read_text().split())
    changed = whole[:100] + b"\1" + whole[101:]
    library.write_bytes({"cut short": whole[: len(whole) // 2], "empty": b"", "one byte changed": changed}[damage])
    assert building.built_library(tmp_path / "cache").read_bytes() == whole
    assert building.built_library(tmp_path / "cache").read_bytes() == whole
    assert len((tmp_path / "calls").read_text().split()) == 2 * num_calls


def test_a_damaged_library_beside_the_source_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(_fake_compiler(tmp_path)))
    monkeypatch.setattr(building, "SOURCE", _source(tmp_path))
    installed = building.build_library(building.SOURCE.parent)
    assert building.built_library(tmp_path / "cache") == installed
    installed.write_bytes(installed.read_bytes()[:4096])
    assert building.built_library(tmp_path / "cache").parent == tmp_path / "cache"


@pytest.mark.parametrize("given", ["/nowhere/g++", "nowhere-c++ -m64"])
def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setattr(building, "SOURCE", _source(tmp_path))
    monkeypatch.setenv("CXX", given)
    with pytest.raises(building.BuildFailed, match=re.escape(f"CXX names, '{given.split()[0]}', is not there")):
        building.built_library(tmp_path / "cache")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(building.BuildFailed, match=r"no C\+\+ compiler"):
        building.built_library(tmp_path / "cache")


def test_a_compiler_that_cannot_be_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = _fake_compiler(tmp_path)
    compiler.write_text("#!/nowhere/sh\n")
    monkeypatch.setattr(building, "SOURCE", _source(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(building.BuildFailed, match="compiler cannot be run"):
        building.built_library(tmp_path / "cache")


def _source(folder: Path) -> Path:
    (folder / "source").mkdir()
    file = folder / "source" / "quantized.cpp"
    file.write_text("int nothing;\n")
    return file
