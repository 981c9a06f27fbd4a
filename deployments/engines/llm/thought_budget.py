"""A bound on an answer's tokens of reasoning: after them its reasoning is ended, and the answer goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deployments.engines.records.protocol import TokenConstraint


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The beginnings and ends of reasoning as texts, the tokens that write an end, and the text of a token."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    closing_ids: tuple[int, ...]
    text_of: Callable[[int], str]


@dataclass(slots=True)
class ThoughtBudget:
    """A `TokenConstraint` that lets an answer think for `left` tokens in all, and then forces the end of its thought.

    `inner` is the answer's further constraint. Marks are found in the text, which tokens may cut anywhere.
    """

    marks: ThoughtMarks
    left: int
    is_thinking: bool
    inner: TokenConstraint | None = None
    _forced: int = 0  # of the end's tokens
    _tail: str = ""

    @property
    def is_complete(self) -> bool:
        return self.inner is not None and self.inner.is_complete

    @property
    def is_free(self) -> bool:
        """Return whether any token may come next."""
        return not self._must_end and (self.inner is None or self.inner.is_free)

    @property
    def _must_end(self) -> bool:
        return self.is_thinking and self.left <= 0

    def fork(self) -> ThoughtBudget:
        return replace(self, inner=self.inner and self.inner.fork())

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        if self.inner is not None and not self.inner.is_free:
            self.inner.fill_mask(mask)
        else:
            mask[:] = -1
        if self._must_end:
            token = self._next_of_end
            place, bit = token >> 3, 1 << (token & 7)
            if mask.view(np.uint8)[place] & bit:  # else a character of several tokens has to end first
                mask[:] = 0
                mask.view(np.uint8)[place] = bit

    @property
    def _next_of_end(self) -> int:
        return self.marks.closing_ids[self._forced]

    def advance(self, token_id: int) -> None:
        if self.inner is not None:
            self.inner.advance(token_id)
        if self._must_end and token_id == self._next_of_end:
            self._forced += 1
            if self._forced == len(self.marks.closing_ids):
                self._turn()
            return
        self._tail += self.marks.text_of(token_id)
        if (end := _end_of(self._tail, self.marks.closings if self.is_thinking else self.marks.openings)) >= 0:
            self._turn(self._tail[end:])
        elif self.is_thinking:
            self.left -= 1
        longest = max(map(len, (*self.marks.openings, *self.marks.closings)))
        self._tail = self._tail[-longest:]

    def _turn(self, tail: str = "") -> None:
        self.is_thinking, self._forced, self._tail = not self.is_thinking, 0, tail


def _end_of(text: str, marks: Sequence[str]) -> int:
    """Return the end of the first mark in a text, -1 without one."""
    return min((at + len(mark) for mark in marks if (at := text.find(mark)) >= 0), default=-1)
