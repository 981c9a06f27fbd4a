"""Hooks of mkdocs: documents of the root become pages, and the schema of a config becomes the tables of its page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from configs.cluster import ClusterConfig

ROOT = Path(__file__).parents[1]
OF_ROOT = ("ARCHITECTURE.md", "BENCHMARKS.md", "CONTRIBUTING.md", "CHANGELOG.md")
MARK = "<!-- every key of the schema -->"
SIZES = {2**30: "GiB", 2**20: "MiB"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents of the root, in lower case."""
    for name in OF_ROOT:
        files.append(File.generated(config, name.lower(), content=_without_links_out((ROOT / name).read_text())))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the tables of the schema where the page has the mark; leave out links to files that are not in the site."""
    if page.file.src_uri.startswith("benchmarks/"):
        markdown = re.sub(r"!?\[([^\]]+)\]\(\.\./\.\./[^)]*\)", r"\1", markdown)
    return markdown.replace(MARK, "\n\n".join(_sections(ClusterConfig, ""))) if MARK in markdown else markdown


def _without_links_out(text: str) -> str:
    """Return a document of the root with the words of its links to files that are not in the site."""
    return re.sub(r"!?\[([^\]]+)\]\((?!http|#)[^)]*\)", r"\1", text)


def _sections(model: type[BaseModel], name: str) -> Iterator[str]:
    """Yield a heading with a table for a section of the config, then for those within it."""
    heading = f"## {name}\n\n" if name else ""
    rows = [_row(key, field) for key, field in model.model_fields.items()]
    yield f"{heading}{_description(model)}\n\n| key | | default | |\n|---|---|---|---|\n" + "\n".join(rows)
    for key, field in model.model_fields.items():
        for inner in _models_of(field.annotation):
            yield from _sections(inner, f"{name}.{key}".removeprefix("."))


def _description(model: type[BaseModel]) -> str:
    return re.sub(r"\s*\n\s*", " ", (model.__doc__ or "").strip().split("\n\n")[0])


def _row(key: str, field: FieldInfo) -> str:
    meaning = field.description or "; ".join(_description(model) for model in _models_of(field.annotation))
    cells = (f"`{key}`", _kind(field.annotation), _default(key, field), meaning)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _models_of(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_of(argument)]


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_kind(one) for one in arguments if one is not NoneType))
    if hasattr(annotation, "__metadata__"):
        return _kind(arguments[0])
    if origin is dict:
        return f"{_kind(arguments[1])} by name"
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if _models_of(annotation):
        return "section"
    return {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path"}.get(annotation, "")


def _default(key: str, field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=False)
    if field.is_required():
        return "required"
    if isinstance(value, BaseModel) or value in (None, (), {}):
        return ""
    if key.endswith("_bytes") and isinstance(value, int):
        unit = next((unit for unit in SIZES if value % unit == 0), 1)
        return f"`{value // unit} {SIZES[unit]}`" if unit > 1 else f"`{value}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
