"""The number of prompt tokens of a step beside decoding sequences, by the measured times of such steps.

Every decoding sequence waits for the whole step. So a step may take `max_delay` times as long as without
prompts, and gets the most prompt tokens that should fit. Pure: tokens and seconds come in, tokens go out.

If another engine waits for the device between two steps, prompts take no more of it at a time than `MAX_HELD_STEPS`
of that engine's own steps, also where nothing decodes.

Costs are those of `StepCosts`: a kind is a number of decoding sequences, a size all tokens of the step. Sizes that were
never measured are approached by at most doubling, and a size that was slow once is tried again. The time without
prompts is measured whenever none wait; while they always do, one step in `MAX_BESIDE` goes without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from deployments.engines.costs.step_costs import StepCosts

FEWEST: Final = 4  # tokens; a prompt may be cut anywhere, but products of fewer rows are padded
MAX_HELD_STEPS: Final = 2.0  # of another engine: the longest delay by a step with prompts
FREE_GROWTH: Final = 1.25  # tokens that add no more than this to a step's fixed time are free
MAX_BESIDE: Final = 64  # steps with prompts for one without, which measures what decoding alone takes
FIRST_BESIDE: Final = 4  # the same while it was measured once: a first step is often slow
TRUSTED_CALLS: Final = 32  # of one number of sequences; during them a slow size counts as slow


@dataclass(slots=True)
class _Kind:
    """The steps of one number of sequences: those without prompts, and those with prompts since the last of them."""

    num_idle: int = 0
    num_beside: int = 0


class PrefillPace:
    """The prompt tokens of the next step, by measured steps."""

    def __init__(self, max_delay: float, max_tokens: int) -> None:
        """Allow steps `max_delay` times their time without prompts, and at most `max_tokens` prompt tokens."""
        self._max_delay, self._max_tokens = max_delay, max_tokens
        self._costs = StepCosts(TRUSTED_CALLS)
        self._kinds: dict[int, _Kind] = {}

    def choose_tokens(self, num_decoding: int) -> int:
        """Return the most prompt tokens that the next step may compute beside `num_decoding` sequences.

        0 asks for a step that measures decoding alone; at least `FEWEST` (or the maximum) follow it.
        """
        known = self._kinds.get(num_decoding, _Kind())
        if known.num_beside >= min(MAX_BESIDE, FIRST_BESIDE * known.num_idle):
            return 0
        kind = _name(num_decoding)
        fewest_s = self._costs.least_seconds(kind, num_decoding + FEWEST)
        # The first of the two may be an outlier: prompts make no step shorter.
        idle_s = min(self._costs.seconds(kind, num_decoding), fewest_s)
        allowed_s = self._max_delay * idle_s
        if fewest_s > allowed_s:  # prompts go on all the same: their allowance counts from there
            allowed_s += fewest_s - idle_s
        return self._most_within(num_decoding, allowed_s, self._max_tokens)

    def free_tokens(self, num_decoding: int) -> int:
        """Return the most tokens beside `num_decoding` sequences that add little to a step's time."""
        kind = _name(num_decoding)
        return self._most_within(num_decoding, FREE_GROWTH * self._costs.seconds(kind, num_decoding), self._max_tokens)

    def decode_seconds(self, num_decoding: int) -> float:
        """Return the measured seconds of a step of such sequences alone; 0 where none was measured."""
        kind = _name(num_decoding)
        return self._costs.seconds(kind, num_decoding) if self._costs.is_measured(kind, num_decoding) else 0.0

    def tokens_beside(self, num_decoding: int, other_step_s: float, max_tokens: int) -> int:
        """Return the most prompt tokens, up to `max_tokens`, while an engine with such steps waits."""
        fewest_s = self._costs.least_seconds(_name(num_decoding), num_decoding + FEWEST)
        is_known = self._costs.is_measured(_name(num_decoding), num_decoding + FEWEST)
        allowed_s = max(MAX_HELD_STEPS * other_step_s, FREE_GROWTH * fewest_s if is_known else 0.0)
        return self._most_within(num_decoding, allowed_s, max_tokens)

    def _most_within(self, num_decoding: int, allowed_s: float, max_tokens: int) -> int:
        """Return the most prompt tokens with which a step should take no longer, at least `FEWEST`."""
        kind = _name(num_decoding)
        most = self._costs.max_rows_to_try(kind) - num_decoding
        chosen = size = FEWEST
        while size < max_tokens and (size := _next_size(size)) <= most:
            total, smaller = num_decoding + size, num_decoding + chosen
            seconds = self._costs.seconds(kind, total)
            # If larger steps take another way, sizes between are not on the line to them: they are tried.
            if not self._costs.is_measured(kind, total):
                seconds = min(seconds, self._costs.friendly_guess(kind, total, smaller))
            if seconds <= allowed_s:
                chosen = size
        return min(chosen, max_tokens)

    def note_step(self, num_decoding: int, num_tokens: int, seconds: float) -> None:
        """Take in the seconds of a step with so many decoding sequences and prompt tokens."""
        known = self._kinds.setdefault(num_decoding, _Kind())
        if num_tokens:
            known.num_beside += 1
        else:
            known.num_idle, known.num_beside = known.num_idle + 1, 0
        self._costs.note_call(_name(num_decoding), num_decoding + _size_of(num_tokens), seconds)


def _name(num_decoding: int) -> str:
    return f"{num_decoding} decoding"


def _next_size(size: int) -> int:
    """Return the size after one of 4, 6, 8, 12, 16, 24, 32, ...: few enough for each to be measured often."""
    return size + max(2, 1 << (size.bit_length() - 2))


def _size_of(num_tokens: int) -> int:
    """Return the size that stands for so many tokens: the last chunk of a prompt may have any number."""
    if not num_tokens:
        return 0
    size = FEWEST
    while size < num_tokens:
        size = _next_size(size)
    return size
