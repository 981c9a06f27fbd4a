"""Docstrings name things: they do not open with "what it ...", "which one" or "who asks" in the place of a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "weights", "cluster", "deployments", "infra", "tests")
VERBS = "Return|Yield|Tell|Say|Print|Show|Give|Take|Remove|Read|Raise|Write|Keep|Forget|Hold"
FRAGMENT = re.compile(
    rf"(?:(?:{VERBS}) )?(?:what|who|whom|whose|whoever|whatever|those who|that which|one that|those that)\b"
    r"|(?:of|how|where|when|whether|which|why|whichever|wherever)\b",
    re.IGNORECASE,
)
MAYBE = re.compile(rf'"""\s*(?:{FRAGMENT.pattern})', re.IGNORECASE)  # so that few files are parsed
DOCUMENTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text.splitlines()[0]


def fragments_of(source: str) -> list[str]:
    return [text for text in docstrings(source) if FRAGMENT.match(text)] if MAYBE.search(source) else []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_open_with_a_noun_or_a_verb(package: str) -> None:
    sources = [path.read_text() for path in (ROOT / package).rglob("*.py")]
    assert sources
    assert [text for source in sources for text in fragments_of(source)] == []


@pytest.mark.parametrize(
    ("text", "is_odd"),
    [
        ("What a machine has.", True),
        ("Return what this machine has.", True),
        ("Tell whoever waits.", True),
        ("How a machine is found.", True),
        ("Where it stands.", True),
        ("Which of them wait.", True),
        ("Return those that wait.", True),
        ("Return whether it is there.", False),
        ("Return how many there are.", False),
        ("Return which of them wait.", False),
        ("The resources of a machine.", False),
    ],
)
def test_fragments_are_found(text: str, is_odd: bool) -> None:
    assert fragments_of(f'"""{text}"""') == [text] * is_odd
    assert fragments_of(f'def f():\n    """\n    {text}\n    """') == [text] * is_odd
