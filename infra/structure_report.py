"""Report the structure of the product's tree: figures to steer by, with nothing forbidden.

`python infra/structure_report.py [--list PACKAGE] [--root FOLDER]`, for example `--list weights/storage` or `--list .`.

Names are matched without type inference: a method counts as used when another module mentions an attribute (or a
string) of its name. The counts are therefore lower bounds. What a framework calls by name is left out: decorated routes
and commands, validators, methods of classes with a base outside the tree. A method that a base class or a protocol of
the tree declares has the sense of that declaration: with it, it counts as one definition of its name.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = ("configs", "weights", "cluster", "deployments")
GENERATED = "protos"
MAX_DEFINITIONS = 4
FRAGMENTS = re.compile(
    r"(of|what|who|whom|whose|whether|how|by|when|where|why|which|from|for|with|if|as|that|than|to|in|on|at)\b", re.I
)
RECORD_BASES = {"NamedTuple", "TypedDict", "BaseModel"}
PLAIN_BASES = {"object", "ABC", "Protocol", "Generic", "Enum", "StrEnum", "IntEnum", "IntFlag"} | RECORD_BASES
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
    records: list[Definition] = field(default_factory=list)
    docstrings: list[tuple[int, str]] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)  # in `__all__`
    exposed: set[str] = field(default_factory=set)  # exported, or in a signature, field or base of something public
    imports: set[tuple[str, str]] = field(default_factory=set)  # (module, name), name "" for the module itself
    attributes: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    raised: set[str] = field(default_factory=set)
    bases: dict[str, set[str]] = field(default_factory=dict)  # of each class, by name
    members: dict[str, set[str]] = field(default_factory=dict)  # methods, properties and fields of each class
    protocols: set[str] = field(default_factory=set)
    attributes_by_class: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # "" outside of classes
    calls: list[str] = field(default_factory=list)


def parse_modules(root: Path, folders: tuple[str, ...]) -> dict[str, Module]:
    """Parse every Python file below the folders; files with generated code are left out."""
    modules = {}
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if GENERATED in parts:
                continue
            is_package = parts[-1] == "__init__"
            text = path.read_text()
            module = Module(
                ".".join(parts[:-1] if is_package else parts), len(text.splitlines()), ast.parse(text), is_package
            )
            _collect_definitions(module)
            _collect_mentions(module)
            modules[module.name] = module
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
            if _is_record(node):
                module.records.append(module.definitions[-1])
            _collect_class(module, node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names == ["__all__"]:
                module.exported |= {str(leaf.value) for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                module.exposed |= module.exported
            module.definitions += [Definition(module.name, name, node.lineno) for name in names]
            if any(map(_is_public, names)) and isinstance(node.value, ast.Subscript | ast.BinOp):
                module.exposed |= _names(node.value)  # an alias of types
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node)):
            module.docstrings.append((getattr(node, "lineno", 1), text.splitlines()[0]))


def _collect_class(module: Module, node: ast.ClassDef) -> None:
    is_public = _is_public(node.name)
    module.bases[node.name] = {_last_name(base) for base in node.bases}
    if "Protocol" in module.bases[node.name]:
        module.protocols.add(node.name)
    module.members[node.name] = {each.name for each in node.body if isinstance(each, Function)} | {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    if is_public:
        for base in node.bases:
            module.exposed |= _names(base)
    has_foreign_base = any(_last_name(base) not in PLAIN_BASES for base in node.bases)
    for member in node.body:
        if isinstance(member, ast.AnnAssign) and is_public:
            module.exposed |= _names(member.annotation)
        if not isinstance(member, Function):
            continue
        if is_public and (_is_public(member.name) or member.name == "__init__"):
            _expose_signature(module, member)
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
            source = node.module or ""
            if node.level:
                base = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
                source = ".".join(base[: len(base) - node.level + 1] + ([node.module] if node.module else []))
            module.imports |= {(source, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            module.imports |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.Attribute):
            module.attributes.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            module.strings.add(node.value)
        elif isinstance(node, ast.Raise) and node.exc is not None:
            module.raised |= _names(node.exc)
    _collect_by_class(module, module.tree, "")


def _collect_by_class(module: Module, parent: ast.AST, owner: str) -> None:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.Call):
            name = _last_name(node.func)
            module.calls.append(owner if name == "cls" else name)
        elif isinstance(node, ast.Attribute):
            module.attributes_by_class[owner].add(node.attr)
        _collect_by_class(module, node, node.name if isinstance(node, ast.ClassDef) and not owner else owner)


def _expose_signature(module: Module, node: Function) -> None:
    arguments = node.args
    annotated = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for annotation in [argument.annotation for argument in annotated if argument] + [node.returns]:
        if annotation is not None:
            module.exposed |= _names(annotation)


def _names(node: ast.AST) -> set[str]:
    names = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
    for leaf in ast.walk(node):
        if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
            names |= set(re.findall(r"\w+", leaf.value))
    return names


def _last_name(node: ast.AST) -> str:
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_constant(definition: Definition) -> bool:
    return not definition.owner and (definition.name.isupper() or definition.name == "logger")


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _is_hook(node: Function) -> bool:
    return node.name in HOOK_METHODS or any(HOOK_DECORATORS.fullmatch(_last_name(each)) for each in node.decorator_list)


def _is_record(node: ast.ClassDef) -> bool:
    return any(_last_name(each) == "dataclass" for each in node.decorator_list) or any(
        _last_name(base) in RECORD_BASES for base in node.bases
    )


class Structure:
    """The product's modules and those who mention them."""

    def __init__(self, root: Path, packages: tuple[str, ...] = PACKAGES) -> None:
        self.packages = packages
        self._imports: dict[str, set[tuple[str, str]]] = {}
        self.modules = parse_modules(root, packages)
        self._outside = {
            **parse_modules(root, ("tests",)),
            **{f"infra:{name}": each for name, each in parse_modules(root, ("infra",)).items()},
        }
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
        self._protocols = {name for module in self.modules.values() for name in module.protocols}
        scripts = [path for path in (root / "pyproject.toml", root / "Makefile") if path.exists()]
        self._scripts = " ".join(path.read_text() for path in scripts)

    def importers(self) -> dict[str, set[str]]:
        """Map each module to the product's other modules that import it; a package's re-exports do not count."""
        importers: dict[str, set[str]] = {name: set() for name in self.modules}
        for module in self.modules.values():
            for source, name in self._resolved_imports(module):
                target = f"{source}.{name}" if f"{source}.{name}" in self.modules else source
                is_reexport = module.is_package and target.startswith(f"{module.name}.")
                if target in importers and target != module.name and not is_reexport:
                    importers[target].add(module.name)
        return importers

    def one_importer_modules(self) -> list[tuple[str, str]]:
        """List (module, its only importer)."""
        return [(name, *users) for name, users in self.importers().items() if len(users) == 1]  # type: ignore[misc]

    def unused_symbols(self) -> list[tuple[Definition, str]]:
        """List public functions, classes and methods that no other module mentions, with "tests", "infra" or "nobody".

        A class in the signature of something public is used, and so are a method that another class of its file calls,
        what `__all__` exports, and methods of exported classes that a test calls.
        """
        return [each for each in self._unmentioned() if not _is_constant(each[0])]

    def private_constants(self) -> list[tuple[Definition, str]]:
        """List constants without an underscore that no other module mentions."""
        return [each for each in self._unmentioned() if _is_constant(each[0])]

    def _unmentioned(self) -> list[tuple[Definition, str]]:
        product = list(self.modules.values())
        outside = [("infra" if name.startswith("infra:") else "tests", each) for name, each in self._outside.items()]
        raised = {name for module in product for name in module.raised}
        unused = []
        for module in product:
            for each in [each for each in module.definitions + module.methods if _is_public(each.name)]:
                if (not each.owner and each.name in module.exposed | raised) or self._is_script(each):
                    continue
                others = (names for owner, names in module.attributes_by_class.items() if owner != each.owner)
                if each.owner and any(each.name in names for names in others):
                    continue
                if each.owner in module.exported and any(self._mentions(other, each) for _, other in outside):
                    continue
                if any(self._mentions(other, each) for other in product if other is not module):
                    continue
                users = {kind for kind, other in outside if self._mentions(other, each)}
                unused.append((each, " and ".join(sorted(users)) or "nobody"))
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
        return found | {name for name in self._protocols if self._members[name] and self._members[name] <= own}

    def records_by_constructions(self) -> list[tuple[Definition, int]]:
        """List records (dataclasses, NamedTuples, TypedDicts, pydantic models), each with its calls in the product."""
        calls = Counter(name for module in self.modules.values() for name in module.calls)
        return [(each, calls[each.name]) for module in self.modules.values() for each in module.records]

    def fragments(self) -> list[tuple[str, int, str]]:
        """List docstrings that open with a fragment: (module, line, first line)."""
        return [(module.name, line, text) for module in self.modules.values() for line, text in _fragments(module)]

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
            return wanted.name in module.attributes or wanted.name in module.strings
        imports = self._resolved_imports(module)
        if (wanted.module, wanted.name) in imports:
            return True
        package, _, last = wanted.module.rpartition(".")
        knows_module = (package, last) in imports or (wanted.module, "") in imports or wanted.module in module.strings
        named = {f"{wanted.module}:{wanted.name}", f"{wanted.module}.{wanted.name}"}
        return (knows_module and wanted.name in module.attributes) or bool(named & module.strings)

    def _is_script(self, wanted: Definition) -> bool:
        return not wanted.owner and f"{wanted.module}:{wanted.name}" in self._scripts


