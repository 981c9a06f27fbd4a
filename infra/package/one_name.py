"""The tree of a wheel: the rooms of the repository below the one name `atelier`.

`configs`, `weights`, `cluster` and `deployments` are good names in a checkout, and bad ones beside the folders of a
user's project. So a wheel has `atelier.configs` and so on, and each import and each module named in a string is written
that way as the wheel is built. Standard library only: the build hook runs this file by its path.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

NAME: Final = "atelier"
ROOMS: Final = ("configs", "weights", "cluster", "deployments", "infra")
CARRIED: Final = (
    *ROOMS[:-1],
    "infra/bench/command",
    "infra/offline",
    "infra/sim",
    "infra/simulator",
)  # of infra, what a user runs
_INIT: Final = '"""Serve diffusion models and LLMs from one Ray Serve application."""\n'
_MAIN: Final = f"from {NAME}.deployments.cli.entry import main\n\nmain()\n"
_DOTTED: Final = re.compile(rb"(?<![\w./\\-])(?:%s)(?:\.[A-Za-z_]\w*)+" % b"|".join(room.encode() for room in ROOMS))
_BUILT: Final = ("*.pyc", "*.so")


class Unmovable(Exception):
    """A source names a module in a way that cannot be written below the one name."""


def write_tree(root: Path, into: Path) -> Path:
    """Write the rooms of the checkout at `root` below `into`, as one package, and return its folder.

    What was built from them, such as libraries of any age, stays behind. Raises Unmovable with file and line.
    """
    package = into / NAME
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_INIT)
    (package / "__main__.py").write_text(_MAIN)
    for file in _files(root):
        target = package / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = file.read_bytes()
        if file.suffix == ".py":
            try:
                content = moved(content, root)
            except Unmovable as error:
                raise Unmovable(f"{file.relative_to(root)}: {error}") from None
        target.write_bytes(content)
    return package


def moved(source: bytes, root: Path) -> bytes:
    """Return Python source with the modules of the rooms at `root` below the one name, in imports and in strings.

    Raises Unmovable.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    places: set[int] = set()
    for node in _outermost(ast.parse(source)):
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if isinstance(node, ast.ImportFrom):
            places.add(begin + re.match(rb"from\s+", source[begin:end]).end())
        elif isinstance(node, ast.Import):
            places.update(begin + found.start() for found in _whole_imports(node, source[begin:end]))
        else:
            named = [found for found in _DOTTED.finditer(source, begin, end) if _is_module(found[0].decode(), root)]
            _check_text(node, [found[0].decode() for found in named])
            places.update(found.start() for found in named)
    for place in sorted(places, reverse=True):
        source = source[:place] + NAME.encode() + b"." + source[place:]
    return source


def _outermost(node: ast.AST) -> Iterator[ast.ImportFrom | ast.Import | ast.Constant | ast.JoinedStr]:
    """Yield the imports from rooms, and whole strings: the parts of an f-string have no place of their own."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            if child.level == 0 and (child.module or "").split(".")[0] in ROOMS:
                yield child
        elif isinstance(child, ast.Import):
            if any(alias.name.split(".")[0] in ROOMS for alias in child.names):
                yield child
        elif isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield child
        else:
            yield from _outermost(child)


def _whole_imports(node: ast.Import, text: bytes) -> Iterator[re.Match[bytes]]:
    for alias in node.names:
        if alias.asname is None and alias.name.split(".")[0] in ROOMS:
            raise Unmovable(f"line {node.lineno}: `import {alias.name}` binds a room's name; say `from ... import ...`")
    return _DOTTED.finditer(text)


def _check_text(node: ast.Constant | ast.JoinedStr, names: list[str]) -> None:
    """Raise Unmovable where a name is in the code of an f-string, or said in pieces."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts)
    if any(text.count(name) < names.count(name) for name in names):
        raise Unmovable(f"line {node.lineno}: {sorted(set(names))} in an expression of an f-string; name it before")


def _is_module(dotted: str, root: Path) -> bool:
    """Return whether a name begins with a module of the tree, at least one floor below a room."""
    parts = dotted.split(".")
    path = root.joinpath(*parts[:2])
    return path.is_dir() or path.with_suffix(".py").is_file()


def _files(root: Path) -> Iterator[Path]:
    for folder in CARRIED:
        yield from sorted(
            file for file in (root / folder).rglob("*") if file.is_file() and not any(map(file.match, _BUILT))
        )
