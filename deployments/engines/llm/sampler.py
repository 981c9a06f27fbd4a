"""Picks the next token of every row: greedy, or drawn after temperature, top-k and top-p."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deployments.engines.protocol import ComputationFailed, SamplingParams
from weights.memory.devices import host_generator


@dataclass(frozen=True, slots=True)
class TokenPicker:
    """The sampling parameters of a request and its random stream.

    The stream gives one float64 per sampled token, so a continuation on another machine is `seed` and as many
    draws as there are tokens.
    """

    params: SamplingParams
    generator: torch.Generator

    @classmethod
    def create(cls, params: SamplingParams) -> TokenPicker:
        seed = random.getrandbits(32) if params.seed is None else params.seed
        return cls(params, host_generator(seed))

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature == 0 or self.params.top_k == 1


def sample(logits_NV: torch.Tensor, pickers: Sequence[TokenPicker]) -> list[int | ComputationFailed]:
    """Pick one token id per row of the float32 logits, or say why there is none: no usable maximum (NaN, infinity).

    The generator of such a row is not advanced.
    """
    best, token_ids = logits_NV.max(dim=-1)
    return [
        ComputationFailed("the logits are not finite")
        if not is_finite
        else int(token_ids[row])
        if picker.is_greedy
        else _draw(logits_NV[row], picker)
        for row, (picker, is_finite) in enumerate(zip(pickers, best.isfinite().tolist(), strict=True))
    ]


def _draw(logits_V: torch.Tensor, picker: TokenPicker) -> int:
    """Draw one token from the filtered distribution, by inverting its cumulative sum.

    The sum runs in the order of token ids, not of probability: then a rounding difference in the logits moves
    the borders between tokens by as little, and never exchanges two of them.
    """
    token_ids, probabilities = _filter_logits(logits_V, picker.params)
    cumulative = probabilities.cumsum(0)
    point = torch.rand(1, generator=picker.generator, dtype=torch.float64) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, point, right=True))
    return int(token_ids[min(index, len(token_ids) - 1)])


def _filter_logits(logits_V: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens that top-k and then top-p leave, by ascending id, with their unnormalized float64
    probabilities.

    Top-p keeps the most probable tokens until their sum reaches `top_p` (of what top-k left), at least one.
    """
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    scaled = (logits_V - logits_V.max()).double() / params.temperature
    if 0 < params.top_k < len(scaled):
        scaled, token_ids = scaled.topk(params.top_k)
    elif params.top_p < 1:
        scaled, token_ids = scaled.sort(descending=True, stable=True)
    else:
        token_ids = torch.arange(len(scaled))
    probabilities = scaled.softmax(0)
    if params.top_p < 1:
        kept = probabilities.cumsum(0) - probabilities < params.top_p
        token_ids, probabilities = token_ids[kept], probabilities[kept]
    possible = probabilities > 0
    token_ids, order = token_ids[possible].sort()
    return token_ids, probabilities[possible][order]
