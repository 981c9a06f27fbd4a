"""From tokens, one at a time, to text that can be shown: whole characters, right spaces, no stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

NUM_CONTEXT_TOKENS = 8  # of the prompt: enough for the decoder to know that the completion is not a beginning
UNFINISHED = "\ufffd"  # what decoders write for bytes that are not a character, or not yet


class IncrementalDecoder:
    """Decodes a completion token by token; the pieces join to the text that it has behind its prompt.

    A token is decoded together with its predecessors, because decoders drop the space before a first word,
    and spread characters over tokens. Text that ends in an unfinished character is held back. Special tokens
    give no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # The tokens that still matter; the first `_num_shown` of them have been given out as `_shown`.
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._num_shown = len(self._token_ids)
        self._shown = self._decode()

    def feed(self, token_id: int) -> str:
        """The text that has become certain with this token."""
        self._token_ids.append(token_id)
        text = self._decode()
        if text.endswith(UNFINISHED) or len(text) <= len(self._shown):
            return ""
        piece = text[len(self._shown) :]
        # The tokens of this piece are the context of the next one. They start and end with whole characters.
        del self._token_ids[: self._num_shown]
        self._num_shown = len(self._token_ids)
        self._shown = self._decode()
        return piece

    def flush(self) -> str:
        """What was held back, as it is. Call it once, at the end."""
        return self._decode()[len(self._shown) :]

    def _decode(self) -> str:
        return str(
            self._tokenizer.decode(self._token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class StopMatcher:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    The first is the one that is complete first (of several that end together, the longest), so the result
    does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False

    def feed(self, piece: str) -> str:
        """The text that can be shown now; after the stop string, none."""
        if self.stopped:
            return ""
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        keep = self._num_possible()
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, when no stop string can follow any more."""
        return "" if self.stopped else self._held

    def _num_possible(self) -> int:
        """The length of the longest end of the held text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
