"""Tables fit the screen, keep words and figures whole, and show everything with --wide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from deployments.console.output import Column, _layout, print_line, size

COLUMNS = (Column("name", "name"), Column("size", align="right"), Column("text", "text"))
WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=12), max_size=20).map(" ".join)
ROWS = st.lists(st.tuples(st.text("mnopq_.日", max_size=60), st.integers(0, 10**9).map(str), WORDS), max_size=5)


@given(rows=ROWS, width=st.integers(50, 120))
def test_lines_fit_and_words_and_figures_stay_whole(rows: list[tuple[str, str, str]], width: int) -> None:
    lines = _layout(COLUMNS, rows, width)
    assert max(map(cell_len, lines)) <= width
    told = " ".join(lines).split()
    for _, figure, text in rows:
        assert figure in told
        assert set(text.split()) <= set(told)


@given(rows=ROWS)
def test_a_wide_table_has_one_line_per_row_with_all_of_it(rows: list[tuple[str, str, str]]) -> None:
    header, *lines = _layout(COLUMNS, rows, None)
    assert header.split() == ["name", "size", "text"]
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert all(cell in line for cell in row)


def test_text_gives_way_before_names_and_names_keep_both_ends() -> None:
    row = ("transformer_blocks.0.attn.add_k_proj.weight", "12", "one two three four five six seven")
    assert row[0] in _layout(COLUMNS, [row], 70)[1]
    (first, *_) = _layout(COLUMNS, [row], 50)[1:]
    assert first.startswith("transformer")
    assert "…" in first
    assert ".weight" in first


@pytest.mark.parametrize(
    ("width", "expected"), [(12, "abcdefghijkl"), (11, "abcde…hijkl"), (10, "abcde…ijkl"), (5, "abcd…jkl")]
)
def test_a_name_is_shortened_in_its_middle_and_keeps_eight_characters(width: int, expected: str) -> None:
    assert _layout([Column("name", "name")], [("abcdefghijkl",)], width)[1] == expected


def test_lines_of_text_wrap_between_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_line("listed in /a/path/that/is/longer/than/the/screen [/red]\nand more")
    assert capsys.readouterr().out == "listed in\n/a/path/that/is/longer/than/the/screen\n[/red]\nand more\n"


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (3 * 2**20, "3.0 MiB"), (2**40, "1024.00 GiB")],
)
def test_sizes_have_the_unit_that_suits_them(nbytes: int, expected: str) -> None:
    assert size(nbytes) == expected
