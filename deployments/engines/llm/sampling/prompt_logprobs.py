"""Log probabilities of a prompt's own tokens, noted chunk by chunk while it is computed."""

from __future__ import annotations

from typing import Final

import torch

from deployments.engines.llm.sampling.sampler import score_tokens
from deployments.engines.records.protocol import TokenLogprob

ROWS_AT_ONCE: Final = 64  # rows of logits, which are as wide as the vocabulary, that are in memory together


class PromptLogprobs:
    """The log probability of each token of a prompt after those before it; the first has none.

    Tokens may be noted again, as when a chunk is computed twice.
    """

    def __init__(self, token_ids: tuple[int, ...], num_best: int) -> None:
        self._token_ids, self._num_best = token_ids, num_best
        self._found = [TokenLogprob(token_id, None) for token_id in token_ids]

    @property
    def end(self) -> int:
        """Return the position of the prompt's last token."""
        return len(self._token_ids) - 1

    @property
    def tokens(self) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities of each token."""
        return tuple(self._found)

    def note_logits(self, position: int, logits_NV: torch.Tensor) -> None:
        """Note the tokens that follow `position` and the next ones, by the float32 logits of these."""
        count = min(len(logits_NV), self.end - position)
        tokens = self._token_ids[position + 1 : position + 1 + count]
        found = score_tokens(logits_NV, range(count), tokens, [self._num_best] * count)
        self._found[position + 1 : position + 1 + count] = found
