"""Names and sizes that fit into a column, and files that cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.seeding import seeded_random
from rich.cells import cell_len

from deployments.console.client import ClientError, _event
from deployments.console.output import OptionError, _shortened, size, write_file


def test_a_name_keeps_its_ends() -> None:
    random = seeded_random()
    for _ in range(200):
        name = "".join(random.choices("ab漢字", k=random.randrange(12)))
        width = random.randrange(1, 12)
        found = _shortened(name, width)
        if cell_len(name) <= width:
            assert found == name
        else:
            first, last = found.split("…")
            assert cell_len(found) <= width
            assert name.startswith(first)
            assert name.endswith(last)
    assert [_shortened("abcdefgh", width) for width in (8, 7, 4, 3, 2)] == ["abcdefgh", "abc…fgh", "ab…h", "a…h", "a…"]
    assert [_shortened("漢字漢字", width) for width in (7, 5, 3, 2, 1)] == ["漢字…字", "漢…字", "漢…", "…", "…"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 * 1024, "1.5 MiB"),
        (1024**3, "1.00 GiB"),
        (1024**4, "1024.00 GiB"),
    ],
)
def test_bytes_have_the_unit_that_suits_them(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


def test_a_file_is_written_with_its_folders_or_says_why_not(tmp_path: Path) -> None:
    write_file(tmp_path / "a" / "b.txt", "ü")
    assert (tmp_path / "a" / "b.txt").read_bytes() == "ü".encode()
    with pytest.raises(OptionError, match=r"txt: (File exists|Not a directory)$"):
        write_file(tmp_path / "a" / "b.txt" / "c.txt", "")


def test_a_stream_has_events_and_errors() -> None:
    assert _event('data: {"a": 1}') == {"a": 1}
    assert (_event("data: [DONE]"), _event(": still here"), _event("")) == ({}, {}, {})
    with pytest.raises(ClientError, match="no room"):
        _event('data: {"error": {"message": "no room"}}')
