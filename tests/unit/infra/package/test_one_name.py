"""The names of modules in the wheel's tree: the interpreter's own reading of the sources judges."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from infra.package.one_name import NAME, ROOMS, Unmovable, moved, write_tree

ROOT = Path(__file__).parents[4]
IMPORT = re.compile(rb"^[ \t]*(?:from[ \t]+|import\b[^\n]*[ ,])(?:%s)\b" % "|".join(ROOMS).encode(), re.MULTILINE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for file in ("configs/cluster.py", "weights/formats/gguf.py", "cluster/start/session.py", "deployments/app.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from configs.cluster import A", "from atelier.configs.cluster import A"),
        ("from   weights import formats", "from   atelier.weights import formats"),
        ("import os, cluster.start.session as s", "import os, atelier.cluster.start.session as s"),
        ("def f():\n    from deployments.app import g", "def f():\n    from atelier.deployments.app import g"),
        ("x = 'deployments.app:build_app'", "x = 'atelier.deployments.app:build_app'"),
        ("x = ['-m', \"cluster.start.session\"]  # é", "x = ['-m', \"atelier.cluster.start.session\"]  # é"),
        ("é = 'é'; x = 'cluster.start.session'", "é = 'é'; x = 'atelier.cluster.start.session'"),
        ("x = f'weights.formats.{form}'", "x = f'atelier.weights.formats.{form}'"),
        ('"""Raises what `configs.cluster` raises."""', '"""Raises what `atelier.configs.cluster` raises."""'),
        (
            "x = ('from weights.formats.gguf import y\\n' 'z')",
            "x = ('from atelier.weights.formats.gguf import y\\n' 'z')",
        ),
    ],
)
def test_imports_and_modules_in_strings_are_below_the_name(before: str, after: str, checkout: Path) -> None:
    assert moved(before.encode(), checkout).decode() == after


@pytest.mark.parametrize(
    "source",
    [
        "cluster.start.session.f(weights.formats)",  # variables
        "x = f'{cluster.sessions}'",
        "x = 'weights.total', 'configs/cluster.yaml', 'cluster'",  # a tensor, a file, a word
        "x = 'my.weights.formats', '/srv/weights.formats', 'https://x/cluster.session'",
        "from . import cluster\nfrom mine.configs import cluster\nimport configsets",
    ],
)
def test_all_else_is_left_alone(source: str, checkout: Path) -> None:
    assert moved(source.encode(), checkout).decode() == source


@pytest.mark.parametrize(
    "source", ["import cluster.start.session", "x = 1\nimport configs", "x = f'{weights.formats.a} b'"]
)
def test_what_cannot_be_said_below_the_name_is_refused_with_its_line(source: str, checkout: Path) -> None:
    with pytest.raises(Unmovable, match=f"line {source.count(chr(10)) + 1}: "):
        moved(source.encode(), checkout)


@pytest.mark.slow
def test_the_tree_of_the_wheel_names_no_room_from_outside(tmp_path: Path) -> None:
    package = write_tree(ROOT, tmp_path)
    sources = sorted(package.rglob("*.py"))
    assert {file.relative_to(package).parts[0] for file in sources} >= set(ROOMS)
    left = []
    for file in sources:
        content = file.read_bytes()
        for node in ast.walk(ast.parse(content)) if IMPORT.search(content) else ():  # few files are parsed once more
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            left += [f"{file}: {name}" for name in names if name.split(".")[0] in ROOMS]
    assert left == []
    assert not [*package.rglob("*.so"), *package.rglob("*.pyc")]
    assert (package / "__main__.py").read_text().startswith(f"from {NAME}.deployments.cli.entry import main")
