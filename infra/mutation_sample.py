"""Break the product at random places, one at a time, and say which of them no test notices.

`python infra/mutation_sample.py [--record] [--count 60] [--seed 0] [--since REVISION] [--quick]`, in a checkout of its
own: files change and are put back. A break turns a comparison, swaps `and` and `or`, negates a condition, moves a
number by one, swaps plus and minus, or leaves out a call. `--record` runs the unit and device tests once under
coverage, which is wanted again when the code has changed: a break has the tests that run its line, those that import
the module first, all of its package where other processes run it too, then ruff and mypy. `--quick` leaves out the long
tests, as `make test` does; Ray's are never run. A test that takes a minute has failed. A survivor may be as good as
what stood there: each wants a look.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from coverage import CoverageData

PACKAGES: Final = ("configs", "weights", "cluster", "deployments")
TEST_TIMEOUT_S: Final = 60
RUN_TIMEOUT_S: Final = 1800
RECORDED: Final = Path("out/lines/data")
_NO_TESTS: Final = 5  # pytest's exit code
_SWAPS: Final[dict[type[ast.AST], Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


class Break(NamedTuple):
    """One place, broken."""

    lines: range  # of its statement, up to the place
    said: str
    text: str  # the whole module


def breaks_of(source: str) -> Iterator[Break]:
    """Yield a break for each place inside of functions."""
    lines = source.splitlines(keepends=True)
    functions = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    inner = {one: None for function in functions for statement in function.body for one in ast.walk(statement)}
    for statement in inner:
        for node in _own_nodes(statement) if isinstance(statement, ast.stmt) else ():
            if node.lineno != node.end_lineno or (broken := _broken(node)) is None:
                continue
            line = lines[node.lineno - 1].encode()
            changed = line[: node.col_offset] + broken.encode() + line[node.end_col_offset :]
            text = "".join([*lines[: node.lineno - 1], changed.decode(), *lines[node.lineno :]])
            said = f"{ast.get_source_segment(source, node)} -> {broken}"
            first = min(statement.lineno, node.lineno)  # a decorator stands before its function
            yield Break(range(first, node.lineno + 1), said, text)


def _own_nodes(node: ast.AST) -> Iterator[Any]:
    """Yield a statement and what it has but for statements."""
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            yield from _own_nodes(child)


def _broken(node: ast.AST) -> str | None:
    """Return the source of a node, broken; None for what is not broken."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPS:
        swapped = ast.Compare(node.left, [_SWAPS[type(node.ops[0])]()], node.comparators)
        return f"({ast.unparse(swapped)})"
    if isinstance(node, ast.BoolOp):
        return f"({ast.unparse(ast.BoolOp(_SWAPS[type(node.op)](), node.values))})"
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        return f"({ast.unparse(ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right))})"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return ast.unparse(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "log" not in ast.unparse(node.value.func):
        return "pass"
    return None


def record(options: list[str]) -> None:
    """Run the unit and device tests, and keep which of them run which lines, and for how long."""
    shutil.rmtree(RECORDED.parent, ignore_errors=True)
    copies = ["-p", "no:xdist", "--forks", str((os.cpu_count() or 1) + 1)]
    for tests, more in (("unit", copies), ("device", [])):
        times = ["--times", str(RECORDED.with_name(f"{tests}.tsv"))]
        measured = [sys.executable, "-m", "coverage", "run", f"--data-file={RECORDED}", "-m", "pytest"]
        subprocess.run([*measured, f"tests/{tests}", *more, *options, *times], check=False)
    subprocess.run([sys.executable, "-m", "coverage", "combine", f"--data-file={RECORDED}"], check=True)


class Recording:
    """A recording of which tests run which lines."""

    def __init__(self) -> None:
        self._data = CoverageData(str(RECORDED))
        self._data.read()
        rows = (line.split("\t") for path in RECORDED.parent.glob("*.tsv") for line in path.read_text().splitlines())
        self._took_s = {test: float(passed) for _, passed, test in rows}

    def tests_of(self, module: Path, lines: range) -> list[str]:
        """Return the tests that run one of these lines, by files: those that import the module first, then the quick.

        They are files or folders where their fixtures run it. Last come all of the package, where a process runs it. A
        line that was not seen to run may run in the processes of the tests that import the module.
        """
        contexts = self._data.contexts_by_lineno(str(module))
        found = {test for line in lines for test in contexts.get(line, ())}
        files: dict[str, list[str]] = {}
        for test in sorted(found - {""}):
            files.setdefault(test.partition("::")[0], []).append(test)
        in_order = sorted(files, key=lambda file: self._order(file, files[file], module))
        folders = (Path("tests/unit") / parent for parent in module.parents)
        rest = [str(next(folder for folder in folders if folder.is_dir()))] if "" in found else []
        if not found:
            rest = [str(file) for file in sorted(Path("tests/unit").rglob("test_*.py")) if _imports(file, module)]
        return [test for file in in_order for test in files[file]] + rest

    def _order(self, file: str, tests: list[str], module: Path) -> tuple[bool, float]:
        return not _imports(Path(file), module), sum(self._took_s.get(test, TEST_TIMEOUT_S) for test in tests)


def _imports(test: Path, module: Path) -> bool:
    dotted = str(module.with_suffix("")).replace("/", ".")
    package, _, name = dotted.rpartition(".")
    text = test.read_text() if test.is_file() else ""
    return any(one in text for one in (f"from {dotted} import", f"from {package} import {name}", f"import {dotted}"))


def first_failure(tests: list[str], options: list[str]) -> str:
    """Return the first of the tests that fails, "" where none does."""
    fixed = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S)]
    command = [sys.executable, "-m", "pytest", *fixed, *options, *tests]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return "no end"
    if run.returncode in (0, _NO_TESTS):
        return ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split()[1] if failed else f"exit code {run.returncode}"


