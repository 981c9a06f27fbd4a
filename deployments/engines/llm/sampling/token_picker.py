"""The sampler's state of one completion: its parameters, its random stream, its tokens, and its constraint."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from deployments.engines.records.protocol import SamplingParams, TokenConstraint
from weights.memory.devices import host_generator


@dataclass(slots=True)
class TokenPicker:
    """The sampling parameters of a request, its random stream, and the tokens that its penalties look at.

    The stream gives one float64 per sampled token, so a continuation on another machine is `seed` and as many
    draws as there are tokens.
    """

    params: SamplingParams
    generator: torch.Generator
    constraint: TokenConstraint | None = None
    _seen: _SeenTokens | None = None  # None without penalties

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        prompt_token_ids: Iterable[int] = (),
        *,
        index: int = 0,
        constraint: TokenConstraint | None = None,
    ) -> TokenPicker:
        """Return the picker of a request's completion number `index`, which has a random stream of its own."""
        seed = random.getrandbits(32) if params.seed is None else params.seed
        has_penalty = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0)
        generator = host_generator(seed if index == 0 else _mixed(seed, index))
        return cls(params, generator, constraint, _SeenTokens(prompt_token_ids) if has_penalty else None)

    def ahead(self) -> TokenPicker:
        """Return a picker that will draw with the numbers of this one's next tokens, for proposals of them.

        It has the temperature and the filters, and no penalty, bias or constraint: these would cost a copy for each
        proposal.
        """
        params = replace(self.params, logit_bias=(), num_logprobs=None)
        return TokenPicker(params, self.generator.clone_state())

    @property
    def is_greedy(self) -> bool:
        """Return whether the likeliest token is taken each time."""
        return self.params.temperature == 0 or self.params.top_k == 1

    @property
    def changes_logits(self) -> bool:
        """Return whether the model's logits are changed."""
        return self._seen is not None or self.mask is not None or bool(self.params.logit_bias)

    @property
    def mask(self) -> TokenConstraint | None:
        """Return the constraint if it forbids some tokens now."""
        return None if self.constraint is None or self.constraint.is_free else self.constraint

    @property
    def seen(self) -> _SeenTokens | None:
        """Return the tokens for penalties; None without penalties."""
        return self._seen

    @property
    def is_complete(self) -> bool:
        """Return whether the constraint allows no further token."""
        return self.constraint is not None and self.constraint.is_complete

    def advance(self, token_id: int) -> None:
        """Note the completion's next token."""
        if self._seen is not None:
            self._seen.add(token_id)
        if self.constraint is not None:
            self.constraint.advance(token_id)


class _SeenTokens:
    """The tokens of prompt and completion, each once, and how often the completion has each of them."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._ids = np.unique(np.fromiter(prompt_token_ids, np.int64))
        self._counts = np.zeros(len(self._ids))
        self._size = len(self._ids)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count a token of the completion."""
        place = self._places.setdefault(token_id, self._size)
        if place == self._size:
            if self._size == len(self._ids):
                self._ids = np.resize(self._ids, 2 * self._size + 16)
                self._counts = np.resize(self._counts, 2 * self._size + 16)
            self._ids[place], self._counts[place] = token_id, 0
            self._size += 1
        self._counts[place] += 1


def _mixed(seed: int, index: int) -> int:
    """Return the seed of another completion of the same request."""
    return int(np.random.SeedSequence([seed & (2**64 - 1), index]).generate_state(1, np.uint64)[0]) >> 1
