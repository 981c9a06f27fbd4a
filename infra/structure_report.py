"""Report the structure of the product's tree: figures to steer by, with nothing forbidden.

`python infra/structure_report.py [--list PACKAGE] [--root FOLDER]`, for example `--list weights/storage` or `--list .`.

Names are matched without type inference: a method counts as used when another module mentions an attribute (or a
string) of its name. The counts are therefore lower bounds. What a framework calls by name is left out: decorated routes
and commands, validators, methods of classes with a base outside the tree. What a route is given or answers with (its
annotations, its decorator, `response_model=`, the "model" of `responses`) is used: the OpenAPI page names it. A method
that a base class or a protocol of the tree declares has the sense of that declaration: with it, it counts as one
definition of its name.

A module with one importer is a part of that importer, or has a reason of its own to change. Two kinds have one importer
by construction and are counted apart: entries of a list (`LISTS`: one file per command, benchmark, router, deployment,
foreign format, policy of the simulator), and parts of an actor (what an `actor.py` puts together: their state lives in
its process).
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("configs", "weights", "cluster", "deployments")
GENERATED = "protos"
MAX_DEFINITIONS = 4
FRAGMENTS = re.compile(
    r"(of|what|who|whom|whose|whether|how|by|when|where|why|which|from|for|with|if|as|that|than|to|in|on|at)\b", re.I
)
LISTS = re.compile(
    r"deployments\.(app|services\.replica_classes|cli\.main|cli\.bench|ingress\.http)|weights\.intake"
    r"|cluster\.simulator\.running"
)
KINDS = ("entries of a list", "parts of an actor", "others")
PLAIN_BASES = re.compile("object|ABC|Protocol|Generic|(Str|Int)?Enum|IntFlag|NamedTuple|TypedDict|BaseModel")
HOOK_DECORATORS = re.compile(
    r"command|callback|get|post|put|delete|head|patch|route|websocket|exception_handler|middleware"
    r"|(field|model)_(validator|serializer)|validator|fixture|overload|register"
)
HOOK_METHODS = {"reconfigure", "check_health", "record_routing_stats", "forward", "model_post_init"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A function, method, class or constant of a module; `owner` is the class of a method."""

    module: str
    name: str
    line: int
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} {f'{self.owner}.' if self.owner else ''}{self.name}"


@dataclass
class Module:
    """One parsed file: what it defines, and the names it mentions of others."""

    name: str
    lines: int
    tree: ast.Module
    is_package: bool
    definitions: list[Definition] = field(default_factory=list)
    methods: list[Definition] = field(default_factory=list)
    verbs: list[Definition] = field(default_factory=list)
    docstrings: list[tuple[int, str]] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)  # in `__all__`
    exposed: set[str] = field(default_factory=set)  # exported, raised, or in a signature or field of something public
    imports: set[tuple[str, str]] = field(default_factory=set)  # (module, name), name "" for the module itself
    strings: set[str] = field(default_factory=set)
    bases: dict[str, set[str]] = field(default_factory=dict)  # of each class, by name
    members: dict[str, set[str]] = field(default_factory=dict)  # methods, properties and fields of each class
    attributes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # by class, "" outside


def parse_modules(root: Path, folders: tuple[str, ...]) -> dict[str, Module]:
    """Parse every Python file below the folders; files with generated code are left out."""
    modules = {}
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if GENERATED not in parts:
            text, is_package = path.read_text(), parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            modules[name] = module = Module(name, len(text.splitlines()), ast.parse(text), is_package)
            _collect_definitions(module)
            _collect_mentions(module)
    return modules


