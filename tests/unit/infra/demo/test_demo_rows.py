"""The output of `make demo`: first whether it worked, then a line for each answer, whatever is in it."""

from __future__ import annotations

import importlib
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[4]

LONG = "5 wait 3.5 s for 1 busy workers; ready in 1.44 s, [red]costs[/red] others 0.0 request-seconds"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "infra/demo")
    return importlib.import_module("run_demo")


def printed(demo: Any, rows: list[Any], width: int) -> list[str]:
    text = io.StringIO()
    demo.print_rows(rows, Console(file=text, width=width))
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


def row(demo: Any, what: str, *, right: bool = True) -> Any:
    return demo.Row(what, LONG, right, {"queue": 1.0, "total": 12345.6}, "10 of 20")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_each_row_is_one_line_within_the_terminal(demo: Any, width: int) -> None:
    names = [f"{number} a long name of what was asked for here" for number in range(5)]
    lines = printed(demo, [row(demo, name) for name in names], width)
    assert lines[0] == "It worked: all 5 answers were right."
    assert [line.split()[0] for line in lines[3:]] == list("01234")
    assert max(map(len, lines)) <= width
    assert all(line.endswith("12,346    10/20") for line in lines[3:])


def test_what_is_wrong_is_said_first(demo: Any) -> None:
    lines = printed(demo, [row(demo, "one"), row(demo, "two", right=False)], 80)
    assert lines[0] == "1 of 2 answers were wrong: two."
    assert "WRONG 5 wait" in lines[4]
