"""The pieces of a stream as additions to the blocks of an answer."""

from __future__ import annotations

from typing import Any

from deployments.engines.llm.chat import CalledTool
from deployments.ingress.messages.answer_parts import AnswerParts
from deployments.records import TextChunk


def piece(text: str = "", **more: Any) -> TextChunk:
    return TextChunk(text, 1, 1, **more)


def call(index: int, arguments: str = "", name: str = "f") -> CalledTool:
    return CalledTool(index, f"id{index}", name, arguments)


def read(chunks: list[TextChunk], max_calls: int | None = None) -> list[tuple[str, str, bool]]:
    parts = AnswerParts(max_calls)
    return [(part.kind, part.text, part.begins) for chunk in chunks for part in parts.of(chunk)]


def test_blocks_follow_each_other_and_grow() -> None:
    chunks = [piece(reasoning="a"), piece("c", reasoning="b"), piece("d"), piece(reasoning="e"), piece("f")]
    assert read(chunks) == [
        ("thought", "a", True),
        ("thought", "b", False),
        ("text", "c", True),
        ("text", "d", False),
        ("thought", "e", True),
        ("text", "f", True),
    ]


def test_calls_begin_once_and_blanks_between_them_are_left_out() -> None:
    chunks = [
        piece(" "),
        piece(tool_calls=(call(0, '{"a"'),)),
        piece(tool_calls=(call(0, ": 1}"),)),
        piece("\n", tool_calls=(call(1), call(1, "{}"))),
        piece("end"),
    ]
    assert read(chunks) == [
        ("text", " ", True),
        ("call", '{"a"', True),
        ("call", ": 1}", False),
        ("call", "", True),
        ("call", "{}", False),
        ("text", "end", True),
    ]


def test_calls_beyond_the_bound_are_left_out() -> None:
    chunks = [piece(tool_calls=(call(0, "{}"), call(1, "{}")))]
    assert read(chunks, max_calls=1) == [("call", "{}", True)]


def test_the_rest_of_an_open_call_comes_before_what_was_joined_behind_it() -> None:
    chunks = [
        piece(tool_calls=(call(0, '{"a"'),)),
        piece("so", reasoning="hm", tool_calls=(call(0, ": 1}"), call(1, "{"))),
        piece(tool_calls=(call(1, "}"),)),
    ]
    assert read(chunks) == [
        ("call", '{"a"', True),
        ("call", ": 1}", False),
        ("thought", "hm", True),
        ("text", "so", True),
        ("call", "{", True),
        ("call", "}", False),
    ]
