"""Report the structure of the product's tree: figures to steer by, with nothing forbidden.

`python infra/structure_report.py [--list PACKAGE] [--root FOLDER]`, for example `--list weights/storage` or `--list .`.

Names are matched without type inference (`python_modules.py`): a method counts as used when another module mentions an
attribute (or a string) of its name. The counts are therefore lower bounds. Users are the product, the scripts of
infra/ and those of the root (the build hook); tests are counted apart. What a framework calls by name is left out:
decorated routes and commands, validators, methods of classes with a base outside the tree. What a route is given or
answers with is used: the OpenAPI page names it.

A module with one importer is a part of that importer, or has a reason of its own to change. Three kinds have one
importer by construction and are counted apart: entries of a list (`LISTS`: one file per command, benchmark, router,
deployment, foreign format, policy of the simulator), parts of an actor (what an `actor.py` or a replica's class puts
together: their state lives in its process), and programs that their importer starts as a process.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

import budgets
from python_modules import Definition, Module, is_public, parse_modules

PACKAGES = ("configs", "weights", "cluster", "deployments")
SCRIPTS = ("infra/**/*.py", "*.py")
TESTS = ("tests/**/*.py",)
MAX_DEFINITIONS = 4
FRAGMENTS = re.compile(
    r"(of|what|who|whom|whose|whether|how|by|when|where|why|which|from|for|with|if|as|that|than|to|in|on|at)\b", re.I
)
LISTS = re.compile(
    r"deployments\.(app|services\.replica_classes|cli\.main|cli\.bench|ingress\.http)|weights\.intake"
    r"|weights\.quantization\.checkpoints"
)
ACTORS = re.compile(r".*\.actor|deployments\.services\.(worker|text_encoder)")
KINDS = ("entries of a list", "parts of an actor", "programs", "others")


class Structure:
    """The product's modules and those who mention them."""

    def __init__(self, root: Path) -> None:
        self.modules = parse_modules(root, [f"{package}/**/*.py" for package in PACKAGES])
        self._users = [*self.modules.values(), *parse_modules(root, SCRIPTS).values()]
        self._tests = list(parse_modules(root, TESTS).values())
        self._reexports = {
            (package.name, name): (source, name)
            for package in self.modules.values()
            if package.is_package
            for source, name in package.imports
            if source in self.modules
        }
        self._imports: dict[str, set[tuple[str, str]]] = {}
        self._bases: dict[str, set[str]] = defaultdict(set)
        self._members: dict[str, set[str]] = defaultdict(set)
        for module in self.modules.values():
            for name, bases in module.bases.items():
                self._bases[name] |= bases
                self._members[name] |= module.members[name]
        scripts = [path for path in (root / "pyproject.toml", root / "Makefile") if path.exists()]
        self._words = set(re.findall(r"[\w.:]+", " ".join(path.read_text() for path in scripts)))
        self._words |= {text for module in self._users for text in module.strings}

    def importers(self) -> dict[str, set[str]]:
        """Map each module to the product's other modules that import it, or name it ("module:function", its path).

        A package's re-exports do not count.
        """
        importers: dict[str, set[str]] = {name: set() for name in self.modules}
        for module in self._users:
            named = {text.partition(":")[0] for text in module.strings if ":" in text} | module.paths
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
        found = [(name, *users) for name, users in self.importers().items() if len(users) == 1]
        return [(name, user, self._kind(name, user)) for name, user in found]

    def _kind(self, module: str, user: str) -> str:
        rules = (LISTS.fullmatch(user), ACTORS.fullmatch(user), self.modules[module].is_program, True)
        return next(kind for kind, holds in zip(KINDS, rules, strict=True) if holds)

    def unused_symbols(self) -> list[tuple[Definition, bool]]:
        """List public functions, classes, variables and methods that no other module mentions, and whether a test does.

        A class in the signature of something public is used, and so are a method that another class of its file calls
        or another file's subclass overrides, what `__all__` exports, and methods of exported classes that a test calls.
        """
        unused = []
        for module in self.modules.values():
            for each in filter(lambda each: is_public(each.name), module.definitions + module.methods):
                is_tested = any(self._mentions(test, each) for test in self._tests)
                users = (user for user in self._users if user is not module)
                is_used = self._is_used_at_home(module, each) or any(self._mentions(user, each) for user in users)
                if not is_used and not (is_tested and each.owner in module.exported):
                    unused.append((each, is_tested))
        return unused

    def _is_used_at_home(self, module: Module, each: Definition) -> bool:
        if each.owner:
            return any(each.name in names for owner, names in module.attributes.items() if owner != each.owner)
        paths = {f"{each.module}:{each.name}", f"{each.module}.{each.name}"}
        return each.name in module.exposed or bool(paths & self._words)

    def repeated_verbs(self) -> dict[str, list[Definition]]:
        """Map names of public functions and methods with more than four definitions to these.

        Methods that a base class or a protocol of the tree declares, too, count once with its declaration.
        """
        verbs = defaultdict(list)
        for each in (each for module in self.modules.values() for each in module.verbs if is_public(each.name)):
            verbs[each.name].append(each)
        senses = {name: self._distinct(found) for name, found in verbs.items() if len(found) > MAX_DEFINITIONS}
        return {name: found for name, found in senses.items() if len(found) > MAX_DEFINITIONS}

    def repeated_classes(self) -> dict[str, int]:
        """Map names of classes with more than one definition at the top of a module to how many they have."""
        counts = Counter(name for module in self.modules.values() for name in module.bases)
        return {name: number for name, number in counts.items() if number > 1}

    def _distinct(self, definitions: list[Definition]) -> list[Definition]:
        """Leave out methods that another of the definitions declares: of a base class, or of a protocol they meet."""
        owners = {each.owner for each in definitions if each.owner}
        return [each for each in definitions if not self._declarers(each.owner) & (owners - {each.owner})]

    def _declarers(self, owner: str) -> set[str]:
        """Return the base classes of a class, all the way up, and the protocols of which it has every member."""
        found = self._ancestors(owner)
        own = {member for name in (owner, *found) for member in self._members.get(name, ())}
        protocols = (name for name, bases in self._bases.items() if "Protocol" in bases)
        return found | {name for name in protocols if self._members[name] and self._members[name] <= own}

    def _ancestors(self, owner: str) -> set[str]:
        """Return the base classes of a class, all the way up."""
        found: set[str] = set()
        unseen = [owner]
        while unseen:
            bases = self._bases.get(unseen.pop(), set()) - found
            found |= bases
            unseen += bases
        return found

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
            overriding = (module.members[name] for name in module.bases if wanted.owner in self._ancestors(name))
            return any(wanted.name in names for names in (module.strings, *module.attributes.values(), *overriding))
        imports = self._resolved_imports(module)
        package, _, last = wanted.module.rpartition(".")
        knows_module = (
            (package, last) in imports
            or (wanted.module, "") in imports
            or wanted.module in module.strings | module.paths
        )
        is_attribute = any(wanted.name in names for names in module.attributes.values())
        return (wanted.module, wanted.name) in imports or (knows_module and is_attribute)


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
        ("record classes", [module.name for module in structure.modules.values() for _ in module.records]),
        ("docstrings", [module.name for module in structure.modules.values() for _ in module.docstrings]),
        ("  opening with a fragment", [name for name, _, _ in structure.fragments()]),
    ]
    print(f"{'':26}" + "".join(f"{each:>13}" for each in (*PACKAGES, "all")))
    sizes = [[each.lines for each in modules if _is_below(each.name, name)] for name in (*PACKAGES, "")]
    print("lines".ljust(26) + "".join(f"{sum(each):>13,}" for each in sizes))
    print("median lines".ljust(26) + "".join(f"{int(statistics.median(each or [0])):>13,}" for each in sizes))
    for label, names in counted:
        values = [sum(_is_below(name, package) for name in names) for package in (*PACKAGES, "")]
        print(f"{label:26}" + "".join(f"{value:>13,}" for value in values))
    num_others = sum(kind == "others" for *_, kind in alone)
    share = num_others / (len(modules) - len(alone) + num_others)
    print(f"\nwith one importer, of the modules that are none of these kinds: {share:.1%}")
    classes = structure.repeated_classes()
    print(f"class names with several definitions: {len(classes)}")
    print("  " + ", ".join(f"{name} {number}" for name, number in sorted(classes.items())))
    verbs = sorted(structure.repeated_verbs().items(), key=lambda item: -len(item[1]))
    print(f"names of functions and methods with more than {MAX_DEFINITIONS} definitions: {len(verbs)}")
    print("  " + ", ".join(f"{name} {len(found)}" for name, found in verbs))


