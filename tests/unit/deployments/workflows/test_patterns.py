"""Patterns of workflows: replaced so many times, bounded in length, and the first object of a text."""

from __future__ import annotations

import re

import pytest
from kit.seeding import seeded_random

from deployments.workflows import patterns
from deployments.workflows.patterns import compiled, first_object, in_time, replaced
from deployments.workflows.records import Refused


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_so_many_matches_are_replaced(count: int) -> None:
    random = seeded_random()
    for _ in range(20):
        text = "".join(random.choices("ab1", k=12))
        found = replaced(compiled("(a+)", False, False, False), r"<\1>", text, count)
        assert found == re.sub("(a+)", r"<\1>", text, count=count)


@pytest.mark.parametrize(
    ("flags", "number"),
    [((False, False, False), 0), ((True, False, True), 1), ((True, True, False), 2), ((True, True, True), 1)],
)
def test_flags_are_those_that_are_set(flags: tuple[bool, bool, bool], number: int) -> None:
    assert len(compiled("^A.*$", *flags).findall("aa\na")) == number


def test_patterns_and_results_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled("a" * 2000, False, False, False)
    with pytest.raises(Refused, match="a pattern of 2001 characters: at most 2000"):
        compiled("a" * 2001, False, False, False)
    monkeypatch.setattr(patterns, "MAX_TEXT", 9)
    pattern = compiled("a", False, False, False)
    assert replaced(pattern, "xxxx", "a-a-a", 2) == "xxxx-xxxx-a"
    with pytest.raises(Refused, match="a text of more than 9 characters"):
        replaced(pattern, "xxxx", "a-a-a", 0)

    def late(seconds: float) -> None:
        raise TimeoutError

    with pytest.raises(Refused, match="took more than 1 s"):
        in_time(late)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1} {"b": 2}', {"a": 1}),
        ('words {no} {"a": {"b": 2}} more', {"a": {"b": 2}}),
        ("{" * 999 + '{"a": 1}', {"a": 1}),
        ("{" * 1000 + '{"a": 1}', None),
        ("words", None),
        ("", None),
        ("[1]", None),
    ],
)
def test_the_first_object_of_a_text_is_found(text: str, found: object) -> None:
    assert first_object(text) == found
