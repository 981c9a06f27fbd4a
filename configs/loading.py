"""Load YAML into a ClusterConfig. A mistake is reported with file, line, key and, for a typo, the nearest name."""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ValidationError

from configs.cluster import ClusterConfig
from configs.errors import ConfigFileError, Problem

_Location = tuple[str | int, ...]

_RENAMED: Final = {"merging": "batching"}  # keys of earlier versions, too far from their new names for a typo


def load_cluster_config(path: str | Path) -> ClusterConfig:
    """Read a cluster YAML. Relative paths inside it are relative to the file's own folder.

    Raises ConfigFileError with every problem that was found, not only the first.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigFileError(path, [Problem(None, "", "no such file")]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(path, [Problem(None, "", f"cannot be read: {error}")]) from None
    node, data = _parse(path, text)
    if not isinstance(data, dict):
        raise ConfigFileError(path, [Problem(1, "", f"expected a mapping, got {type(data).__name__}")])
    duplicates = list(_duplicate_keys(node, (), set()))
    if duplicates:
        raise ConfigFileError(path, duplicates)
    try:
        config = ClusterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigFileError(path, [_problem(node, detail) for detail in _causes(error)]) from None
    try:
        return _resolve_paths(config, path.resolve().parent)
    except RuntimeError as error:  # "~somebody" without a home directory
        raise ConfigFileError(path, [Problem(None, "", str(error))]) from None


def located_problems(path: Path, problems: Iterable[tuple[Sequence[str | int], str]]) -> ConfigFileError:
    """Return mistakes that were found after loading (keys, what is wrong) as an error with their lines."""
    node, _ = _parse(path, path.read_text("utf-8"))
    found = [Problem(_line_of(node, tuple(keys)), ".".join(map(str, keys)), text) for keys, text in problems]
    return ConfigFileError(path, found)


def _resolve_paths(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """Return the config with absolute paths, so that any process of any node reads the same files."""

    def absolute(path: Path) -> Path:
        return (folder / path.expanduser()).resolve()

    def located(source: Path | str) -> Path | str:
        return absolute(source) if isinstance(source, Path) else source

    return config.model_copy(
        update={
            "access": config.access.model_copy(
                update={"keys_file": config.access.keys_file and absolute(config.access.keys_file)}
            ),
            "store": config.store.model_copy(update={"path": absolute(config.store.path)}),
            "model_roots": config.model_roots and tuple(map(absolute, config.model_roots)),
            "models": tuple(m.model_copy(update={"path": located(m.path)}) for m in config.models),
            "adapters": tuple(a.model_copy(update={"path": located(a.path)}) for a in config.adapters),
        }
    )


def _parse(path: Path, text: str) -> tuple[yaml.Node | None, Any]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        return node, yaml.safe_load(text)
    except RecursionError:
        raise ConfigFileError(path, [Problem(None, "", "not valid YAML: nested too deep")]) from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-99-99
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else None
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigFileError(path, [Problem(line, "", f"not valid YAML: {reason}")]) from None


def _causes(error: ValidationError) -> list[Any]:
    """Drop errors that merely follow: a list counts as too short when one of its items is wrong."""
    details = error.errors()

    def follows(detail: Any) -> bool:
        depth = len(detail["loc"])
        inside = (other for other in details if len(other["loc"]) > depth and other["loc"][:depth] == detail["loc"])
        return detail["type"] == "too_short" and any(inside)

    return [detail for detail in details if not follows(detail)]


def _problem(node: yaml.Node | None, detail: Any) -> Problem:
    location: _Location = tuple(detail["loc"])
    key = ".".join(str(part) for part in location)
    text = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        name = str(location[-1])
        nearest = [_RENAMED[name]] if _RENAMED.get(name) in known else difflib.get_close_matches(name, known, 1, 0.5)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        text = f"unknown key{hint} (known: {', '.join(known)})"
    elif detail["type"] == "missing":
        text = "required, but missing"
    elif not isinstance(detail.get("input"), dict | list | tuple | BaseModel):
        # A mistaken URL may have a password in it: https://user:password@host.
        text = f"{text}, got {re.sub(r'//.*@', '//***@', repr(detail.get('input')))}"
    return Problem(_line_of(node, location), key, text)


def _line_of(node: yaml.Node | None, location: _Location) -> int | None:
    """Return the line of the deepest part of `location` in the file (a missing key has its parent's line)."""
    line = node.start_mark.line + 1 if node else None
    for part in location:
        step = _child(node, part)
        if step is None:
            break
        line, node = step
    return line


def _child(node: yaml.Node | None, part: str | int) -> tuple[int, yaml.Node] | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        child = node.value[part]
        return child.start_mark.line + 1, child
    return None


def _duplicate_keys(node: yaml.Node | None, location: _Location, visited: set[int]) -> Iterable[Problem]:
    """Yield duplicate keys: YAML lets the later one win silently, which hides a mistake.

    `visited`: aliases make a graph of the tree, with many ways to a node and even circles.
    """
    if id(node) in visited:
        return
    visited.add(id(node))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                dotted = ".".join(str(part) for part in (*location, name))
                yield Problem(key.start_mark.line + 1, dotted, "given twice")
            seen.add(name)
            yield from _duplicate_keys(value, (*location, name), visited)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            yield from _duplicate_keys(child, (*location, index), visited)


def _known_keys(location: _Location) -> list[str]:
    """Return the field names of the config model at `location`."""
    model: type[BaseModel] | None = ClusterConfig
    for part in location:
        if isinstance(part, int) or model is None:
            continue
        field = model.model_fields.get(part)
        model = _model_in(field.annotation) if field else None
    return sorted(model.model_fields) if model else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    for argument in typing.get_args(annotation):
        found = _model_in(argument)
        if found:
            return found
    return None
