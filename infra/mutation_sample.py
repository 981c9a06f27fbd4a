"""Break the product at random places, one at a time, and say which breaks no unit test notices.

`python infra/mutation_sample.py [--count 60] [--seed 0] [--since REVISION] [--quick] [--near]`, in a checkout of its
own: files change and are put back. A break turns a comparison, swaps `and` and `or`, negates a condition, moves a
number by one, swaps plus and minus, or leaves out a call. The tests are those that import the module (one without any
is passed over), and where these do not fail, all others of its package; `--near` stops before that, `--quick` leaves
out the long tests, as `make test` does. A test that takes a minute has failed. A survivor may be as good as what stood
there: each wants a look.
"""

from __future__ import annotations

import argparse
import ast
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = ("configs", "weights", "cluster", "deployments")
TEST_TIMEOUT_S: Final = 60
NEAR_TIMEOUT_S: Final = 240  # of tests that import the module: without an end, where no test is at fault
PACKAGE_TIMEOUT_S: Final = 1800
_NO_TESTS: Final = 5  # pytest's exit code
_SWAPS: Final[dict[type[ast.AST], Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


def breaks_of(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, what is broken, the whole text with it) for each place inside of functions."""
    lines = source.splitlines(keepends=True)
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                for node in ast.walk(statement):
                    if not isinstance(node, ast.expr | ast.stmt) or node.lineno != node.end_lineno:
                        continue
                    if (broken := _broken(node)) is not None:
                        before = ast.get_source_segment(source, node)
                        line = lines[node.lineno - 1].encode()
                        changed = line[: node.col_offset] + broken.encode() + line[node.end_col_offset :]
                        text = "".join([*lines[: node.lineno - 1], changed.decode(), *lines[node.lineno :]])
                        yield node.lineno, f"{before} -> {broken}", text


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


def tests_of(module: Path) -> list[str]:
    """Return the unit tests that import a module."""
    dotted = str(module.with_suffix("")).replace("/", ".")
    package, _, name = dotted.rpartition(".")
    found = []
    for test in Path("tests/unit").rglob("test_*.py"):
        text = test.read_text()
        if f"from {dotted} import" in text or f"from {package} import {name}" in text or f"import {dotted}" in text:
            found.append(str(test))
    return sorted(found)


def others_of(module: Path, near: list[str]) -> list[str]:
    """Return the unit tests of the module's package, or of the one around it, but those that import it."""
    folders = (Path("tests/unit") / parent for parent in module.parents)
    folder = next(folder for folder in folders if folder.is_dir())
    return sorted({str(test) for test in folder.rglob("test_*.py")} - set(near))


def first_failure(tests: list[str], quick: bool, timeout_s: float, workers: int = 0) -> str:
    """Return the first of the tests that fails, "" where none does."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_TIMEOUT_S), "-n", str(workers)]
    options += ["-m", "not long"] if quick else []
    command = [sys.executable, "-m", "pytest", *options, *tests]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "no end"
    if run.returncode in (0, _NO_TESTS):
        return ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split()[1] if failed else f"exit code {run.returncode}"


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
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--since")
    parser.add_argument("--quick", action="store_true", help="the tests of `make test` alone")
    parser.add_argument("--near", action="store_true", help="those alone that import the module")
    given = parser.parse_args()
    rng, files, num_near, num_others, num_tried = random.Random(given.seed), candidates(given.since), 0, 0, 0
    while num_tried < given.count:
        file = rng.choice(files)
        source, tests = file.read_text(), tests_of(file)
        places = list(breaks_of(source))
        if not tests or not places:
            continue
        line, what, text = rng.choice(places)
        file.write_text(text)
        try:
            failure = first_failure(tests, given.quick, NEAR_TIMEOUT_S)
            num_near += bool(failure)
            if not failure and not given.near and (others := others_of(file, tests)):
                failure = first_failure(others, given.quick, PACKAGE_TIMEOUT_S, workers=2)
                num_others += bool(failure)
        finally:
            file.write_text(source)
        num_tried += 1
        sys.stdout.write(f"{'caught  ' if failure else 'SURVIVED'} {file}:{line} {what}{failure and f' ({failure})'}\n")
        sys.stdout.flush()
    told = f"{num_near} of {num_tried} caught by tests that import the module"
    told += "" if given.near else f", {num_others} more by others of its package"
    sys.stdout.write(f"{told} (seed {given.seed})\n")
    sys.exit(num_near + num_others < 0.9 * num_tried)


if __name__ == "__main__":
    main()
