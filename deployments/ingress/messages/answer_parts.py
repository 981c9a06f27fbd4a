"""The additions of a text stream's pieces to its answer, independent of any protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from deployments.engines.llm.chat import CalledTool
from deployments.records import TextChunk


class AnswerPart(NamedTuple):
    """An addition to a block of the answer; `begins`, to a new one. The `text` of a call are its arguments."""

    kind: Literal["thought", "text", "call"]
    text: str
    begins: bool
    call: CalledTool | None = None


class AnswerParts:
    """Reads an answer as blocks, one after the other: thoughts, text, calls. Calls beyond `max_calls` are left out."""

    def __init__(self, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._num_calls = 0
        self._kind = ""  # of the last block

    def of(self, chunk: TextChunk) -> Iterator[AnswerPart]:
        """Yield the additions of a piece, which may join several. The rest of an open call comes first of all."""
        meant = [call for call in chunk.tool_calls if self._max_calls is None or call.index < self._max_calls]
        num_before = self._num_calls
        for call in meant:
            if call.index < num_before:
                yield AnswerPart("call", call.arguments, begins=False, call=call)
        if chunk.reasoning:
            yield self._addition("thought", chunk.reasoning)
        if chunk.text.strip() or (chunk.text and not self._num_calls):  # blanks between calls are dropped
            yield self._addition("text", chunk.text)
        for call in meant:
            if call.index >= num_before:
                begins = call.index >= self._num_calls
                self._num_calls, self._kind = call.index + 1, "call"
                yield AnswerPart("call", call.arguments, begins, call)

    def _addition(self, kind: Literal["thought", "text"], text: str) -> AnswerPart:
        begins, self._kind = self._kind != kind, kind
        return AnswerPart(kind, text, begins)
