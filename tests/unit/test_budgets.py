"""The tree keeps its budgets: order among folders, small constructors and classes, a short README in each folder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from infra import budgets

ROOT = Path(__file__).parents[2]
README_LINES = 40
MAX_EXCEPTIONS = 8
NUM_CALLABLES = 87  # that all classes and records are made with; the bound gets lower, never higher
# Classes that are over the bound of methods, with what they have: the list gets shorter, and no number larger.
METHODS: dict[str, int] = {}


@pytest.fixture(scope="module")
def tree() -> dict[str, ast.Module]:
    return budgets.sources(ROOT)


@pytest.fixture(scope="module")
def callables(tree: dict[str, ast.Module]) -> dict[str, int]:
    return budgets.callables(tree)


def test_no_import_goes_round(tree: dict[str, ast.Module]) -> None:
    graph = budgets.imports(tree)
    assert sum(map(len, graph.values())) > 1000
    assert budgets.circles(graph) == []
    assert budgets.mutual_folders(graph) == []


def test_constructors_take_few_callables(callables: dict[str, int]) -> None:
    over = {name: count for name, count in callables.items() if count > budgets.MAX_CALLABLES}
    assert over == {}, "pass an object that has these methods"


def test_callables_of_constructors_get_fewer(callables: dict[str, int]) -> None:
    total = sum(callables.values())
    assert total <= NUM_CALLABLES, "pass what they return as an argument of the method, or an object with that method"


def test_classes_have_few_methods(tree: dict[str, ast.Module]) -> None:
    over = {name: count for name, count in budgets.methods(tree).items() if count > budgets.MAX_METHODS}
    assert len(METHODS) <= MAX_EXCEPTIONS
    assert over == METHODS, "take a part out that has a name; a class that is below the bound leaves the list"


def test_each_folder_of_the_second_level_says_what_it_does() -> None:
    folders = [
        path for package in budgets.PACKAGES for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()
    ]
    assert len(folders) > 20
    assert [str(path.relative_to(ROOT)) for path in folders if not (path / "README.md").exists()] == []
    lines = {str(path.relative_to(ROOT)): len((path / "README.md").read_text().splitlines()) for path in folders}
    assert {path: count for path, count in lines.items() if count > README_LINES} == {}


def test_circles_and_pairs_are_found() -> None:
    tree = {
        "a.x": "from b.y import Z",
        "b.y": "def f():\n    from a import w",
        "a.w": "import c",
        "c.__init__": "",
        "b.t": "from b import y",
    }
    graph = budgets.imports({name: ast.parse(source) for name, source in tree.items()})
    assert graph == {"a.x": {"b.y"}, "b.y": {"a.w"}, "a.w": {"c.__init__"}, "c.__init__": set(), "b.t": {"b.y"}}
    assert budgets.mutual_folders(graph) == [("a", "b")]
    assert budgets.circles(graph) == []
    assert budgets.circles(graph | {"a.w": {"a.x"}}) == [["a.w", "a.x", "b.y"]]


def test_callables_and_methods_are_counted() -> None:
    source = """
Maker = Callable[[], int]

class A:
    def __init__(self, one: Callable[[], int], two: Maker | None, *, three: int) -> None: ...
    async def run(self) -> None: ...

@dataclass(frozen=True)
class B:
    one: Mapping[str, Callable[..., int]]
    def run(self, other: Maker) -> None: ...
"""
    assert budgets.callables({"m": ast.parse(source)}) == {"m:A": 2, "m:B": 1}
    assert budgets.methods({"m": ast.parse(source)}) == {"m:A": 2, "m:B": 1}
