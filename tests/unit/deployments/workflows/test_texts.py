"""Nodes of texts beside Python's own methods."""

from __future__ import annotations

import re
from typing import Any

import pytest

from deployments.workflows import texts
from deployments.workflows.records import Refused
from deployments.workflows.table import KINDS

FLAGS = {"case_insensitive": False, "multiline": False, "dotall": False}


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        ("StringConcatenate", {"string_a": "a", "string_b": "b", "delimiter": "-"}, "a-b"),
        ("StringReplace", {"string": "aXbX", "find": "X", "replace": "--"}, "a--b--"),
        ("StringSubstring", {"string": "abcdef", "start": 1, "end": -1}, "bcde"),
        ("StringLength", {"string": "abc"}, 3),
        ("CaseConverter", {"string": "aB cD", "mode": "UPPERCASE"}, "AB CD"),
        ("CaseConverter", {"string": "aB cD", "mode": "lowercase"}, "ab cd"),
        ("CaseConverter", {"string": "aB cD", "mode": "Capitalize"}, "Ab cd"),
        ("CaseConverter", {"string": "aB cD", "mode": "Title Case"}, "Ab Cd"),
        ("StringTrim", {"string": " a ", "mode": "Left"}, "a "),
        ("StringTrim", {"string": " a ", "mode": "Right"}, " a"),
        ("StringTrim", {"string": " a ", "mode": "Both"}, "a"),
        ("StringContains", {"string": "aBc", "substring": "b", "case_sensitive": True}, False),
        ("StringContains", {"string": "aBc", "substring": "B", "case_sensitive": True}, True),
        ("StringContains", {"string": "aBc", "substring": "bC", "case_sensitive": False}, True),
        ("StringContains", {"string": "aBc", "substring": "x", "case_sensitive": False}, False),
        ("StringCompare", {"string_a": "Ab", "string_b": "ab", "mode": "Equal", "case_sensitive": True}, False),
        ("StringCompare", {"string_a": "Ab", "string_b": "aB", "mode": "Equal", "case_sensitive": False}, True),
        ("StringCompare", {"string_a": "ab", "string_b": "a", "mode": "Starts With", "case_sensitive": True}, True),
        ("StringCompare", {"string_a": "ab", "string_b": "b", "mode": "Starts With", "case_sensitive": True}, False),
        ("StringCompare", {"string_a": "ab", "string_b": "b", "mode": "Ends With", "case_sensitive": True}, True),
        ("JsonExtractString", {"json_string": 'x {"a": 1, "b": null}', "key": "a"}, "1"),
        ("JsonExtractString", {"json_string": 'x {"a": 1, "b": null}', "key": "b"}, ""),
        ("JsonExtractString", {"json_string": "x", "key": "a"}, ""),
        ("StringFormat", {"f_string": "{a}-{b}-{{", "values": {"a": 1, "b": "x"}}, "1-x-{"),
    ],
)
def test_texts_are_pythons(kind: str, given: dict[str, Any], found: Any) -> None:
    assert KINDS[kind].function(**given) == (found,)


TEXT = "k1=a; k2=b; K3="


@pytest.mark.parametrize(
    ("mode", "pattern", "group", "found"),
    [
        ("First Match", r"k\d", 1, "k1"),
        ("First Match", r"x", 1, ""),
        ("All Matches", r"k\d", 1, "k1\nk2"),
        ("All Matches", r"(\d)=([a-z])?", 2, "1\n2\n3"),
        ("First Group", r"k(\d)=(.)", 2, "a"),
        ("First Group", r"k(\d)=(.)", 3, ""),
        ("First Group", r"k\d", 0, "k1"),
        ("First Group", r"k\d", 1, ""),
        ("All Groups", r"(\d)=([a-z])?", 2, "a\nb"),
        ("All Groups", r"(\d)=([a-z])?", 1, "1\n2\n3"),
        ("All Groups", r"\d", 0, ""),
        ("All Groups", r"(", 1, ""),
    ],
)
def test_parts_of_a_text_are_found(mode: str, pattern: str, group: int, found: str) -> None:
    given = {"string": TEXT, "regex_pattern": pattern, "mode": mode, "group_index": group, **FLAGS}
    assert KINDS["RegexExtract"].function(**given) == (found,)
    is_found = KINDS["RegexMatch"].function(string=TEXT, regex_pattern=pattern, **FLAGS)
    try:
        assert is_found == (re.search(pattern, TEXT) is not None,)
    except re.error:
        assert is_found == (False,)


def test_texts_grow_to_a_bound_and_formats_have_no_more_than_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_TEXT", 8)
    replace, fill = KINDS["StringReplace"].function, KINDS["StringFormat"].function
    assert replace(string="aXaX", find="X", replace="bbb") == ("abbbabbb",)
    with pytest.raises(Refused, match="a text of 10 characters: at most 8"):
        replace(string="aXaX", find="X", replace="bbbb")
    assert fill(f_string="{a}{a}", values={"a": "four"}) == ("fourfour",)
    with pytest.raises(Refused, match="a text of 9 characters: at most 8"):
        fill(f_string="-{a}{a}", values={"a": "four"})
    for wrong, words in (
        ("{b}", "expected one of a,"),
        ("{a!r}", "without a format"),
        ("{a:3}", "without"),
        ("{", "not a format"),
    ):
        with pytest.raises(Refused, match=words):
            fill(f_string=wrong, values={"a": 1})
    with pytest.raises(Refused, match="expected one of no names"):
        fill(f_string="{a}", values={})
    with pytest.raises(Refused, match="not a pattern"):
        KINDS["RegexReplace"].function(string="a", regex_pattern="(", replace="")
    with pytest.raises(Refused, match="not a pattern"):
        KINDS["RegexReplace"].function(string="a", regex_pattern="a", replace=r"\2")
