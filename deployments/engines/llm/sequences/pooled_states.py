"""The hidden states of a prompt as one vector."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from deployments.engines.records.protocol import ComputationFailed, Pooling


class PooledStates:
    """The mean of a prompt's hidden states, or its last one, of length 1.

    Tokens may be noted again, as when a chunk is computed twice. The mean is added up token by token in float64: it
    does not depend on how the prompt was cut.
    """

    def __init__(self, num_tokens: int, pooling: Pooling) -> None:
        self._num_tokens, self._pooling = num_tokens, pooling
        self._num_noted = 0
        self._state: torch.Tensor | None = None  # (1, C): the sum so far, or the last one

    @property
    def needs_all(self) -> bool:
        """Return whether every token's hidden state counts, also that of a token with cached keys and values."""
        return self._pooling == "mean"

    def note_states(self, position: int, hidden_NC: torch.Tensor) -> None:
        """Note the hidden states of `position` and the next ones, which follow the noted ones if all count."""
        new_NC = hidden_NC[max(0, self._num_noted - position) :]
        if not len(new_NC):
            return
        self._num_noted = position + len(hidden_NC)
        if self._pooling == "last":
            self._state = new_NC[-1:].double()
        elif self._state is None:
            self._state = new_NC.double().cumsum(0)[-1:]
        else:
            self._state = torch.cat([self._state, new_NC.double()]).cumsum(0)[-1:]

    def vector(self) -> npt.NDArray[np.float32]:
        """Return the vector (C,). Raises ComputationFailed if it is not finite."""
        assert self._state is not None
        assert self._num_noted == self._num_tokens
        vector: npt.NDArray[np.float32] = F.normalize(self._state[0], dim=0).float().cpu().numpy()
        if not np.isfinite(vector).all():
            raise ComputationFailed("the hidden states are not finite")
        return vector
