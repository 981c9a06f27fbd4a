"""What the modules of a stock language model know of the step that they run in; its linear layers and experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from deployments.engines.library_seam import apply_gate
from deployments.engines.nn.batch_invariant import settled_rows
from deployments.engines.nn.few_rows import multiply_rows

TURN: Final = "atelier_turn"


@dataclass(slots=True, eq=False)
class StepRows:
    """Whose products the kernels compute in a batch (*shape, ...), by row: torch computes the others.

    Those are padded to a multiple of `row_multiple`, for which a row's result does not depend on their number.
    """

    shape: tuple[int, ...]
    by_kernels: slice | torch.Tensor | None  # all up to a number, of which those behind count nothing; rows; none
    row_multiple: int = 1


@dataclass(slots=True, eq=False)
class Turn:
    """The step that a model runs, if it runs one: all its modules have it, under the name `TURN`."""

    attention: Any = None
    states: Any = None
    rows: StepRows | None = None


def turn_of(module: nn.Module) -> Turn:
    """Return the turn of the model that a module is a part of."""
    turn: Turn = getattr(module, TURN)
    return turn


class StepLinear(nn.Linear):
    """A linear layer of a decoder. Batches of other shapes, those of experts say, are torch's."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = turn_of(self).rows
        # Latent keys and values have an axis for their one head before that of the rows.
        if rows is None or input.shape[:-1] != (*[1] * (input.ndim - 1 - len(rows.shape)), *rows.shape):
            return super().forward(input)
        flat, chosen = input.flatten(0, -2), rows.by_kernels
        if isinstance(chosen, slice):
            found = multiply_rows(self, flat[chosen], len(flat) - len(flat[chosen]))
            if found is not None:
                return found.view(*input.shape[:-1], -1)
        padded = F.pad(flat, (0, 0, 0, -len(flat) % rows.row_multiple))
        result = super().forward(padded)[: len(flat)]
        if isinstance(chosen, torch.Tensor) and (found := multiply_rows(self, flat[chosen])) is not None:
            result[chosen] = found
        return result.view(*input.shape[:-1], -1)


def compute_experts(
    experts: Any, hidden_NC: torch.Tensor, chosen_NU: torch.Tensor, weights_NU: torch.Tensor
) -> torch.Tensor:
    """Return what the chosen experts of each token make of it, in place of transformers' functions for all experts.

    Whose rows an expert has beside a token's changes nothing: their number is padded, and a token adds up what it gets
    in the order of the experts. One whose number is none of theirs is left out.
    """
    out_NC = torch.zeros_like(hidden_NC)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    for expert in sorted({one for one in chosen_NU.flatten().tolist() if one < len(experts.down_proj)}):
        tokens, places = torch.where(chosen_NU == expert)
        padded = F.pad(hidden_NC[tokens], (0, 0, 0, -len(tokens) % settled_rows()))
        inner = _multiply(experts, name, expert, padded)
        inner = apply_gate(experts, inner) if experts.has_gate else experts.act_fn(inner)
        made = _multiply(experts, "down_proj", expert, inner)
        if experts.has_post_expert_norm:
            made = experts.post_expert_norm(made)
        out_NC.index_add_(0, tokens, (made[: len(tokens)] * weights_NU[tokens, places, None]).to(out_NC.dtype))
    return out_NC


def _multiply(experts: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(x, weight.T if experts.is_transposed else weight, bias)
