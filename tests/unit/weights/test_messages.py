"""Names in messages: the first ones, and how many more there are."""

from __future__ import annotations

import pytest

from weights.records.errors import listed


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", "nothing"),
        ("a", "a"),
        ("ab", "a, b"),
        ("abc", "a, b, c"),
        ("abcd", "a, b, c and 1 more"),
        ("abcdefg", "a, b, c and 4 more"),
    ],
)
def test_so_many_names_are_listed(names: str, text: str) -> None:
    assert listed(iter(names), 3, none="nothing") == text
