"""The feed-forward part of a decoder layer: one gated MLP, or several experts of which each token takes a few.

Parameter names are those of Qwen3-MoE's checkpoints; `renamed_experts` makes them of Mixtral's. A packed file keeps all
experts of a layer in one tensor, of which each expert takes a view.

Suffixes: T tokens, C hidden size, E experts, U experts that a token uses.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import nn
from torch.nn import functional as F

_T = TypeVar("_T")
_MIXTRAL: Final = re.compile(r"\.block_sparse_moe\.(gate|experts\.\d+\.(w1|w2|w3))\.")
_MIXTRAL_NAMES: Final = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of a decoder; `layers` have them, others a plain MLP. `normalizes`: used weights sum up to 1."""

    num_experts: int
    num_used: int
    intermediate_size: int
    layers: frozenset[int]
    normalizes: bool = True


class MLP(nn.Module):
    """The gated feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TC)) * self.up_proj(x_TC))


class MixtureOfExperts(nn.Module):
    """Experts of which each token takes those that the router `gate` scores best.

    An expert's product has only the rows of its tokens. `row_multiple` is what their number is padded to, where
    products of few rows round by their number: a token's result must not depend on who else chose its expert.
    `routed_rows` are those of the expert that is being computed, None for the router (`nn/lora.py`).
    """

    def __init__(self, hidden_size: int, spec: ExpertsSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, spec.num_experts, bias=False)
        self.experts = nn.ModuleList(MLP(hidden_size, spec.intermediate_size) for _ in range(spec.num_experts))
        self.num_used = spec.num_used
        self.normalizes = spec.normalizes
        self.row_multiple = 1
        self.routed_rows: torch.Tensor | None = None

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        self.routed_rows = None  # the router has all rows, even after an expert that failed
        scores_TE = F.softmax(self.gate(x_TC).float(), dim=-1)
        weights_TU, chosen_TU = scores_TE.topk(self.num_used, dim=-1)
        if self.normalizes:
            weights_TU = weights_TU / weights_TU.sum(-1, keepdim=True)
        weights_TU = weights_TU.to(x_TC.dtype)
        out_TC = torch.zeros_like(x_TC)
        # In the order of the experts: what a token adds up, and in which order, follows from its own choice alone.
        for expert in sorted(set(chosen_TU.flatten().tolist())):
            tokens, places = torch.where(chosen_TU == expert)
            rows = x_TC[tokens]
            padded = F.pad(rows, (0, 0, 0, -len(rows) % self.row_multiple))
            self.routed_rows = tokens
            made = self.experts[expert](padded)[: len(rows)]
            out_TC.index_add_(0, tokens, made * weights_TU[tokens, places, None])
        return out_TC


def renamed_experts(named: Mapping[str, _T]) -> dict[str, _T]:
    """Return tensors, or what else has names like theirs, with Mixtral's names in the form of Qwen3-MoE's."""
    return {_MIXTRAL.sub(_renamed, name): one for name, one in named.items()}


def _renamed(match: re.Match[str]) -> str:
    stem, _, leaf = match[1].rpartition(".")
    return f".mlp.{stem}.{_MIXTRAL_NAMES[leaf]}." if leaf in _MIXTRAL_NAMES else ".mlp.gate."
