"""Private names of libraries are the seams': nobody else uses one, and the installed libraries have them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ray_seam import shims
from deployments.engines.libraries import library_seam
from weights.platform import torch_seam
from weights.platform.private_names import Shim, problems

ROOT = Path(__file__).parents[2]
PACKAGES = ("configs", "weights", "cluster", "deployments")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
SEAMS = ("cluster/ray_seam/", "weights/platform/torch_seam.py", "deployments/engines/libraries/library_seam.py")
LISTED = (*shims.ALL, *torch_seam.SHIMS, *library_seam.SHIMS)
# Of the standard library and its conventions, and of libraries that say they are for others to use.
KNOWN = {
    "os": {"_exit"},
    "a named tuple": {"_replace", "_asdict", "_make"},
    "a class of jinja2 that hides what it has": {"_Namespace__attrs"},
    "our own mark on a storage of torch's": {"_simulated"},
}
# Programs that are measured beside Atelier, by what they have.
MEASURED = {"infra/bench/command/llama_cpp_process.py", "infra/bench/command/stock.py"}
LIBRARIES = ("ray", "torch", "diffusers", "transformers")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file of ours gives to functions, classes, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value  # an attribute that is set by its name


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def private_names(tree: ast.AST, own: set[str], of_seams: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of what others call private: attributes, imports, and names in texts.

    An attribute is another's when no file of ours defines one of that name, or when a seam lists it.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_self(node.value):
            if node.attr not in own or node.attr in of_seams:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            paths = [".".join([*module, alias.name]) for alias in node.names]
            foreign = (path for path in paths if path.partition(".")[0] not in (*PACKAGES, "__future__"))
            yield from ((node.lineno, path) for path in foreign if any(map(is_private, path.split("."))))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            parts = node.value.replace(":", ".").split(".")
            is_path = parts[0] in LIBRARIES and any(map(is_private, parts))
            if is_path or node.value in of_seams:
                yield node.lineno, node.value


@pytest.fixture(scope="module")
def trees() -> Iterator[dict[str, ast.Module]]:
    """Yield the product's files by path, parsed.

    They are over a million objects, which a collection would look at for a second, and none refers to itself.
    """
    gc.disable()
    yield {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in FILES}
    gc.enable()


PARTS = {part for shim in LISTED for name in shim.private for part in name.replace(":", ".").split(".")}
OF_SEAMS = {
    last for shim in LISTED for name in shim.private if is_private(last := name.rpartition(":")[2].rpartition(".")[2])
}


def test_nobody_but_the_seams_uses_a_private_name_of_a_library(trees: dict[str, ast.Module]) -> None:
    allowed = {name for names in KNOWN.values() for name in names}
    others = {path: tree for path, tree in trees.items() if not path.startswith(SEAMS)}
    own = {name for tree in others.values() for name in own_names(tree) if is_private(name)}
    found = [
        f"{path}:{line} {name}"
        for path, tree in others.items()
        if path not in MEASURED
        for line, name in private_names(tree, own, OF_SEAMS)
        if name not in allowed
    ]
    assert found == [], "a private name of a library belongs in its seam, and in the list of that seam"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("handle._request_metadata", ["_request_metadata"]),
        ("module._forward_hooks", ["_forward_hooks"]),
        ("getattr(module, '_forward_hooks')", ["_forward_hooks"]),
        ("from ray._private import node", ["ray._private.node"]),
        ("import torch._dynamo", ["torch._dynamo"]),
        ("import_module('ray.serve._private.replica')", ["ray.serve._private.replica"]),
        ("from transformers.utils import _name", ["transformers.utils._name"]),
        ("self._mine, other._mine, torch.__version__, from_here._known", []),
    ],
)
def test_a_private_name_is_seen(source: str, found: list[str]) -> None:
    seen = private_names(ast.parse(source), {"_mine", "_known", "_forward_hooks"}, {"_forward_hooks"})
    assert [name for _, name in seen] == found


@pytest.mark.parametrize("shim", torch_seam.SHIMS + library_seam.SHIMS, ids=lambda shim: shim.purpose)
def test_the_pinned_libraries_fit(shim: Shim) -> None:
    assert problems(shim) == []


def test_a_name_is_listed_by_the_seam_that_uses_it(trees: dict[str, ast.Module]) -> None:
    """Names that a seam's own code reads of others are in its list: `atelier doctor` would not miss one."""
    for file, tree in ((file, tree) for file, tree in trees.items() if file.startswith(SEAMS)):
        own = set(own_names(tree)) - OF_SEAMS
        used = {name.rpartition(".")[2] for _, name in private_names(tree, own, set()) if ":" not in name}
        assert set(filter(is_private, used)) - PARTS <= {"_transformers_version"} | KNOWN["os"], file
