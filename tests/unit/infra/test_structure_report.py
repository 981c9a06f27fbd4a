"""The report counts what it says, on a small tree."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FILES = {
    "pyproject.toml": 'atelier = "deployments.main:main"',
    "configs/__init__.py": "from configs.model import Model as Model\n",
    "configs/model.py": '''"""What a model is."""
from dataclasses import dataclass

LIMIT = 3

@dataclass
class Model:
    """A model."""

    name: str

    def describe(self) -> "Description":
        """Return it."""
        return Description(self.unused())

    def unused(self) -> str:
        return self.name

@dataclass
class Description:
    text: str

def nobody() -> None: ...

def for_tests() -> None: ...

def _private() -> None: ...
''',
    "deployments/main.py": '''import typer
from configs import Model

app = typer.Typer()

@app.command()
def serve() -> None: ...

def main() -> None:
    """Of the program."""
    Model("a").describe()
    Model("b")
    app()
''',
    "deployments/other.py": "from configs.model import Model\n__all__ = ['exported']\ndef exported(): ...\n",
    "tests/test_model.py": "from configs.model import for_tests\n",
}
ROUTES = """
class Body: ...
class Answer: ...
class Refusal: ...
class Page: ...
class Unnamed: ...

class Form:
    def hook(self): ...
    def other_hook(self): ...
    def show(self):
        self.hook()
        self.other_hook()

def create_router(router):
    @router.post("/", responses={400: {"model": Refusal}})
    async def ask(body: Body | None = None): ...
    @router.get("/", dependencies=[Page])
    async def read(): ...
    router.add_api_route("/all", read, response_model=list[Answer])