def print_budgets(tree: dict[str, ast.Module]) -> None:
    """Print the figures of `tests/unit/test_budgets.py`."""
    graph, callables, methods = budgets.imports(tree), budgets.callables(tree), budgets.methods(tree)
    over = sum(count > budgets.MAX_CALLABLES for count in callables.values())
    large = sum(count > budgets.MAX_METHODS for count in methods.values())
    circles, pairs = budgets.circles(graph), budgets.mutual_folders(graph)
    print(f"import circles: {len(circles)}, folders that import each other: {len(pairs)}")
    print(
        f"callables in constructors: {sum(callables.values())}, classes with more than {budgets.MAX_CALLABLES}: {over}"
    )
    print(f"classes of more than {budgets.MAX_METHODS} methods: {large}")


def print_lists(structure: Structure, package: str) -> None:
    """Print the names behind the figures, for modules below `package` ("." for all)."""
    prefix = package.strip("./").replace("/", ".")

    def print_list(title: str, lines: list[tuple[str, str]]) -> None:
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
    root = arguments.root or Path.cwd()
    structure = Structure(root)
    if not structure.modules:
        sys.exit("No modules here: run it at the root of the tree, or pass --root.")
    print_table(structure)
    print_budgets(budgets.sources(root))
    if arguments.list:
        print_lists(structure, arguments.list)


if __name__ == "__main__":
    main()
