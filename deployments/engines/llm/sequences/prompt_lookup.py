"""Proposed tokens without a second model: the earlier successors of the last tokens. Pure.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding), with an index instead of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LENGTHS: Final = (3, 2)  # numbers of last tokens to look up, the surest first
MOST: Final = 16  # tokens proposed at once
FIRST: Final = 4
WINDOW: Final = 16_384  # of the last tokens: an index of all would take seconds for a long prompt
LONGEST_PAUSE: Final = 64  # steps without a proposal after wrong ones


class PromptLookup:
    """Proposals for one completion; prompt and answer have at most `limit` tokens.

    It proposes as many as were right lately. After wrong ones it pauses, each time for twice as many steps.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ends: dict[tuple[int, ...], int] = {}  # the place after the last occurrence of these tokens
        self._num_indexed = -1
        self._length, self._pause, self._next_pause = FIRST, 0, 1

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that may follow."""
        self._index(token_ids)
        if self._pause:
            self._pause -= 1
            return ()
        room = min(most, self._length, self._limit - len(token_ids) - 1)
        found = (self._ends.get(tuple(token_ids[-length:])) for length in LENGTHS)
        end = next((end for end in found if end is not None), None)
        if end is None or room <= 0:
            return ()
        proposed = list(token_ids[end : end + room])
        while len(proposed) < room:  # a repeating text goes on from its own beginning
            proposed.append(proposed[end - len(token_ids)])
        return tuple(proposed)

    def note(self, num_proposed: int, num_right: int) -> None:
        """Take in the number of proposed tokens that were drawn."""
        if num_right == num_proposed:
            self._length = min(MOST, 2 * self._length)
        else:
            self._length = max(1, num_right + 1)
        if num_right:
            self._next_pause = 1
        else:
            self._pause, self._next_pause = self._next_pause, min(LONGEST_PAUSE, 2 * self._next_pause)

    def _index(self, token_ids: Sequence[int]) -> None:
        """Index the tokens before the last one, which itself is part of the look-up."""
        first = max(self._num_indexed, len(token_ids) - WINDOW, 1)
        for end in range(first, len(token_ids)):
            for length in LENGTHS:
                if end >= length:
                    self._ends[tuple(token_ids[end - length : end])] = end
        self._num_indexed = len(token_ids)
