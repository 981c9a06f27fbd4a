"""The tables of adapters in docs/models.md say what registration does."""

from __future__ import annotations

import pytest
from kit.seeding import seeded_random

from infra.supported import adapters

pytestmark = pytest.mark.slow  # imports diffusers


def page_rows() -> dict[str, list[bool]]:
    """Return the marks of each row of all tables, as the page has them."""
    text = adapters.PAGE.read_text(encoding="utf-8")
    written = text.partition(adapters.BEGIN)[2].partition(adapters.END)[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in written.splitlines() if line.startswith("| ")]
    titles = [denoiser.title for denoiser in adapters.DENOISERS]
    assert [row[0] for row in cells if row[1:] == titles] == [*adapters.TABLES]
    return {row[0]: [mark == "✓" for mark in row[1:]] for row in cells if row[1:] != titles}


def test_the_page_has_all_layouts_and_kinds_and_a_sample_of_its_cells_is_right() -> None:
    rows = page_rows()
    assert list(rows) == [row for table in adapters.TABLES.values() for row in table]
    draw = seeded_random()
    for place in draw.sample(range(len(adapters.DENOISERS)), 4):
        denoiser = adapters.DENOISERS[place]
        for row in draw.sample(list(rows), 8):
            assert rows[row][place] == adapters.is_served(row, denoiser), (row, denoiser.title)
    text = adapters.PAGE.read_text(encoding="utf-8")
    assert all(name.removesuffix("Pipeline") in text for name in draw.sample(adapters.prompted_classes(), 5))


@pytest.mark.long
def test_the_page_is_what_the_command_writes() -> None:
    text = adapters.PAGE.read_text(encoding="utf-8")
    assert adapters.with_tables(text) == text
