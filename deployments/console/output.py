"""The output of commands: one JSON object, tables that read well at 80 columns, or files of pictures and pages.

On a narrow screen a table wraps its text columns between words, and then shortens its names in the middle. Figures and
short hashes always stay whole.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]
Wide = Annotated[bool, typer.Option("--wide", "-w", help="All columns, nothing shortened, one line per row.")]

GAP: Final = "  "
MIN_NAME: Final = 8  # cells that a name keeps
MAX_WORD: Final = 28  # cells of a word that a text column keeps whole
SHORT_HASH: Final = 8  # characters


class OptionError(Exception):
    """An unusable value of an option; the message names the option."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `fit` is its behaviour without room; `only_wide` columns need `--wide`."""

    header: str
    fit: Literal["whole", "name", "text"] = "whole"
    align: Literal["left", "right"] = "left"
    only_wide: bool = False


def print_json(record: Any) -> None:
    """Print one JSON object on one line."""
    sys.stdout.write(json.dumps(record, default=str) + "\n")


def print_line(text: str, style: str = "") -> None:
    """Print text without markup, wrapped between words."""
    console = Console()
    for paragraph in text.splitlines() or [""]:
        for line in _wrapped(paragraph, console.width):
            console.print(Text(line, style), soft_wrap=True)


def print_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    wide: bool = False,
    title: str = "",
    is_error: bool = False,
) -> None:
    """Print a table, `is_error` on stderr; rows have a cell for every column, those of `--wide` as well.

    Without rows nothing is printed.
    """
    if not rows:
        return
    console = Console(stderr=is_error)
    shown = [index for index, column in enumerate(columns) if wide or not column.only_wide]
    lines = _layout(
        [columns[index] for index in shown],
        [[row[index] for index in shown] for row in rows],
        None if wide else console.width,
    )
    if title:
        console.print()
        console.print(Text(title, "bold"))
    for number, line in enumerate(lines):
        console.print(Text(line, "dim" if number == 0 else ""), soft_wrap=True)


def _layout(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    """Return the lines of a table, header first, at most `width` cells wide if the figures fit.

    `width` None is for one line per row, as wide as it comes.
    """
    flat = [[" ".join(cell.split()) for cell in row] for row in rows]
    widths = [
        max(cell_len(column.header), *(cell_len(row[index]) for row in flat), 0) for index, column in enumerate(columns)
    ]
    if width is not None:
        least = [_min_width(column, [row[index] for row in flat]) for index, column in enumerate(columns)]
        widths = _fitted(columns, widths, least, width - len(GAP) * (len(columns) - 1))
    lines = [_joined(columns, [column.header for column in columns], widths)]
    for row in flat:
        cells = [_lines_of(*parts) for parts in zip(columns, row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append(_joined(columns, parts, widths))
    return lines


def _shortened(name: str, width: int) -> str:
    """Return the name with its middle left out, at most `width` cells wide."""
    if cell_len(name) <= width:
        return name
    room = keep = max(width - 1, 0)
    tail = keep // 2
    while cell_len(name[: keep - tail]) + cell_len(name[len(name) - tail :]) > room:
        keep -= 1
        tail = keep // 2
    return f"{name[: keep - tail]}…{name[len(name) - tail :]}"


def size(nbytes: int) -> str:
    """Return a number of bytes in the unit that suits it: "2.0 KiB"."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def _min_width(column: Column, cells: Sequence[str]) -> int:
    """Return the width that a column keeps on any screen: a text column keeps its words whole."""
    longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
    return max(cell_len(column.header), min(longest, MAX_WORD) if column.fit == "text" else MIN_NAME)


def _fitted(columns: Sequence[Column], widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Shrink the widest text columns first, then the widest names."""
    fitted = list(widths)
    for fit in ("text", "name"):
        while sum(fitted) > room:
            wide = [index for index, column in enumerate(columns) if column.fit == fit and fitted[index] > least[index]]
            if not wide:
                break
            fitted[max(wide, key=lambda index: fitted[index])] -= 1
    return fitted


def _lines_of(column: Column, cell: str, width: int) -> list[str]:
    if column.fit != "text":
        return [_shortened(cell, width)]
    return [_shortened(line, width) for line in _wrapped(cell, width)]


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _joined(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if column.align == "right" else cell + space)
    return GAP.join(padded).rstrip()


def check_plot(path: Path | None) -> None:
    """Raise OptionError now for a picture that could not be written after minutes of work."""
    if path is None:
        return
    if path.suffix.lower() != ".svg":
        raise OptionError(f"--plot {path}: expected a file that ends in .svg")
    if path.is_dir():
        raise OptionError(f"--plot {path}: a folder is there")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--plot {path}: {error.strerror or error}") from None


def write_file(path: Path, text: str) -> None:
    """Write a file and the folders above it. Raises OptionError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}") from None
