"""The tree as anybody sees it who opens it."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["configs", "weights", "cluster", "deployments"]
FILES = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
MAX_BODY_LINES = 40
MAX_PARAMETERS = 8  # of a constructor
# What was longer when the rule came. The list gets shorter, never longer.
LONG = {
    "deployments/engines/nn/triton_products.py _unpacked",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


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


def functions(source: str) -> Iterator[Function]:
    yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))


@cache
def functions_of(file: Path) -> list[Function]:
    return list(functions(file.read_text()))


def outermost(nodes: Iterable[ast.AST]) -> Iterator[Function]:
    """Yield the functions among nodes and within them, and none that is within another."""
    for node in nodes:
        if isinstance(node, Function):
            yield node
        else:
            yield from outermost(ast.iter_child_nodes(node))


def body_lines(function: Function) -> int:
    """Return the lines of a body without its docstring and without the functions within it."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    within = sum((node.end_lineno or 0) - node.lineno + 1 for node in outermost(body))
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 - within


def num_parameters(function: Function) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1  # without self


def test_a_function_fits_a_screen() -> None:
    long = {
        f"{file.relative_to(ROOT)} {function.name}"
        for file in FILES
        for function in functions_of(file)
        if body_lines(function) > MAX_BODY_LINES
    }
    assert long - LONG == set(), f"functions of more than {MAX_BODY_LINES} lines; take a part out that has a name"


def test_a_constructor_has_few_parameters() -> None:
    wide = {
        f"{file.relative_to(ROOT)}:{function.lineno}": num_parameters(function)
        for file in FILES
        for function in functions_of(file)
        if function.name == "__init__" and num_parameters(function) > MAX_PARAMETERS
    }
    assert wide == {}, f"constructors of more than {MAX_PARAMETERS} parameters; put what belongs together into a record"


def test_lines_are_counted_without_docstring_and_inner_functions() -> None:
    source = '''def outer(a):
    """Doc
    string."""

    x = 1
    def inner():
        def innermost():
            return 1
        return innermost
    return (
        x,
        inner,
    )
'''
    outer, inner, innermost = sorted(functions(source), key=lambda function: function.lineno)
    assert [body_lines(outer), body_lines(inner), body_lines(innermost)] == [5, 1, 1]
