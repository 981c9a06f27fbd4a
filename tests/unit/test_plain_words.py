"""Docstrings name things: they do not open with "what it ..." or "who asks" in the place of a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "weights", "cluster", "deployments", "infra")
PLAIN = (
    *("configs", "weights", "infra"),
    *("cluster/door", "cluster/keeper", "cluster/peers", "cluster/process", "cluster/ray_seam", "cluster/records"),
    *("cluster/registry", "cluster/start"),
    *("deployments/batching", "deployments/cli", "deployments/console", "deployments/modules", "deployments/pipelines"),
    *("deployments/engines/building", "deployments/engines/costs", "deployments/engines/graph"),
    *("deployments/engines/libraries", "deployments/engines/native", "deployments/engines/programs"),
    *("deployments/engines/records", "deployments/engines/text"),
    *("deployments/plots", "deployments/records", "deployments/replicas", "deployments/requests"),
    *("deployments/services", "deployments/text"),
)
MAX_SHARE = 0.025  # of all docstrings: the rest of the tree gets plainer, never less plain
VERBS = "Return|Yield|Tell|Say|Print|Show|Give|Take|Remove|Read"
FREE_RELATIVE = re.compile(
    rf"(?:(?:{VERBS}) )?(?:what|who|whom|whoever|whatever|those who|that which)\b", re.IGNORECASE
)
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text.splitlines()[0]


def docstrings_of(folder: str) -> list[str]:
    return [text for path in (ROOT / folder).rglob("*.py") for text in docstrings(path.read_text())]


@pytest.mark.parametrize("folder", PLAIN)
def test_docstrings_of_a_plain_folder_open_with_a_noun_or_a_verb(folder: str) -> None:
    found = docstrings_of(folder)
    assert found
    assert [text for text in found if FREE_RELATIVE.match(text)] == []


def test_few_docstrings_of_the_tree_open_with_a_free_relative() -> None:
    found = [text for package in PACKAGES for text in docstrings_of(package)]
    odd = [text for text in found if FREE_RELATIVE.match(text)]
    assert len(odd) < MAX_SHARE * len(found), odd


@pytest.mark.parametrize(
    ("text", "is_odd"),
    [
        ("What a machine has.", True),
        ("Return what this machine has.", True),
        ("Tell whoever waits.", True),
        ("Return whether it is there.", False),
        ("The resources of a machine.", False),
    ],
)
def test_free_relatives_are_found(text: str, is_odd: bool) -> None:
    (found,) = docstrings(f'"""{text}"""')
    assert bool(FREE_RELATIVE.match(found)) == is_odd