def _fragments(module: Module) -> list[tuple[int, str]]:
    return [each for each in module.docstrings if FRAGMENTS.match(each[1])]


def print_table(structure: Structure) -> None:
    """Print the figures of each package and of all."""
    sizes: dict[str, list[int]] = defaultdict(list)
    figures: dict[str, Counter[str]] = {package: Counter() for package in structure.packages}
    unused = structure.unused_symbols()
    constructions = structure.records_by_constructions()
    counted: list[tuple[str, list[str]]] = [
        ("one-importer modules", [name for name, _ in structure.one_importer_modules()]),
        ("unused public symbols", [each.module for each, _ in unused]),
        ("  of these in tests only", [each.module for each, users in unused if "tests" in users]),
        ("constants of one module", [each.module for each, _ in structure.private_constants()]),
        ("records", [each.module for each, _ in constructions]),
        ("  made in one place", [each.module for each, calls in constructions if calls == 1]),
        ("docstrings", [module.name for module in structure.modules.values() for _ in module.docstrings]),
        ("  opening with a fragment", [name for name, _, _ in structure.fragments()]),
    ]
    for module in structure.modules.values():
        if not (module.is_package and module.lines < 2):
            sizes[module.name.split(".")[0]].append(module.lines)
    for label, names in counted:
        for name in names:
            figures[name.split(".")[0]][label] += 1
    print(f"{'':26}" + "".join(f"{each:>13}" for each in (*structure.packages, "all")))
    everything = [size for each in sizes.values() for size in each]
    columns = [*(sizes[package] for package in structure.packages), everything]
    for label, measure in (
        ("modules", len),
        ("lines", sum),
        ("median lines", lambda each: int(statistics.median(each))),
    ):
        print(f"{label:26}" + "".join(f"{measure(each) if each else 0:>13,}" for each in columns))
    for label, names in counted:
        values = [*(figures[package][label] for package in structure.packages), len(names)]
        print(f"{label:26}" + "".join(f"{value:>13,}" for value in values))
    verbs = structure.repeated_verbs()
    print(f"\nnames of functions and methods with more than {MAX_DEFINITIONS} definitions: {len(verbs)}")
    print(
        "  "
        + ", ".join(f"{name} {len(found)}" for name, found in sorted(verbs.items(), key=lambda item: -len(item[1])))
    )


