"""The report of what tests take."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infra import times_report

LINES = [
    (0.5, 2.0, "a/test_x.py::test_one[b[c]-1]"),
    (0.25, 0.25, "a/test_x.py::test_one[2]"),
    (0.5, 1, "a.py::test_y"),
]


@pytest.fixture
def times(tmp_path: Path) -> Path:
    path = tmp_path / "unit.tsv"
    path.write_text("".join(f"{processor:.3f}\t{passed:.3f}\t{test}\n" for processor, passed, test in LINES))
    return path


def test_cases_and_tests_are_summed_and_the_dearest_come_first(times: Path) -> None:
    taken = times_report.read_times(times)
    assert list(times_report.sums(taken, "[").items()) == [
        ("a/test_x.py::test_one", (0.75, 2.25, 2)),
        ("a.py::test_y", (0.5, 1, 1)),
    ]
    assert list(times_report.sums(taken, "::")) == ["a/test_x.py", "a.py"]


def test_a_page_has_every_run(times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = times.with_name("times.md")
    monkeypatch.setattr(sys, "argv", ["times_report.py", str(times), "--to", str(page)])
    times_report.main()
    assert "| 1.2 | 3.2 | 3 | unit |" in page.read_text()
    assert "| 0.8 | 2.2 | 2 | a/test_x.py::test_one |" in page.read_text()
