"""The hidden states of a sequence's last computed tokens, for a draft model that goes on from one of them."""

from __future__ import annotations

import torch


class LastStates:
    """The states of the last step's tokens that have logits: of them, those that were drawn are known only later."""

    def __init__(self) -> None:
        self._first = 0
        self._states: torch.Tensor | None = None

    def note_states(self, first: int, states_NC: torch.Tensor) -> None:
        """Take in the states of the tokens from place `first` on."""
        self._first, self._states = first, states_NC

    def at(self, place: int) -> torch.Tensor | None:
        """Return the state of the token at a place; None where the last step did not compute it."""
        row = place - self._first
        return self._states[row] if self._states is not None and 0 <= row < len(self._states) else None
