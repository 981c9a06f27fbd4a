"""The tree as anybody sees it who opens it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["configs", "weights", "cluster", "deployments"]
FILES = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]


def test_nothing_is_called_by_what_it_is_not() -> None:
    paths = {part for file in FILES for part in (file, *file.parents) if part.is_relative_to(ROOT) and part != ROOT}
    assert len(paths) > len(PACKAGES)
    assert [
        path for path in paths if path.stem.lower() in {"utils", "util", "common", "helpers", "helper", "core"}
    ] == []


def test_importing_an_engine_runs_nothing_of_deployments() -> None:
    assert (ROOT / "deployments/__init__.py").read_text() == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_the_ones_of_this_tree(package: str) -> None:
    file = importlib.import_module(package).__file__
    assert file is not None
    assert Path(file).resolve().is_relative_to(ROOT)
