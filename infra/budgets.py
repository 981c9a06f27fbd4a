"""The budgets of the tree: imports in one direction, few callables in a constructor, few methods in a class.

Pure: a tree is a mapping of module names to their parsed sources. `python infra/structure_report.py` prints the
figures, and `tests/unit/test_budgets.py` holds them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = ("configs", "weights", "cluster", "deployments")
MAX_CALLABLES = 2
MAX_METHODS = 20


def sources(root: Path) -> dict[str, ast.Module]:
    """Return the product's modules by their dotted names; a package has the name of its folder."""
    files = (file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))
    return {".".join(file.relative_to(root).with_suffix("").parts): ast.parse(file.read_text()) for file in files}


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements within a tree, at any depth. `ast.walk` would take five times as long over expressions."""
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(tree, part, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


def imports(tree: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return which modules of the tree each module imports, within functions and for types alone too."""
    names = {name.removesuffix(".__init__"): name for name in tree}
    found: dict[str, set[str]] = {}
    for module, parsed in tree.items():
        targets = set()
        for node in statements(parsed):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                whole = (f"{node.module}.{alias.name}" for alias in node.names)
                targets |= {each if each in names else node.module for each in whole}
            elif isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
        found[module] = {names[each] for each in targets if each in names} - {module}
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node, each sorted (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            if len(stack) - start > 1:
                found.append(sorted(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


def mutual_folders(graph: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """Return the pairs of folders of which each has a module that imports one of the other's."""
    pairs = {
        (module.rpartition(".")[0], target.rpartition(".")[0])
        for module, targets in graph.items()
        for target in targets
    }
    return sorted((one, other) for one, other in pairs if one < other and (other, one) in pairs)


def callables(tree: Mapping[str, ast.Module]) -> dict[str, int]:
    """Return the number of callables that each class is made with, by `module:class`; of records, their fields.

    A name that its module gives to a callable counts like one.
    """
    found = {}
    for module, node, kinds in _classes(tree):
        makers = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        annotations = [
            argument.annotation
            for maker in makers
            for argument in (*maker.args.posonlyargs, *maker.args.args, *maker.args.kwonlyargs)
        ]
        if not makers and any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            annotations = [each.annotation for each in node.body if isinstance(each, ast.AnnAssign)]
        if count := sum(each is not None and bool(_names(each) & kinds) for each in annotations):
            found[f"{module}:{node.name}"] = count
    return found


def methods(tree: Mapping[str, ast.Module]) -> dict[str, int]:
    """Return the number of methods of each class, public and private, by `module:class`."""
    return {
        f"{module}:{node.name}": sum(isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) for each in node.body)
        for module, node, _ in _classes(tree)
    }


def _classes(tree: Mapping[str, ast.Module]) -> Iterator[tuple[str, ast.ClassDef, set[str]]]:
    """Yield each class with its module and the names that callables have there."""
    for module, parsed in tree.items():
        aliases: dict[str, set[str]] = defaultdict(set)
        for node in parsed.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                aliases[node.targets[0].id] = _names(node.value)
        kinds = {"Callable"} | {name for name, named in aliases.items() if "Callable" in named}
        for node in statements(parsed):
            if isinstance(node, ast.ClassDef):
                yield module, node, kinds


def _names(annotation: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}