def _collect_definitions(module: Module) -> None:
    for node in module.tree.body:
        if isinstance(node, Function):
            if not _is_hook(node):
                module.definitions.append(Definition(module.name, node.name, node.lineno))
                module.verbs.append(module.definitions[-1])
            if _is_public(node.name):
                _expose_signature(module, node)
        elif isinstance(node, ast.ClassDef):
            module.definitions.append(Definition(module.name, node.name, node.lineno))
            _collect_class(module, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names == ["__all__"]:
                module.exported |= {str(leaf.value) for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                module.exposed |= module.exported
            variables = [name for name in names if not name.isupper() and name != "logger"]
            module.definitions += [Definition(module.name, name, node.lineno) for name in variables]
            if any(map(_is_public, names)) and isinstance(node.value, ast.Subscript | ast.BinOp):
                module.exposed |= _names(node.value)  # an alias of types
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            module.docstrings.append((getattr(node, "lineno", 1), text.splitlines()[0]))


def _collect_class(module: Module, node: ast.ClassDef) -> None:
    is_public = _is_public(node.name)
    module.bases[node.name] = {_last_name(base) for base in node.bases}
    module.members[node.name] = {each.name for each in node.body if isinstance(each, Function)} | {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    if is_public:
        for base in node.bases:
            module.exposed |= _names(base)
    has_foreign_base = not all(PLAIN_BASES.fullmatch(_last_name(base)) for base in node.bases)
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and is_public:
            module.exposed |= _names(member.annotation)
        if not isinstance(member, Function):
            continue
        if is_public and (_is_public(member.name) or member.name == "__init__"):
            _expose_signature(module, member)
        if is_public and member.name == "__init__":
            for leaf in ast.walk(member):
                if isinstance(leaf, ast.AnnAssign) and isinstance(leaf.target, ast.Attribute):
                    module.exposed |= _names(leaf.annotation) if _is_public(leaf.target.attr) else set()
        if not _is_public(member.name) or _is_hook(member):
            continue
        definition = Definition(module.name, member.name, member.lineno, node.name)
        if not {"property", "cached_property"} & {_last_name(each) for each in member.decorator_list}:
            module.verbs.append(definition)
        if is_public and not has_foreign_base:
            module.methods.append(definition)


def _collect_mentions(module: Module) -> None:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            module.imports |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            module.imports |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            module.strings.add(node.value)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            module.exposed.add(_last_name(node.exc))
        elif isinstance(node, Function) and _is_hook(node):
            _expose_signature(module, node)
            module.exposed |= set[str]().union(*map(_names, node.decorator_list))
        elif isinstance(node, ast.keyword) and node.arg == "response_model":
            module.exposed |= _names(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "model" and isinstance(value, ast.Name):
                    module.exposed.add(value.id)
    for node in module.tree.body:
        owner = node.name if isinstance(node, ast.ClassDef) else ""
        module.attributes[owner] |= {leaf.attr for leaf in ast.walk(node) if isinstance(leaf, ast.Attribute)}


def _expose_signature(module: Module, node: Function) -> None:
    arguments = [leaf.annotation for leaf in ast.walk(node.args) if isinstance(leaf, ast.arg)]
    for annotation in filter(None, [*arguments, node.returns]):
        module.exposed |= _names(annotation)


def _names(node: ast.AST) -> set[str]:
    leaves = list(ast.walk(node))
    quoted = [leaf.value for leaf in leaves if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]
    return {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}.union(
        *(re.findall(r"\w+", text) for text in quoted)
    )


def _last_name(node: ast.AST) -> str:
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _is_hook(node: Function) -> bool:
    return node.name in HOOK_METHODS or any(HOOK_DECORATORS.fullmatch(_last_name(each)) for each in node.decorator_list)


class Structure:
    """The product's modules and those who mention them."""

    def __init__(self, root: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        self.packages = packages
        self._imports: dict[str, set[tuple[str, str]]] = {}
        self.modules = parse_modules(root, packages)
        self._outside = list(parse_modules(root, ("tests", "infra")).values())
        self._reexports = {
            (package.name, name): (source, name)
            for package in self.modules.values()
            if package.is_package
            for source, name in package.imports
            if source in self.modules
        }
        self._bases: dict[str, set[str]] = defaultdict(set)
        self._members: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for name, bases in module.bases.items():
                self._bases[name] |= bases
                self._members[name] |= module.members[name]
        scripts = [path for path in (root / "pyproject.toml", root / "Makefile") if path.exists()]
        self._scripts = " ".join(path.read_text() for path in scripts)

    def importers(self) -> dict[str, set[str]]:
        """Map each module to the product's other modules that import it, or name it in a string ("module:function").

        A package's re-exports do not count.
        """
        importers: dict[str, set[str]] = {name: set() for name in self.modules}
        for module in self.modules.values():
            named = {text.partition(":")[0] for text in module.strings if ":" in text}
            targets = {f"{source}.{name}" for source, name in self._resolved_imports(module)}
            targets |= {
                source for source, name in self._resolved_imports(module) if f"{source}.{name}" not in importers
            }
            for target in (targets | named) & importers.keys() - {module.name}:
                if not (module.is_package and target.startswith(f"{module.name}.")):
                    importers[target].add(module.name)
        return importers

    def one_importer_modules(self) -> list[tuple[str, str, str]]:
        """List (module, its only importer, one of KINDS)."""
        return [(name, *users, *map(_kind, users)) for name, users in self.importers().items() if len(users) == 1]  # type: ignore[misc]

    def unused_symbols(self) -> list[tuple[Definition, bool]]:
        """List public functions, classes, variables and methods that no other module mentions, and whether a test does.

        A class in the signature of something public is used, and so are a method that another class of its file calls
        or another file's subclass overrides, what `__all__` exports, and methods of exported classes that a test calls.
        """
        unused = []
        for module in self.modules.values():
            for each in filter(lambda each: _is_public(each.name), module.definitions + module.methods):
                if (not each.owner and each.name in module.exposed) or f"{each.module}:{each.name}" in self._scripts:
                    continue
                others = (names for owner, names in module.attributes.items() if owner != each.owner)
                if each.owner and any(each.name in names for names in others):
                    continue
                is_tested = any(self._mentions(other, each) for other in self._outside)
                if is_tested and each.owner in module.exported:
                    continue
                if not any(self._mentions(other, each) for other in self.modules.values() if other is not module):
                    unused.append((each, is_tested))
        return unused

    def repeated_verbs(self) -> dict[str, list[Definition]]:
        """Map names of public functions and methods with more than four definitions to these.

        Methods that a base class or a protocol of the tree declares, too, count once with its declaration.
        """
        verbs = defaultdict(list)
        for each in (each for module in self.modules.values() for each in module.verbs if _is_public(each.name)):
            verbs[each.name].append(each)
        senses = {name: self._distinct(found) for name, found in verbs.items() if len(found) > MAX_DEFINITIONS}
        return {name: found for name, found in senses.items() if len(found) > MAX_DEFINITIONS}

    def _distinct(self, definitions: list[Definition]) -> list[Definition]:
        """Leave out methods that another of the definitions declares: of a base class, or of a protocol they meet."""
        owners = {each.owner for each in definitions if each.owner}
        return [each for each in definitions if not self._declarers(each.owner) & (owners - {each.owner})]

    def _declarers(self, owner: str) -> set[str]:
        """Return the base classes of a class, all the way up, and the protocols of which it has every member."""
        found: set[str] = set()
        unseen = [owner]
        while unseen:
            bases = self._bases.get(unseen.pop(), set()) - found
            found |= bases
            unseen += bases
        own = {member for name in (owner, *found) for member in self._members.get(name, ())}
        protocols = (name for name, bases in self._bases.items() if "Protocol" in bases)
        return found | {name for name in protocols if self._members[name] and self._members[name] <= own}

    def fragments(self) -> list[tuple[str, int, str]]:
        """List docstrings that open with a fragment: (module, line, first line)."""
        return [
            (module.name, line, text)
            for module in self.modules.values()
            for line, text in module.docstrings
            if FRAGMENTS.match(text)
        ]

    def _resolved_imports(self, module: Module) -> set[tuple[str, str]]:
        """Follow what the module imports through the re-exports of packages."""
        if module.name not in self._imports:
            resolved = set()
            for imported in module.imports:
                while imported in self._reexports and imported[0] != module.name:
                    imported = self._reexports[imported]
                resolved.add(imported)
            self._imports[module.name] = resolved
        return self._imports[module.name]

    def _mentions(self, module: Module, wanted: Definition) -> bool:
        if wanted.owner:
            overriding = (module.members[name] for name, bases in module.bases.items() if wanted.owner in bases)
            return any(wanted.name in names for names in (module.strings, *module.attributes.values(), *overriding))
        imports = self._resolved_imports(module)
        if (wanted.module, wanted.name) in imports:
            return True
        package, _, last = wanted.module.rpartition(".")
        knows_module = (package, last) in imports or (wanted.module, "") in imports or wanted.module in module.strings
        is_attribute = any(wanted.name in names for names in module.attributes.values())
        named = {f"{wanted.module}:{wanted.name}", f"{wanted.module}.{wanted.name}"}
        return (knows_module and is_attribute) or bool(named & module.strings)


def _kind(user: str) -> str:
    return KINDS[0] if LISTS.fullmatch(user) else KINDS[1] if user.endswith(".actor") else KINDS[2]


def print_table(structure: Structure) -> None:
    """Print the figures of each package and of all."""
    unused, alone = structure.unused_symbols(), structure.one_importer_modules()
    modules = [each for each in structure.modules.values() if not (each.is_package and each.lines < 2)]
    counted: list[tuple[str, list[str]]] = [
        ("modules", [module.name for module in modules]),
        ("with one importer", [name for name, _, _ in alone]),
        *((f"  {kind}", [name for name, _, found in alone if found == kind]) for kind in KINDS),
        ("unused public symbols", [each.module for each, _ in unused]),
        ("  of these in tests only", [each.module for each, is_tested in unused if is_tested]),
        ("docstrings", [module.name for module in structure.modules.values() for _ in module.docstrings]),
        ("  opening with a fragment", [name for name, _, _ in structure.fragments()]),
    ]
    print(f"{'':26}" + "".join(f"{each:>13}" for each in (*structure.packages, "all")))
    sizes = [[each.lines for each in modules if _is_below(each.name, name)] for name in (*structure.packages, "")]
    print("lines".ljust(26) + "".join(f"{sum(each):>13,}" for each in sizes))
    print("median lines".ljust(26) + "".join(f"{int(statistics.median(each or [0])):>13,}" for each in sizes))
    for label, names in counted:
        values = [sum(_is_below(name, package) for name in names) for package in (*structure.packages, "")]
        print(f"{label:26}" + "".join(f"{value:>13,}" for value in values))
    num_others = sum(kind == "others" for *_, kind in alone)
    share = num_others / (len(modules) - len(alone) + num_others)
    print(f"\nwith one importer, of the modules that are neither entries of a list nor parts of an actor: {share:.1%}")
    verbs = sorted(structure.repeated_verbs().items(), key=lambda item: -len(item[1]))
    print(f"names of functions and methods with more than {MAX_DEFINITIONS} definitions: {len(verbs)}")
    print("  " + ", ".join(f"{name} {len(found)}" for name, found in verbs))


def print_lists(structure: Structure, package: str) -> None:
    """Print what stands behind the figures, for modules below `package` ("." for all)."""
    prefix = package.strip("./").replace("/", ".")

    def print_list(title: str, lines: list[tuple[str, object]]) -> None:
        print(f"\n{title}", *(f"  {line}" for module, line in lines if _is_below(module, prefix)), sep="\n")

    alone = structure.one_importer_modules()
    for kind in KINDS:
        listed = [(name, f"{name} <- {user}") for name, user, found in alone if found == kind]
        print_list(f"One importer: {kind}", listed)
    unused = [(each.module, f"{each}{' (tests)' * by}") for each, by in structure.unused_symbols()]
    print_list("Unused public symbols", unused)
    fragments = [(name, f"{name.replace('.', '/')}.py:{line} {text}") for name, line, text in structure.fragments()]
    print_list("Docstrings that open with a fragment", fragments)
    print(f"\nNames with more than {MAX_DEFINITIONS} definitions")
    for name, found in structure.repeated_verbs().items():
        print_list(f"  {name} ({len(found)} in all)", [(each.module, f"  {each}") for each in found])


def _is_below(module: str, package: str) -> bool:
    return not package or f"{module}.".startswith(f"{package}.")


def main() -> None:
    """Parse the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", metavar="PACKAGE", help="list what stands behind the figures, below this folder")
    parser.add_argument("--root", type=Path, default=None, help="the tree; default: the current folder")
    arguments = parser.parse_args()
    structure = Structure(arguments.root or Path.cwd())
    if not structure.modules:
        sys.exit("No modules here: run it at the root of the tree, or pass --root.")
    print_table(structure)
    if arguments.list:
        print_lists(structure, arguments.list)


if __name__ == "__main__":
    main()
