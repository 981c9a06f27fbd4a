"""The names that users of the library import. Renaming or removing one is a change for CHANGELOG.md."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

import deployments.records

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^\s*from ((?:configs|weights|cluster|deployments)[\w.]*) import ([\w, ]+)$", re.MULTILINE)
SURFACE = {
    "cluster.start.session": {"join_ray": ["address"]},
    "deployments.app": {"build_app": ["args"]},
    "weights.operations.externalize": {"externalize": ["store"]},
    "weights.loading.loader": {"load_model": ["manifest", "provider", "stage"]},
    "weights.loading.provider": {"LocalExtents": []},
    "weights.storage.store": {"WeightStore": []},
}


@pytest.mark.parametrize(
    ("module", "name", "leading"),
    [(module, name, leading) for module, names in SURFACE.items() for name, leading in names.items()],
)
def test_a_name_of_the_readme_is_there_with_its_parameters_and_a_docstring(
    module: str, name: str, leading: list[str]
) -> None:
    imported = importlib.import_module(module)
    found = getattr(imported, name)
    assert name in imported.__all__
    assert inspect.getdoc(found)
    parameters = list(inspect.signature(found).parameters)
    assert [each for each in leading if each not in parameters] == []


@pytest.mark.parametrize("module", [*SURFACE, "deployments.records"])
def test_a_module_has_what_it_says_it_exports(module: str) -> None:
    imported = importlib.import_module(module)
    assert len(set(imported.__all__)) == len(imported.__all__)
    assert [name for name in imported.__all__ if not hasattr(imported, name) or name.startswith("_")] == []


def test_what_the_pages_import_is_the_surface() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [found for page in pages for found in IMPORT.findall(page.read_text())]
    found = {(module, name.strip()) for module, names in lines for name in names.split(",")}
    exported = {(module, name) for module, names in SURFACE.items() for name in names}
    exported |= {("deployments.records", name) for name in deployments.records.__all__}
    assert found
    assert found - exported == set()


def test_the_records_export_what_they_list_and_nothing_else() -> None:
    public = {
        name for name, found in vars(deployments.records).items() if name[0] != "_" and not inspect.ismodule(found)
    }
    assert public - {"annotations"} == set(deployments.records.__all__)