def print_lists(structure: Structure, package: str) -> None:
    """Print what stands behind the figures, for modules below `package` ("." for all)."""
    prefix = "" if package.strip("./") == "" else package.strip("./").replace("/", ".")

    def is_listed(module: str) -> bool:
        return not prefix or module == prefix or module.startswith(prefix + ".")

    def print_list(title: str, lines: list[tuple[str, object]]) -> None:
        print(f"\n{title}")
        print("".join(f"  {line}\n" for module, line in lines if is_listed(module)), end="")

    print_list("One-importer modules", [(name, f"{name} <- {user}") for name, user in structure.one_importer_modules()])
    unused, constants = structure.unused_symbols(), structure.private_constants()
    print_list("Unused public symbols (mentioned by)", [(each.module, f"{each}  ({by})") for each, by in unused])
    print_list("Constants of one module (mentioned by)", [(each.module, f"{each}  ({by})") for each, by in constants])
    made_once = [each for each, calls in structure.records_by_constructions() if calls == 1]
    print_list("Records made in one place", [(each.module, each) for each in made_once])
    fragments = [(name, f"{name.replace('.', '/')}.py:{line} {text}") for name, line, text in structure.fragments()]
    print_list("Docstrings that open with a fragment", fragments)
    print(f"\nNames with more than {MAX_DEFINITIONS} definitions")
    for name, found in structure.repeated_verbs().items():
        listed = [each for each in found if is_listed(each.module)]
        if listed:
            print(f"  {name} ({len(found)} in all)")
            print("".join(f"    {each}\n" for each in listed), end="")


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
