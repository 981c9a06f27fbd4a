"""The number of tokens that a draft model proposes for a sequence: as many as pay, by how many were right. Pure.

A proposed token is right with some probability, if those before it are. So many tokens in a row give a known number of
tokens per step, and take the measured time: the best number follows. Where none pays, there are pauses.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

MOST: Final = 8  # tokens proposed at once
UNKNOWN: Final = -1  # stands for a token until the draft model has computed it
LONGEST_PAUSE: Final = 64  # steps without a proposal where proposals do not pay
_LEAST_GAIN: Final = 1.03  # of tokens per time, for which proposals are made
_GUESSED_COST: Final = 0.1
_LEAST_COST: Final = 0.02
_NUM_KEPT: Final = 9  # costs, whose median counts
_MEMORY: Final = 0.8  # of earlier proposals, with each new one
_GUESSED: Final = (1.5, 2.0)  # right ones of those tried, before the first


class DraftCost:
    """The measured cost of a proposed token, in steps of the large model without any: drafting and checking it."""

    def __init__(self) -> None:
        self._measured: deque[float] = deque(maxlen=_NUM_KEPT)
        self.per_token = _GUESSED_COST

    def note(self, num_tokens: int, extra_s: float, step_s: float) -> None:
        """Take in that a step with so many proposed tokens took longer than the `step_s` of one without."""
        self._measured.append(max(_LEAST_COST, extra_s / num_tokens / step_s))
        self.per_token = statistics.median(self._measured)


def best_length(rate: float, cost: float, most: int) -> int:
    """Return how many tokens to propose, each right at this `rate` after right ones; 0 where that gains nothing."""
    best, gain, expected = 0, _LEAST_GAIN, 1.0
    for length in range(1, most + 1):
        expected += rate**length
        if (found := expected / (1 + length * cost)) > gain:
            best, gain = length, found
    return best


class DraftPace:
    """The lengths of the proposals for one completion, which has with its prompt at most `limit` tokens."""

    def __init__(self, limit: int, cost: DraftCost) -> None:
        self._limit, self._cost = limit, cost
        self._right, self._tried = _GUESSED
        self._pause, self._next_pause = 0, 1

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return the places of up to `most` tokens, which the draft model is to fill in."""
        if self._pause:
            self._pause -= 1
            return ()
        room = min(most, MOST, self._limit - len(token_ids) - 1)
        return (UNKNOWN,) * min(room, max(1, self._best_length()))

    def note(self, num_proposed: int, num_right: int) -> None:
        """Take in the number of proposed tokens that were drawn."""
        self._right = _MEMORY * self._right + num_right
        self._tried = _MEMORY * self._tried + min(num_proposed, num_right + 1)
        if self._best_length():
            self._next_pause = 1
        else:
            self._pause, self._next_pause = self._next_pause, min(LONGEST_PAUSE, 2 * self._next_pause)

    def _best_length(self) -> int:
        return best_length(self._right / self._tried, self._cost.per_token, MOST)