"""


@pytest.fixture(scope="module")
def report() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "infra"))  # as a script finds its neighbours
        yield importlib.import_module("structure_report")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_importers_are_found_through_a_package_that_reexports(report: ModuleType, tree: Path) -> None:
    importers = report.Structure(tree).importers()
    assert importers["configs.model"] == {"deployments.main", "deployments.other"}
    (tree / "deployments/other.py").unlink()
    assert report.Structure(tree).one_importer_modules() == [("configs.model", "deployments.main", "others")]


def test_unused_symbols_are_neither_commands_nor_exported_nor_in_a_signature(report: ModuleType, tree: Path) -> None:
    unused = {each.name: is_tested for each, is_tested in report.Structure(tree).unused_symbols()}
    assert unused == {"unused": False, "nobody": False, "for_tests": True}


def test_what_a_route_takes_and_gives_is_used_and_so_is_a_hook_that_a_subclass_overrides(
    report: ModuleType, tree: Path
) -> None:
    (tree / "deployments/routes.py").write_text(ROUTES)
    (tree / "deployments/words.py").write_text("""def body(): raise ValueError("Unnamed")\n""")
    unused = {each.name for each, _ in report.Structure(tree).unused_symbols() if each.module == "deployments.routes"}
    assert unused == {"Unnamed", "hook", "other_hook", "show", "create_router", "Form"}
    (tree / "deployments/forms.py").write_text(
        "from deployments.routes import Form, create_router\nclass Table(Form):\n    def hook(self): ...\n"
    )
    (tree / "deployments/tables.py").write_text("class Long(Table):\n    def other_hook(self): ...\n")
    unused = {each.name for each, _ in report.Structure(tree).unused_symbols() if each.module == "deployments.routes"}
    assert unused == {"Unnamed", "show"}


def test_entries_of_a_list_parts_of_an_actor_and_programs_are_counted_apart(report: ModuleType, tree: Path) -> None:
    (tree / "deployments/cli").mkdir()
    (tree / "cluster").mkdir()
    (tree / "deployments/cli/main.py").write_text("from deployments.cli import chat\n")
    (tree / "deployments/cli/chat.py").write_text("import deployments.other\n")
    (tree / "deployments/other.py").write_text("from deployments.child import ask\n")
    (tree / "deployments/child.py").write_text("def ask(): ...\n\nif __name__ == '__main__':\n    ask()\n")
    (tree / "cluster/actor.py").write_text("from cluster.part import run\nENTRY = 'deployments.main:main'\n")
    (tree / "cluster/part.py").write_text("def run(): ...\n")
    assert report.Structure(tree).one_importer_modules() == [
        ("cluster.part", "cluster.actor", "parts of an actor"),
        ("configs.model", "deployments.main", "others"),
        ("deployments.child", "deployments.other", "programs"),
        ("deployments.cli.chat", "deployments.cli.main", "entries of a list"),
        ("deployments.main", "cluster.actor", "parts of an actor"),
        ("deployments.other", "deployments.cli.chat", "others"),
    ]


def test_fragments_and_repeated_verbs_are_listed(report: ModuleType, tree: Path) -> None:
    classes = "".join(f"class C{number}:\n    def run(self): ...\n" for number in range(5))
    (tree / "deployments/verbs.py").write_text(classes)
    structure = report.Structure(tree)
    assert [(name, text) for name, _, text in structure.fragments()] == [
        ("configs.model", "What a model is."),
        ("deployments.main", "Of the program."),
    ]
    assert {name: len(found) for name, found in structure.repeated_verbs().items()} == {"run": 5}


def test_class_names_with_several_definitions_and_records_are_counted(report: ModuleType, tree: Path) -> None:
    (tree / "deployments/again.py").write_text("class Model: ...\nclass Row(NamedTuple):\n    name: str\n")
    structure = report.Structure(tree)
    assert structure.repeated_classes() == {"Model": 2}
    assert structure.modules["deployments.again"].records == {"Row"}
    assert structure.modules["configs.model"].records == {"Model", "Description"}


def test_a_verb_counts_once_with_its_protocol_or_base_class_and_not_as_a_command(
    report: ModuleType, tree: Path
) -> None:
    protocol = "class Runner(Protocol):\n    size: int\n    def run(self): ...\n"
    meets = "".join(f"class M{number}:\n    size: int\n    def run(self): ...\n" for number in range(2))
    derived = "class D(M0):\n    def run(self): ...\n"
    others = "".join(f"class C{number}:\n    def run(self): ...\n" for number in range(3))
    command = "@app.command()\ndef run(): ...\n"
    (tree / "deployments/verbs.py").write_text(protocol + meets + derived + others + command)
    assert report.Structure(tree).repeated_verbs() == {}
    (tree / "deployments/more.py").write_text("def run(): ...\n")
    (names,) = report.Structure(tree).repeated_verbs().values()
    assert {each.owner for each in names} == {"Runner", "C0", "C1", "C2", ""}


def test_what_an_alias_of_types_names_is_used(report: ModuleType, tree: Path) -> None:
    (tree / "configs/alias.py").write_text("class Part: ...\nParts = tuple[Part, ...]\n")
    (tree / "deployments/parts.py").write_text("from configs.alias import Parts\n")
    assert "Part" not in {each.name for each, _ in report.Structure(tree).unused_symbols()}


def test_the_table_and_the_lists_are_printed(
    report: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["structure_report.py", "--root", str(tree), "--list", "configs"])
    report.main()
    printed = capsys.readouterr().out
    assert "with one importer" in printed
    assert "configs/model.py:23 nobody\n" in printed
    assert "configs/model.py:25 for_tests (tests)" in printed
    assert "deployments/main.py" not in printed


def test_scripts_use_what_they_import_or_open_by_its_path_and_tests_do_not(report: ModuleType, tree: Path) -> None:
    (tree / "configs/built.py").write_text(
        "def build(): ...\nINSTALLED = 'configs.built.install'\ndef install(): ...\n"
    )
    (tree / "infra").mkdir()
    (tree / "infra/train.py").write_text("from configs.model import nobody\n")
    (tree / "hook.py").write_text("module = load('configs/built.py')\nmodule.build()\n")
    structure = report.Structure(tree)
    assert {each.name for each, _ in structure.unused_symbols()} == {"unused", "for_tests"}
    assert structure.importers()["configs.built"] == {"hook"}


def test_what_a_public_attribute_holds_is_used(report: ModuleType, tree: Path) -> None:
    (tree / "configs/log.py").write_text(
        "class Shown: ...\nclass Hidden: ...\nclass Log:\n    def __init__(self):\n"
        "        self.entries: list[Shown] = []\n        self._kept: list[Hidden] = []\n"
    )
    unused = {each.name for each, _ in report.Structure(tree).unused_symbols() if each.module == "configs.log"}
    assert unused == {"Hidden", "Log"}