def first_complaint(module: Path) -> str:
    """Return the first of the checks that complains of a module, "" where none does."""
    for check in (["ruff", "check", "--quiet", str(module)], ["mypy"]):
        if subprocess.run([sys.executable, "-m", *check], capture_output=True, check=False).returncode:
            return check[0]
    return ""


def candidates(since: str | None) -> list[Path]:
    """Return the modules of the product; of those alone that changed since a revision, where one is named."""
    if since:
        named = subprocess.run(["git", "diff", "--name-only", since], capture_output=True, text=True, check=True)
        files = [Path(name) for name in named.stdout.split()]
    else:
        files = [file for package in PACKAGES for file in Path(package).rglob("*.py")]
    return sorted(file for file in files if file.suffix == ".py" and file.parts[0] in PACKAGES and file.exists())


def main() -> None:
    """Break, test and put back; ends with 1 when fewer than nine of ten are caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="which tests run which lines, first")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--since")
    parser.add_argument("--quick", action="store_true", help="the tests of `make test` alone")
    given = parser.parse_args()
    options = ["-m", "not long"] if given.quick else []
    os.environ.setdefault("ATELIER_TEST_SEED", "1")  # or each break would draw other tests than the recorded ones
    if given.record:
        record(options)
    rng, files, recording, num_caught, num_tried = random.Random(given.seed), candidates(given.since), Recording(), 0, 0
    while num_tried < given.count:
        file = rng.choice(files)
        source = file.read_text()
        if not (places := list(breaks_of(source))):
            continue
        lines, said, text = rng.choice(places)
        tests = recording.tests_of(file, lines)
        file.write_text(text)
        try:
            failure = (first_failure(tests, options) if tests else "") or first_complaint(file)
        finally:
            file.write_text(source)
        num_tried, num_caught = num_tried + 1, num_caught + bool(failure)
        outcome = f"caught   {file}:{lines[-1]} {said} ({failure})"
        sys.stdout.write(f"{outcome if failure else f'SURVIVED {file}:{lines[-1]} {said} (of {len(tests)} tests)'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{num_caught} of {num_tried} caught (seed {given.seed})\n")
    sys.exit(num_caught < 0.9 * num_tried)


if __name__ == "__main__":
    main()
