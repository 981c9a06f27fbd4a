"""Parse Python files into what they define and the names that they mention. Names only: no types are inferred."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

GENERATED = "protos"
RECORD_BASES = {"NamedTuple", "TypedDict", "BaseModel", "StrictModel", "Answer"}
PLAIN_BASES = re.compile("object|ABC|Protocol|Generic|(Str|Int)?Enum|IntFlag|NamedTuple|TypedDict|BaseModel")
HOOK_DECORATORS = re.compile(
    r"command|callback|get|post|put|delete|head|patch|route|websocket|exception_handler|middleware"
    r"|(field|model)_(validator|serializer)|validator|fixture|overload|register"
)
HOOK_METHODS = {"reconfigure", "check_health", "record_routing_stats", "forward", "model_post_init"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A function, method, class or variable of a module; `owner` is the class of a method."""

    module: str
    name: str
    line: int
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} {f'{self.owner}.' if self.owner else ''}{self.name}"


@dataclass
class Module:
    """One parsed file. What a framework calls by name is in neither `methods` nor `verbs`."""

    name: str
    lines: int
    is_package: bool
    is_program: bool  # is started as a process
    definitions: list[Definition] = field(default_factory=list)
    methods: list[Definition] = field(default_factory=list)  # public ones, of public classes with bases of the tree
    verbs: list[Definition] = field(default_factory=list)  # functions and methods, without properties
    docstrings: list[tuple[int, str]] = field(default_factory=list)  # (line, first line)
    exported: set[str] = field(default_factory=set)  # in `__all__`
    exposed: set[str] = field(default_factory=set)  # exported, raised, or in a signature or field of something public
    imports: set[tuple[str, str]] = field(default_factory=set)  # (module, name), name "" for the module itself
    strings: set[str] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)  # modules whose files it names
    bases: dict[str, set[str]] = field(default_factory=dict)  # of each class, by name
    members: dict[str, set[str]] = field(default_factory=dict)  # methods, properties and fields of each class
    records: set[str] = field(default_factory=set)  # classes that are dataclasses, or have a base for records
    attributes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by class, "" outside


def parse_modules(root: Path, patterns: Iterable[str]) -> dict[str, Module]:
    """Parse every Python file that a pattern finds; files with generated code are left out."""
    modules = {}
    for path in sorted(path for pattern in patterns for path in root.glob(pattern)):
        parts = path.relative_to(root).with_suffix("").parts
        if GENERATED not in parts:
            text, is_package = path.read_text(), parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = module = Module(name, len(text.splitlines()), is_package, "\nif __name__ ==" in text)
            tree = ast.parse(text)
            _collect_definitions(module, tree)
            _collect_mentions(module, tree)
            module.exposed = module.exported | set(_exposed_names(tree))
    return modules


def is_public(name: str) -> bool:
    """Return whether a name has no leading underscore."""
    return not name.startswith("_")


def _collect_definitions(module: Module, tree: ast.Module) -> None:
    for node in tree.body:
        if isinstance(node, Function):
            if not _is_hook(node):
                module.definitions.append(Definition(module.name, node.name, node.lineno))
                module.verbs.append(module.definitions[-1])
        elif isinstance(node, ast.ClassDef):
            module.definitions.append(Definition(module.name, node.name, node.lineno))
            _collect_class(module, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = [each.id for each in _targets(node) if isinstance(each, ast.Name)]
            if names == ["__all__"]:
                module.exported |= {str(leaf.value) for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
            variables = [name for name in names if not name.isupper() and name != "logger"]
            module.definitions += [Definition(module.name, name, node.lineno) for name in variables]
    for each in ast.walk(tree):
        if isinstance(each, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(each)):
            module.docstrings.append((getattr(each, "lineno", 1), text.splitlines()[0]))


def _collect_class(module: Module, node: ast.ClassDef) -> None:
    functions = [each for each in node.body if isinstance(each, Function)]
    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    module.bases[node.name] = {_last_name(base) for base in node.bases}
    if RECORD_BASES & module.bases[node.name] or "dataclass" in map(_last_name, node.decorator_list):
        module.records.add(node.name)
    module.members[node.name] = {*(each.name for each in functions), *map(_last_name, fields)}
    has_own_names = is_public(node.name) and all(map(PLAIN_BASES.fullmatch, module.bases[node.name]))
    for each in functions:
        if is_public(each.name) and not _is_hook(each):
            method = Definition(module.name, each.name, each.lineno, node.name)
            if not {"property", "cached_property"} & set(map(_last_name, each.decorator_list)):
                module.verbs.append(method)
            if has_own_names:
                module.methods.append(method)


def _collect_mentions(module: Module, tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module.imports |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            module.imports |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            module.strings.add(node.value)
            if node.value.endswith(".py"):
                module.paths.add(node.value.removesuffix(".py").replace("/", "."))
    for node in tree.body:
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        module.attributes[owner] |= {leaf.attr for leaf in ast.walk(node) if isinstance(leaf, ast.Attribute)}


def _exposed_names(tree: ast.Module) -> Iterator[str]:
    """Yield names in what others see of a file: what is public, what it raises, and what routes and hooks declare."""
    yield from _public_names(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield _last_name(node.exc)
        elif isinstance(node, Function) and _is_hook(node):
            yield from _signature_names(node)
            yield from _names(*node.decorator_list)
        elif isinstance(node, ast.keyword) and node.arg == "response_model":
            yield from _names(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "model" and isinstance(value, ast.Name):
                    yield value.id


def _public_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield names in signatures, base classes, declared fields and aliases of types."""
    for node in body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            yield from _names(*node.bases)
            yield from _public_names(node.body)
        elif isinstance(node, Function) and (is_public(node.name) or node.name == "__init__"):
            yield from _signature_names(node)
            if node.name == "__init__":
                declared = [leaf for leaf in ast.walk(node) if isinstance(leaf, ast.AnnAssign)]
                yield from _public_names([each for each in declared if isinstance(each.target, ast.Attribute)])
        elif isinstance(node, ast.AnnAssign) and is_public(_last_name(node.target)):
            yield from _names(node.annotation)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            yield from _names(node.value) if any(is_public(_last_name(each)) for each in _targets(node)) else ()


def _signature_names(node: Function) -> Iterator[str]:
    return _names(*(leaf.annotation for leaf in ast.walk(node.args) if isinstance(leaf, ast.arg)), node.returns)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _names(*nodes: ast.AST | None) -> Iterator[str]:
    for node in filter(None, nodes):
        for leaf in ast.walk(node):
            if isinstance(leaf, ast.Name):
                yield leaf.id
            elif isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                yield from re.findall(r"\w+", leaf.value)


def _last_name(node: ast.AST) -> str:
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_hook(node: Function) -> bool:
    return node.name in HOOK_METHODS or any(HOOK_DECORATORS.fullmatch(_last_name(each)) for each in node.decorator_list)
